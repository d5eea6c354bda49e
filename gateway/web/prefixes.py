"""Prefixes: which parts of prompts the workers' caches found most often, and what is pinned.

Knows a worker's own list. Does not know prompts: a prefix is a hash and a length. For admins: a
prefix of one tenant is no other tenant's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from billing.accounts import Role
from gateway.roster import Roster
from gateway.secrets import DeploymentSecret
from gateway.web.filters import tenant_choice
from gateway.web.live import LiveCache, ScopeNames, live_caches
from gateway.web.panels import Cell, Panel, Table, code, columns, count, duration, size, text
from gateway.web.visits import Visit, Visits

PREFIXES: Final = "/dashboard/prefixes"
FOR_EVER: Final = "until it is removed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixPage:
    visits: Visits
    roster: Roster
    secret: DeploymentSecret

    def routes(self) -> Sequence[BaseRoute]:
        return (Route(PREFIXES, self.visits.page(self.show, role=Role.ADMIN), methods=["GET"]),)

    async def show(self, visit: Visit) -> Response:
        live = await live_caches(self.roster)
        names = ScopeNames(self.secret, visit.tenants)
        return await self.visits.render(
            "page.html",
            visit,
            active="prefixes",
            title="Prefixes",
            subtitle=f"{visit.whose[:1].upper()}{visit.whose[1:]} · as the workers tell it now",
            action=PREFIXES,
            choices=tenant_choice(visit),
            is_behind=False,
            tiles=(),
            panels=panels_of(live, names, visit),
            has_chart=False,
        )


def panels_of(live: Sequence[LiveCache], names: ScopeNames, visit: Visit) -> Sequence[Panel]:
    if not live:
        return (Panel(key="hottest", title="Hottest prefixes", empty="No worker is configured."),)
    return tuple(
        panel
        for cache in live
        for panel in (hottest_panel(cache, names, visit), pins_panel(cache, names, visit))
    )


def hottest_panel(cache: LiveCache, names: ScopeNames, visit: Visit) -> Panel:
    key, title = f"hottest-{cache.worker}", f"Hottest prefixes, {cache.worker}"
    seen = cache.statistics
    if seen is None:
        return Panel(key=key, title=title, empty=_away(cache), is_wide=True)
    rows: list[Sequence[Cell]] = [
        (
            code(prefix.name[:16], value=prefix.name),
            text(
                f"public, {prefix.num_scopes} tenants" if prefix.scope == "" else names.name(prefix.scope),
                value=prefix.scope,
            ),
            count(prefix.num_tokens),
            count(prefix.hits),
            size(prefix.num_tokens * seen.kv_bytes_per_token),
            duration(prefix.idle_seconds),
        )
        for prefix in seen.prefixes
        if names.is_of(prefix.scope, visit.tenant_ids)
    ]
    return Panel(
        key=key,
        title=title,
        hint="A prefix is as hot as the prompts that found all of it since it was stored. "
        "Its name is the hash of its last block, which stands for all tokens before it.",
        is_wide=True,
        table=Table(
            caption="Most often found first",
            columns=columns("Name", "Tenant", "Tokens", "Hits", "Memory", "Idle for", num_texts=2),
            rows=rows,
        )
        if rows
        else None,
        empty="No prefix was found a second time yet.",
    )


def pins_panel(cache: LiveCache, names: ScopeNames, visit: Visit) -> Panel:
    key, title = f"pins-{cache.worker}", f"Pins, {cache.worker}"
    if cache.statistics is None:
        return Panel(key=key, title=title, empty=_away(cache), is_wide=True)
    rows: list[Sequence[Cell]] = [
        (
            text(names.name(pin.scope), value=pin.scope),
            count(pin.num_tokens),
            size(pin.num_tokens * cache.statistics.kv_bytes_per_token),
            text(FOR_EVER) if pin.ttl_seconds is None else duration(pin.ttl_seconds),
            text(FOR_EVER) if pin.seconds_left is None else duration(pin.seconds_left),
        )
        for pin in cache.statistics.pins
        if names.is_of(pin.scope, visit.tenant_ids)
    ]
    return Panel(
        key=key,
        title=title,
        hint="What was promised to stay. A hit begins the time anew.",
        is_wide=True,
        table=Table(
            caption="Oldest first",
            columns=columns("Tenant", "Tokens", "Memory", "Promised for", "Left", num_texts=1),
            rows=rows,
        )
        if rows
        else None,
        empty="Nothing is pinned.",
    )


def _away(cache: LiveCache) -> str:
    return f"{cache.worker} is away: {cache.away_because}."

"""Prices: what is in force, and what a new book would change before it is loaded.

Knows the list prices and a book as it is pasted. Does not know SQL or HTML. What a book would have made of
the last thirty days is their quantities at its units: exact, and before discounts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import structlog
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from billing.accounts import Role
from billing.calendar import UTC_ZONE, uncut
from billing.errors import BillingError, DatabaseUnavailable
from billing.instants import MICROSECONDS_PER_SECOND, Microseconds
from billing.price_sheet import ANY_MODEL, PriceSheet, parse_price_sheet
from billing.prices import PriceVersion, price_history, publish
from billing.reports import Dimension, GroupUsage, Selection, grouped_usage
from billing.usage import TokenClass
from gateway.statements import CLASS_LABELS
from gateway.web import pages
from gateway.web.panels import (
    Cell,
    Field,
    Form,
    Panel,
    Table,
    columns,
    count,
    moment,
    money,
    nothing,
    percent,
    text,
)
from gateway.web.visits import Visit, Visits, refused

PRICES: Final = "/dashboard/prices"
MAX_BOOK_BYTES: Final = 256 * 1024
PER_MILLION: Final = 1_000_000
_THIRTY_DAYS: Final = 30 * 86_400 * MICROSECONDS_PER_SECOND

Units = Mapping[str, Mapping[TokenClass, int]]
log = structlog.get_logger("gateway.web")


@dataclass(frozen=True, slots=True, kw_only=True)
class PricePages:
    visits: Visits

    def routes(self) -> Sequence[BaseRoute]:
        visits = self.visits
        return (
            Route(PRICES, visits.page(self.show, role=Role.ADMIN), methods=["GET"]),
            Route(
                PRICES + "/what-if",
                visits.form(self.what_if, role=Role.ADMIN, max_bytes=MAX_BOOK_BYTES),
                methods=["POST"],
            ),
            Route(
                PRICES + "/load",
                visits.form(self.load, role=Role.ADMIN, max_bytes=MAX_BOOK_BYTES),
                methods=["POST"],
            ),
        )

    async def show(self, visit: Visit) -> Response:
        history = await self.visits.run(lambda: price_history(self.visits.database))
        return await self._page(visit, (in_force_panel(in_force(history, visit.now), visit), book_panel("")))

    async def what_if(self, visit: Visit) -> Response:
        source = visit.form.get("book", "")
        sheet = _parsed(source)
        history = await self.visits.run(lambda: price_history(self.visits.database))
        used = await self.visits.run(lambda: self._used(visit.now))
        now = _units(in_force(history, visit.now))
        return await self._page(
            visit, (changes_panel(now, sheet, source), effect_panel(now, sheet, used), book_panel(source))
        )

    async def load(self, visit: Visit) -> Response:
        sheet = _parsed(visit.form.get("book", ""))
        try:
            added = await self.visits.run(
                lambda: publish(self.visits.database, sheet, clock=self.visits.clock)
            )
        except DatabaseUnavailable:
            raise
        except BillingError as error:
            raise refused(error) from error
        log.info("dashboard_prices_loaded", versions=added, by=str(visit.principal.api_key_id))
        return pages.go_to(PRICES)

    async def _page(self, visit: Visit, panels: Sequence[Panel]) -> Response:
        return await self.visits.render(
            "page.html",
            visit,
            active="prices",
            title="Prices",
            subtitle=f"List prices in USD for a million tokens · times in {visit.zone.key}",
            panels=panels,
            has_chart=False,
        )

    def _used(self, now: Microseconds) -> Sequence[GroupUsage]:
        spans = uncut(Microseconds(now - _THIRTY_DAYS), now, UTC_ZONE)
        return grouped_usage(self.visits.database, Selection(), spans, by=[Dimension.MODEL])


def in_force(history: Iterable[PriceVersion], now: Microseconds) -> Sequence[PriceVersion]:
    """The last version of each model and class that has begun."""
    latest: dict[tuple[str, TokenClass], PriceVersion] = {}
    for version in sorted(history, key=lambda one: one.effective_from):
        if version.effective_from <= now:
            latest[version.model, version.token_class] = version
    return list(latest.values())


def in_force_panel(versions: Sequence[PriceVersion], visit: Visit) -> Panel:
    by_model: dict[str, list[PriceVersion]] = {}
    for version in versions:
        by_model.setdefault(version.model, []).append(version)
    classes = [one for one in TokenClass if any(version.token_class is one for version in versions)]
    rows = []
    for model, own in sorted(by_model.items()):
        units = {version.token_class: version.unit_pusd for version in own}
        rows.append(
            (
                text(_model_name(model), value=model),
                moment(max(version.effective_from for version in own), visit.zone),
                *(_unit(units.get(one)) for one in classes),
            )
        )
    return Panel(
        key="in-force",
        title="In force now",
        is_wide=True,
        table=Table(
            caption="By model and class of token",
            columns=columns("Model", "Since", *(CLASS_LABELS[one] for one in classes), num_texts=2),
            rows=rows,
        )
        if rows
        else None,
        empty="No price is in force: every request is refused.",
    )


def book_panel(source: str) -> Panel:
    return Panel(
        key="book",
        title="What if",
        hint="Paste a price book in YAML: its differences are shown, and nothing changes yet.",
        is_wide=True,
        form=Form(
            key="what-if",
            action=PRICES + "/what-if",
            button="Show the differences",
            takes_file="book",
            fields=(
                Field(
                    name="book",
                    label="Price book",
                    value=source,
                    rows=14,
                    is_required=True,
                    hint="Units are picodollars per token, which are micro-dollars for a million tokens.",
                ),
            ),
        ),
    )


def changes_panel(now: Units, sheet: PriceSheet, source: str) -> Panel:
    rows: list[Sequence[Cell]] = []
    for model, units in sorted(sheet.units.items()):
        for token_class, unit in units.items():
            before = now.get(model, {}).get(token_class)
            if before != unit:
                rows.append(
                    (
                        text(_model_name(model), value=model),
                        text(CLASS_LABELS[token_class], value=token_class.value),
                        _unit(before),
                        _unit(unit),
                        nothing() if not before else percent(unit - before, before),
                    )
                )
    if not rows:
        return Panel(
            key="changes", title=f"{sheet.name}: no difference", empty="Every unit of the book is in force."
        )
    return Panel(
        key="changes",
        title=f"{sheet.name}: what would change",
        hint="A model that the book leaves out keeps its price. It applies to requests from then on.",
        is_wide=True,
        table=Table(
            caption="Units for a million tokens",
            columns=columns("Model", "Class", "In force", "New", "Change", num_texts=2),
            rows=rows,
        ),
        form=Form(
            key="load",
            action=PRICES + "/load",
            button="Load these prices",
            fields=(),
            hidden=(("book", source),),
        ),
    )


def effect_panel(now: Units, sheet: PriceSheet, used: Sequence[GroupUsage]) -> Panel:
    new = {**now, **sheet.units}
    rows, before_sum, after_sum = [], 0, 0
    for one in used:
        model = one.group.model or ANY_MODEL
        before, after = _amount(now, model, one), _amount(new, model, one)
        before_sum, after_sum = before_sum + before, after_sum + after
        rows.append(
            (
                text(model),
                count(one.totals.requests),
                money(before),
                money(after),
                money(after - before),
                percent(after - before, before),
            )
        )
    if not rows:
        return Panel(key="effect", title="The last 30 days", empty="Nothing was used in the last 30 days.")
    return Panel(
        key="effect",
        title="The last 30 days at these prices",
        hint="Their tokens at list price, now and as the book has it. Nothing of the past is re-rated.",
        is_wide=True,
        table=Table(
            caption="By model, all tenants",
            columns=columns("Model", "Requests", "In force", "New", "Difference", "Change"),
            rows=rows,
            total=(
                text("Total"),
                text(""),
                money(before_sum),
                money(after_sum),
                money(after_sum - before_sum),
                percent(after_sum - before_sum, before_sum),
            ),
        ),
    )


def _amount(units: Units, model: str, used: GroupUsage) -> int:
    own = units.get(model) or units.get(ANY_MODEL, {})
    return sum(
        used.totals.tokens(token_class) * own.get(token_class, 0) for token_class in used.totals.by_class
    )


def _units(versions: Iterable[PriceVersion]) -> Units:
    units: dict[str, dict[TokenClass, int]] = {}
    for version in versions:
        units.setdefault(version.model, {})[version.token_class] = version.unit_pusd
    return units


def _unit(unit_pusd: int | None) -> Cell:
    return nothing() if unit_pusd is None else money(unit_pusd * PER_MILLION)


def _model_name(model: str) -> str:
    return "every other model" if model == ANY_MODEL else model


def _parsed(source: str) -> PriceSheet:
    try:
        # Browsers send lines as networks do.
        return parse_price_sheet(source.replace("\r\n", "\n"))
    except BillingError as error:
        raise refused(error, "book") from error

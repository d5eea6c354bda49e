"""What the workers' caches did and hold, asked for now.

Knows the roster, scopes and how long a page waits. Does not know how figures are shown. A worker that
does not answer in time is one that says why: nothing here is remembered or made up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from billing.accounts import Tenant
from billing.ids import TenantId
from gateway.auth import scope_of
from gateway.roster import Roster, Worker
from gateway.secrets import DeploymentSecret
from gateway.workers import WorkerError
from model_worker.protocol import OTHER_SCOPES, CacheStatistics, ScopeStatistics
from prefix_store.blocks import without_adapter

WAIT_SECONDS: Final = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveCache:
    """One worker's answer, or why there is none."""

    worker: str
    model: str
    statistics: CacheStatistics | None
    away_because: str | None


async def live_caches(roster: Roster) -> Sequence[LiveCache]:
    """All workers at once, each for at most `WAIT_SECONDS`."""
    return await asyncio.gather(*(_ask(worker) for worker in roster.workers))


async def _ask(worker: Worker) -> LiveCache:
    model = worker.card.model if worker.card else ""
    try:
        seen = await worker.client.statistics(seconds=WAIT_SECONDS)
    except WorkerError as error:
        return LiveCache(worker=worker.name, model=model, statistics=None, away_because=error.reason)
    return LiveCache(worker=worker.name, model=model, statistics=seen, away_because=None)


class ScopeNames:
    """Whose a scope is. Scopes that a salt made narrower are somebody's, and nobody's name is known."""

    def __init__(self, secret: DeploymentSecret, tenants: Iterable[Tenant]) -> None:
        self._tenants: Mapping[str, Tenant] = {scope_of(secret, one.id): one for one in tenants}

    def tenant(self, scope: str) -> Tenant | None:
        return self._tenants.get(without_adapter(scope))

    def name(self, scope: str) -> str:
        if scope == "":
            return "public"
        if scope == OTHER_SCOPES:
            return "other scopes"
        found = self.tenant(scope)
        return "a salted scope" if found is None else found.name

    def is_of(self, scope: str, tenant_ids: Sequence[TenantId] | None) -> bool:
        """Whether a row may be shown to who sees these tenants; None sees everything."""
        if tenant_ids is None:
            return True
        found = self.tenant(scope)
        return found is not None and found.id in tenant_ids


def rows_of(
    cache: LiveCache, names: ScopeNames, tenant_ids: Sequence[TenantId] | None
) -> Sequence[tuple[str, ScopeStatistics]]:
    """The scopes that may be shown, by the name of their tenant; scopes of one name apart."""
    if cache.statistics is None:
        return []
    return [
        (names.name(row.scope), row) for row in cache.statistics.scopes if names.is_of(row.scope, tenant_ids)
    ]

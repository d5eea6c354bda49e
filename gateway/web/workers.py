"""The workers, whether they take requests, and the gateway's own health.

Knows the roster and the meter's counts. Does not know how a worker is spoken to. Draining is this
gateway's: another one that shares the worker decides for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import structlog
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from billing.accounts import Role
from gateway.edge.errors import NotFound
from gateway.roster import Roster, UnknownWorker, Worker
from gateway.web import pages
from gateway.web.live import LiveCache, live_caches
from gateway.web.panels import Cell, Panel, Table, button, columns, count, duration, nothing, size, text
from gateway.web.visits import Visit, Visits

WORKERS: Final = "/dashboard/workers"
_METER: Final[Mapping[str, str]] = {
    "pending": "Settled, not yet in the ledger",
    "in_flight": "Admitted, not yet settled",
    "admitted": "Admitted since start",
    "refused": "Refused since start",
    "posted": "Posted since start",
    "swept": "Given up by a process, and settled by another",
    "database_failures": "Times the database failed",
    "journal_failures": "Times the journal failed",
    "conflicts": "Two ends of one request: a person must look",
    "rejected": "Ends that could not be priced: a person must look",
}

log = structlog.get_logger("gateway.web")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPage:
    visits: Visits
    roster: Roster

    def routes(self) -> Sequence[BaseRoute]:
        form = self.visits.form
        return (
            Route(WORKERS, self.visits.page(self.show, role=Role.ADMIN), methods=["GET"]),
            Route(WORKERS + "/{worker}/drain", form(self.drain, role=Role.ADMIN), methods=["POST"]),
            Route(WORKERS + "/{worker}/undrain", form(self.undrain, role=Role.ADMIN), methods=["POST"]),
        )

    async def show(self, visit: Visit) -> Response:
        live = await live_caches(self.roster)
        is_reachable = await self.visits.run(self.visits.database.is_reachable)
        return await self.visits.render(
            "page.html",
            visit,
            active="workers",
            title="Workers",
            subtitle="As they are now",
            panels=(
                workers_panel(self.roster.workers, live),
                health_panel(self.visits.meter.stats().as_mapping(), is_reachable=is_reachable),
            ),
            has_chart=False,
        )

    async def drain(self, visit: Visit) -> Response:
        return self._move(visit, self.roster.drain)

    async def undrain(self, visit: Visit) -> Response:
        return self._move(visit, self.roster.undrain)

    def _move(self, visit: Visit, move: Callable[[str], None]) -> Response:
        try:
            move(visit.request.path_params["worker"])
        except UnknownWorker as error:
            raise NotFound("There is no such worker.") from error
        return pages.go_to(WORKERS)


def workers_panel(workers: Sequence[Worker], live: Sequence[LiveCache]) -> Panel:
    caches = {cache.worker: cache for cache in live}
    return Panel(
        key="workers",
        title="Workers",
        hint="A draining worker gets no new requests from this gateway, and ends those it has.",
        is_wide=True,
        table=Table(
            caption="By name",
            columns=[
                *columns(
                    "Worker",
                    "Address",
                    "Model",
                    "Device",
                    "State",
                    "In flight",
                    "Resident",
                    "Up for",
                    num_texts=5,
                ),
                *columns("Change"),
            ],
            rows=[_worker_row(worker, caches[worker.name]) for worker in workers],
        )
        if workers
        else None,
        empty="No worker is configured.",
    )


def _worker_row(worker: Worker, cache: LiveCache) -> Sequence[Cell]:
    card, seen = worker.card, cache.statistics
    resident = 0 if seen is None else sum(seen.resident_blocks_by_tier.values()) * seen.block_size
    action = "undrain" if worker.is_draining else "drain"
    return (
        text(worker.name),
        text(worker.url),
        text(card.model) if card else nothing(),
        text(f"{card.device}, {card.dtype}") if card else nothing(),
        text(_state(worker, cache)),
        count(worker.in_flight),
        nothing() if seen is None else size(resident * seen.kv_bytes_per_token),
        nothing() if seen is None else duration(seen.uptime_seconds),
        button(action.capitalize(), f"{WORKERS}/{worker.name}/{action}", names=worker.name),
    )


def _state(worker: Worker, cache: LiveCache) -> str:
    if cache.away_because is not None:
        return f"away: {cache.away_because}"
    return "draining" if worker.is_draining else "ready"


def health_panel(meter: Mapping[str, int], *, is_reachable: bool) -> Panel:
    return Panel(
        key="health",
        title="Health of this gateway",
        is_wide=True,
        table=Table(
            caption="Database and meter",
            columns=columns("Check", "Value"),
            rows=[
                (text("Database"), text("reachable" if is_reachable else "unreachable")),
                *((text(label, value=name), count(meter[name])) for name, label in _METER.items()),
            ],
        ),
    )

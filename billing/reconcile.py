"""A reconciliation: all books beside each other, in one snapshot, kept for ever.

Knows which comparisons there are, and in what portions. Does not know what any of them looks at.

A run is written once, with what it found, and never changed. Differences at one place (check, tenant,
period, class, price version) are one row; of more places than `MAX_DIFFERENCES` the rest is counted
alone, so that a run is as small for books that agree nowhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

import msgspec
from sqlalchemy import Connection, func, insert, select, text

from billing import instants, schema
from billing.book_balances import (
    WorkerCount,
    events_and_workers,
    held_reservations,
    ledger_and_budgets,
    open_requests,
)
from billing.book_documents import (
    ledger_and_receipts,
    ledger_and_statements,
    promises_and_credits,
    receipt_chains,
)
from billing.books import (
    NO_BOOKS,
    Check,
    Difference,
    Window,
    events_and_ledger,
    events_and_rollups,
    ledger_and_rollups,
    prices_and_ledger,
    requests_and_events,
    rollups_and_deployment,
    totals_of,
)
from billing.calendar import Span
from billing.db import Database
from billing.errors import InvalidPeriod, UnknownReconciliation
from billing.ids import ReconciliationId, TenantId, new_id
from billing.instants import BUCKET_MICROSECONDS, Clock, Microseconds, bucket_start
from billing.statements import Reconciliation

MAX_DIFFERENCES: Final = 1_000
MAX_RUNS: Final = 100
PORTION: Final = timedelta(days=1)
"""As much is compared by one statement, so that none runs for long."""

_runs: Final = schema.reconciliation_runs.c

_BY_PORTION: Final = (
    events_and_ledger,
    prices_and_ledger,
    ledger_and_rollups,
    events_and_rollups,
    rollups_and_deployment,
    ledger_and_receipts,
    promises_and_credits,
)
_AT_ONCE: Final = (requests_and_events, receipt_chains, ledger_and_statements, held_reservations)


class TenantBooks(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant's totals of the window, in the three books that have them."""

    tenant_id: UUID
    tenant: str
    books: Reconciliation


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What one reconciliation compared and found. `num_differences` also counts those not listed."""

    id: UUID
    tenant_id: UUID | None
    start: Microseconds
    end: Microseconds
    started_at: Microseconds
    finished_at: Microseconds
    tenants: Sequence[TenantBooks]
    num_differences: int
    differences: Sequence[Difference]
    not_compared: Sequence[str]

    @property
    def agrees(self) -> bool:
        return self.num_differences == 0

    @property
    def total(self) -> Reconciliation:
        """All tenants together."""
        return sum_books(one.books for one in self.tenants)


def reconcile(
    db: Database,
    *,
    clock: Clock,
    start: Microseconds | None = None,
    end: Microseconds | None = None,
    tenant_id: TenantId | None = None,
    count_workers: Callable[[], Sequence[WorkerCount]] = lambda: (),
) -> Run:
    """Compares the closed quarters of an hour from `start` to `end`, by default all of them; keeps the run.

    `count_workers` is asked before and after. Raises InvalidPeriod for cuts within a quarter, or
    whatever it raises.
    """
    began = clock()
    window = _window(db, start, end, tenant_id, began)
    found = _Findings()
    before = count_workers()
    with db.read() as connection:
        _take_time(connection)
        tenants = _names(connection, tenant_id)
        books = _compare(connection, window, tenants, found)
        # The snapshot stands: whatever the workers say from here on came after it.
        after = count_workers() if before else ()
        if tenant_id is None:
            compared = events_and_workers(
                connection, before, after=after, is_open=open_requests(connection) > 0
            )
            found.add_all((*compared.differences, *compared.not_compared))
        elif before:
            found.add_all(["workers: they count all tenants together, and one was asked for"])
    run = Run(
        id=new_id(),
        tenant_id=tenant_id,
        start=window.start,
        end=window.end,
        started_at=began,
        finished_at=max(began, clock()),
        tenants=books,
        num_differences=found.num_differences,
        differences=list(found.by_place.values()),
        not_compared=found.not_compared,
    )
    with db.write() as connection:
        connection.execute(insert(schema.reconciliation_runs).values(_row(run)))
    return run


def list_runs(db: Database, *, limit: int) -> Sequence[Run]:
    """The latest first."""
    assert 0 < limit <= MAX_RUNS, "whoever asks has a limit of its own"
    latest = select(_runs.document).order_by(_runs.started_at_us.desc(), _runs.id.desc()).limit(limit)
    with db.read() as connection:
        return [decode(document) for document in connection.execute(latest).scalars()]


def find_run(db: Database, run_id: ReconciliationId) -> Run:
    """Raises UnknownReconciliation."""
    with db.read() as connection:
        found = select(_runs.document).where(_runs.id == run_id)
        document = connection.execute(found).scalar_one_or_none()
    if document is None:
        raise UnknownReconciliation(f"no reconciliation has the id {run_id}")
    return decode(document)


def encode(run: Run) -> str:
    """JSON with integers of any size, which msgspec's own has not."""
    return json.dumps(msgspec.to_builtins(run), separators=(",", ":"), ensure_ascii=False)


def decode(document: str) -> Run:
    return msgspec.convert(json.loads(document), Run)


def sum_books(books: Any) -> Reconciliation:
    """Several as one."""
    names = Reconciliation.__struct_fields__
    sums = dict.fromkeys(names, 0)
    for one in books:
        for name in names:
            sums[name] += getattr(one, name)
    return Reconciliation(**sums)


class _Findings:
    """Differences by place, as many as a run may hold, and what could not be compared."""

    def __init__(self) -> None:
        self.by_place: dict[tuple[Any, ...], Difference] = {}
        self.num_differences = 0
        self.not_compared: list[str] = []

    def add_all(self, found: Any) -> None:
        for one in found:
            if isinstance(one, str):
                if len(self.not_compared) < MAX_DIFFERENCES:
                    self.not_compared.append(one)
            else:
                self._add(one)

    def _add(self, one: Difference) -> None:
        self.num_differences += one.occurrences
        is_named = one.tenant_id is None or one.check in _NAMED_ONE_BY_ONE
        period = (one.start, one.end)
        subject = one.subject if is_named else ""
        place = (one.check, one.tenant_id, *period, one.token_class, one.price_version_id, subject)
        known = self.by_place.get(place)
        if known is not None:
            self.by_place[place] = msgspec.structs.replace(
                known,
                occurrences=known.occurrences + one.occurrences,
                tokens=known.tokens + one.tokens,
                pusd=known.pusd + one.pusd,
            )
        elif len(self.by_place) < MAX_DIFFERENCES:
            self.by_place[place] = one


_NAMED_ONE_BY_ONE: Final = {Check.LEDGER_STATEMENTS, Check.LEDGER_BUDGETS, Check.HELD_RESERVATIONS}


def _compare(
    connection: Connection, window: Window, tenants: Mapping[TenantId, str], found: _Findings
) -> Sequence[TenantBooks]:
    books: dict[TenantId, Reconciliation] = {}
    for portion in _portions(window):
        for compare in _BY_PORTION:
            found.add_all(compare(connection, portion))
        span = Span(label="", start=portion.start, end=portion.end)
        for one, added in totals_of(connection, list(tenants), span).items():
            books[one] = sum_books([books.get(one, NO_BOOKS), added])
    for compare in _AT_ONCE:
        found.add_all(compare(connection, window))
    found.add_all(ledger_and_budgets(connection, window))
    return [
        TenantBooks(tenant_id=one, tenant=name, books=books[one])
        for one, name in tenants.items()
        if one in books
    ]


def _window(
    db: Database,
    start: Microseconds | None,
    end: Microseconds | None,
    tenant_id: TenantId | None,
    now: Microseconds,
) -> Window:
    closed_until = bucket_start(now)
    for name, cut in (("start", start), ("end", end)):
        if cut is not None and cut % BUCKET_MICROSECONDS:
            raise InvalidPeriod(f"the {name} is within a quarter of an hour, which is the least there is")
    last = closed_until if end is None else min(end, closed_until)
    first = _first_instant(db, tenant_id, last) if start is None else start
    if end is not None and first > end:
        raise InvalidPeriod("the period ends before it starts")
    return Window(start=min(first, last), end=last, tenant_id=tenant_id)


def _first_instant(db: Database, tenant_id: TenantId | None, default: Microseconds) -> Microseconds:
    """Of anything that is accounted, in any book."""
    tenants, events = schema.tenants.c, schema.usage_events.c
    firsts = [
        select(func.min(instant)).where(owner == tenants.id).scalar_subquery()
        for owner, instant in (
            (events.tenant_id, events.accounted_at_us),
            (schema.class_rollups.c.tenant_id, schema.class_rollups.c.bucket_start_us),
            (schema.request_rollups.c.tenant_id, schema.request_rollups.c.bucket_start_us),
        )
    ]
    # Ids grow with time.
    oldest = select(schema.requests.c.admitted_at_us).order_by(schema.requests.c.id).limit(1)
    chosen = select(*firsts, oldest.scalar_subquery()).select_from(schema.tenants)
    if tenant_id is not None:
        chosen = chosen.where(tenants.id == tenant_id)
    with db.read() as connection:
        _take_time(connection)
        found = [one for row in connection.execute(chosen) for one in row]
    return bucket_start(min((one for one in found if one is not None), default=default))


def _portions(window: Window) -> Iterator[Window]:
    start = window.start
    while start < window.end:
        end = min(instants.later(start, PORTION), window.end)
        yield Window(start=start, end=end, tenant_id=window.tenant_id)
        start = end


def _take_time(connection: Connection) -> None:
    """A comparison may outlast any request's patience."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SET LOCAL statement_timeout = 0"))


def _names(connection: Connection, tenant_id: TenantId | None) -> dict[TenantId, str]:
    tenants = schema.tenants.c
    chosen = select(tenants.id, tenants.name).order_by(tenants.name)
    if tenant_id is not None:
        chosen = chosen.where(tenants.id == tenant_id)
    return {TenantId(row.id): row.name for row in connection.execute(chosen)}


def _row(run: Run) -> dict[str, object]:
    return {
        "id": run.id,
        "tenant_id": run.tenant_id,
        "start_us": run.start,
        "end_us": run.end,
        "started_at_us": run.started_at,
        "finished_at_us": run.finished_at,
        "num_differences": run.num_differences,
        "document": encode(run),
    }

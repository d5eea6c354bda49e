"""The ledger: from counts to lines, and from events to rows.

Knows what one posting transaction writes. Does not know how a count is rated, nor
journals, threads or retries.

Posting is idempotent by constraint: the database takes the first terminal event
of a request and returns it; lines are written for returned events alone.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from typing import Any, Final
from uuid import UUID

import msgspec
from sqlalchemy import Connection, Row, Uuid, bindparam, exists, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from billing import budgets, instants, limits, rollups, schema
from billing.budgets import Charge, Reserving
from billing.cache_outcomes import count_outcomes
from billing.db import Database
from billing.errors import BillingError, DuplicateRequest, UnpricedModel
from billing.ids import EventId, JournalId, ProcessId, RequestId, new_id
from billing.instants import Microseconds
from billing.limits import Standing, Throttling
from billing.periods import hold_periods
from billing.prices import BookHistory, ModelPrice, RecentBook
from billing.rating import LedgerLine, differences, rate_quantities
from billing.receipt_chain import note_due
from billing.sql import among, insert_many, insert_new
from billing.usage import ABANDONED, Admission, Estimate, TokenClass, TokenCounts, UsageEvent, UsageKind

ADJUSTMENT: Final = "adjustment"
CREDIT: Final = "credit"

_ARE_ANY = select(
    exists(select(schema.budgets.c.id)).label("budgets"), exists(select(schema.limits.c.id)).label("limits")
)
_ENCODER = msgspec.json.Encoder(order="sorted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Whose journal answers for a request: one journal directory, in one run of its process."""

    journal_id: JournalId
    process_id: ProcessId


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """An admission. `standing` tells of its rate limits, if any; `holds`, if something is reserved for it."""

    standing: Standing | None = None
    holds: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """What a tenant gets back of a request. `digest` is of the reason: the same one is credited once."""

    original: Admission
    original_id: EventId
    quantities: Mapping[TokenClass, int]
    digest: bytes
    granted_at: Microseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Posting:
    """What became of a batch of events.

    `duplicates` had been posted before, equal in every byte. `conflicts` had
    been posted before with another payload: the first stands, and somebody must look.
    `adjusted` came late, after a sweep had ended their requests: what they say beyond that
    was posted as an adjustment.
    """

    posted: Sequence[UsageEvent]
    adjusted: Sequence[UsageEvent]
    duplicates: Sequence[UsageEvent]
    conflicts: Sequence[UsageEvent]


def payload_digest(event: UsageEvent) -> bytes:
    """SHA-256 of the event in one canonical form: two events are the same exactly if this is."""
    return hashlib.sha256(_ENCODER.encode(event)).digest()


def admit_all(
    connection: Connection, admissions: Iterable[Admission], *, owner: Owner, lease: timedelta
) -> set[RequestId]:
    """Writes request rows; returns the ids that are new. A known id keeps its row."""
    rows = [_request_row(admission, owner=owner, lease=lease) for admission in admissions]
    return insert_new(connection, schema.requests, rows)


def admit_priced(
    connection: Connection,
    admissions: Sequence[tuple[Admission, Estimate]],
    *,
    book: RecentBook,
    owner: Owner,
    lease: timedelta,
) -> list[Grant | BillingError]:
    """Writes the request rows of what has a price, and room in its limits and budgets, which is reserved.

    Returns, for each admission in order, its grant, or why it is refused: UnpricedModel,
    DuplicateRequest, RateLimited or BudgetExceeded.
    """
    asked = [admission for admission, _ in admissions]
    room = _Room(connection, asked, book)
    outcomes = [room.take(admission, estimate) for admission, estimate in admissions]
    granted = [
        one for one, outcome in zip(asked, outcomes, strict=True) if not isinstance(outcome, BillingError)
    ]
    new = admit_all(connection, granted, owner=owner, lease=lease) if granted else set()
    room.write(new, {one.request_id: instants.later(one.admitted_at, lease) for one in granted})
    return [
        outcome
        if isinstance(outcome, BillingError) or one.request_id in new
        else DuplicateRequest(f"request {one.request_id} was admitted before")
        for one, outcome in zip(asked, outcomes, strict=True)
    ]


def admission_alone(db: Database, admission: Admission, *, owner: Owner, lease: timedelta) -> bool:
    """Writes the row of a request with a price, unless a budget or a limit is over it, in one statement.

    False when one is, or when the request was admitted before: `admit_priced` tells which.
    """
    row = _request_row(admission, owner=owner, lease=lease)
    return bool(db.write_alone(_unless_limited(db.engine.dialect.name), row))


@cache
def _unless_limited(dialect_name: str) -> Any:
    """Made once: it takes longer to compose than to run."""
    columns = list(schema.requests.c)
    scope_ids = [bindparam(name, type_=Uuid()) for name in ("tenant_id", "project_id", "api_key_id")]
    row = select(*(bindparam(column.name, type_=column.type) for column in columns)).where(
        ~budgets.among_scopes(scope_ids).exists(), ~limits.among_scopes(scope_ids).exists()
    )
    dialect = postgresql if dialect_name == "postgresql" else sqlite
    statement = dialect.insert(schema.requests).from_select(columns, row)
    return statement.on_conflict_do_nothing(index_elements=["id"]).returning(schema.requests.c.id)


class _Room:
    """What a batch of admissions may still take, as it is taken in their order."""

    def __init__(self, connection: Connection, admissions: Sequence[Admission], book: RecentBook) -> None:
        self._connection = connection
        self._book = book
        scope_ids = {one for admission in admissions for one in budgets.scope_of(admission).ids}
        # Most have neither, and one look tells.
        has_budget, has_limit = connection.execute(
            select(
                budgets.among_scopes(scope_ids).exists(),
                limits.among_scopes(scope_ids).exists(),
            )
        ).one()
        self._reserving = Reserving.load(connection, admissions) if has_budget else Reserving({}, {})
        self._throttling = Throttling.load(connection, admissions) if has_limit else Throttling({})
        self._seen: set[RequestId] = set()

    def take(self, admission: Admission, estimate: Estimate) -> Grant | BillingError:
        """From every limit and budget over the request, or from none."""
        if admission.request_id in self._seen:
            return DuplicateRequest(f"request {admission.request_id} was admitted before")
        try:
            price = self._book.price(self._connection, admission)
        except UnpricedModel as refusal:
            return refusal
        refused = self._throttling.refusal(admission, estimate) or self._reserving.reserve(
            admission, price, estimate
        )
        if refused is not None:
            return refused
        self._seen.add(admission.request_id)
        standing = self._throttling.hold(admission, estimate)
        return Grant(standing=standing, holds=standing is not None or self._reserving.has_budget(admission))

    def write(self, admitted: set[RequestId], lease_until: Mapping[RequestId, int]) -> None:
        self._reserving.write(self._connection, admitted, lease_until)
        self._throttling.write(self._connection, admitted, lease_until)


def post_all(
    connection: Connection, events: Sequence[UsageEvent], *, owner: Owner, lease: timedelta, now: Microseconds
) -> Posting:
    """Posts events in one transaction, the caller's.

    Raises UnpricedModel, AmountTooLarge or an IntegrityError when an event can
    never be posted; the transaction must then be rolled back.
    """
    # A request whose admission was lost with the database is told by its event.
    unadmitted = _unadmitted(connection, events)
    if unadmitted:
        admit_all(connection, unadmitted, owner=owner, lease=lease)
    closed_until = hold_periods(connection, {event.admission.tenant_id for event in events})
    drafts = [_draft(event, closed_until) for event in events]
    returned = _insert_terminal(connection, drafts, now)
    repeated = [draft for draft in drafts if draft.event_id not in returned]
    earlier = _earlier(connection, [draft.event.request_id for draft in repeated])
    corrections, duplicates, conflicts = _sort_repeated(repeated, earlier)
    posted = [draft for draft in drafts if draft.event_id in returned]
    if corrections:
        connection.execute(insert(schema.usage_events), [_event_row(one, now) for one in corrections])
    written = [*posted, *corrections]
    note_due(connection, [(draft.event_id, draft.event.admission.tenant_id) for draft in written])
    lines = _write_lines(connection, written)
    _end_reservations(connection, written, lines, now)
    count_outcomes(connection, [draft.event for draft in posted])
    _settle_requests(connection, [event.request_id for event in events], now)
    return Posting(
        posted=[draft.event for draft in posted],
        adjusted=[draft.event for draft in corrections],
        duplicates=duplicates,
        conflicts=conflicts,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """A row of `usage_events` that is about to be written: a terminal event, or what one corrects."""

    event_id: EventId
    event: UsageEvent
    digest: bytes
    accounted_at: Microseconds
    quantities: Sequence[tuple[TokenClass, int]]
    delivered: int
    original_id: EventId | None = None
    correction_kind: str = ADJUSTMENT

    @property
    def kind(self) -> str:
        return self.event.kind.value if self.original_id is None else self.correction_kind


@dataclass(frozen=True, slots=True, kw_only=True)
class _Earlier:
    """What was posted of a request: its terminal event, and the sums with all corrections."""

    original_id: EventId
    is_swept: bool
    digests: frozenset[bytes]
    quantities: Sequence[tuple[TokenClass, int]]
    delivered: int


def _draft(event: UsageEvent, closed_until: Mapping[UUID, Microseconds]) -> _Draft:
    return _Draft(
        event_id=EventId(new_id()),
        event=event,
        digest=payload_digest(event),
        accounted_at=max(
            event.admission.admitted_at, closed_until.get(event.admission.tenant_id, Microseconds(0))
        ),
        quantities=event.counts.by_class(),
        delivered=event.delivered,
    )


def _sort_repeated(
    repeated: Sequence[_Draft], earlier: Mapping[RequestId, _Earlier]
) -> tuple[list[_Draft], list[UsageEvent], list[UsageEvent]]:
    """Of events whose requests had ended before: corrections, duplicates, conflicts."""
    corrections: list[_Draft] = []
    duplicates: list[UsageEvent] = []
    conflicts: list[UsageEvent] = []
    corrected: set[RequestId] = set()
    for draft in repeated:
        known = earlier.get(draft.event.request_id)
        # Without one, its first is in this very batch: the database kept that alone.
        if known is None or draft.event.request_id in corrected:
            first = next(one for one in repeated if one.event.request_id == draft.event.request_id)
            (duplicates if first.digest == draft.digest else conflicts).append(draft.event)
        elif draft.digest in known.digests:
            duplicates.append(draft.event)
        elif known.is_swept:
            corrections.append(_correction(draft, known))
            corrected.add(draft.event.request_id)
        else:
            conflicts.append(draft.event)
    return corrections, duplicates, conflicts


def _correction(late: _Draft, known: _Earlier) -> _Draft:
    return replace(
        late,
        original_id=known.original_id,
        quantities=differences(late.quantities, known.quantities),
        delivered=late.delivered - known.delivered,
    )


def post_credit(connection: Connection, credit: Credit, *, now: Microseconds) -> EventId:
    """Posts a credit in the caller's transaction, at the original's prices and discount.

    It is accounted to the original's period or, if that is closed, to the next open one.
    Raises UnpricedModel when a class of it has no price.
    """
    admission = credit.original
    closed_until = hold_periods(connection, {admission.tenant_id})
    nothing = UsageEvent(
        admission=admission, kind=UsageKind.FINAL, counts=TokenCounts(), finished_at=credit.granted_at
    )
    draft = replace(
        _draft(nothing, closed_until),
        digest=credit.digest,
        quantities=[(one, credit.quantities.get(one, 0)) for one in TokenClass],
        original_id=credit.original_id,
        correction_kind=CREDIT,
    )
    connection.execute(insert(schema.usage_events).values(_event_row(draft, now)))
    note_due(connection, [(draft.event_id, admission.tenant_id)])
    lines = _write_lines(connection, [draft])
    _end_reservations(connection, [draft], lines, now)
    return draft.event_id


def narrow_all(connection: Connection, narrowed: Mapping[RequestId, tuple[Admission, Estimate]]) -> None:
    """Lets go of what these requests reserved and, as is known now, cannot use."""
    book = _book_of(connection, [admission for admission, _ in narrowed.values()])
    budgets.narrow(
        connection,
        {
            request_id: budgets.worst_case_pusd(_price_of(book, admission), estimate)
            for request_id, (admission, estimate) in narrowed.items()
        },
    )
    limits.narrow(connection, {request_id: estimate for request_id, (_, estimate) in narrowed.items()})


def abandoned_requests(
    connection: Connection, *, owner: Owner, now: Microseconds, limit: int
) -> list[Admission]:
    """Admitted requests that their process will not settle: it is a former one, or the lease ran out."""
    requests = schema.requests.c
    former = (requests.journal_id == owner.journal_id) & (requests.process_id != owner.process_id)
    rows = connection.execute(
        select(schema.requests)
        .where(requests.state == "admitted", former | (requests.lease_until_us <= now))
        .order_by(requests.lease_until_us)
        .limit(limit)
    )
    return [
        Admission(
            request_id=RequestId(row.id),
            tenant_id=row.tenant_id,
            api_key_id=row.api_key_id,
            project_id=row.project_id,
            model=row.model,
            admitted_at=row.admitted_at_us,
        )
        for row in rows
    ]


def _end_reservations(
    connection: Connection,
    drafts: Sequence[_Draft],
    lines: Mapping[EventId, Sequence[LedgerLine]],
    now: Microseconds,
) -> None:
    """Of what was just written: so each ends once. A correction ends none, but costs all the same."""
    if not drafts:
        return
    charges = [
        Charge(
            request_id=draft.event.request_id,
            scope=budgets.scope_of(draft.event.admission),
            accounted_at=draft.accounted_at,
            amount_pusd=sum(line.amount_pusd for line in lines.get(draft.event_id, ())),
        )
        for draft in drafts
    ]
    has_budgets, has_limits = _has_budgets_and_limits(connection)
    if has_budgets:
        budgets.settle(connection, charges, now)
    ended = {draft.event.request_id: draft.event.counts for draft in drafts if draft.original_id is None}
    if has_limits:
        limits.settle(connection, ended, now)


def _has_budgets_and_limits(connection: Connection) -> tuple[bool, bool]:
    """Whether anybody has; or has had, for neither is ever deleted. What most deployments pay for them."""
    row = connection.execute(_ARE_ANY).one()
    return bool(row.budgets), bool(row.limits)


def _unadmitted(connection: Connection, events: Sequence[UsageEvent]) -> list[Admission]:
    ids = [event.request_id for event in events]
    requests = schema.requests.c
    known = set(connection.execute(select(requests.id).where(among(connection, requests.id, ids))).scalars())
    return [event.admission for event in events if event.request_id not in known]


def _insert_terminal(connection: Connection, drafts: Sequence[_Draft], now: Microseconds) -> set[EventId]:
    """Writes the events of requests that have none; returns their ids."""
    rows = [_event_row(draft, now) for draft in drafts]
    return insert_new(
        connection, schema.usage_events, rows, key=("tenant_id", "request_id"), where=schema.TERMINAL
    )


def _write_lines(connection: Connection, drafts: Sequence[_Draft]) -> Mapping[EventId, Sequence[LedgerLine]]:
    """Writes lines, and the roll-ups that they and their events are added to; returns the lines."""
    rated = [draft for draft in drafts if any(quantity for _, quantity in draft.quantities)]
    lines: dict[EventId, Sequence[LedgerLine]] = {}
    if rated:
        book = _book_of(connection, [draft.event.admission for draft in rated])
        for draft in rated:
            price = _price_of(book, draft.event.admission)
            lines[draft.event_id] = rate_quantities(draft.quantities, price)
    rows = [_line_row(event_id, line) for event_id, of_event in lines.items() for line in of_event]
    insert_many(connection, schema.ledger_lines, rows)
    rollups.add(connection, [_posted(draft, lines.get(draft.event_id, ())) for draft in drafts])
    return lines


def _book_of(connection: Connection, admissions: Sequence[Admission]) -> BookHistory:
    models, tenants = {one.model for one in admissions}, {one.tenant_id for one in admissions}
    return BookHistory.load(connection, models, tenants)


def _price_of(book: BookHistory, admission: Admission) -> ModelPrice:
    return book.price(admission.model, admission.admitted_at, admission.tenant_id)


def _posted(draft: _Draft, lines: Sequence[LedgerLine]) -> rollups.PostedEvent:
    is_terminal = draft.original_id is None
    return rollups.PostedEvent(
        admission=draft.event.admission,
        accounted_at=draft.accounted_at,
        requests=int(is_terminal),
        aborted=int(is_terminal and draft.event.kind is UsageKind.ABORTED),
        usage_missing=int(is_terminal and draft.event.is_usage_missing),
        delivered=draft.delivered,
        lines=lines,
    )


def _settle_requests(connection: Connection, ids: Sequence[RequestId], now: Microseconds) -> None:
    requests = schema.requests
    connection.execute(
        update(requests)
        .where(among(connection, requests.c.id, ids), requests.c.state == "admitted")
        .values(state="settled", settled_at_us=now)
    )


def _earlier(connection: Connection, ids: Sequence[RequestId]) -> dict[RequestId, _Earlier]:
    if not ids:
        return {}
    events = schema.usage_events.c
    by_request: defaultdict[RequestId, list[Row[Any]]] = defaultdict(list)
    for row in connection.execute(
        select(schema.usage_events).where(among(connection, events.request_id, ids))
    ):
        by_request[RequestId(row.request_id)].append(row)
    return {request_id: _summed(rows) for request_id, rows in by_request.items()}


def _summed(rows: Sequence[Row[Any]]) -> _Earlier:
    original = next(row for row in rows if row.original_id is None)
    # A credit changes what a request costs, not what it used.
    used = [row for row in rows if row.kind != CREDIT]
    return _Earlier(
        original_id=EventId(original.id),
        is_swept=original.kind == UsageKind.ABORTED and original.finish_reason == ABANDONED,
        digests=frozenset(row.payload_digest for row in rows),
        quantities=[
            (token_class, sum(getattr(row, column) for row in used))
            for token_class, column in zip(TokenClass, schema.COUNT_COLUMNS, strict=True)
        ],
        delivered=sum(row.delivered_tokens for row in used),
    )


def _request_row(admission: Admission, *, owner: Owner, lease: timedelta) -> dict[str, object]:
    return {
        "id": admission.request_id,
        "tenant_id": admission.tenant_id,
        "api_key_id": admission.api_key_id,
        "project_id": admission.project_id,
        "model": admission.model,
        "state": "admitted",
        "admitted_at_us": admission.admitted_at,
        "lease_until_us": instants.later(admission.admitted_at, lease),
        "settled_at_us": None,
        "journal_id": owner.journal_id,
        "process_id": owner.process_id,
    }


def _event_row(draft: _Draft, now: Microseconds) -> dict[str, object]:
    event = draft.event
    return {
        "id": draft.event_id,
        "tenant_id": event.admission.tenant_id,
        "request_id": event.request_id,
        "kind": draft.kind,
        "original_id": draft.original_id,
        "model": event.admission.model,
        **dict(zip(schema.COUNT_COLUMNS, (count for _, count in draft.quantities), strict=True)),
        "delivered_tokens": draft.delivered,
        "usage_state": "usage_missing" if event.is_usage_missing else "reported",
        "finish_reason": event.finish_reason,
        "first_token_ns": event.first_token_ns,
        "worker": event.worker,
        "miss_reason": event.miss_reason,
        "deepest_block": event.deepest_block,
        "admitted_at_us": event.admission.admitted_at,
        "accounted_at_us": draft.accounted_at,
        "finished_at_us": event.finished_at,
        "payload_digest": draft.digest,
        "posted_at_us": now,
        "worker_epoch": event.worker_epoch,
    }


def _line_row(event_id: EventId, line: LedgerLine) -> dict[str, object]:
    return {
        "id": new_id(),
        "event_id": event_id,
        "token_class": line.token_class.value,
        "quantity_tokens": line.quantity,
        "list_unit_pusd": line.list_unit_pusd,
        "discount_basis_points": line.discount_basis_points,
        "unit_pusd": line.unit_pusd,
        "amount_pusd": line.amount_pusd,
        "amount_without_cache_pusd": line.amount_without_cache_pusd,
        "price_version_id": line.price_version_id,
    }

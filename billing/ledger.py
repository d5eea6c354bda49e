"""The ledger: from counts to lines, and from events to rows.

Knows how a request is rated and what one posting transaction writes. Does not
know journals, threads or retries.

Posting is idempotent by constraint: the database takes the first terminal event
of a request and returns it; lines are written for returned events alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
from sqlalchemy import Connection, Table, insert, select, text, update
from sqlalchemy.dialects import postgresql, sqlite

from billing import budgets, instants, limits, schema
from billing.budgets import Charge, Reserving
from billing.cache_outcomes import count_outcomes
from billing.errors import AmountTooLarge, BillingError, DuplicateRequest, UnpricedModel
from billing.ids import EventId, JournalId, PriceVersionId, ProcessId, RequestId, new_id
from billing.instants import Microseconds
from billing.limits import Standing, Throttling
from billing.money import MAX_STORED
from billing.prices import BookHistory, ModelPrice, discounted
from billing.usage import Admission, Estimate, TokenClass, TokenCounts, UsageEvent

_ENCODER = msgspec.json.Encoder(order="sorted")


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLine:
    """`quantity` tokens of one class at one unit price. Exact: `amount_pusd` is their product.

    Token-hours, for a pin. Negative in a correction. `list_…` units are those of the
    book, before the tenant's discount.
    """

    token_class: TokenClass
    quantity: int
    list_unit_pusd: int
    list_unit_without_cache_pusd: int
    discount_basis_points: int
    price_version_id: PriceVersionId

    @property
    def unit_pusd(self) -> int:
        return discounted(self.list_unit_pusd, self.discount_basis_points)

    @property
    def unit_without_cache_pusd(self) -> int:
        return discounted(self.list_unit_without_cache_pusd, self.discount_basis_points)

    @property
    def list_amount_pusd(self) -> int:
        return self.quantity * self.list_unit_pusd

    @property
    def amount_pusd(self) -> int:
        return self.quantity * self.unit_pusd

    @property
    def amount_without_cache_pusd(self) -> int:
        if self.token_class is TokenClass.PIN:
            return 0  # without a cache nobody would have bought it
        return self.quantity * self.unit_without_cache_pusd


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Whose journal answers for a request: one journal directory, in one run of its process."""

    journal_id: JournalId
    process_id: ProcessId


@dataclass(frozen=True, slots=True, kw_only=True)
class Posting:
    """What became of a batch of events.

    `duplicates` had been posted before, equal in every byte. `conflicts` had
    been posted before with another payload: the first stands, and somebody must look.
    """

    posted: Sequence[UsageEvent]
    duplicates: Sequence[UsageEvent]
    conflicts: Sequence[UsageEvent]


def rate(counts: TokenCounts, price: ModelPrice) -> tuple[LedgerLine, ...]:
    """A line for every class with tokens. Pure: the same counts and versions give the same lines.

    Raises UnpricedModel when a class has tokens and no price, AmountTooLarge
    when a line does not fit its column.
    """
    lines = []
    for token_class, quantity in counts.by_class():
        if quantity == 0:
            continue
        version = price.version(token_class)
        line = LedgerLine(
            token_class=token_class,
            quantity=quantity,
            list_unit_pusd=version.unit_pusd,
            list_unit_without_cache_pusd=price.version(_class_without_cache(token_class)).unit_pusd,
            discount_basis_points=price.discount_basis_points,
            price_version_id=version.id,
        )
        if quantity * max(line.list_unit_pusd, line.list_unit_without_cache_pusd) > MAX_STORED:
            raise AmountTooLarge(f"{quantity} {token_class} tokens at {line.list_unit_pusd} picodollars")
        lines.append(line)
    return tuple(lines)


def payload_digest(event: UsageEvent) -> bytes:
    """SHA-256 of the event in one canonical form: two events are the same exactly if this is."""
    return hashlib.sha256(_ENCODER.encode(event)).digest()


def admit_all(
    connection: Connection, admissions: Iterable[Admission], *, owner: Owner, lease: timedelta
) -> set[RequestId]:
    """Writes request rows; returns the ids that are new. A known id keeps its row."""
    rows = [_request_row(admission, owner=owner, lease=lease) for admission in admissions]
    statement = _insert_or_keep(connection, schema.requests).returning(schema.requests.c.id)
    return {RequestId(request_id) for request_id in connection.execute(statement, rows).scalars()}


def admit_priced(
    connection: Connection,
    admissions: Sequence[tuple[Admission, Estimate]],
    *,
    owner: Owner,
    lease: timedelta,
) -> list[Standing | BillingError | None]:
    """Writes the request rows of what has a price, and room in its limits and budgets, which is reserved.

    Returns, for each admission in order, how its limits stand (None without any), or why it is
    refused: UnpricedModel, DuplicateRequest, RateLimited or BudgetExceeded.
    """
    asked = [admission for admission, _ in admissions]
    book = BookHistory.load(connection, {admission.model for admission in asked})
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


class _Room:
    """What a batch of admissions may still take, as it is taken in their order."""

    def __init__(self, connection: Connection, admissions: Sequence[Admission], book: BookHistory) -> None:
        self._connection = connection
        self._book = book
        self._reserving = Reserving.load(connection, admissions)
        self._throttling = Throttling.load(connection, admissions)
        self._seen: set[RequestId] = set()

    def take(self, admission: Admission, estimate: Estimate) -> Standing | BillingError | None:
        """From every limit and budget over the request, or from none."""
        if admission.request_id in self._seen:
            return DuplicateRequest(f"request {admission.request_id} was admitted before")
        try:
            price = self._book.price(admission.model, admission.admitted_at)
        except UnpricedModel as refusal:
            return refusal
        refused = self._throttling.refusal(admission, estimate) or self._reserving.reserve(
            admission, price, estimate
        )
        if refused is not None:
            return refused
        self._seen.add(admission.request_id)
        return self._throttling.hold(admission, estimate)

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
    admit_all(connection, [event.admission for event in events], owner=owner, lease=lease)
    book = BookHistory.load(connection, {event.admission.model for event in events})
    by_event_id = {EventId(new_id()): event for event in events}
    returned = _insert_events(connection, by_event_id, now)
    rated = {
        event_id: rate(event.counts, book.price(event.admission.model, event.admission.admitted_at))
        for event_id, event in by_event_id.items()
        if event_id in returned
    }
    lines = [_line_row(event_id, line) for event_id, of_event in rated.items() for line in of_event]
    if lines:
        connection.execute(insert(schema.ledger_lines), lines)
    _end_reservations(
        connection, [(by_event_id[event_id], of_event) for event_id, of_event in rated.items()], now
    )
    _settle_requests(connection, [event.request_id for event in events], now)
    posted = [event for event_id, event in by_event_id.items() if event_id in returned]
    count_outcomes(connection, posted)
    repeated = [event for event_id, event in by_event_id.items() if event_id not in returned]
    known = _known_digests(connection, [event.request_id for event in repeated])
    same = [known.get(event.request_id) == payload_digest(event) for event in repeated]
    return Posting(
        posted=posted,
        duplicates=[event for event, is_same in zip(repeated, same, strict=True) if is_same],
        conflicts=[event for event, is_same in zip(repeated, same, strict=True) if not is_same],
    )


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
    connection: Connection, posted: Sequence[tuple[UsageEvent, Sequence[LedgerLine]]], now: Microseconds
) -> None:
    """Of events that the database took: so each ends once."""
    if not posted:
        return
    charges = [
        Charge(
            request_id=event.request_id,
            scope=budgets.scope_of(event.admission),
            accounted_at=event.admission.admitted_at,
            amount_pusd=sum(line.amount_pusd for line in lines),
        )
        for event, lines in posted
    ]
    budgets.settle(connection, charges, now)
    limits.settle(connection, {event.request_id: event.counts for event, _ in posted}, now)


def _class_without_cache(token_class: TokenClass) -> TokenClass:
    """What a token would have been without a cache: every prompt token would be plain input."""
    return token_class if token_class in {TokenClass.OUTPUT, TokenClass.PIN} else TokenClass.INPUT


def _insert_or_keep(connection: Connection, table: Table) -> Any:
    """INSERT … ON CONFLICT DO NOTHING, in the dialect of the connection."""
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    statement = dialect.insert(table)
    if table is schema.usage_events:
        return statement.on_conflict_do_nothing(
            index_elements=["tenant_id", "request_id"], index_where=text(schema.TERMINAL)
        )
    return statement.on_conflict_do_nothing(index_elements=["id"])


def _insert_events(
    connection: Connection, by_event_id: Mapping[EventId, UsageEvent], now: Microseconds
) -> set[EventId]:
    rows = [_event_row(event_id, event, now) for event_id, event in by_event_id.items()]
    statement = _insert_or_keep(connection, schema.usage_events).returning(schema.usage_events.c.id)
    return {EventId(event_id) for event_id in connection.execute(statement, rows).scalars()}


def _settle_requests(connection: Connection, ids: Sequence[RequestId], now: Microseconds) -> None:
    requests = schema.requests
    connection.execute(
        update(requests)
        .where(requests.c.id.in_(ids), requests.c.state == "admitted")
        .values(state="settled", settled_at_us=now)
    )


def _known_digests(connection: Connection, ids: Sequence[RequestId]) -> dict[RequestId, bytes]:
    if not ids:
        return {}
    events = schema.usage_events.c
    rows = connection.execute(
        select(events.request_id, events.payload_digest).where(
            events.request_id.in_(ids), text(schema.TERMINAL)
        )
    )
    return {RequestId(row.request_id): row.payload_digest for row in rows}


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


def _event_row(event_id: EventId, event: UsageEvent, now: Microseconds) -> dict[str, object]:
    return {
        "id": event_id,
        "tenant_id": event.admission.tenant_id,
        "request_id": event.request_id,
        "kind": event.kind.value,
        "original_id": None,
        "model": event.admission.model,
        **dict(zip(schema.COUNT_COLUMNS, (count for _, count in event.counts.by_class()), strict=True)),
        "delivered_tokens": event.delivered,
        "usage_state": "usage_missing" if event.is_usage_missing else "reported",
        "finish_reason": event.finish_reason,
        "first_token_ns": event.first_token_ns,
        "worker": event.worker,
        "miss_reason": event.miss_reason,
        "deepest_block": event.deepest_block,
        "admitted_at_us": event.admission.admitted_at,
        "accounted_at_us": event.admission.admitted_at,
        "finished_at_us": event.finished_at,
        "payload_digest": payload_digest(event),
        "posted_at_us": now,
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

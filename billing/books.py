"""The books side by side: every comparison of two of them returns differences alone.

Knows each table that counts usage or money, and what must be equal. Does not know who asks, nor
what is done about a difference.

Comparisons are made by the database, so that however many events there are, what comes here is
what does not fit; receipts and statements are documents, and are read one after another. All of it
is to run in one snapshot: whatever is posted is posted to all books in one transaction, so they agree
at every instant.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final
from uuid import UUID

import msgspec
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Row,
    RowMapping,
    Select,
    Table,
    case,
    func,
    literal_column,
    or_,
    select,
    text,
    union_all,
)

from billing import schema
from billing.calendar import Span
from billing.errors import UnpricedModel
from billing.ids import TenantId
from billing.instants import BUCKET_MICROSECONDS, Microseconds, bucket_start
from billing.price_sheet import ANY_MODEL
from billing.prices import TIERS, BookHistory, discounted
from billing.reports import Dimension, Selection, usage_within
from billing.rollups import CLASS_SUMS, REQUEST_SUMS
from billing.statements import Reconciliation
from billing.sums import exact_sum, exact_sums
from billing.usage import TokenClass

ROWS_AT_A_TIME: Final = 1_000
CREDIT: Final = "credit"
NO_BOOKS: Final = Reconciliation(
    events_tokens=0, ledger_tokens=0, rollup_tokens=0, ledger_pusd=0, rollup_pusd=0
)
"""Of a period in which nothing was used."""

_events: Final = schema.usage_events.c
_lines: Final = schema.ledger_lines.c
_requests: Final = schema.requests.c
_BUCKET: Final[ColumnElement[int]] = literal_column(
    f"usage_events.accounted_at_us - usage_events.accounted_at_us % {BUCKET_MICROSECONDS}", BigInteger()
)
COUNTED: Final[ColumnElement[int]] = sum(
    (_events[name] for name in schema.COUNT_COLUMNS[1:]), start=_events[schema.COUNT_COLUMNS[0]]
)
COUNT_OF: Final = dict(zip(TokenClass, schema.COUNT_COLUMNS, strict=True))
_DISCOUNTED: Final[ColumnElement[int]] = literal_column(
    "(ledger_lines.list_unit_pusd / 10000 * (10000 - ledger_lines.discount_basis_points)"
    " + ledger_lines.list_unit_pusd % 10000 * (10000 - ledger_lines.discount_basis_points) / 10000)",
    BigInteger(),
)


class Check(StrEnum):
    """Two books that must agree; the second one's surplus is the difference."""

    REQUESTS_EVENTS = "requests_events"
    EVENTS_LEDGER = "events_ledger"
    PRICES_LEDGER = "prices_ledger"
    LEDGER_ROLLUPS = "ledger_rollups"
    EVENTS_ROLLUPS = "events_rollups"
    ROLLUPS_DEPLOYMENT = "rollups_deployment"
    LEDGER_RECEIPTS = "ledger_receipts"
    LEDGER_STATEMENTS = "ledger_statements"
    PROMISES_CREDITS = "promises_credits"
    LEDGER_BUDGETS = "ledger_budgets"
    HELD_RESERVATIONS = "held_reservations"
    EVENTS_WORKERS = "events_workers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What is compared: whole quarters of an hour from `start` to `end`, of all tenants or of one."""

    start: Microseconds
    end: Microseconds
    tenant_id: TenantId | None = None

    def owns(self, tenant_id: ColumnElement[UUID]) -> ColumnElement[bool]:
        """Without a tenant no condition, but the way into an index that begins with one."""
        if self.tenant_id is not None:
            return tenant_id == self.tenant_id
        return tenant_id.in_(select(schema.tenants.c.id))

    def holds_event(self) -> ColumnElement[bool]:
        accounted = _events.accounted_at_us.between(self.start, self.end - 1)
        return self.owns(_events.tenant_id) & accounted


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Where two books differ, and by how much: what the second one has beyond the first.

    `start` and `end` are of the quarter of an hour, the month or the like. `subject` names what was
    found first: a request, a statement, a budget, a worker. There are `occurrences` of it at this place.
    """

    check: Check
    tenant_id: UUID | None = None
    start: Microseconds | None = None
    end: Microseconds | None = None
    token_class: TokenClass | None = None
    price_version_id: UUID | None = None
    subject: str = ""
    occurrences: int = 1
    tokens: int = 0
    pusd: int = 0


def totals_of(
    connection: Connection, tenant_ids: Collection[TenantId], span: Span
) -> dict[TenantId, Reconciliation]:
    """Each tenant's period in three books: events, ledger and roll-ups. Only those that have any."""
    within = _events.tenant_id.in_(tenant_ids) & _events.accounted_at_us.between(span.start, span.end - 1)

    def counted(sums: Sequence[ColumnElement[Any]]) -> Select[Any]:
        return select(_events.tenant_id, *sums).where(within).group_by(_events.tenant_id)

    def posted(sums: Sequence[ColumnElement[Any]]) -> Select[Any]:
        joined = schema.usage_events.join(schema.ledger_lines, _lines.event_id == _events.id)
        return select(_events.tenant_id, *sums).select_from(joined).where(within).group_by(_events.tenant_id)

    tokens, amounts = {"tokens": COUNTED}, {"tokens": _lines.quantity_tokens, "pusd": _lines.amount_pusd}
    events = {row["tenant_id"]: row for row in exact_sums(connection, tokens, counted)}
    ledger = {row["tenant_id"]: row for row in exact_sums(connection, amounts, posted)}
    reported = usage_within(connection, Selection(tenant_ids=tenant_ids), [span], by=[Dimension.TENANT])
    rollups = {one.group.tenant_id: one.totals.of(TokenClass) for one in reported}
    return {
        TenantId(one): Reconciliation(
            events_tokens=_sum_of(events.get(one), "tokens"),
            ledger_tokens=_sum_of(ledger.get(one), "tokens"),
            rollup_tokens=rollups[one].quantity if one in rollups else 0,
            ledger_pusd=_sum_of(ledger.get(one), "pusd"),
            rollup_pusd=rollups[one].amount_pusd if one in rollups else 0,
        )
        for one in {*events, *ledger, *rollups}
        if one is not None
    }


def requests_and_events(connection: Connection, window: Window) -> Iterator[Difference]:
    """A settled request has its one end, and whatever has ended is settled."""
    ended = (
        (_events.tenant_id == _requests.tenant_id)
        & (_events.request_id == _requests.id)
        & text(schema.TERMINAL)
    )
    admitted = _requests.admitted_at_us.between(window.start, window.end - 1)
    unended = (
        select(_requests.id, _requests.tenant_id, _requests.admitted_at_us)
        .outerjoin(schema.usage_events, ended)
        .where(window.owns(_requests.tenant_id), admitted, _requests.state == "settled", _events.id.is_(None))
    )
    unsettled = (
        select(_requests.id, _requests.tenant_id, _requests.admitted_at_us)
        .join(schema.usage_events, ended)
        .where(window.owns(_requests.tenant_id), admitted, text("requests.state = 'admitted'"))
    )
    for chosen, words in ((unended, "settled without an event"), (unsettled, "has an event and is open")):
        for row in streamed(connection, chosen):
            yield in_bucket(
                Check.REQUESTS_EVENTS, row.tenant_id, row.admitted_at_us, f"request {row.id}: {words}"
            )


def events_and_ledger(connection: Connection, window: Window) -> Iterator[Difference]:
    """Every event, class by class, has the lines of its tokens. What is missing is rated again."""
    posted: dict[TokenClass, ColumnElement[int]] = {
        one: func.coalesce(
            func.sum(case((_lines.token_class == one.value, _lines.quantity_tokens), else_=0)), 0
        )
        for one in TokenClass
    }
    chosen = (
        select(schema.usage_events, *(total.label(f"posted_{one}") for one, total in posted.items()))
        .outerjoin(schema.ledger_lines, _lines.event_id == _events.id)
        .where(window.holds_event())
        .group_by(_events.id)
        .having(or_(*(total != _events[COUNT_OF[one]] for one, total in posted.items())))
    )
    prices = _Prices(connection)
    for row in streamed(connection, chosen):
        for one in TokenClass:
            surplus = getattr(row, f"posted_{one}") - getattr(row, COUNT_OF[one])
            if surplus:
                version_id, unit = prices.unit_of(row, one)
                yield in_bucket(
                    Check.EVENTS_LEDGER,
                    row.tenant_id,
                    row.accounted_at_us,
                    f"request {row.request_id}",
                    token_class=one,
                    price_version_id=version_id,
                    tokens=int(surplus),
                    pusd=int(surplus) * unit,
                )


def prices_and_ledger(connection: Connection, window: Window) -> Iterator[Difference]:
    """Every line is its quantity times its version's unit, less its discount."""
    versions = schema.price_versions.c
    is_product = _lines.amount_pusd == _lines.quantity_tokens * _lines.unit_pusd
    # A tier without a price of its own is read at that of the device's.
    is_read = _lines.token_class.in_(TIERS) & (versions.token_class == TokenClass.READ.value)
    is_its_own = (
        ((versions.token_class == _lines.token_class) | is_read)
        & versions.model.in_([_events.model, ANY_MODEL])
        & (versions.tenant_id.is_(None) | (versions.tenant_id == _events.tenant_id))
        & (versions.effective_from_us <= _events.admitted_at_us)
    )
    is_right = is_product & is_its_own & (_lines.unit_pusd == _DISCOUNTED)
    chosen = (
        select(
            schema.ledger_lines,
            _events.tenant_id,
            _events.request_id,
            _events.accounted_at_us,
            versions.unit_pusd.label("version_unit_pusd"),
        )
        .join(schema.usage_events, _lines.event_id == _events.id)
        .join(schema.price_versions, versions.id == _lines.price_version_id)
        .where(window.holds_event(), ~(is_right & (_lines.list_unit_pusd == versions.unit_pusd)))
    )
    for row in streamed(connection, chosen):
        right = row.quantity_tokens * discounted(row.version_unit_pusd, row.discount_basis_points)
        yield in_bucket(
            Check.PRICES_LEDGER,
            row.tenant_id,
            row.accounted_at_us,
            f"request {row.request_id}",
            token_class=TokenClass(row.token_class),
            price_version_id=row.price_version_id,
            pusd=row.amount_pusd - right,
        )


def ledger_and_rollups(connection: Connection, window: Window) -> Iterator[Difference]:
    """Each roll-up of tokens and money is the sum of its lines."""
    joined = schema.usage_events.join(schema.requests, _requests.id == _events.request_id).join(
        schema.ledger_lines, _lines.event_id == _events.id
    )
    amounts = (
        _lines.quantity_tokens,
        _lines.quantity_tokens * _lines.list_unit_pusd,
        _lines.amount_pusd,
        _lines.amount_without_cache_pusd,
    )
    posted = (
        select(*_event_key(), _lines.token_class, *_labelled(CLASS_SUMS, amounts, negative=True))
        .select_from(joined)
        .where(window.holds_event())
    )
    rolled_up = _rolled_up(schema.class_rollups, CLASS_SUMS, window, schema.class_rollups.c.token_class)
    key = ("tenant_id", "bucket_start_us", "api_key_id", "model", "token_class")
    for row in _unbalanced(connection, posted, rolled_up, key=key, sums=CLASS_SUMS):
        yield in_bucket(
            Check.LEDGER_ROLLUPS,
            row["tenant_id"],
            row["bucket_start_us"],
            f"key {row['api_key_id']}, {row['model']}",
            token_class=TokenClass(row["token_class"]),
            tokens=exact_sum(row, "quantity_tokens"),
            pusd=exact_sum(row, "amount_pusd"),
        )


def events_and_rollups(connection: Connection, window: Window) -> Iterator[Difference]:
    """Each roll-up of requests counts its events."""
    is_end = _events.original_id.is_(None)
    counts = (
        case((is_end, 1), else_=0),
        case((_events.kind == "aborted", 1), else_=0),
        case((is_end & (_events.usage_state == "usage_missing"), 1), else_=0),
        _events.delivered_tokens,
    )
    counted = (
        select(*_event_key(), *_labelled(REQUEST_SUMS, counts, negative=True))
        .select_from(schema.usage_events.join(schema.requests, _requests.id == _events.request_id))
        .where(window.holds_event())
    )
    rolled_up = _rolled_up(schema.request_rollups, REQUEST_SUMS, window)
    key = ("tenant_id", "bucket_start_us", "api_key_id", "model")
    for row in _unbalanced(connection, counted, rolled_up, key=key, sums=REQUEST_SUMS):
        surplus = {name: exact_sum(row, name) for name in REQUEST_SUMS}
        words = ", ".join(f"{name} {amount:+d}" for name, amount in surplus.items() if amount)
        yield in_bucket(
            Check.EVENTS_ROLLUPS,
            row["tenant_id"],
            row["bucket_start_us"],
            f"key {row['api_key_id']}, {row['model']}: {words}",
        )


def rollups_and_deployment(connection: Connection, window: Window) -> Iterator[Difference]:
    """The roll-ups of all tenants as one are the sums of everybody's; one tenant's say nothing of them."""
    if window.tenant_id is not None:
        return
    tables = (
        (schema.class_rollups, schema.deployment_class_rollups, CLASS_SUMS, ("token_class",)),
        (schema.request_rollups, schema.deployment_request_rollups, REQUEST_SUMS, ()),
    )
    for of_each, of_all, names, more in tables:
        key = ("bucket_start_us", "model", *more)
        each = _sums_within(of_each, key, names, window, negative=True)
        together = _sums_within(of_all, key, names, window, negative=False)
        for row in _unbalanced(connection, each, together, key=key, sums=names):
            words = ", ".join(f"{name} {surplus:+d}" for name in names if (surplus := exact_sum(row, name)))
            start = row["bucket_start_us"]
            yield Difference(
                check=Check.ROLLUPS_DEPLOYMENT,
                start=start,
                end=Microseconds(start + BUCKET_MICROSECONDS),
                token_class=TokenClass(row["token_class"]) if more else None,
                subject=f"{row['model']}: {words}",
                tokens=exact_sum(row, "quantity_tokens") if more else 0,
                pusd=exact_sum(row, "amount_pusd") if more else 0,
            )


def _sums_within(
    table: Table, key: Sequence[str], sums: Sequence[str], window: Window, *, negative: bool
) -> Select[Any]:
    columns = table.c
    amounts = [columns[name] for name in sums]
    chosen = select(*(columns[name] for name in key), *_labelled(sums, amounts, negative=negative))
    chosen = chosen.where(columns.bucket_start_us.between(window.start, window.end - 1))
    return chosen.where(window.owns(columns.tenant_id)) if "tenant_id" in columns else chosen


class _Prices:
    """What tokens of an event cost, for those that the ledger lacks or has too many of."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._histories: dict[tuple[str, UUID], BookHistory] = {}

    def unit_of(self, event: Row[Any], token_class: TokenClass) -> tuple[UUID | None, int]:
        """The price version and the tenant's unit; none and 0 where there is no price."""
        key = (event.model, event.tenant_id)
        if key not in self._histories:
            self._histories[key] = BookHistory.load(self._connection, {event.model}, {event.tenant_id})
        try:
            price = self._histories[key].price(event.model, event.admitted_at_us, event.tenant_id)
            version = price.version(token_class)
        except UnpricedModel:
            return None, 0
        return version.id, discounted(version.unit_pusd, price.discount_basis_points)


def _event_key() -> list[ColumnElement[Any]]:
    return [
        _events.tenant_id,
        _BUCKET.label("bucket_start_us"),
        _requests.api_key_id,
        _events.model,
    ]


def _labelled(
    names: Sequence[str], columns: Sequence[ColumnElement[Any]], *, negative: bool
) -> list[ColumnElement[Any]]:
    return [
        (-column if negative else column).label(name) for name, column in zip(names, columns, strict=True)
    ]


def _rolled_up(table: Table, sums: Sequence[str], window: Window, *more: ColumnElement[Any]) -> Select[Any]:
    columns = table.c
    within = columns.bucket_start_us.between(window.start, window.end - 1)
    key = (columns.tenant_id, columns.bucket_start_us, columns.api_key_id, columns.model)
    return select(*key, *more, *(columns[name] for name in sums)).where(
        window.owns(columns.tenant_id), within
    )


def _unbalanced(
    connection: Connection,
    first: Select[Any],
    second: Select[Any],
    *,
    key: Sequence[str],
    sums: Sequence[str],
) -> Iterator[RowMapping]:
    """Where the second, and the first with its sign changed, do not add up to nothing."""
    both = union_all(first, second).subquery("both_books")

    def build(totals: Sequence[ColumnElement[Any]]) -> Select[Any]:
        keys = [both.c[name] for name in key]
        is_left: ColumnElement[bool] = or_(*(total.element != 0 for total in totals))
        return select(*keys, *totals).group_by(*keys).having(is_left)

    for row in exact_sums(connection, {name: both.c[name] for name in sums}, build):
        if any(exact_sum(row, name) for name in sums):
            yield row


def streamed(
    connection: Connection, chosen: Select[Any], *, at_a_time: int = ROWS_AT_A_TIME
) -> Iterator[Row[Any]]:
    """Rows as they come, never all of them at once."""
    yield from connection.execute(chosen, execution_options={"yield_per": at_a_time})


def in_bucket(check: Check, tenant_id: UUID, instant: Microseconds, subject: str, **more: Any) -> Difference:
    start = bucket_start(instant)
    end = Microseconds(start + BUCKET_MICROSECONDS)
    return Difference(check=check, tenant_id=tenant_id, start=start, end=end, subject=subject, **more)


def _sum_of(row: RowMapping | None, name: str) -> int:
    return 0 if row is None else exact_sum(row, name)

"""Requests one by one: a page of them, newest first, and all that is known of one.

Knows events, requests, attempts and lines. Does not know names or how a page is shown. A page begins
after the last row of the one before it, so rows that come meanwhile move nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from uuid import UUID

from sqlalchemy import ColumnElement, Connection, Row, select, tuple_

from billing import schema
from billing.db import Database
from billing.errors import UnknownRequest
from billing.ids import ApiKeyId, ProjectId, RequestId, TenantId
from billing.instants import Microseconds
from billing.reports import Selection
from billing.totals import PROMPT, READS
from billing.usage import TokenClass, UsageKind

MAX_ROWS: Final = 200
TERMINAL_KINDS: Final = tuple(kind.value for kind in UsageKind)

_events: Final = schema.usage_events.c
_requests: Final = schema.requests.c
_lines: Final = schema.ledger_lines.c
_READ: Final = (
    _events.read_tokens + _events.read_host_tokens + _events.read_disk_tokens + _events.read_remote_tokens
)


class Place(NamedTuple):
    """Where a row stands: the instant it is accounted to, and its event's id."""

    accounted_at: Microseconds
    event_id: UUID


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFilter:
    """Which requests are meant. None is no condition. `kinds` are those of events."""

    selection: Selection
    start: Microseconds
    end: Microseconds
    kinds: Collection[str] | None = None
    is_hit: bool | None = None
    miss_reasons: Collection[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    """One event of a request, with what its lines add up to."""

    place: Place
    request_id: RequestId
    tenant_id: TenantId
    project_id: ProjectId | None
    api_key_id: ApiKeyId
    kind: str
    model: str
    worker: str | None
    finish_reason: str | None
    miss_reason: str | None
    first_token_ns: int | None
    usage_state: str
    admitted_at: Microseconds
    finished_at: Microseconds
    tokens: Mapping[TokenClass, int]
    list_amount_pusd: int
    amount_pusd: int
    amount_without_cache_pusd: int

    @property
    def prompt_tokens(self) -> int:
        return sum(self.tokens[one] for one in PROMPT)

    @property
    def read_tokens(self) -> int:
        """From any tier."""
        return sum(self.tokens[one] for one in READS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLine:
    token_class: TokenClass
    quantity: int
    list_unit_pusd: int
    unit_pusd: int
    amount_pusd: int
    amount_without_cache_pusd: int
    price_version_id: UUID


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestAttempt:
    number: int
    worker: str | None
    outcome: str
    started_at: Microseconds
    ended_at: Microseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """`events` are the end of the request and its corrections, in order; `lines` are of all of them."""

    events: Sequence[RequestRow]
    lines: Sequence[RequestLine]
    attempts: Sequence[RequestAttempt]


def list_requests(
    db: Database, wanted: RequestFilter, *, after: Place | None = None, limit: int
) -> tuple[Sequence[RequestRow], Place | None]:
    """At most `limit` rows, newest first, and where the next page begins; None when this is the last."""
    assert 0 < limit <= MAX_ROWS, "whoever asks has a limit of its own"
    chosen = (
        select(schema.usage_events, _requests.project_id, _requests.api_key_id)
        .join(schema.requests, _requests.id == _events.request_id)
        .where(*_conditions(wanted))
        .order_by(_events.accounted_at_us.desc(), _events.id.desc())
        .limit(limit + 1)
    )
    if after is not None:
        # The first condition says no more than the second, in words that an index understands.
        chosen = chosen.where(
            _events.accounted_at_us <= after.accounted_at,
            tuple_(_events.accounted_at_us, _events.id) < (after.accounted_at, after.event_id),
        )
    with db.read() as connection:
        found = connection.execute(chosen).all()
        rows = list(_with_amounts(connection, found[:limit]))
    return rows, rows[-1].place if len(found) > limit else None


def find_request(
    db: Database, request_id: RequestId, *, tenant_ids: Collection[TenantId] | None
) -> RequestRecord:
    """Raises UnknownRequest, also for one of a tenant that is not among those given."""
    chosen = (
        select(schema.usage_events, _requests.project_id, _requests.api_key_id)
        .join(schema.requests, _requests.id == _events.request_id)
        .where(_events.request_id == request_id)
        .order_by(_events.posted_at_us, _events.id)
    )
    if tenant_ids is not None:
        chosen = chosen.where(_events.tenant_id.in_(tenant_ids))
    with db.read() as connection:
        found = connection.execute(chosen).all()
        if not found:
            raise UnknownRequest(f"no request has the id {request_id}")
        return RequestRecord(
            events=list(_with_amounts(connection, found)),
            lines=_lines_of(connection, [row.id for row in found]),
            attempts=_attempts_of(connection, request_id),
        )


def _conditions(wanted: RequestFilter) -> Iterator[ColumnElement[bool]]:
    chosen = wanted.selection
    yield _events.accounted_at_us >= wanted.start
    yield _events.accounted_at_us < wanted.end
    for column, values in (
        (_events.tenant_id, chosen.tenant_ids),
        (_requests.project_id, chosen.project_ids),
        (_requests.api_key_id, chosen.api_key_ids),
        (_events.model, chosen.models),
        (_events.kind, wanted.kinds),
        (_events.miss_reason, wanted.miss_reasons),
    ):
        if values is not None:
            yield column.in_(values)
    if chosen.tenant_ids is None:
        # No condition, but the way into an index that begins with the tenant.
        yield _events.tenant_id.in_(select(schema.tenants.c.id))
    if wanted.is_hit is not None:
        yield _events.kind.in_(TERMINAL_KINDS)
        yield _READ > 0 if wanted.is_hit else _READ == 0


def _with_amounts(connection: Connection, rows: Sequence[Row[Any]]) -> Iterator[RequestRow]:
    amounts: dict[UUID, list[int]] = {row.id: [0, 0, 0] for row in rows}
    posted = select(
        _lines.event_id,
        _lines.quantity_tokens,
        _lines.list_unit_pusd,
        _lines.amount_pusd,
        _lines.amount_without_cache_pusd,
    ).where(_lines.event_id.in_(amounts))
    for line in connection.execute(posted):
        sums = amounts[line.event_id]
        sums[0] += line.quantity_tokens * line.list_unit_pusd
        sums[1] += line.amount_pusd
        sums[2] += line.amount_without_cache_pusd
    for row in rows:
        yield _request_row(row, *amounts[row.id])


def _request_row(row: Row[Any], list_amount: int, amount: int, without_cache: int) -> RequestRow:
    return RequestRow(
        place=Place(row.accounted_at_us, row.id),
        request_id=RequestId(row.request_id),
        tenant_id=TenantId(row.tenant_id),
        project_id=row.project_id,
        api_key_id=ApiKeyId(row.api_key_id),
        kind=row.kind,
        model=row.model,
        worker=row.worker,
        finish_reason=row.finish_reason,
        miss_reason=row.miss_reason,
        first_token_ns=row.first_token_ns,
        usage_state=row.usage_state,
        admitted_at=row.admitted_at_us,
        finished_at=row.finished_at_us,
        tokens={
            one: row._mapping[column] for one, column in zip(TokenClass, schema.COUNT_COLUMNS, strict=True)
        },
        list_amount_pusd=list_amount,
        amount_pusd=amount,
        amount_without_cache_pusd=without_cache,
    )


def _lines_of(connection: Connection, event_ids: Sequence[UUID]) -> Sequence[RequestLine]:
    chosen = select(schema.ledger_lines).where(_lines.event_id.in_(event_ids))
    order = list(TokenClass)
    return sorted(
        (
            RequestLine(
                token_class=TokenClass(row.token_class),
                quantity=row.quantity_tokens,
                list_unit_pusd=row.list_unit_pusd,
                unit_pusd=row.unit_pusd,
                amount_pusd=row.amount_pusd,
                amount_without_cache_pusd=row.amount_without_cache_pusd,
                price_version_id=row.price_version_id,
            )
            for row in connection.execute(chosen)
        ),
        key=lambda line: order.index(line.token_class),
    )


def _attempts_of(connection: Connection, request_id: RequestId) -> Sequence[RequestAttempt]:
    attempts = schema.attempts.c
    chosen = select(schema.attempts).where(attempts.request_id == request_id).order_by(attempts.number)
    return [
        RequestAttempt(
            number=row.number,
            worker=row.worker,
            outcome=row.outcome,
            started_at=row.started_at_us,
            ended_at=row.ended_at_us,
        )
        for row in connection.execute(chosen)
    ]

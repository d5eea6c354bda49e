"""The ledger, line by line, for programs of others.

Knows events, lines and pages. Does not know files or formats. However long the ledger is, one page
of it is in memory; all pages are of one snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Connection, Row, Select, select, tuple_

from billing import schema
from billing.db import Database
from billing.ids import TenantId
from billing.instants import Microseconds
from billing.names import TenantNames, names_of
from billing.reports import require_forwards

EVENTS_PER_PAGE: Final = 2_000

_events: Final = schema.usage_events.c
_lines: Final = schema.ledger_lines.c


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """One line, with what it belongs to. `quantity` is tokens, or token-hours for pins."""

    tenant_id: TenantId
    tenant: str
    event_id: UUID
    request_id: UUID
    kind: str
    admitted_at: Microseconds
    accounted_at: Microseconds
    project_id: UUID | None
    project: str | None
    api_key_id: UUID
    api_key: str
    model: str
    token_class: str
    quantity: int
    list_unit_pusd: int
    discount_basis_points: int
    unit_pusd: int
    amount_pusd: int
    amount_without_cache_pusd: int
    price_version_id: UUID


def ledger_rows(
    db: Database, *, tenant_ids: Sequence[TenantId], start: Microseconds, end: Microseconds
) -> Iterator[LedgerRow]:
    """Every line accounted to `[start, end)`: by tenant as given, then by instant, event and class.

    Raises InvalidPeriod or UnknownTenant.
    """
    require_forwards(start, end)
    with db.read() as connection:
        for tenant_id in tenant_ids:
            names = names_of(connection, tenant_id)
            for page in _event_pages(connection, tenant_id, start, end):
                yield from _rows(connection, page, tenant_id, names)


def _event_pages(
    connection: Connection, tenant_id: TenantId, start: Microseconds, end: Microseconds
) -> Iterator[Sequence[Row[Any]]]:
    requests, keys = schema.requests.c, schema.api_keys.c
    chosen: Select[Any] = (
        select(
            _events.id,
            _events.request_id,
            _events.kind,
            _events.model,
            _events.admitted_at_us,
            _events.accounted_at_us,
            keys.project_id,
            requests.api_key_id,
        )
        .join(schema.requests, requests.id == _events.request_id)
        .join(schema.api_keys, keys.id == requests.api_key_id)
        .where(_events.tenant_id == tenant_id, _events.accounted_at_us < end)
        .order_by(_events.accounted_at_us, _events.id)
        .limit(EVENTS_PER_PAGE)
    )
    following = chosen.where(_events.accounted_at_us >= start)
    while page := connection.execute(following).all():
        yield page
        last = page[-1]
        # The first condition says no more than the second, in words that an index understands.
        following = chosen.where(
            _events.accounted_at_us >= last.accounted_at_us,
            tuple_(_events.accounted_at_us, _events.id) > (last.accounted_at_us, last.id),
        )


def _rows(
    connection: Connection, page: Sequence[Row[Any]], tenant_id: TenantId, names: TenantNames
) -> Iterator[LedgerRow]:
    by_event: dict[UUID, list[Row[Any]]] = {event.id: [] for event in page}
    posted = select(schema.ledger_lines).where(_lines.event_id.in_(by_event))
    for line in connection.execute(posted.order_by(_lines.token_class)):
        by_event[line.event_id].append(line)
    for event in page:
        for line in by_event[event.id]:
            yield _row(event, line, tenant_id, names)


def _row(event: Row[Any], line: Row[Any], tenant_id: TenantId, names: TenantNames) -> LedgerRow:
    return LedgerRow(
        tenant_id=tenant_id,
        tenant=names.tenant,
        event_id=event.id,
        request_id=event.request_id,
        kind=event.kind,
        admitted_at=event.admitted_at_us,
        accounted_at=event.accounted_at_us,
        project_id=event.project_id,
        project=None if event.project_id is None else names.projects[event.project_id],
        api_key_id=event.api_key_id,
        api_key=names.api_keys[event.api_key_id],
        model=event.model,
        token_class=line.token_class,
        quantity=line.quantity_tokens,
        list_unit_pusd=line.list_unit_pusd,
        discount_basis_points=line.discount_basis_points,
        unit_pusd=line.unit_pusd,
        amount_pusd=line.amount_pusd,
        amount_without_cache_pusd=line.amount_without_cache_pusd,
        price_version_id=line.price_version_id,
    )

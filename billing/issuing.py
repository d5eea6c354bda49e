"""Statements are drawn up, issued and found again.

Knows tables, closed periods and the order of statements. Does not know how a statement looks.

States of a month: `open → closed → stated`. Of an open one there is a preview, which is kept
nowhere. A statement is written once, as one document with its digest; whoever asks
again gets the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from sqlalchemy import Connection, insert, select, text

from billing import calendar, schema, statements
from billing.books import CREDIT, NO_BOOKS, totals_of
from billing.calendar import Span, month_of, zone_named
from billing.db import Database
from billing.errors import PeriodOpen, StatementOutOfOrder, UnknownStatement
from billing.ids import ApiKeyId, ProjectId, TenantId, new_id
from billing.instants import Microseconds
from billing.names import TenantNames, names_of
from billing.reports import CURRENCY, Dimension, Group, GroupUsage, Selection, usage_within
from billing.statements import (
    LineKind,
    Statement,
    StatementLine,
    Status,
    statement_number,
)
from billing.totals import NOTHING, ClassTotals
from billing.usage import TokenClass

_BY: Final = (Dimension.PROJECT, Dimension.API_KEY, Dimension.MODEL)
_statements: Final = schema.statements.c
_events: Final = schema.usage_events.c
_lines: Final = schema.ledger_lines.c


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedStatement:
    """A statement as it is kept: `document` is its canonical form, and `digest` the SHA-256 of that."""

    statement: Statement
    document: str
    digest: bytes


def issue_statement(db: Database, *, tenant_id: TenantId, period: str, now: Microseconds) -> IssuedStatement:
    """The statement of a closed month (`2026-11`); the one that was issued, if one was.

    Raises InvalidPeriod, UnknownTenant, PeriodOpen, or StatementOutOfOrder.
    """
    with db.write() as connection:
        _lock(connection, tenant_id)
        issued = _find(connection, tenant_id, period)
        if issued is not None:
            return issued
        names = names_of(connection, tenant_id)
        span = calendar.month(period, zone_named(names.time_zone))
        _require_closed(connection, tenant_id, span, now)
        _require_next(connection, tenant_id, span)
        statement = _draw_up(connection, tenant_id, names, span, now=now, status=Status.FINAL)
        document = statements.encode(statement)
        issued = IssuedStatement(statement=statement, document=document, digest=statements.digest(document))
        connection.execute(insert(schema.statements).values(_row(issued)))
        return issued


def preview_statement(db: Database, *, tenant_id: TenantId, period: str, now: Microseconds) -> Statement:
    """What a statement would say if the month ended now. Raises InvalidPeriod or UnknownTenant."""
    with db.read() as connection:
        names = names_of(connection, tenant_id)
        span = calendar.month(period, zone_named(names.time_zone))
        return _draw_up(connection, tenant_id, names, span, now=now, status=Status.PREVIEW)


def find_statement(db: Database, *, tenant_id: TenantId, period: str, now: Microseconds) -> IssuedStatement:
    """Raises InvalidPeriod, UnknownTenant, PeriodOpen, or UnknownStatement when none was issued yet."""
    with db.read() as connection:
        issued = _find(connection, tenant_id, period)
        if issued is not None:
            return issued
        span = calendar.month(period, zone_named(names_of(connection, tenant_id).time_zone))
        _require_closed(connection, tenant_id, span, now)
    raise UnknownStatement(f"{period} has no statement yet")


def list_statements(db: Database, *, tenant_id: TenantId) -> Sequence[IssuedStatement]:
    """The latest month first."""
    issued = select(schema.statements).where(_statements.tenant_id == tenant_id)
    with db.read() as connection:
        rows = connection.execute(issued.order_by(_statements.end_us.desc())).all()
    return [_issued(row.document, row.digest) for row in rows]


def _find(connection: Connection, tenant_id: TenantId, period: str) -> IssuedStatement | None:
    row = connection.execute(
        select(_statements.document, _statements.digest).where(
            _statements.tenant_id == tenant_id, _statements.period == period
        )
    ).one_or_none()
    return None if row is None else _issued(row.document, row.digest)


def _issued(document: str, digest: bytes) -> IssuedStatement:
    assert digest == statements.digest(document), "a statement is never changed"
    return IssuedStatement(statement=statements.decode(document), document=document, digest=digest)


def _row(issued: IssuedStatement) -> dict[str, object]:
    statement = issued.statement
    return {
        "id": new_id(),
        "tenant_id": statement.tenant_id,
        "number": statement.number,
        "period": statement.period,
        "start_us": statement.start,
        "end_us": statement.end,
        "issued_at_us": statement.issued_at,
        "document": issued.document,
        "digest": issued.digest,
    }


def _lock(connection: Connection, tenant_id: TenantId) -> None:
    """One statement of a tenant at a time. SQLite has one writer anyway, and no such clause."""
    connection.execute(select(schema.tenants.c.id).where(schema.tenants.c.id == tenant_id).with_for_update())


def _require_closed(connection: Connection, tenant_id: TenantId, span: Span, now: Microseconds) -> None:
    if now < span.end:
        raise PeriodOpen(f"{span.label} is still open: there is a preview of it, and no statement yet")


def _require_next(connection: Connection, tenant_id: TenantId, span: Span) -> None:
    """Every picodollar is on one statement: months follow each other, and none with usage is left out."""
    last = _last_before(connection, tenant_id, None)
    if last is not None and last.end > span.start:
        raise StatementOutOfOrder(f"{last.period} has a statement already, so {span.label} comes too late")
    stated_until = last.end if last is not None else 0
    unstated = select(_events.accounted_at_us).where(
        _events.tenant_id == tenant_id,
        _events.accounted_at_us >= stated_until,
        _events.accounted_at_us < span.start,
    )
    first = connection.execute(unstated.order_by(_events.accounted_at_us).limit(1)).scalar_one_or_none()
    if first is not None:
        zone = zone_named(names_of(connection, tenant_id).time_zone)
        month = month_of(Microseconds(first), zone)
        raise StatementOutOfOrder(f"{month} has usage and no statement: it comes before {span.label}")


def _last_before(connection: Connection, tenant_id: TenantId, end: Microseconds | None) -> Statement | None:
    """The latest statement of a tenant; with `end`, of those that end by then."""
    chosen = select(_statements.document).where(_statements.tenant_id == tenant_id)
    if end is not None:
        chosen = chosen.where(_statements.end_us <= end)
    latest = chosen.order_by(_statements.end_us.desc()).limit(1)
    document = connection.execute(latest).scalar_one_or_none()
    return None if document is None else statements.decode(document)


class _Account(NamedTuple):
    """What a line is for."""

    kind: LineKind
    for_period: str
    project_id: ProjectId | None
    api_key_id: ApiKeyId
    model: str
    token_class: TokenClass


def _draw_up(
    connection: Connection,
    tenant_id: TenantId,
    names: TenantNames,
    span: Span,
    *,
    now: Microseconds,
    status: Status,
) -> Statement:
    usage = usage_within(connection, Selection(tenant_ids=[tenant_id]), [span], by=_BY)
    amounts = _amounts(usage, _corrections(connection, tenant_id, span, names), span)
    before = _last_before(connection, tenant_id, span.start)
    return Statement(
        number=statement_number(tenant_id, span.label),
        status=status,
        tenant_id=tenant_id,
        tenant=names.tenant,
        period=span.label,
        time_zone=names.time_zone,
        start=span.start,
        end=span.end,
        issued_at=now,
        currency=CURRENCY,
        requests=sum(one.totals.requests for one in usage),
        lines=_in_order(_line(account, totals, names) for account, totals in amounts.items()),
        residual_brought_pusd=before.residual_kept_pusd if before is not None else 0,
        reconciliation=totals_of(connection, [tenant_id], span).get(tenant_id, NO_BOOKS),
    )


def _amounts(
    usage: Sequence[GroupUsage], corrections: Mapping[_Account, ClassTotals], span: Span
) -> Mapping[_Account, ClassTotals]:
    """Reports do not tell corrections apart, so the period's own usage is what is left without them."""
    amounts = dict(corrections)
    for one in usage:
        for token_class, totals in one.totals.by_class.items():
            amounts[_own_account(one.group, token_class, span)] = totals
    for account, totals in corrections.items():
        own = account._replace(kind=LineKind.USAGE, for_period=span.label)
        amounts[own] = amounts.get(own, NOTHING) + -totals
    return {account: totals for account, totals in amounts.items() if totals != NOTHING}


def _own_account(group: Group, token_class: TokenClass, span: Span) -> _Account:
    assert group.api_key_id is not None, "usage was asked for by key"
    assert group.model is not None, "usage was asked for by model"
    return _Account(LineKind.USAGE, span.label, group.project_id, group.api_key_id, group.model, token_class)


def _corrections(
    connection: Connection, tenant_id: TenantId, span: Span, names: TenantNames
) -> Mapping[_Account, ClassTotals]:
    """What is accounted to the period without being its own usage: corrected, granted or late."""
    requests, keys, zone = schema.requests.c, schema.api_keys.c, zone_named(names.time_zone)
    # By itself, so that the predicate is the index's own.
    events = (
        select(schema.usage_events)
        .where(_events.tenant_id == tenant_id, _events.accounted_at_us.between(span.start, span.end - 1))
        .where(text(schema.OUT_OF_PERIOD))
        .subquery()
    )
    rows = connection.execute(
        select(
            events.c.kind,
            events.c.model,
            events.c.admitted_at_us,
            keys.project_id,
            requests.api_key_id,
            _lines.token_class,
            _lines.quantity_tokens,
            (_lines.quantity_tokens * _lines.list_unit_pusd).label("list_amount_pusd"),
            _lines.amount_pusd,
            _lines.amount_without_cache_pusd,
        )
        .join(schema.requests, requests.id == events.c.request_id)
        .join(schema.api_keys, keys.id == requests.api_key_id)
        .join(schema.ledger_lines, _lines.event_id == events.c.id)
    )
    found: dict[_Account, ClassTotals] = {}
    for row in rows:
        account = _Account(
            LineKind.CREDIT if row.kind == CREDIT else LineKind.ADJUSTMENT,
            month_of(row.admitted_at_us, zone),
            row.project_id,
            row.api_key_id,
            row.model,
            TokenClass(row.token_class),
        )
        found[account] = found.get(account, NOTHING) + ClassTotals(
            quantity=row.quantity_tokens,
            list_amount_pusd=row.list_amount_pusd,
            amount_pusd=row.amount_pusd,
            amount_without_cache_pusd=row.amount_without_cache_pusd,
        )
    return found


def _line(account: _Account, totals: ClassTotals, names: TenantNames) -> StatementLine:
    project_id, api_key_id = account.project_id, account.api_key_id
    return StatementLine(
        kind=account.kind,
        for_period=account.for_period,
        project_id=project_id,
        project=names.projects[project_id] if project_id is not None else None,
        api_key_id=api_key_id,
        api_key=names.api_keys[api_key_id],
        model=account.model,
        token_class=account.token_class,
        quantity=totals.quantity,
        list_amount_pusd=totals.list_amount_pusd,
        amount_pusd=totals.amount_pusd,
        amount_without_cache_pusd=totals.amount_without_cache_pusd,
    )


def _in_order(lines: Iterable[StatementLine]) -> Sequence[StatementLine]:
    """Usage, adjustments, credits; in each by project, key, model and class."""
    kinds, classes = list(LineKind), list(TokenClass)
    return sorted(
        lines,
        key=lambda line: (
            kinds.index(line.kind),
            line.for_period,
            line.project or "",
            line.api_key,
            line.model,
            classes.index(line.token_class),
        ),
    )

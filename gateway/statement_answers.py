"""Statements over HTTP: which one is asked for, in which format, and what is refused.

Knows the query and the media types. Does not know who asks: the tenant is the
caller's own, from a key or from a session.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from starlette.responses import Response

from billing.db import Database
from billing.errors import InvalidPeriod, PeriodOpen, UnknownStatement
from billing.ids import TenantId
from billing.instants import Microseconds
from billing.issuing import find_statement, list_statements, preview_statement
from billing.money import format_cents
from billing.statements import Statement, Status
from gateway.edge.errors import InvalidRequest, NotFound
from gateway.queries import NO_OR_YES, Query, QueryItems
from gateway.statements import as_csv, as_json, as_text
from gateway.tables import shown_instant
from gateway.web.statements import statement_page

FORMATS: Final = ("json", "csv", "html", "text")
ADDRESS: Final = "/v1/statements"


@dataclass(frozen=True, slots=True, kw_only=True)
class StatementQuery:
    period: str
    form: str
    is_preview: bool


def parse(period: str, items: QueryItems, *, default_format: str) -> StatementQuery:
    """Raises `InvalidRequest`."""
    query = Query(items, known=("format", "preview"))
    return StatementQuery(
        period=period,
        form=query.choice("format", {name: name for name in FORMATS}, default=default_format),
        is_preview=query.choice("preview", NO_OR_YES, default="false"),
    )


def answer(database: Database, tenant_id: TenantId, asked: StatementQuery, *, now: Microseconds) -> Response:
    """Blocks. Raises `InvalidRequest` for what is no month or still open, `NotFound` without a statement."""
    try:
        if asked.is_preview:
            preview = preview_statement(database, tenant_id=tenant_id, period=asked.period, now=now)
            return _response(preview, None, asked.form)
        issued = find_statement(database, tenant_id=tenant_id, period=asked.period, now=now)
    except InvalidPeriod as error:
        raise InvalidRequest("A period is a month, as '2026-11'.", param="period") from error
    except PeriodOpen as error:
        raise InvalidRequest(
            f"{asked.period} is still open: ask with preview=true.", param="period", code="period_open"
        ) from error
    except UnknownStatement as error:
        raise NotFound(
            f"{asked.period} has no statement yet.", param="period", code="statement_not_found"
        ) from error
    return _response(issued.statement, issued.digest, asked.form)


def as_list(database: Database, tenant_id: TenantId) -> bytes:
    """JSON, the latest month first. Blocks."""
    issued = list_statements(database, tenant_id=tenant_id)
    data = [
        {
            "object": "statement",
            "number": one.statement.number,
            "period": one.statement.period,
            "issued_at": shown_instant(one.statement.issued_at),
            "currency": one.statement.currency,
            "due": format_cents(one.statement.due_cents),
            "digest": one.digest.hex(),
            "url": f"{ADDRESS}/{one.statement.period}",
        }
        for one in issued
    ]
    return json.dumps({"object": "list", "data": data}).encode()


def _response(statement: Statement, digest: bytes | None, form: str) -> Response:
    if form == "html":
        return statement_page(statement, digest)
    body, media_type = _body(statement, digest, form)
    response = Response(body, media_type=media_type, headers={"cache-control": "no-store"})
    if form == "csv":
        name = f"{statement.number}{'-preview' if statement.status is Status.PREVIEW else ''}.csv"
        response.headers["content-disposition"] = f'attachment; filename="{name}"'
    return response


def _body(statement: Statement, digest: bytes | None, form: str) -> tuple[bytes, str]:
    if form == "csv":
        return as_csv(statement), "text/csv"
    if form == "text":
        return as_text(statement, digest).encode(), "text/plain"
    return as_json(statement, digest), "application/json"

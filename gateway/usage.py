"""`GET /v1/usage`: what the caller's own tenant used, paid and saved in a period.

Knows query parameters and the report's JSON. Does not know SQL: billing adds up.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID
from zoneinfo import ZoneInfo

from billing import calendar, instants
from billing.calendar import Cutter, Span, days, hours, uncut
from billing.db import Database
from billing.ids import TenantId
from billing.instants import MICROSECONDS_PER_SECOND, Microseconds
from billing.money import format_basis_points, format_dollars
from billing.names import TenantNames, names_of
from billing.reports import CURRENCY, Dimension, GroupUsage, Selection, usage_within
from billing.totals import ClassTotals, UsageTotals
from billing.usage import TokenClass
from gateway.edge.errors import InvalidRequest
from gateway.queries import Query, QueryItems, next_second, require_forwards

MAX_GROUPS: Final = 1_000
MAX_DAYS: Final = {"day": 400, "hour": 31}
OTHER: Final = "other"
STATEMENTS: Final = "/v1/statements"
SECONDS_PER_DAY: Final = 86_400

_PARAMETERS: Final = ("start_time", "end_time", "time_zone", "group_by")
_DIMENSIONS: Final = {
    "project": Dimension.PROJECT,
    "api_key": Dimension.API_KEY,
    "model": Dimension.MODEL,
}
_CUTTERS: Final[Mapping[str, Cutter]] = {"day": days, "hour": hours}

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuery:
    """A period in a zone, cut into spans, and the names of what its usage is told apart by."""

    start: Microseconds
    end: Microseconds
    zone: ZoneInfo
    by: Sequence[str]
    spans: Sequence[Span]


def parse_usage_query(items: QueryItems, *, now: Microseconds, tenant_zone: str) -> UsageQuery:
    """By default the day so far, in the tenant's zone. Raises `InvalidRequest`."""
    query = Query(items, known=_PARAMETERS)
    zone = query.zone("time_zone", default=tenant_zone)
    today = instants.to_datetime(now).astimezone(zone).date()
    start = query.instant("start_time", default=calendar.start_of_day(today, zone))
    end = query.instant("end_time", default=next_second(now))
    require_forwards(start, end)
    by = query.choices("group_by", {name: name for name in (*_DIMENSIONS, *_CUTTERS)})
    return UsageQuery(start=start, end=end, zone=zone, by=by, spans=_spans(by, start, end, zone))


def read_usage(database: Database, tenant_id: TenantId, items: QueryItems, *, now: Microseconds) -> bytes:
    """The tenant's report as JSON. Blocks. Raises `InvalidRequest` or `DatabaseUnavailable`."""
    with database.read() as connection:
        names = names_of(connection, tenant_id)
        query = parse_usage_query(items, now=now, tenant_zone=names.time_zone)
        selection = Selection(tenant_ids=[tenant_id])
        by = [_DIMENSIONS[name] for name in query.by if name in _DIMENSIONS]
        groups = usage_within(connection, selection, query.spans, by=by)
    # Not msgspec, whose integers have 64 bits: a total may have more.
    return json.dumps(_body(query, groups, names), ensure_ascii=False).encode()


def _spans(by: Collection[str], start: Microseconds, end: Microseconds, zone: ZoneInfo) -> Sequence[Span]:
    cutters = [name for name in by if name in _CUTTERS]
    if len(cutters) > 1:
        raise InvalidRequest("'group_by' is either 'day' or 'hour'.", param="group_by")
    if not cutters:
        return uncut(start, end, zone)
    days_asked = (end - start) // (SECONDS_PER_DAY * MICROSECONDS_PER_SECOND)
    if days_asked > MAX_DAYS[cutters[0]]:
        most = MAX_DAYS[cutters[0]]
        raise InvalidRequest(
            f"Grouped by {cutters[0]}, a period has at most {most} days.", param="start_time"
        )
    return _CUTTERS[cutters[0]](start, end, zone)


def _body(query: UsageQuery, groups: Sequence[GroupUsage], names: TenantNames) -> Json:
    body = {
        "object": "usage",
        "start_time": query.start // MICROSECONDS_PER_SECOND,
        "end_time": query.end // MICROSECONDS_PER_SECOND,
        "time_zone": query.zone.key,
        **_figures(sum((one.totals for one in groups), UsageTotals())),
        "statements": STATEMENTS,
    }
    return {**body, "groups": _rows(query, groups, names)} if query.by else body


def _rows(query: UsageQuery, groups: Sequence[GroupUsage], names: TenantNames) -> Sequence[Json]:
    """The largest groups, in order of time; the rest is one more, so that all of them add up."""
    largest = sorted(groups, key=_size, reverse=True)
    kept = sorted(largest[:MAX_GROUPS], key=lambda one: one.span.start)
    rows = [{**_group(query, one, names), **_figures(one.totals)} for one in kept]
    rest = sum((one.totals for one in largest[MAX_GROUPS:]), UsageTotals())
    if len(largest) > MAX_GROUPS:
        rows.append({**dict.fromkeys(query.by, OTHER), **_figures(rest)})
    return rows


def _size(one: GroupUsage) -> tuple[int, int, str]:
    return one.totals.amount_pusd, one.totals.prompt_tokens, str(one.group)


def _group(query: UsageQuery, one: GroupUsage, names: TenantNames) -> Json:
    project_id, api_key_id = one.group.project_id, one.group.api_key_id
    known: Json = {
        "project": {"project_id": _text(project_id), "project": project_id and names.projects[project_id]},
        "api_key": {"api_key_id": _text(api_key_id), "api_key": api_key_id and names.api_keys[api_key_id]},
        "model": {"model": one.group.model},
        "day": {"day": one.span.label},
        "hour": {"hour": one.span.label},
    }
    fields: Json = {}
    for name in query.by:
        fields |= known[name]
    return fields


def _figures(totals: UsageTotals) -> Json:
    """Token classes are disjoint and add up to `input_tokens`; money is exact."""
    return {
        "requests": totals.requests,
        "input_tokens": totals.prompt_tokens,
        "input_uncached_tokens": totals.uncached_tokens,
        "input_cached_tokens": totals.read_tokens,
        "input_cache_write_tokens": totals.written_tokens,
        "output_tokens": totals.output_tokens,
        "hit_percent": format_basis_points(totals.hit_basis_points),
        "currency": CURRENCY.lower(),
        **_money("list_amount", totals.list_amount_pusd),
        **_money("discount", totals.list_amount_pusd - totals.amount_pusd),
        **_money("amount", totals.amount_pusd),
        **_money("amount_without_cache", totals.amount_without_cache_pusd),
        **_money("saved", totals.saved_pusd),
        "token_classes": {one.value: _class_figures(totals.of([one])) for one in TokenClass},
    }


def _class_figures(totals: ClassTotals) -> Json:
    return {"quantity": totals.quantity, **_money("amount", totals.amount_pusd)}


def _money(name: str, amount_pusd: int) -> Json:
    return {name: format_dollars(amount_pusd), f"{name}_pusd": amount_pusd}


def _text(identity: UUID | None) -> str | None:
    return None if identity is None else str(identity)

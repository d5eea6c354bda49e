"""`/v1/organization/usage/completions` and `/v1/organization/costs`: everybody's usage, in OpenAI's shape.

Knows the query and the pages that OpenAI's admin client takes. Does not know SQL: billing
adds up. An organization is this deployment, and its projects are those of all tenants.

A page is a row of time buckets. In every bucket the groups add up to the total: what exceeds
`MAX_GROUPS` is one group more, named `other`. A float is made here and nowhere else, because the
shape has one; the exact amount stands beside it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final
from zoneinfo import ZoneInfo

from billing import calendar
from billing.calendar import Cutter, Span, days, hours, minutes
from billing.db import Database
from billing.ids import ApiKeyId, ProjectId
from billing.instants import MICROSECONDS_PER_SECOND, Microseconds
from billing.money import PICODOLLARS_PER_DOLLAR, format_dollars
from billing.reports import CURRENCY, Dimension, GroupUsage, Selection, grouped_usage
from billing.totals import ClassTotals, UsageTotals
from billing.usage import TokenClass
from gateway.edge.errors import InvalidRequest, UnsupportedParameter
from gateway.queries import Query, QueryItems, next_second, require_forwards

MAX_GROUPS: Final = 100
OTHER: Final = "other"
LINE_ITEM: Final = "line_item"
UTC: Final = "UTC"
_DIGEST_DIGITS: Final = 16

_COMMON: Final = (
    "start_time",
    "end_time",
    "time_zone",
    "bucket_width",
    "group_by",
    "project_ids",
    "api_key_ids",
    "limit",
    "page",
)
# What OpenAI's client can ask for, and nobody here can answer.
_UNKNOWABLE: Final = ("user_ids", "batch", "line_items")
_GROUPS: Final = {one.value: one for one in Dimension}

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Width:
    """Of a time bucket: how it is cut, the longest it can be, and how many a page may have."""

    cutter: Cutter
    longest_seconds: int
    default_limit: int
    max_limit: int


_MINUTE: Final = Width(cutter=minutes, longest_seconds=60, default_limit=60, max_limit=1_440)
_HOUR: Final = Width(cutter=hours, longest_seconds=5_400, default_limit=24, max_limit=168)
_DAY: Final = Width(cutter=days, longest_seconds=90_000, default_limit=7, max_limit=31)
_DAY_OF_COSTS: Final = Width(cutter=days, longest_seconds=90_000, default_limit=7, max_limit=180)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageQuery:
    """One page: its buckets, whose usage, told apart by what, and what the next page is asked with."""

    spans: Sequence[Span]
    selection: Selection
    by: Sequence[Dimension]
    by_line_item: bool
    next_page: str | None


def parse_usage_query(items: QueryItems, *, now: Microseconds) -> PageQuery:
    """Raises `InvalidRequest`."""
    query = _query(items, known=(*_COMMON, "models"))
    width = query.choice("bucket_width", {"1m": _MINUTE, "1h": _HOUR, "1d": _DAY}, default="1d")
    by = query.choices("group_by", _GROUPS)
    return _page_query(query, width, by, by_line_item=False, now=now)


def parse_costs_query(items: QueryItems, *, now: Microseconds) -> PageQuery:
    """Raises `InvalidRequest`."""
    query = _query(items, known=_COMMON)
    width = query.choice("bucket_width", {"1d": _DAY_OF_COSTS}, default="1d")
    told_apart = {name: one for name, one in _GROUPS.items() if one is not Dimension.MODEL}
    chosen = query.choices("group_by", {**told_apart, LINE_ITEM: None})
    by = [one for one in chosen if one is not None]
    return _page_query(query, width, by, by_line_item=None in chosen, now=now)


def read_usage_page(database: Database, query: PageQuery) -> bytes:
    """JSON. Blocks. Raises `DatabaseUnavailable`."""
    return _page(query, lambda groups: _usage_results(groups, query), _read(database, query, query.by))


def read_costs_page(database: Database, query: PageQuery) -> bytes:
    """JSON. Blocks. Raises `DatabaseUnavailable`."""
    by = [*query.by, Dimension.MODEL] if query.by_line_item else query.by
    return _page(query, lambda groups: _cost_results(groups, query), _read(database, query, by))


def _query(items: QueryItems, *, known: Sequence[str]) -> Query:
    for name, _ in items:
        if name.removesuffix("[]") in _UNKNOWABLE:
            raise UnsupportedParameter(f"'{name}' is not known here.", param=name)
    return Query(items, known=known)


def _page_query(
    query: Query, width: Width, by: Sequence[Dimension], *, by_line_item: bool, now: Microseconds
) -> PageQuery:
    limit = query.integer("limit", default=width.default_limit, least=1, most=width.max_limit)
    zone = query.zone("time_zone", default=UTC)
    if query.one("start_time") is None:
        raise InvalidRequest("'start_time' is missing: whole seconds since 1970.", param="start_time")
    start = query.instant("start_time", default=now)
    end = query.instant("end_time", default=next_second(now))
    require_forwards(start, end)
    asked = _asked(query)
    cursor = query.one("page")
    if cursor is not None:
        start, end = _read_cursor(cursor, asked)
    spans, has_more = _spans(width, zone, start, end, limit)
    return PageQuery(
        spans=spans,
        selection=Selection(
            project_ids=query.ids("project_ids", ProjectId),
            api_key_ids=query.ids("api_key_ids", ApiKeyId),
            models=query.many("models") or None,
        ),
        by=by,
        by_line_item=by_line_item,
        next_page=_cursor(spans[-1].end, end, asked) if has_more else None,
    )


def _spans(
    width: Width, zone: ZoneInfo, start: Microseconds, end: Microseconds, limit: int
) -> tuple[Sequence[Span], bool]:
    """The first buckets of a period, and whether there are more."""
    # One bucket more than asked for: the last one would be cut short by this horizon.
    horizon = start + (limit + 2) * width.longest_seconds * MICROSECONDS_PER_SECOND
    spans = width.cutter(start, Microseconds(min(end, horizon)), zone)
    return spans[:limit], len(spans) > limit


def _asked(query: Query) -> str:
    """Names a question, whatever page of it: a cursor is good for its own question alone."""
    names = ("start_time", "bucket_width", "group_by", "project_ids", "api_key_ids", "models", "time_zone")
    values = [[name, *query.many(name)] for name in names]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:_DIGEST_DIGITS]


def _cursor(start: Microseconds, end: Microseconds, asked: str) -> str:
    # With the end: where it is `now`, it must not move between pages.
    return "page_" + base64.urlsafe_b64encode(f"{start}.{end}.{asked}".encode()).decode().rstrip("=")


def _read_cursor(cursor: str, asked: str) -> tuple[Microseconds, Microseconds]:
    refusal = InvalidRequest("'page' is no cursor of this query: take 'next_page' as it was.", param="page")
    encoded = cursor.removeprefix("page_")
    try:
        text = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode("ascii")
        start, end, digest = text.split(".")
        period = Microseconds(int(start)), Microseconds(int(end))
    except (binascii.Error, ValueError):
        raise refusal from None
    is_period = 0 <= period[0] < period[1] <= calendar.LAST_INSTANT
    if _cursor(*period, digest) != cursor or digest != asked or not is_period:
        raise refusal
    return period


def _read(
    database: Database, query: PageQuery, by: Sequence[Dimension]
) -> Mapping[Microseconds, Sequence[GroupUsage]]:
    """The groups of each bucket that has any, by its start."""
    groups: dict[Microseconds, list[GroupUsage]] = {}
    for used in grouped_usage(database, query.selection, query.spans, by=by):
        groups.setdefault(used.span.start, []).append(used)
    return groups


def _page(
    query: PageQuery,
    results: Callable[[Sequence[GroupUsage]], Sequence[Json]],
    groups: Mapping[Microseconds, Sequence[GroupUsage]],
) -> bytes:
    buckets = [
        {
            "object": "bucket",
            "start_time": span.start // MICROSECONDS_PER_SECOND,
            "end_time": span.end // MICROSECONDS_PER_SECOND,
            "results": results(groups.get(span.start, ())),
        }
        for span in query.spans
    ]
    page = {
        "object": "page",
        "data": buckets,
        "has_more": query.next_page is not None,
        "next_page": query.next_page,
    }
    # Not msgspec, whose integers have 64 bits: a total may have more.
    return json.dumps(page).encode()


def _usage_results(groups: Sequence[GroupUsage], query: PageQuery) -> Sequence[Json]:
    ordered = sorted(groups, key=lambda one: (_tokens(one.totals), str(one.group)), reverse=True)
    results = [_usage_row(one.totals, _names(one, query.by)) for one in ordered[:MAX_GROUPS]]
    rest = ordered[MAX_GROUPS:]
    if rest:
        totals = sum((one.totals for one in rest), UsageTotals())
        results.append(_usage_row(totals, {one.value: OTHER for one in query.by}))
    return results


def _tokens(totals: UsageTotals) -> int:
    return totals.prompt_tokens + totals.output_tokens


def _usage_row(totals: UsageTotals, names: Mapping[str, str | None]) -> Json:
    return {
        "object": "organization.usage.completions.result",
        "input_tokens": totals.prompt_tokens,
        "input_uncached_tokens": totals.uncached_tokens,
        "input_cached_tokens": totals.read_tokens,
        "input_cache_write_tokens": totals.written_tokens,
        "output_tokens": totals.output_tokens,
        "num_model_requests": totals.requests,
        "tenant_id": None,
        "project_id": None,
        "user_id": None,
        "api_key_id": None,
        "model": None,
        "batch": None,
        "service_tier": None,
        **names,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cost:
    """What a group paid, of one class where line items are asked for."""

    names: Mapping[str, str | None]
    totals: ClassTotals
    token_class: TokenClass | None = None


def _cost_results(groups: Sequence[GroupUsage], query: PageQuery) -> Sequence[Json]:
    costs = [cost for one in groups for cost in _costs(one, query)]
    ordered = sorted(costs, key=lambda cost: (cost.totals.amount_pusd, str(cost.names)), reverse=True)
    results = [_cost_row(cost) for cost in ordered[:MAX_GROUPS]]
    rest = ordered[MAX_GROUPS:]
    if rest:
        names: dict[str, str | None] = {one.value: OTHER for one in query.by}
        if query.by_line_item:
            names[LINE_ITEM] = OTHER
        totals = sum((cost.totals for cost in rest), ClassTotals())
        results.append(_cost_row(_Cost(names=names, totals=totals)))
    return results


def _costs(used: GroupUsage, query: PageQuery) -> Sequence[_Cost]:
    names = _names(used, query.by)
    if not query.by_line_item:
        return [_Cost(names=names, totals=used.totals.of(TokenClass))]
    return [
        _Cost(
            names={**names, LINE_ITEM: f"{used.group.model}, {token_class.value}"},
            totals=totals,
            token_class=token_class,
        )
        for token_class, totals in used.totals.by_class.items()
    ]


def _cost_row(cost: _Cost) -> Json:
    amount_pusd, token_class = cost.totals.amount_pusd, cost.token_class
    return {
        "object": "organization.costs.result",
        "amount": {
            # Correctly rounded: a quotient of integers, not a product of floats.
            "value": float(Fraction(amount_pusd, PICODOLLARS_PER_DOLLAR)),
            "currency": CURRENCY.lower(),
            "decimal": format_dollars(amount_pusd),
        },
        "amount_pusd": amount_pusd,
        "tenant_id": None,
        "project_id": None,
        "user_id": None,
        "api_key_id": None,
        "line_item": None,
        "quantity": cost.totals.quantity if token_class is not None else None,
        "quantity_unit": _unit(token_class) if token_class is not None else None,
        **cost.names,
    }


def _unit(token_class: TokenClass) -> str:
    return "token_hours" if token_class is TokenClass.PIN else "tokens"


def _names(used: GroupUsage, by: Sequence[Dimension]) -> Mapping[str, str | None]:
    values = {one.value: getattr(used.group, one.value) for one in by}
    return {name: None if value is None else str(value) for name, value in values.items()}

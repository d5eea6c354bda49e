"""`GET /v1/usage`: what the caller's own tenant used, paid and saved in a period.

Knows query parameters and the report's JSON. Does not know SQL: billing adds up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from billing.accounts import Principal
from billing.db import Database
from billing.instants import MICROSECONDS_PER_SECOND, Microseconds
from billing.meter import Meter
from billing.money import format_basis_points, format_dollars
from billing.reports import UsageReport, usage_report
from gateway.edge.errors import InvalidRequest

SECONDS_PER_DAY: Final = 86_400
POSTING_SECONDS: Final = 2
LAST_SECOND: Final = 2**40
"""Far beyond any date, and well inside 64 bits of microseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """`[start, end)` in whole seconds since 1970, UTC."""

    start_seconds: int
    end_seconds: int


class UsageBody(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. Token classes are disjoint and add up to `input_tokens`; money is exact."""

    object: str = "usage"
    start_time: int
    end_time: int
    requests: int
    input_tokens: int
    input_uncached_tokens: int
    input_cached_tokens: int
    input_cache_write_tokens: int
    output_tokens: int
    hit_percent: str
    currency: str
    amount: str
    amount_pusd: int
    amount_without_cache: str
    amount_without_cache_pusd: int
    saved: str
    saved_pusd: int


def parse_period(query: Mapping[str, str], *, now: Microseconds) -> Period:
    """`start_time` and `end_time`, seconds since 1970; by default the UTC day so far.

    Raises `InvalidRequest`.
    """
    now_seconds = now // MICROSECONDS_PER_SECOND
    start = _seconds(query, "start_time", default=now_seconds - now_seconds % SECONDS_PER_DAY)
    end = _seconds(query, "end_time", default=now_seconds + 1)
    if end < start:
        raise InvalidRequest("'end_time' is before 'start_time'.", param="end_time")
    return Period(start_seconds=start, end_seconds=end)


def read_usage(database: Database, meter: Meter, principal: Principal, period: Period) -> bytes:
    """The tenant's report as JSON. Blocks: waits a moment for what was just settled to be posted.

    Raises `MeterUnavailable` when that takes longer, or `DatabaseUnavailable`.
    """
    meter.flush(timeout_seconds=POSTING_SECONDS)
    report = usage_report(
        database,
        tenant_id=principal.tenant_id,
        start=Microseconds(period.start_seconds * MICROSECONDS_PER_SECOND),
        end=Microseconds(period.end_seconds * MICROSECONDS_PER_SECOND),
    )
    return msgspec.json.encode(_body(report, period))


def _seconds(query: Mapping[str, str], name: str, *, default: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    # At most twelve digits: int() of a very long string is slow.
    if not (text.isascii() and text.isdigit() and len(text) <= 12 and int(text) < LAST_SECOND):  # noqa: PLR2004
        raise InvalidRequest(f"'{name}' must be whole seconds since 1970.", param=name)
    return int(text)


def _body(report: UsageReport, period: Period) -> UsageBody:
    totals = report.totals
    return UsageBody(
        start_time=period.start_seconds,
        end_time=period.end_seconds,
        requests=totals.requests,
        input_tokens=totals.prompt_tokens,
        input_uncached_tokens=totals.uncached_tokens,
        input_cached_tokens=totals.read_tokens,
        input_cache_write_tokens=totals.written_tokens,
        output_tokens=totals.output_tokens,
        hit_percent=format_basis_points(totals.hit_basis_points),
        currency=report.currency.lower(),
        amount=format_dollars(totals.amount_pusd),
        amount_pusd=totals.amount_pusd,
        amount_without_cache=format_dollars(totals.amount_without_cache_pusd),
        amount_without_cache_pusd=totals.amount_without_cache_pusd,
        saved=format_dollars(totals.saved_pusd),
        saved_pusd=totals.saved_pusd,
    )

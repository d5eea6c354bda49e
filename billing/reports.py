"""What a tenant used, paid and saved in a period.

Knows events and ledger lines. Does not know time zones or how a figure is shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Final

from sqlalchemy import BigInteger, ColumnElement, Connection, FromClause, cast, func, literal_column, select

from billing import schema
from billing.db import Database
from billing.ids import TenantId
from billing.instants import BUCKET_MICROSECONDS, Microseconds

CURRENCY: Final = "USD"

# SQLite's SUM refuses to pass 64 bits. Halves of values cannot, below two milliard rows in a bucket.
_HALF_BITS: Final = 32
_HALF_MASK: Final = 2**_HALF_BITS - 1

_events = schema.usage_events.c
_lines = schema.ledger_lines.c

_EVENT_SUMS: Final[Mapping[str, ColumnElement[int]]] = {
    "requests": cast(literal_column("1"), BigInteger()),
    "uncached_tokens": _events.uncached_tokens,
    "read_tokens": _events.read_tokens
    + _events.read_host_tokens
    + _events.read_disk_tokens
    + _events.read_remote_tokens,
    "written_tokens": _events.write_auto_tokens + _events.write_5m_tokens + _events.write_1h_tokens,
    "output_tokens": _events.output_tokens,
}
_LINE_SUMS: Final[Mapping[str, ColumnElement[int]]] = {
    "amount_pusd": _lines.amount_pusd,
    "amount_without_cache_pusd": _lines.amount_without_cache_pusd,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageTotals:
    """Exact sums. Written tokens are part of the prompt, like uncached and read ones."""

    requests: int = 0
    uncached_tokens: int = 0
    read_tokens: int = 0
    written_tokens: int = 0
    output_tokens: int = 0
    amount_pusd: int = 0
    amount_without_cache_pusd: int = 0

    @property
    def prompt_tokens(self) -> int:
        return self.uncached_tokens + self.read_tokens + self.written_tokens

    @property
    def saved_pusd(self) -> int:
        """Reads at the discount, minus write premiums: can be negative."""
        return self.amount_without_cache_pusd - self.amount_pusd

    @property
    def hit_share(self) -> Fraction:
        """Read tokens of all prompt tokens, exact; 0 when there were none."""
        return Fraction(self.read_tokens, self.prompt_tokens or 1)

    @property
    def hit_basis_points(self) -> int:
        """`hit_share` in hundredths of a percent, rounded down. `money.format_basis_points` shows it."""
        return self.read_tokens * 10_000 // (self.prompt_tokens or 1)

    def __add__(self, other: UsageTotals) -> UsageTotals:
        return UsageTotals(
            **{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageBucket:
    """The requests admitted in the 15 minutes from `start`."""

    start: Microseconds
    totals: UsageTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageReport:
    """Requests admitted in `[start, end)`. Buckets without requests are left out."""

    tenant_id: TenantId
    start: Microseconds
    end: Microseconds
    currency: str
    totals: UsageTotals
    buckets: Sequence[UsageBucket]


def usage_report(db: Database, *, tenant_id: TenantId, start: Microseconds, end: Microseconds) -> UsageReport:
    """Raises ValueError when `end` is before `start`."""
    if end < start:
        raise ValueError(f"the period ends ({end}) before it starts ({start})")
    events = schema.usage_events.c
    period = (
        (events.tenant_id == tenant_id) & (events.accounted_at_us >= start) & (events.accounted_at_us < end)
    )
    with db.read() as connection:
        counts = _sums_by_bucket(connection, _EVENT_SUMS, schema.usage_events, period)
        amounts = _sums_by_bucket(
            connection, _LINE_SUMS, schema.ledger_lines.join(schema.usage_events), period
        )
    buckets = [
        UsageBucket(start=bucket, totals=UsageTotals(**counts[bucket], **amounts.get(bucket, {})))
        for bucket in sorted(counts)
    ]
    return UsageReport(
        tenant_id=tenant_id,
        start=start,
        end=end,
        currency=CURRENCY,
        totals=sum((bucket.totals for bucket in buckets), start=UsageTotals()),
        buckets=buckets,
    )


def _sums_by_bucket(
    connection: Connection,
    sums: Mapping[str, ColumnElement[int]],
    source: FromClause,
    period: ColumnElement[bool],
) -> dict[Microseconds, dict[str, int]]:
    """Exact sums of each bucket of the period, also where a sum is wider than 64 bits."""
    accounted_at = schema.usage_events.c.accounted_at_us
    bucket = accounted_at - accounted_at % BUCKET_MICROSECONDS
    halves = [
        half.label(f"{name}_{part}")
        for name, column in sums.items()
        for part, half in (("high", func.sum(_high(column))), ("low", func.sum(_low(column))))
    ]
    rows = connection.execute(
        select(bucket.label("bucket"), *halves).select_from(source).where(period).group_by(bucket)
    ).mappings()
    return {
        Microseconds(int(row["bucket"])): {
            name: (int(row[f"{name}_high"]) << _HALF_BITS) + int(row[f"{name}_low"]) for name in sums
        }
        for row in rows
    }


# Literals, because PostgreSQL shifts by a 32-bit integer and a parameter would be a 64-bit one.
def _high(column: ColumnElement[int]) -> ColumnElement[int]:
    return column.bitwise_rshift(literal_column(str(_HALF_BITS)))


def _low(column: ColumnElement[int]) -> ColumnElement[int]:
    return column.bitwise_and(literal_column(str(_HALF_MASK)))

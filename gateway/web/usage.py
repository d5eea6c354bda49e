"""A usage report as a page shows it: named rows, and the hours of a day.

Knows words, units and how a number is written. Does not know HTML or how the
numbers came to be: each one is the report's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from billing import instants
from billing.instants import MICROSECONDS_PER_SECOND, Microseconds
from billing.money import format_basis_points, format_dollars
from billing.reports import UsageReport
from billing.totals import UsageTotals

DAY: Final = timedelta(days=1)
HOUR: Final = timedelta(hours=1)
HOUR_MICROSECONDS: Final = 3_600 * MICROSECONDS_PER_SECOND
_DAY_MICROSECONDS: Final = 24 * HOUR_MICROSECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure. `value` is exact and for machines, `shown` (with its `unit`) for people."""

    key: str
    label: str
    hint: str
    value: str
    shown: str
    unit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hour:
    """What was admitted in the hour from `start`."""

    start: Microseconds
    totals: UsageTotals

    @property
    def computed_tokens(self) -> int:
        """Input that was not reused. Written tokens were computed, too."""
        return self.totals.uncached_tokens + self.totals.written_tokens

    @property
    def begins(self) -> str:
        return instants.to_datetime(self.start).strftime("%H:%M")

    @property
    def label(self) -> str:
        end = instants.to_datetime(instants.later(self.start, HOUR))
        return f"{self.begins}–{end:%H:%M}"


def day_of(now: Microseconds) -> tuple[Microseconds, Microseconds]:
    """Start and end of the UTC day that holds the instant."""
    start = Microseconds(now - now % _DAY_MICROSECONDS)
    return start, instants.later(start, DAY)


def hours_of(report: UsageReport) -> Sequence[Hour]:
    """The hours in which something was used, in order. The report is cut by hours."""
    return [Hour(start=used.span.start, totals=used.totals) for used in report.spans]


def rows_of(report: UsageReport) -> Sequence[Row]:
    """Every total of the report, in the order in which they explain each other."""
    totals, currency = report.totals, report.currency
    return (
        _count("requests", "Requests", "admitted today", totals.requests),
        _count("uncached_tokens", "Uncached input", "tokens computed", totals.uncached_tokens),
        _count("read_tokens", "Cached input", "tokens reused, not computed", totals.read_tokens),
        _count("written_tokens", "Written input", "computed and kept on request", totals.written_tokens),
        _count("output_tokens", "Output", "tokens generated", totals.output_tokens),
        hit_share_row(totals),
        _money("amount_without_cache", "Without cache", "the same tokens, all computed",
               totals.amount_without_cache_pusd, currency),
        _money("saved", "Saved", "what reuse took off", totals.saved_pusd, currency),
        _money("amount", "Amount", "what you pay", totals.amount_pusd, currency),
    )  # fmt: skip


def hit_share_row(totals: UsageTotals) -> Row:
    share = format_basis_points(totals.hit_basis_points)
    return Row(
        key="hit_share",
        label="Hit share",
        hint="cached of all input tokens",
        value=share,
        shown=share,
        unit="%",
    )


def _count(key: str, label: str, hint: str, count: int) -> Row:
    return Row(key=key, label=label, hint=hint, value=str(count), shown=f"{count:,}")


def _money(key: str, label: str, hint: str, amount_pusd: int, currency: str) -> Row:
    exact = format_dollars(amount_pusd)
    return Row(key=key, label=label, hint=hint, value=exact, shown=exact.replace("-", "−"), unit=currency)

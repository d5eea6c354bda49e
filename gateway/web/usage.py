"""A usage report as a page shows it: named rows, and the hours of a day.

Knows words, units and how a number is written. Does not know HTML or how the
numbers came to be: each one is the report's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Final
from zoneinfo import ZoneInfo

from billing import calendar, instants
from billing.calendar import Span
from billing.instants import Microseconds
from billing.money import format_basis_points, format_dollars
from billing.reports import CURRENCY, GroupUsage
from billing.totals import UsageTotals

_ONE_DAY: Final = timedelta(days=1)


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
    """What was admitted in one hour on the wall of the zone."""

    span: Span
    zone: ZoneInfo
    totals: UsageTotals

    @property
    def computed_tokens(self) -> int:
        """Input that was not reused. Written tokens were computed, too."""
        return self.totals.uncached_tokens + self.totals.written_tokens

    @property
    def begins(self) -> str:
        return self._clock(self.span.start)

    @property
    def label(self) -> str:
        return f"{self.begins}–{self._clock(self.span.end)}"

    def _clock(self, instant: Microseconds) -> str:
        return f"{instants.to_datetime(instant).astimezone(self.zone):%H:%M}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """A civil day of a zone, all of its hours in order: 24 of them, unless clocks are changed in it."""

    date: date
    hours: Sequence[Hour]

    @property
    def totals(self) -> UsageTotals:
        return sum((hour.totals for hour in self.hours), UsageTotals())

    @property
    def used_hours(self) -> Sequence[Hour]:
        return [hour for hour in self.hours if hour.totals != UsageTotals()]


def hours_of(now: Microseconds, zone: ZoneInfo) -> Sequence[Span]:
    """Of the civil day that holds the instant: where it is cut."""
    today = _today(now, zone)
    start, end = calendar.start_of_day(today, zone), calendar.start_of_day(today + _ONE_DAY, zone)
    return calendar.hours(start, end, zone)


def day_of(now: Microseconds, zone: ZoneInfo, used: Sequence[GroupUsage]) -> Day:
    """The day, with what was used in its hours. Usage of several groups in an hour is added up."""
    totals = {span: UsageTotals() for span in hours_of(now, zone)}
    for one in used:
        totals[one.span] += one.totals
    return Day(
        date=_today(now, zone),
        hours=[Hour(span=span, zone=zone, totals=found) for span, found in totals.items()],
    )


def _today(now: Microseconds, zone: ZoneInfo) -> date:
    return instants.to_datetime(now).astimezone(zone).date()


def rows_of(totals: UsageTotals) -> Sequence[Row]:
    """Every total, in the order in which they explain each other."""
    return (
        _count("requests", "Requests", "admitted today", totals.requests),
        _count("uncached_tokens", "Uncached input", "tokens computed", totals.uncached_tokens),
        _count("read_tokens", "Cached input", "tokens reused, not computed", totals.read_tokens),
        _count("written_tokens", "Written input", "computed and kept on request", totals.written_tokens),
        _count("output_tokens", "Output", "tokens generated", totals.output_tokens),
        hit_share_row(totals),
        _money("amount_without_cache", "Without cache", "the same tokens, all computed",
               totals.amount_without_cache_pusd),
        _money("saved", "Saved", "what reuse took off", totals.saved_pusd),
        _money("amount", "Amount", "what is paid", totals.amount_pusd),
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


def _money(key: str, label: str, hint: str, amount_pusd: int) -> Row:
    exact = format_dollars(amount_pusd)
    return Row(key=key, label=label, hint=hint, value=exact, shown=exact.replace("-", "−"), unit=CURRENCY)

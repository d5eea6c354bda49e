"""Which period a page is about, and the filters above it.

Knows the names of periods and how they are cut. Does not know what is counted. A period begins and
ends with a day, or a quarter of an hour, of the zone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final
from zoneinfo import ZoneInfo

from billing import calendar, instants
from billing.calendar import Cutter, Span, month, month_of
from billing.errors import InvalidPeriod
from billing.instants import BUCKET_MICROSECONDS, Microseconds, bucket_start
from gateway.edge.errors import InvalidRequest
from gateway.web.panels import Choice
from gateway.web.visits import TENANT, ZONE, Visit

PERIOD: Final = "period"
NUM_MONTHS: Final = 12
MAX_OPTIONS: Final = 200
"""More are no list that anybody would choose from."""
ZONES: Final = (
    "UTC",
    "Europe/London",
    "Europe/Berlin",
    "America/New_York",
    "America/Chicago",
    "America/Los_Angeles",
    "America/Sao_Paulo",
    "Asia/Kolkata",
    "Asia/Shanghai",
    "Asia/Tokyo",
    "Australia/Sydney",
)
_DAY: Final = timedelta(days=1)
_ROLLING: Final = {"day": ("24 hours", 1), "week": ("7 days", 7), "days30": ("30 days", 30)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """`[start, end)`, its name, and the spans that figures over time are drawn by."""

    name: str
    label: str
    start: Microseconds
    end: Microseconds
    spans: Sequence[Span]
    zone: ZoneInfo

    @property
    def whole(self) -> Sequence[Span]:
        return calendar.uncut(self.start, self.end, self.zone)

    @property
    def is_by_day(self) -> bool:
        return "T" not in self.spans[0].label

    def short(self, span: Span) -> str:
        """A span's name where there is little room: the day, or the hour."""
        local = instants.to_datetime(span.start).astimezone(self.zone)
        if self.is_by_day:
            return f"{local:%b} {local.day}"
        return f"{local:%H:%M}"


def period_of(visit: Visit, *, default: str) -> Period:
    """Raises `InvalidRequest`."""
    name = visit.query.one(PERIOD) or default
    if name == "today":
        start, end = _days_until_now(visit, 1)
        return _period(visit, name, "Today", start, end, calendar.hours)
    if name == "day":
        end = Microseconds(bucket_start(visit.now) + BUCKET_MICROSECONDS)
        return _period(visit, name, "24 hours", instants.later(end, -_DAY), end, calendar.hours)
    if name in _ROLLING:
        label, num_days = _ROLLING[name]
        start, end = _days_until_now(visit, num_days)
        return _period(visit, name, label, start, end, calendar.days)
    try:
        span = month(name, visit.zone)
    except InvalidPeriod as error:
        raise InvalidRequest(f"'{PERIOD}' cannot be '{name}'.", param=PERIOD) from error
    return _period(visit, name, name, span.start, span.end, calendar.days)


def common_choices(visit: Visit, period: Period) -> Sequence[Choice]:
    """The filters that every page has."""
    return (*period_choice(visit, period), *tenant_choice(visit), zone_choice(visit))


def period_choice(visit: Visit, period: Period) -> Sequence[Choice]:
    rolling = [(name, label) for name, (label, _) in _ROLLING.items()]
    months = [(name, name) for name in _months(visit)]
    options = [("today", "Today"), *rolling, *months]
    if period.name not in dict(options):
        options.append((period.name, period.label))
    return (Choice(name=PERIOD, label="Period", value=period.name, options=options),)


def tenant_choice(visit: Visit) -> Sequence[Choice]:
    if not visit.is_admin:
        return ()
    chosen = "" if visit.tenant is None else str(visit.tenant.id)
    if len(visit.tenants) > MAX_OPTIONS:
        return (Choice(name=TENANT, label="Tenant's id", value=chosen),)
    options = [("", "All tenants"), *((str(one.id), one.name) for one in visit.tenants)]
    return (Choice(name=TENANT, label="Tenant", value=chosen, options=options),)


def zone_choice(visit: Visit) -> Choice:
    suggestions = tuple(dict.fromkeys((visit.zone.key, *ZONES)))
    return Choice(name=ZONE, label="Time zone", value=visit.zone.key, suggestions=suggestions)


def described(visit: Visit, period: Period) -> str:
    """Whose figures these are, of when, and in which zone."""
    first = instants.to_datetime(period.start).astimezone(visit.zone)
    last = instants.to_datetime(Microseconds(period.end - 1)).astimezone(visit.zone)
    days = f"{first:%Y-%m-%d}" if first.date() == last.date() else f"{first:%Y-%m-%d} to {last:%Y-%m-%d}"
    return f"{visit.whose[:1].upper()}{visit.whose[1:]} · {days} · times in {visit.zone.key}"


def _period(
    visit: Visit, name: str, label: str, start: Microseconds, end: Microseconds, cutter: Cutter
) -> Period:
    spans = cutter(start, end, visit.zone)
    return Period(name=name, label=label, start=start, end=end, spans=spans, zone=visit.zone)


def _days_until_now(visit: Visit, num_days: int) -> tuple[Microseconds, Microseconds]:
    """So many civil days, of which today is the last, whole."""
    today = instants.to_datetime(visit.now).astimezone(visit.zone).date()
    first = calendar.start_of_day(today - _DAY * (num_days - 1), visit.zone)
    return first, calendar.start_of_day(today + _DAY, visit.zone)


def _months(visit: Visit) -> Sequence[str]:
    """The month that is now, and those before it."""
    names = [month_of(visit.now, visit.zone)]
    while len(names) < NUM_MONTHS:
        before = Microseconds(month(names[-1], visit.zone).start - 1)
        names.append(month_of(before, visit.zone))
    return names

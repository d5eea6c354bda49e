"""Civil time: where a zone's days, hours and months begin.

Knows IANA zones and instants. Does not know usage. A zone is applied when
usage is read, never when it is written down.

Everything here is a row of cuts: half-open spans, each of which begins where the one
before it ends. So whatever is summed by span adds up, however odd the zone. Days
may have 23, 24, 25 or other numbers of hours; a day that a zone skipped is no span.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import cache
from itertools import pairwise
from typing import Final
from zoneinfo import ZoneInfo, available_timezones

from billing import instants
from billing.errors import InvalidPeriod, UnknownZone
from billing.instants import Microseconds

MINUTE_MICROSECONDS: Final = 60 * instants.MICROSECONDS_PER_SECOND
HOUR_MICROSECONDS: Final = 60 * MINUTE_MICROSECONDS
FIRST_YEAR: Final = 1970
UTC_ZONE: Final = ZoneInfo("UTC")
LAST_YEAR: Final = 9998
LAST_INSTANT: Final = instants.from_datetime(datetime(LAST_YEAR, 12, 31, tzinfo=UTC))
"""No span reaches beyond it, whatever the zone."""

Cutter = Callable[[Microseconds, Microseconds, ZoneInfo], Sequence["Span"]]
"""Cuts `[start, end)` into spans in a zone: `uncut`, `days`, `hours` or `minutes`."""

_MONTH: Final = re.compile(r"([0-9]{4})-(0[1-9]|1[0-2])")
_ONE_DAY: Final = timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """`[start, end)`, with the name that people give it in their zone."""

    label: str
    start: Microseconds
    end: Microseconds

    def holds(self, instant: int) -> bool:
        return self.start <= instant < self.end


def zone_named(name: str) -> ZoneInfo:
    """Raises UnknownZone. Takes names of the IANA database alone, never paths."""
    if name not in _zone_names():
        raise UnknownZone(f"there is no time zone named {name!r}; IANA names look like 'Europe/Berlin'")
    return ZoneInfo(name)


def month_of(instant: Microseconds, zone: ZoneInfo) -> str:
    """The month that holds the instant in the zone: `2026-11`."""
    local = instants.to_datetime(instant).astimezone(zone)
    return f"{local.year:04d}-{local.month:02d}"


def month(label: str, zone: ZoneInfo) -> Span:
    """The month `2026-11` in the zone. Raises InvalidPeriod."""
    found = _MONTH.fullmatch(label)
    if found is None or not FIRST_YEAR <= int(found[1]) < LAST_YEAR:
        raise InvalidPeriod(f"{label!r} is no month; months look like '2026-11'")
    year, number = int(found[1]), int(found[2])
    after = date(year + number // 12, number % 12 + 1, 1)
    return Span(label=label, start=start_of_day(date(year, number, 1), zone), end=start_of_day(after, zone))


def start_of_day(day: date, zone: ZoneInfo) -> Microseconds:
    """The first instant of a civil day, also where midnight was skipped or came twice."""
    midnight = datetime(day.year, day.month, day.day, tzinfo=zone)
    instant = instants.from_datetime(midnight)
    if _wall(instant, zone) == midnight.replace(tzinfo=None):
        return instant
    # Midnight was skipped: the day begins with the jump over it.
    return _jump_before(instant, zone)


def uncut(start: Microseconds, end: Microseconds, zone: ZoneInfo) -> Sequence[Span]:
    """The whole of it as one span, or none when it is empty."""
    return [Span(label="", start=start, end=end)] if start < end else []


def minutes(start: Microseconds, end: Microseconds, zone: ZoneInfo) -> Sequence[Span]:
    """Minutes of UTC, which are those of every zone now in use; labelled like hours."""
    first = start - start % MINUTE_MICROSECONDS
    cuts = (Microseconds(cut) for cut in range(first, end + MINUTE_MICROSECONDS, MINUTE_MICROSECONDS))
    return _clipped(((_clock(cut, zone), cut) for cut in cuts), start, end)


def days(start: Microseconds, end: Microseconds, zone: ZoneInfo) -> Sequence[Span]:
    """The civil days of `[start, end)`, labelled `2026-11-03`; the first and the last may be cut short."""
    return _clipped(_day_cuts(start, end, zone), start, end)


def hours(start: Microseconds, end: Microseconds, zone: ZoneInfo) -> Sequence[Span]:
    """The hours on the wall, labelled by their start with its offset: `2026-11-03T14:00+05:30`.

    Where clocks go back, the hour that comes twice is two spans, and their offsets tell them apart.
    """
    return _clipped(_hour_cuts(start, end, zone), start, end)


def _clipped(
    cuts: Iterator[tuple[str, Microseconds]], start: Microseconds, end: Microseconds
) -> Sequence[Span]:
    spans = []
    for (label, begin), (_, finish) in pairwise(cuts):
        first, last = max(begin, start), min(finish, end)
        if first < last:
            spans.append(Span(label=label, start=Microseconds(first), end=Microseconds(last)))
    return spans


def _day_cuts(start: Microseconds, end: Microseconds, zone: ZoneInfo) -> Iterator[tuple[str, Microseconds]]:
    """From a day that begins at or before `start` to one that begins at or after `end`."""
    day = _local(start, zone).date()
    while True:
        cut = start_of_day(day, zone)
        yield day.isoformat(), cut
        if cut >= end:
            return
        day += _ONE_DAY


def _hour_cuts(start: Microseconds, end: Microseconds, zone: ZoneInfo) -> Iterator[tuple[str, Microseconds]]:
    finish = end
    for (_, begin), (_, finish) in pairwise(_day_cuts(start, end, zone)):
        for cut in _hours_of_day(begin, finish, zone):
            yield _clock(cut, zone), cut
    yield "", finish


def _hours_of_day(begin: Microseconds, finish: Microseconds, zone: ZoneInfo) -> Sequence[Microseconds]:
    """The day's start, and every later instant at which its clocks show a full hour or jump past one."""
    first = _local(begin, zone).date()
    on_the_hour = {
        instants.from_datetime(datetime(day.year, day.month, day.day, hour, tzinfo=zone, fold=fold))
        for day in (first, first + _ONE_DAY)
        for hour in range(24)
        for fold in (0, 1)
    }
    return sorted({begin, *(cut for cut in on_the_hour if begin < cut < finish and _begins_hour(cut, zone))})


def _begins_hour(instant: Microseconds, zone: ZoneInfo) -> bool:
    """Whether the hour on the wall is another than just before, or the same one for the second time."""
    before, after = _local(Microseconds(instant - 1), zone), _local(instant, zone)
    return (before.hour, before.utcoffset()) != (after.hour, after.utcoffset())


def _jump_before(instant: Microseconds, zone: ZoneInfo) -> Microseconds:
    """Where the zone's offset changed last, in the two days before the instant."""
    offset = _local(instant, zone).utcoffset()
    low, high = instant - 2 * 86_400 * instants.MICROSECONDS_PER_SECOND, int(instant)
    while high - low > 1:
        middle = (low + high) // 2
        if _local(Microseconds(middle), zone).utcoffset() == offset:
            high = middle
        else:
            low = middle
    return Microseconds(high)


@cache
def _zone_names() -> frozenset[str]:
    return frozenset(available_timezones())


def _clock(instant: Microseconds, zone: ZoneInfo) -> str:
    return _local(instant, zone).isoformat(timespec="minutes")


def _local(instant: Microseconds, zone: ZoneInfo) -> datetime:
    return instants.to_datetime(instant).astimezone(zone)


def _wall(instant: Microseconds, zone: ZoneInfo) -> datetime:
    return _local(instant, zone).replace(tzinfo=None)

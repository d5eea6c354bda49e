from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from zoneinfo import available_timezones

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from billing.calendar import days, hours, month, month_of, start_of_day, zone_named
from billing.errors import InvalidPeriod, UnknownZone
from billing.instants import BUCKET_MICROSECONDS, Microseconds, from_datetime, to_datetime

HOUR = 4 * BUCKET_MICROSECONDS
SECOND = 1_000_000

zones = st.sampled_from(sorted(available_timezones() - {"localtime", "Factory"})).map(zone_named)
instants = st.integers(0, from_datetime(datetime(2100, 1, 1, tzinfo=UTC))).map(Microseconds)


def at(zone: str, *wall: int, fold: int = 0) -> Microseconds:
    return from_datetime(datetime(*wall, tzinfo=zone_named(zone), fold=fold))


def num_hours(zone: str, day: str) -> int:
    year, number, first = map(int, day.split("-"))
    [span] = days(at(zone, year, number, first, 12), at(zone, year, number, first, 13), zone_named(zone))
    assert span.label == day
    begin = start_of_day(date(year, number, first), zone_named(zone))
    end = start_of_day(date(year, number, first) + timedelta(days=1), zone_named(zone))
    assert (end - begin) % BUCKET_MICROSECONDS == 0
    return (end - begin) // HOUR


@settings(deadline=None)
@given(zones, instants, st.integers(0, 40 * 24 * HOUR), st.sampled_from([days, hours]))
@example(zone_named("Asia/Kolkata"), at("UTC", 2026, 3, 1), 40 * HOUR, days)
@example(zone_named("Asia/Kathmandu"), at("UTC", 2026, 3, 1), 40 * HOUR, hours)
@example(zone_named("Pacific/Chatham"), at("UTC", 2026, 4, 4), 60 * HOUR, hours)
@example(zone_named("Australia/Lord_Howe"), at("UTC", 2026, 4, 4), 60 * HOUR, hours)
@example(zone_named("Pacific/Apia"), at("UTC", 2011, 12, 29), 90 * HOUR, days)
@example(zone_named("Africa/Cairo"), at("UTC", 2026, 4, 23), 60 * HOUR, days)
@example(zone_named("America/Toronto"), at("UTC", 2007, 4, 1), 30 * HOUR, hours)
def test_spans_leave_nothing_out_and_count_nothing_twice(zone, start, length, cutter):
    end = start + length
    spans = cutter(start, end, zone)
    assert [span.start for span in spans] == sorted({span.start for span in spans})
    edges = [start, *(span.end for span in spans)]
    assert [span.start for span in spans] == edges[:-1]
    assert edges[-1] == end
    assert len({span.label for span in spans}) == len(spans)


@settings(deadline=None)
@given(zones, st.dates(date(1972, 2, 1), date(2099, 12, 31)))
def test_a_day_begins_where_its_date_does(zone, day):
    begin = start_of_day(day, zone)
    assert to_datetime(begin).astimezone(zone).date() >= day
    assert to_datetime(begin - 1).astimezone(zone).date() < day or date_went_back(zone, begin)


def date_went_back(zone, begin) -> bool:
    """Clocks that go back over midnight show a date again that they had left."""
    nearby = [
        to_datetime(begin + step * BUCKET_MICROSECONDS).astimezone(zone).date() for step in range(-9, 9)
    ]
    return any(later < earlier for earlier, later in pairwise(nearby))


@settings(deadline=None)
@given(
    st.sampled_from(sorted(available_timezones())).map(zone_named),
    st.dates(date(2026, 1, 1), date(2035, 1, 1)),
)
def test_every_civil_day_now_in_use_begins_on_a_quarter_of_an_hour(zone, day):
    assert start_of_day(day, zone) % BUCKET_MICROSECONDS == 0


@pytest.mark.parametrize(
    ("zone", "day", "expected"),
    [
        ("UTC", "2026-11-03", 24),
        ("Asia/Kolkata", "2026-11-03", 24),
        ("Europe/Berlin", "2026-03-29", 23),
        ("Europe/Berlin", "2026-10-25", 25),
        ("America/New_York", "2026-03-08", 23),
        ("America/New_York", "2026-11-01", 25),
        ("Pacific/Chatham", "2026-04-05", 25),
        ("Pacific/Chatham", "2026-09-27", 23),
        ("Africa/Cairo", "2026-04-24", 23),  # begins at one in the morning
    ],
)
def test_a_day_has_as_many_hours_as_its_clocks_show(zone, day, expected):
    assert num_hours(zone, day) == expected


def test_midnight_in_india_nepal_and_chatham_lies_between_hours_of_utc():
    day = date(2026, 11, 3)
    begins = [
        to_datetime(start_of_day(day, zone_named(name)))
        for name in ("Asia/Kolkata", "Asia/Kathmandu", "Pacific/Chatham")
    ]
    assert [begin.isoformat() for begin in begins] == [
        "2026-11-02T18:30:00+00:00",
        "2026-11-02T18:15:00+00:00",
        "2026-11-02T10:15:00+00:00",
    ]


def test_a_day_that_a_zone_skipped_is_no_span():
    labels = [
        span.label
        for span in days(at("UTC", 2011, 12, 29, 12), at("UTC", 2012, 1, 1), zone_named("Pacific/Apia"))
    ]
    assert labels == ["2011-12-29", "2011-12-31", "2012-01-01"]


def test_the_hour_that_comes_twice_is_two_spans():
    start, end = at("Europe/Berlin", 2026, 10, 25), at("Europe/Berlin", 2026, 10, 26)
    labels = [span.label for span in hours(start, end, zone_named("Europe/Berlin"))]
    assert labels[1:5] == [
        "2026-10-25T01:00+02:00",
        "2026-10-25T02:00+02:00",
        "2026-10-25T02:00+01:00",
        "2026-10-25T03:00+01:00",
    ]
    assert len(labels) == 25


def test_the_hour_that_is_skipped_is_none():
    start, end = at("Europe/Berlin", 2026, 3, 29), at("Europe/Berlin", 2026, 3, 30)
    labels = [span.label[11:13] for span in hours(start, end, zone_named("Europe/Berlin"))]
    assert labels[:3] == ["00", "01", "03"]
    assert len(labels) == 23


def test_lord_howe_moves_its_clocks_by_half_an_hour():
    zone = zone_named("Australia/Lord_Howe")
    spans = hours(at(zone.key, 2026, 4, 5), at(zone.key, 2026, 4, 5, 4), zone)
    minutes = [(span.end - span.start) // (60 * SECOND) for span in spans]
    assert minutes == [60, 90, 60, 60]


def test_a_period_may_begin_and_end_inside_a_day():
    start, end = at("Asia/Kolkata", 2026, 11, 3, 14, 7), at("Asia/Kolkata", 2026, 11, 5, 0, 0, 1)
    spans = days(start, end, zone_named("Asia/Kolkata"))
    assert [span.label for span in spans] == ["2026-11-03", "2026-11-04", "2026-11-05"]
    assert spans[0].start == start
    assert spans[-1].end == end


def test_an_empty_period_has_no_spans():
    midnight = at("UTC", 2026, 11, 3)
    for instant in (midnight, midnight + 1):
        assert list(days(instant, instant, zone_named("UTC"))) == []
        assert list(hours(instant, instant, zone_named("UTC"))) == []


@pytest.mark.parametrize(
    "zone", ["UTC", "Asia/Kathmandu", "America/New_York", "Pacific/Chatham", "Africa/Cairo"]
)
def test_months_of_a_year_follow_each_other(zone):
    spans = [
        month(f"{year}-{number:02d}", zone_named(zone)) for year in (2026, 2027) for number in range(1, 13)
    ]
    assert all(earlier.end == later.start for earlier, later in pairwise(spans))
    for span in spans:
        assert month_of(span.start, zone_named(zone)) == span.label
        assert month_of(span.end - 1, zone_named(zone)) == span.label


@pytest.mark.parametrize(
    "label", ["", "2026", "2026-13", "2026-00", "2026-1", "1969-12", "9999-01", "2026-11-01", "-026-01"]
)
def test_what_is_no_month_is_refused(label):
    with pytest.raises(InvalidPeriod, match="month"):
        month(label, zone_named("UTC"))


@pytest.mark.parametrize(
    "name", ["", "Mars/Olympus", "../../etc/passwd", "/etc/localtime", "europe/berlin", "UTC\0", "+05:30"]
)
def test_a_zone_that_does_not_exist_is_refused(name):
    with pytest.raises(UnknownZone, match="no time zone"):
        zone_named(name)

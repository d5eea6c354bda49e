from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.instants import BUCKET_MICROSECONDS, bucket_start, from_datetime, later, now, to_datetime


@given(st.datetimes(timezones=st.just(UTC)))
def test_a_datetime_survives_the_way_to_microseconds_and_back(moment):
    assert to_datetime(from_datetime(moment)) == moment


def test_the_zone_of_a_datetime_does_not_change_its_instant():
    india = timezone(timedelta(hours=5, minutes=30))
    assert from_datetime(datetime(2026, 3, 1, 5, 30, tzinfo=india)) == from_datetime(
        datetime(2026, 3, 1, tzinfo=UTC)
    )


def test_a_datetime_without_a_zone_is_refused():
    with pytest.raises(ValueError, match="no time zone"):
        from_datetime(datetime(2026, 3, 1))  # noqa: DTZ001 - the mistake under test


@given(st.integers(min_value=-(2**50), max_value=2**50))
def test_every_instant_is_in_the_bucket_that_it_belongs_to(instant):
    start = bucket_start(instant)
    assert start <= instant < start + BUCKET_MICROSECONDS
    assert start % BUCKET_MICROSECONDS == 0


def test_later_is_exact():
    assert later(1, timedelta(hours=1, microseconds=1)) == 3_600_000_002


def test_the_clock_tells_this_century():
    assert to_datetime(now()).year >= 2025

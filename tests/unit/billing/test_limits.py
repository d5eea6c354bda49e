"""Buckets: what fits, and exactly when the next one does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.errors import InvalidLimit
from billing.instants import Microseconds
from billing.limits import MAX_LIMIT, PARTS, Buckets, Limits
from tests.unit.billing.builders import T0


def buckets(at=T0, **limits) -> Buckets:
    return Buckets(
        limits=Limits(**limits), requests_level=0, tokens_level=0, open_requests=0, at=Microseconds(at)
    )


def test_a_minutes_worth_fits_at_once_and_then_one_at_a_time():
    full = buckets(requests_per_minute=3)
    for _ in range(3):
        assert full.refusal(0) is None
        full = full.filled(0)
    refusal = full.refusal(0)
    assert (refusal.what, refusal.retry_after_us) == ("requests", 20_000_000)
    assert full.leaked(Microseconds(T0 + 19_999_999)).refusal(0).retry_after_us == 1
    assert full.leaked(Microseconds(T0 + 20_000_000)).refusal(0) is None


@given(
    st.integers(1, MAX_LIMIT),
    st.lists(st.tuples(st.integers(0, 90_000_000), st.integers(0, MAX_LIMIT)), max_size=30),
)
def test_the_time_told_is_the_time_truly_left(limit, asked):
    """Refused until a microsecond before, granted at that instant."""
    now, full = T0, buckets(tokens_per_minute=limit)
    for pause, tokens in asked:
        now += pause
        full = full.leaked(Microseconds(now))
        refusal = full.refusal(tokens)
        if refusal is None:
            full = full.filled(tokens)
            assert full.tokens_level <= limit * PARTS
        elif refusal.is_hopeless:
            assert tokens > limit
        else:
            wait = refusal.retry_after_us
            assert full.leaked(Microseconds(now + wait - 1)).refusal(tokens) is not None
            assert full.leaked(Microseconds(now + wait)).refusal(tokens) is None


@given(st.integers(1, 1_000), st.lists(st.integers(0, 10_000_000), min_size=1, max_size=60))
def test_no_minute_ever_passes_more_than_twice_the_limit(limit, pauses):
    now, full, granted = T0, buckets(requests_per_minute=limit), []
    for pause in pauses:
        now += pause
        full = full.leaked(Microseconds(now))
        if full.refusal(0) is None:
            full = full.filled(0)
            granted.append(now)
    for start in granted:
        assert sum(start <= one < start + 60_000_000 for one in granted) <= 2 * limit


def test_a_clock_that_runs_behind_changes_nothing():
    full = buckets(requests_per_minute=1).filled(0)
    assert full.leaked(Microseconds(T0 - 5_000_000)) == full


def test_without_a_limit_everything_fits_and_nothing_is_kept():
    free = buckets()
    for _ in range(5):
        assert free.refusal(10**12) is None
        free = free.filled(10**12)
    assert (free.requests_level, free.tokens_level, free.standing.requests) == (0, 0, None)


def test_a_request_taken_back_leaves_the_buckets_as_they_were():
    before = buckets(requests_per_minute=5, tokens_per_minute=100).filled(7)
    assert before.filled(9).emptied(9) == before


def test_cached_tokens_count_by_their_weight_rounded_up():
    assert Limits(cached_weight_basis_points=1_000).weigh(cached=11, others=5) == 7
    assert Limits(cached_weight_basis_points=0).weigh(cached=11, others=5) == 5
    assert Limits().weigh(cached=11, others=5) == 16


def test_concurrent_requests_have_no_time_to_tell():
    full = buckets(concurrent_requests=1).filled(0)
    refusal = full.refusal(0)
    assert (refusal.what, refusal.retry_after_us, refusal.is_hopeless) == ("concurrent", None, False)


@pytest.mark.parametrize(
    "limits",
    [
        {"requests_per_minute": 0},
        {"tokens_per_minute": -1},
        {"concurrent_requests": MAX_LIMIT + 1},
        {"cached_weight_basis_points": 10_001},
    ],
)
def test_a_limit_that_cannot_be_is_refused(limits):
    with pytest.raises(InvalidLimit, match=next(iter(limits))):
        Limits(**limits)

from datetime import timedelta

from billing.backoff import Backoff


class Ticks:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def test_each_failure_doubles_the_wait_up_to_the_last_and_a_success_resets_it():
    ticks = Ticks()
    backoff = Backoff(first=timedelta(seconds=1), last=timedelta(seconds=5), monotonic_ns=ticks)
    assert backoff.is_open
    waits = []
    for _ in range(5):
        backoff.fail()
        waits.append(backoff.wait // timedelta(seconds=1))
        ticks.now_ns += waits[-1] * 10**9
    assert waits == [1, 2, 4, 5, 5]
    backoff.succeed()
    backoff.fail()
    assert backoff.wait == timedelta(seconds=1)


def test_it_opens_when_the_wait_is_over_and_not_before():
    ticks = Ticks()
    backoff = Backoff(first=timedelta(seconds=1), last=timedelta(seconds=5), monotonic_ns=ticks)
    backoff.fail()
    ticks.now_ns = 10**9 - 1
    assert not backoff.is_open
    ticks.now_ns = 10**9
    assert backoff.is_open
    assert backoff.wait == timedelta(0)

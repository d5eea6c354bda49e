"""When to try again. Knows delays; does not know what is tried."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta


class Backoff:
    """`open` lets tries through; each failure closes it for twice as long, a success opens it."""

    def __init__(self, *, first: timedelta, last: timedelta, monotonic_ns: Callable[[], int]) -> None:
        self._first = first
        self._last = last
        self._monotonic_ns = monotonic_ns
        self._delay = first
        self._opens_at_ns = monotonic_ns()

    @property
    def is_open(self) -> bool:
        return self._monotonic_ns() >= self._opens_at_ns

    @property
    def wait(self) -> timedelta:
        """Until it opens; zero when it is open."""
        left_ns = max(0, self._opens_at_ns - self._monotonic_ns())
        return timedelta(microseconds=-(-left_ns // 1_000))

    def fail(self) -> None:
        self._opens_at_ns = self._monotonic_ns() + nanoseconds(self._delay)
        self._delay = min(2 * self._delay, self._last)

    def succeed(self) -> None:
        self._delay = self._first


def nanoseconds(delay: timedelta) -> int:
    return delay // timedelta(microseconds=1) * 1_000

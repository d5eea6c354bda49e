"""Instants as integer microseconds since the Unix epoch, UTC.

Knows the clock and the 15-minute bucket. Does not know time zones: a tenant's
zone is applied by whoever reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import NewType

Microseconds = NewType("Microseconds", int)
"""An instant: microseconds since 1970-01-01T00:00:00Z."""

Clock = Callable[[], Microseconds]

MICROSECONDS_PER_SECOND = 1_000_000
BUCKET_MICROSECONDS = 15 * 60 * MICROSECONDS_PER_SECOND
"""15 minutes: the largest bucket that regroups exactly into every civil day now in use."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def now() -> Microseconds:
    """The wall clock."""
    return Microseconds(time.time_ns() // 1_000)


def from_datetime(moment: datetime) -> Microseconds:
    """Exact. Raises ValueError for a datetime without a time zone."""
    if moment.tzinfo is None:
        raise ValueError(f"{moment!r} has no time zone, so it is no instant")
    return Microseconds((moment - _EPOCH) // timedelta(microseconds=1))


def to_datetime(instant: Microseconds) -> datetime:
    """Exact, in UTC. Raises OverflowError beyond the year 9999."""
    return _EPOCH + timedelta(microseconds=instant)


def later(instant: Microseconds, delay: timedelta) -> Microseconds:
    return Microseconds(instant + delay // timedelta(microseconds=1))


def bucket_start(instant: Microseconds) -> Microseconds:
    """Start of the 15-minute UTC bucket that holds the instant."""
    return Microseconds(instant - instant % BUCKET_MICROSECONDS)

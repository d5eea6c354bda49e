"""When each phase of one request began and ended.

Knows names and nanoseconds of one monotonic clock. Does not know what is done in a phase, nor who
reads it: metrics and traces do, when the request is over.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal, get_args

Phase = Literal["authenticate", "receive", "parse", "route", "render", "admit", "prefill", "stream", "settle"]
"""In this order. `render` also tokenises; `prefill` is from dispatch to the first token."""
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)


@dataclass(frozen=True, slots=True)
class Timing:
    """One phase. `error` is the exception's name where one ended it."""

    phase: Phase
    began_ns: int
    ended_ns: int
    error: str | None = None

    @property
    def seconds(self) -> float:
        return (self.ended_ns - self.began_ns) / 1e9


class Phases:
    """The timings of one request, as its phases end."""

    def __init__(self) -> None:
        self.timings: list[Timing] = []

    @contextmanager
    def timed(self, phase: Phase) -> Iterator[None]:
        began_ns = time.monotonic_ns()
        error: str | None = None
        try:
            yield
        except BaseException as raised:
            error = type(raised).__name__
            raise
        finally:
            self.timings.append(Timing(phase, began_ns, time.monotonic_ns(), error))

    @contextmanager
    def generating(self) -> Iterator[Generating]:
        """Two phases: `prefill`, and `stream` once there is a first token."""
        generating = Generating(time.monotonic_ns())
        error: str | None = None
        try:
            yield generating
        except BaseException as raised:
            error = type(raised).__name__
            raise
        finally:
            self.timings += generating.timings(time.monotonic_ns(), error)


@dataclass(slots=True)
class Generating:
    """What a worker does for a request, cut at its first token."""

    began_ns: int
    first_token_ns: int | None = None

    def timings(self, ended_ns: int, error: str | None) -> list[Timing]:
        first_ns = self.first_token_ns
        if first_ns is None:
            return [Timing("prefill", self.began_ns, ended_ns, error)]
        return [
            Timing("prefill", self.began_ns, first_ns),
            Timing("stream", first_ns, ended_ns, error),
        ]

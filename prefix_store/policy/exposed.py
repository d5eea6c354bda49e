"""Exposed runs by rank, the lowest first.

Knows ranks. Does not know what they mean: that is what makes one policy or another.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count
from typing import TypeAlias

from prefix_store.policy.protocol import RunKey

Rank: TypeAlias = tuple[float, ...]

_SLACK = 64


class ExposedRuns:
    """A heap whose entries go stale when a run leaves or is ranked anew; stale ones are dropped when met.

    Runs of equal rank leave in the order in which they came.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, int, RunKey]] = []
        self._ticket_of: dict[RunKey, int] = {}
        self._tickets = count()

    def __len__(self) -> int:
        return len(self._ticket_of)

    def __contains__(self, run: RunKey) -> bool:
        return run in self._ticket_of

    def add(self, run: RunKey, rank: Rank) -> None:
        ticket = next(self._tickets)
        self._ticket_of[run] = ticket
        heappush(self._heap, (rank, ticket, run))
        if len(self._heap) > 2 * len(self._ticket_of) + _SLACK:
            self._heap = [entry for entry in self._heap if self._ticket_of.get(entry[2]) == entry[1]]
            heapify(self._heap)

    def discard(self, run: RunKey) -> None:
        self._ticket_of.pop(run, None)

    def lowest(self) -> RunKey | None:
        heap = self._heap
        while heap:
            _, ticket, run = heap[0]
            if self._ticket_of.get(run) == ticket:
                return run
            heappop(heap)
        return None

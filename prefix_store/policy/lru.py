"""Least recently used first.

Knows when runs were last used. Does not know how often, how deep or of what kind.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count

from prefix_store.blocks import BlockName
from prefix_store.policy.protocol import RunFacts, RunKey

_SLACK = 64


class LruPolicy:
    """A heap of exposed runs by the time of last use; entries made stale by `cover` are dropped when met."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, RunKey]] = []
        self._ticket_of: dict[RunKey, int] = {}
        self._tickets = count()

    def insert(self, run: RunKey, facts: RunFacts, now: float) -> None:
        pass

    def hit(self, run: RunKey, now: float) -> None:
        pass

    def resize(self, run: RunKey, num_blocks: int) -> None:
        pass

    def split(self, run: RunKey, upper: RunKey, num_upper_blocks: int) -> None:
        pass

    def merge(self, upper: RunKey, run: RunKey) -> None:
        pass

    def expose(self, run: RunKey, last_used: float) -> None:
        ticket = next(self._tickets)
        self._ticket_of[run] = ticket
        heappush(self._heap, (last_used, ticket, run))

    def cover(self, run: RunKey) -> None:
        del self._ticket_of[run]
        if len(self._heap) > 2 * len(self._ticket_of) + _SLACK:
            self._heap = [entry for entry in self._heap if self._ticket_of.get(entry[2]) == entry[1]]
            heapify(self._heap)

    def evict(self, run: RunKey, name: BlockName, num_blocks: int, now: float) -> None:
        pass

    def remove(self, run: RunKey) -> None:
        self._ticket_of.pop(run, None)

    def victim(self, now: float) -> RunKey | None:
        heap = self._heap
        while heap:
            _, ticket, run = heap[0]
            if self._ticket_of.get(run) == ticket:
                return run
            heappop(heap)
        return None

"""S3-FIFO: a small queue on trial, a main queue, and the names of those that failed.

Knows queues of runs and how often each was used lately. Does not know times.

J. Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP 2023.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import count

from prefix_store.blocks import BlockName
from prefix_store.policy.exposed import ExposedRuns
from prefix_store.policy.protocol import RunFacts, RunKey

SMALL_SHARE = 0.1
MAX_USES = 3
PROMOTED_AT_USES = 2


@dataclass(slots=True, kw_only=True)
class _Queued:
    num_blocks: int
    place: int
    """In its queue; a lower one is nearer to the end."""
    is_small: bool
    num_uses: int = 0


class S3FifoPolicy:
    """Only exposed runs are met at the end of a queue: a covered one keeps its place until it is exposed.

    The share of the small queue and of the ghosts are of the blocks there are, which
    is the capacity once anything must go.
    """

    def __init__(self) -> None:
        self._runs: dict[RunKey, _Queued] = {}
        self._small, self._main = ExposedRuns(), ExposedRuns()
        self._num_small_blocks = self._num_main_blocks = 0
        self._ghosts: OrderedDict[BlockName, int] = OrderedDict()
        self._num_ghost_blocks = 0
        self._places = count()

    def insert(self, run: RunKey, facts: RunFacts, now: float) -> None:
        ghost_blocks = self._ghosts.pop(facts.name, 0)
        self._num_ghost_blocks -= ghost_blocks
        self._runs[run] = _Queued(num_blocks=0, place=next(self._places), is_small=not ghost_blocks)
        self.resize(run, facts.num_blocks)

    def hit(self, run: RunKey, now: float) -> None:
        queued = self._runs[run]
        queued.num_uses = min(MAX_USES, queued.num_uses + 1)

    def resize(self, run: RunKey, num_blocks: int) -> None:
        queued = self._runs[run]
        self._count(queued, num_blocks - queued.num_blocks)
        queued.num_blocks = num_blocks

    def split(self, run: RunKey, upper: RunKey, num_upper_blocks: int) -> None:
        lower = self._runs[run]
        lower.num_blocks -= num_upper_blocks
        self._runs[upper] = _Queued(
            num_blocks=num_upper_blocks,
            place=lower.place,
            is_small=lower.is_small,
            num_uses=lower.num_uses,
        )

    def merge(self, upper: RunKey, run: RunKey) -> None:
        gone = self._runs.pop(upper)
        self._count(gone, -gone.num_blocks)
        self.resize(run, self._runs[run].num_blocks + gone.num_blocks)

    def expose(self, run: RunKey, last_used: float) -> None:
        queued = self._runs[run]
        self._queue(queued).add(run, (queued.place,))

    def cover(self, run: RunKey) -> None:
        self._queue(self._runs[run]).discard(run)

    def evict(self, run: RunKey, name: BlockName, num_blocks: int, now: float) -> None:
        queued = self._runs[run]
        if queued.is_small:
            self._remember(name, num_blocks)
        self.resize(run, queued.num_blocks - num_blocks)

    def remove(self, run: RunKey) -> None:
        self.resize(run, 0)
        queued = self._runs.pop(run)
        self._queue(queued).discard(run)

    def victim(self, now: float) -> RunKey | None:
        while True:
            small, main = self._small.lowest(), self._main.lowest()
            share = SMALL_SHARE * (self._num_small_blocks + self._num_main_blocks)
            if small is not None and (main is None or self._num_small_blocks >= share):
                if self._runs[small].num_uses < PROMOTED_AT_USES:
                    return small
                self._move_to_main(small)
            elif main is not None:
                queued = self._runs[main]
                if queued.num_uses == 0:
                    return main
                queued.num_uses -= 1
                self._move_to_main(main)
            else:
                return None

    def _move_to_main(self, run: RunKey) -> None:
        queued = self._runs[run]
        self._queue(queued).discard(run)
        if queued.is_small:
            self._count(queued, -queued.num_blocks)
            queued.is_small = False
            queued.num_uses = 0
            self._count(queued, queued.num_blocks)
        queued.place = next(self._places)
        self._main.add(run, (queued.place,))

    def _remember(self, name: BlockName, num_blocks: int) -> None:
        self._num_ghost_blocks += num_blocks - self._ghosts.pop(name, 0)
        self._ghosts[name] = num_blocks
        while self._num_ghost_blocks > self._num_main_blocks:
            _, gone = self._ghosts.popitem(last=False)
            self._num_ghost_blocks -= gone

    def _queue(self, queued: _Queued) -> ExposedRuns:
        return self._small if queued.is_small else self._main

    def _count(self, queued: _Queued, num_blocks: int) -> None:
        if queued.is_small:
            self._num_small_blocks += num_blocks
        else:
            self._num_main_blocks += num_blocks

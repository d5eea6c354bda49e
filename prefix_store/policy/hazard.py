"""Lowest learnt chance of reuse first: keeps what pays most per second that it stays.

Knows how often each run was used, before it was evicted too, how deep it lies and
since when it is idle. Does not know kinds, requests or the future.

LRU takes it that the longer idle the less wanted. In conversations that is not
so: nobody answers within a few seconds, most do within two minutes, and who came
back before comes back more often. So each class of runs, by number of uses and,
for runs seldom used, by depth, has a curve of the rate of reuse by idle age,
learnt as requests come (`ReuseCurves`). A run is worth the hits to expect per
second of keeping it for as long as is best from here, and the one worth least
goes. One-off requests stay in the classes of the once used, whose curves they
depress, and cannot push out the rest.

Related: N. Beckmann, H. Chen, A. Cidon, "LHD: Improving Cache Hit Rate by Maximizing
Hit Density", NSDI 2018, which ranks by hits per space-time too, with sampled
victims and without looking beyond a dip of the curve.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prefix_store.blocks import BlockName
from prefix_store.policy.hazard_curves import (
    EDGES,
    HORIZON_SECONDS,
    NUM_BUCKETS,
    Ranking,
    ReuseCurves,
    bucket_of,
)
from prefix_store.policy.protocol import RunFacts, RunKey

GHOSTS_PER_BLOCK = 8
"""Evicted blocks that are still watched, for each block there is."""
_UNGROUPED_USES = 3
_NUM_DEPTHS = 6
_DEPTHS_UNTIL_USES = 2
_NUM_LATER_CLASSES = 5


def _classes() -> dict[tuple[int, int], int]:
    """Classes by (magnitude of uses, magnitude of depth): depth tells something of runs seldom used only."""
    pairs = [(uses, depth) for uses in range(_DEPTHS_UNTIL_USES) for depth in range(_NUM_DEPTHS)]
    pairs += [(_DEPTHS_UNTIL_USES + later, 0) for later in range(_NUM_LATER_CLASSES)]
    return {pair: number for number, pair in enumerate(pairs)}


_CLASSES = _classes()
_MAX_USES_LEVEL = _DEPTHS_UNTIL_USES + _NUM_LATER_CLASSES - 1
_USES_LEVELS = tuple(uses for uses, _ in _CLASSES)


def _class_of(num_uses: int, depth: int) -> int:
    """Levels of uses are 1, 2, 3, 4 to 7, 8 to 15, 16 to 31 and more; of depth 0 to 2, 3 to 14, 15 to 62 …"""
    level = num_uses - 1 if num_uses <= _UNGROUPED_USES else min(num_uses.bit_length(), _MAX_USES_LEVEL)
    if level >= _DEPTHS_UNTIL_USES:
        return _CLASSES[level, 0]
    return _CLASSES[level, min(((depth + 1).bit_length() - 1) // 2, _NUM_DEPTHS - 1)]


@dataclass(slots=True, kw_only=True)
class _Watched:
    """A run, or what is known of blocks evicted from the end of one."""

    num_blocks: int
    num_uses: int
    depth: int
    last_used: float
    group: int = 0
    """Its class: follows from uses and depth, kept because it is asked for all the time."""

    def __post_init__(self) -> None:
        self.group = _class_of(self.num_uses, self.depth)


@dataclass(slots=True, kw_only=True)
class _Run(_Watched):
    cell: int | None = None
    """Where it waits, while exposed."""
    ghost: BlockName | None = None
    """Of the blocks evicted from its end since it was last used."""


class _Cells:
    """Exposed runs by class and bucket of age, the cells by what a run in them is worth.

    The first non-empty cell is the lowest bit of a number with one bit a cell.
    """

    def __init__(self, ranking: Ranking) -> None:
        self.runs: dict[int, OrderedDict[RunKey, _Run]] = {}
        self.ranking = ranking
        self._occupied = 0

    def rank(self, ranking: Ranking) -> None:
        """From now on the cells go in this order."""
        self.ranking = ranking
        self._occupied = 0
        for cell in self.runs:
            self._occupied |= ranking.bit_of[cell]

    def add(self, key: RunKey, run: _Run, now: float) -> None:
        cell = run.group * NUM_BUCKETS + bucket_of(max(0.0, now - run.last_used))
        runs = self.runs.setdefault(cell, OrderedDict())
        is_oldest = bool(runs) and run.last_used <= next(iter(runs.values())).last_used
        runs[key] = run
        if is_oldest:
            runs.move_to_end(key, last=False)
        run.cell = cell
        self._occupied |= self.ranking.bit_of[cell]

    def discard(self, key: RunKey, run: _Run) -> None:
        if run.cell is None:
            return
        runs = self.runs[run.cell]
        del runs[key]
        if not runs:
            del self.runs[run.cell]
            self._occupied &= ~self.ranking.bit_of[run.cell]
        run.cell = None

    def first(self) -> RunKey | None:
        if not self._occupied:
            return None
        lowest = (self._occupied & -self._occupied).bit_length() - 1
        return next(iter(self.runs[self.ranking.cell_at[lowest]]))

    def check(self, exposed: Mapping[RunKey, _Run]) -> None:
        assert sum(len(runs) for runs in self.runs.values()) == len(exposed)
        assert all(run.cell is not None and key in self.runs[run.cell] for key, run in exposed.items())
        for position, cell in enumerate(self.ranking.cell_at):
            assert self.ranking.bit_of[cell] == 1 << position
            assert (cell in self.runs) == bool(self._occupied >> position & 1)

    def age(self, now: float) -> None:
        """Moves runs that have become too old for their bucket, the oldest bucket first."""
        for cell in sorted(self.runs, reverse=True):
            runs, end = self.runs[cell], EDGES[cell % NUM_BUCKETS + 1]
            while runs and end < HORIZON_SECONDS:
                key, run = next(iter(runs.items()))
                if now - run.last_used < end:
                    break
                self.discard(key, run)
                self.add(key, run, now)


def learning_together() -> Callable[[], HazardPolicy]:
    """Makes policies with one set of curves: what takes memory and time to learn is there once."""
    curves = ReuseCurves(levels=_USES_LEVELS)
    return lambda: HazardPolicy(curves)


class HazardPolicy:
    """Evicts the exposed run with the fewest hits to expect per second of keeping it.

    O(1) a call, amortised: a run passes each of some two dozen ages once, and curves
    and ranks are computed once in two seconds.
    """

    def __init__(self, curves: ReuseCurves | None = None) -> None:
        """`curves` that several policies learn from and rank by; else it has its own."""
        self._runs: dict[RunKey, _Run] = {}
        self._num_blocks = 0
        self._ghosts: OrderedDict[BlockName, _Watched] = OrderedDict()
        self._num_ghost_blocks = 0
        self._learns_alone = curves is None
        self._curves = curves or ReuseCurves(levels=_USES_LEVELS)
        self._cells = _Cells(self._curves.ranking)
        self._now = -math.inf

    def insert(self, run: RunKey, facts: RunFacts, now: float) -> None:
        self._advance(now)
        ghost = self._ghosts.pop(facts.name, None)
        fresh = _Run(
            num_blocks=facts.num_blocks,
            num_uses=1 if ghost is None else 1 + ghost.num_uses,
            depth=facts.depth,
            last_used=now,
        )
        if ghost is not None:
            self._num_ghost_blocks -= ghost.num_blocks
            num_back = min(ghost.num_blocks, facts.num_blocks)
            self._curves.use(ghost.group, ghost.last_used, now, num_back)
            self._curves.watch(ghost.group, ghost.last_used, num_back - ghost.num_blocks)
        self._runs[run] = fresh
        self._num_blocks += facts.num_blocks
        self._curves.watch(fresh.group, now, facts.num_blocks)

    def hit(self, run: RunKey, now: float) -> None:
        self._advance(now)
        known = self._runs[run]
        is_exposed = known.cell is not None
        self._cells.discard(run, known)
        self._curves.use(known.group, known.last_used, now, known.num_blocks)
        known.num_uses += 1
        known.group = _class_of(known.num_uses, known.depth)
        known.last_used = now
        known.ghost = None
        self._curves.watch(known.group, now, known.num_blocks)
        if is_exposed:
            self._cells.add(run, known, now)

    def resize(self, run: RunKey, num_blocks: int) -> None:
        known = self._runs[run]
        num_added = num_blocks - known.num_blocks
        self._curves.watch(known.group, known.last_used, num_added)
        self._num_blocks += num_added
        known.num_blocks = num_blocks
        known.ghost = None

    def split(self, run: RunKey, upper: RunKey, num_upper_blocks: int) -> None:
        # Both keep the depth of the whole, and with it the class under which they are watched.
        lower = self._runs[run]
        lower.num_blocks -= num_upper_blocks
        self._runs[upper] = _Run(
            num_blocks=num_upper_blocks, num_uses=lower.num_uses, depth=lower.depth, last_used=lower.last_used
        )

    def merge(self, upper: RunKey, run: RunKey) -> None:
        gone, known = self._runs.pop(upper), self._runs[run]
        self._cells.discard(upper, gone)
        self._curves.watch(gone.group, gone.last_used, -gone.num_blocks)
        self._curves.watch(known.group, known.last_used, gone.num_blocks)
        known.num_blocks += gone.num_blocks

    def expose(self, run: RunKey, last_used: float) -> None:
        self._advance(last_used)
        known = self._runs[run]
        if last_used > known.last_used:
            self._curves.watch(known.group, known.last_used, -known.num_blocks)
            known.last_used = last_used
            known.ghost = None
            self._curves.watch(known.group, last_used, known.num_blocks)
        self._cells.add(run, known, self._now)

    def cover(self, run: RunKey) -> None:
        self._cells.discard(run, self._runs[run])

    def evict(self, run: RunKey, name: BlockName, num_blocks: int, now: float) -> None:
        self._advance(now)
        known = self._runs[run]
        known.num_blocks -= num_blocks
        self._num_blocks -= num_blocks
        self._num_ghost_blocks += num_blocks
        deeper = None if known.ghost is None else self._ghosts.pop(known.ghost, None)
        if deeper is not None:
            num_blocks += deeper.num_blocks
        namesake = self._ghosts.pop(name, None)
        if namesake is not None:
            self._forget(namesake)
        known.ghost = name
        self._ghosts[name] = _Watched(
            num_blocks=num_blocks, num_uses=known.num_uses, depth=known.depth, last_used=known.last_used
        )
        self._forget_ghosts()

    def remove(self, run: RunKey) -> None:
        known = self._runs.pop(run)
        self._cells.discard(run, known)
        self._num_blocks -= known.num_blocks
        self._curves.watch(known.group, known.last_used, -known.num_blocks)

    def victim(self, now: float) -> RunKey | None:
        self._advance(now)
        return self._cells.first()

    def check(self) -> None:
        """Asserts that the books add up."""
        runs, ghosts = self._runs.values(), self._ghosts.values()
        assert self._num_blocks == sum(run.num_blocks for run in runs)
        assert self._num_ghost_blocks == sum(ghost.num_blocks for ghost in ghosts)
        assert self._num_ghost_blocks <= GHOSTS_PER_BLOCK * self._num_blocks or not self._ghosts
        watched = [one for one in (*runs, *ghosts) if self._curves.is_watched(one.last_used)]
        num_watched = sum(one.num_blocks for one in watched)
        assert self._curves.num_watched() == num_watched or not self._learns_alone
        self._cells.check({key: run for key, run in self._runs.items() if run.cell is not None})

    def _advance(self, now: float) -> None:
        self._now = max(self._now, now)
        self._curves.advance(now)
        if self._cells.ranking is self._curves.ranking:
            return
        self._cells.age(now)
        self._cells.rank(self._curves.ranking)

    def _forget_ghosts(self) -> None:
        limit = GHOSTS_PER_BLOCK * self._num_blocks
        while self._num_ghost_blocks > limit and self._ghosts:
            self._forget(self._ghosts.popitem(last=False)[1])

    def _forget(self, ghost: _Watched) -> None:
        self._num_ghost_blocks -= ghost.num_blocks
        self._curves.watch(ghost.group, ghost.last_used, -ghost.num_blocks)

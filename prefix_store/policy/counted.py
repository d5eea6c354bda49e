"""Least frequently used first, plain and with a cost: policies that rank a run by its number of uses.

Knows how often a run was used since it came and how deep it lies. Does not
know what was used before it was evicted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from prefix_store.blocks import BlockName
from prefix_store.policy.exposed import ExposedRuns, Rank
from prefix_store.policy.protocol import RunFacts, RunKey


@dataclass(slots=True, kw_only=True)
class _Counted:
    num_uses: int
    depth: int
    inflation: float
    """Of the whole cache, when the run was last used."""


class _CountingPolicy(ABC):
    """Keeps the count of uses; a subclass says what rank it gives."""

    def __init__(self) -> None:
        self._runs: dict[RunKey, _Counted] = {}
        self._exposed = ExposedRuns()
        self._inflation = 0.0

    @abstractmethod
    def _rank(self, counted: _Counted) -> float: ...

    def insert(self, run: RunKey, facts: RunFacts, now: float) -> None:
        self._runs[run] = _Counted(num_uses=1, depth=facts.depth, inflation=self._inflation)

    def hit(self, run: RunKey, now: float) -> None:
        counted = self._runs[run]
        counted.num_uses += 1
        counted.inflation = self._inflation
        if run in self._exposed:
            self.expose(run, now)

    def resize(self, run: RunKey, num_blocks: int) -> None:
        return

    def split(self, run: RunKey, upper: RunKey, num_upper_blocks: int) -> None:
        lower = self._runs[run]
        self._runs[upper] = _Counted(num_uses=lower.num_uses, depth=lower.depth, inflation=lower.inflation)
        lower.depth += num_upper_blocks

    def merge(self, upper: RunKey, run: RunKey) -> None:
        self._runs[run].depth = self._runs.pop(upper).depth

    def expose(self, run: RunKey, last_used: float) -> None:
        rank: Rank = (self._rank(self._runs[run]), last_used)
        self._exposed.add(run, rank)

    def cover(self, run: RunKey) -> None:
        self._exposed.discard(run)

    def evict(self, run: RunKey, name: BlockName, num_blocks: int, now: float) -> None:
        return

    def remove(self, run: RunKey) -> None:
        self._exposed.discard(run)
        del self._runs[run]

    def victim(self, now: float) -> RunKey | None:
        return self._exposed.lowest()


class LfuPolicy(_CountingPolicy):
    """Fewest uses since it came; the least recently used of those."""

    def _rank(self, counted: _Counted) -> float:
        return counted.num_uses


class GdsfPolicy(_CountingPolicy):
    """GreedyDual-Size-Frequency: uses × cost ÷ size, aged by what was paid for the last room made.

    A block's size is one; its cost is that of recomputing it, which grows with depth
    as attention looks at everything before: `1 + depth_cost × depth`. With no depth
    cost every block counts the same, which is best for the hit rate.

    L. Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency
    Caching Policy", HP Labs HPL-98-69R1, 1998.
    """

    def __init__(self, *, depth_cost: float = 0.0) -> None:
        super().__init__()
        if depth_cost < 0.0:
            raise ValueError("depth_cost must not be negative")
        self._depth_cost = depth_cost

    def _rank(self, counted: _Counted) -> float:
        return counted.inflation + counted.num_uses * (1.0 + self._depth_cost * counted.depth)

    def evict(self, run: RunKey, name: BlockName, num_blocks: int, now: float) -> None:
        self._inflation = max(self._inflation, self._rank(self._runs[run]))

"""W-TinyLFU: a small window, and a main part that only the more frequently used enter.

Knows how often names were used, in the cache or not, and lately more than long
ago. Does not know times.

G. Einziger, R. Friedman, B. Manes, "TinyLFU: A Highly Efficient Cache Admission
Policy", ACM Transactions on Storage 13(4), 2017.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import IntEnum
from itertools import count

from prefix_store.blocks import BlockName
from prefix_store.policy.exposed import ExposedRuns
from prefix_store.policy.protocol import RunFacts, RunKey

WINDOW_SHARE = 0.01
PROTECTED_SHARE = 0.8
MAX_FREQUENCY = 15
SAMPLES_PER_BLOCK = 10
_MIN_SAMPLES = 1000


class _Segment(IntEnum):
    WINDOW = 0
    PROBATION = 1
    PROTECTED = 2


@dataclass(slots=True, kw_only=True)
class _Placed:
    name: BlockName
    num_blocks: int
    segment: _Segment
    place: int = 0
    is_exposed: bool = False


class _Frequencies:
    """Counts of names, capped, and halved together so that the past fades.

    Exact where the paper has a sketch: names whose count fades to nothing are
    forgotten, so there are never more than samples in one period.
    """

    def __init__(self) -> None:
        self._counts: dict[BlockName, int] = {}
        self._num_samples = 0

    def count(self, name: BlockName, num_resident: int) -> None:
        self._counts[name] = min(MAX_FREQUENCY, self._counts.get(name, 0) + 1)
        self._num_samples += 1
        if self._num_samples >= max(_MIN_SAMPLES, SAMPLES_PER_BLOCK * num_resident):
            self._num_samples //= 2
            self._counts = {one: times // 2 for one, times in self._counts.items() if times > 1}

    def of(self, name: BlockName) -> int:
        return self._counts.get(name, 0)


class WTinyLfuPolicy:
    """Shares are of the blocks there are, which is the capacity once anything must go."""

    def __init__(self) -> None:
        self._runs: dict[RunKey, _Placed] = {}
        self._frequencies = _Frequencies()
        self._order: tuple[OrderedDict[RunKey, None], ...] = tuple(OrderedDict() for _ in _Segment)
        self._exposed = tuple(ExposedRuns() for _ in _Segment)
        self._num_blocks = [0 for _ in _Segment]
        self._num_resident = 0
        self._places = count()

    def insert(self, run: RunKey, facts: RunFacts, now: float) -> None:
        self._frequencies.count(facts.name, self._num_resident)
        self._runs[run] = _Placed(name=facts.name, num_blocks=0, segment=_Segment.WINDOW)
        self._place(run, _Segment.WINDOW)
        self.resize(run, facts.num_blocks)

    def hit(self, run: RunKey, now: float) -> None:
        placed = self._runs[run]
        self._frequencies.count(placed.name, self._num_resident)
        in_window = placed.segment is _Segment.WINDOW
        self._place(run, _Segment.WINDOW if in_window else _Segment.PROTECTED)

    def resize(self, run: RunKey, num_blocks: int) -> None:
        placed = self._runs[run]
        self._num_resident += num_blocks - placed.num_blocks
        self._num_blocks[placed.segment] += num_blocks - placed.num_blocks
        placed.num_blocks = num_blocks

    def split(self, run: RunKey, upper: RunKey, num_upper_blocks: int) -> None:
        # The name of the lower part's first block is not known: it counts as the upper one's.
        lower = self._runs[run]
        self.resize(run, lower.num_blocks - num_upper_blocks)
        self._runs[upper] = _Placed(name=lower.name, num_blocks=0, segment=lower.segment)
        self._place(upper, lower.segment)
        self.resize(upper, num_upper_blocks)

    def merge(self, upper: RunKey, run: RunKey) -> None:
        gone = self._runs[upper]
        self._runs[run].name = gone.name
        num_blocks = self._runs[run].num_blocks + gone.num_blocks
        self.remove(upper)
        self.resize(run, num_blocks)

    def expose(self, run: RunKey, last_used: float) -> None:
        placed = self._runs[run]
        placed.is_exposed = True
        self._exposed[placed.segment].add(run, (placed.place,))

    def cover(self, run: RunKey) -> None:
        placed = self._runs[run]
        placed.is_exposed = False
        self._exposed[placed.segment].discard(run)

    def evict(self, run: RunKey, name: BlockName, num_blocks: int, now: float) -> None:
        self.resize(run, self._runs[run].num_blocks - num_blocks)

    def remove(self, run: RunKey) -> None:
        self.resize(run, 0)
        placed = self._runs.pop(run)
        self._order[placed.segment].pop(run)
        self._exposed[placed.segment].discard(run)

    def victim(self, now: float) -> RunKey | None:
        """The less frequent of the window's oldest, when it is over its share, and the main part's."""
        window = self._order[_Segment.WINDOW]
        while self._num_blocks[_Segment.WINDOW] > WINDOW_SHARE * self._num_resident:
            candidate = next(iter(window))
            rival = self._main_victim()
            if self._runs[candidate].is_exposed and rival is not None:
                if self._frequency(candidate) <= self._frequency(rival):
                    return candidate
                self._place(candidate, _Segment.PROBATION)
                return rival
            self._place(candidate, _Segment.PROBATION)
        rival = self._main_victim()
        return self._exposed[_Segment.WINDOW].lowest() if rival is None else rival

    def _main_victim(self) -> RunKey | None:
        run = self._exposed[_Segment.PROBATION].lowest()
        return self._exposed[_Segment.PROTECTED].lowest() if run is None else run

    def _frequency(self, run: RunKey) -> int:
        return self._frequencies.of(self._runs[run].name)

    def _place(self, run: RunKey, segment: _Segment) -> None:
        """Puts a run at the young end of a segment; the protected one's overflow is on probation again."""
        placed = self._runs[run]
        self._order[placed.segment].pop(run, None)
        self._exposed[placed.segment].discard(run)
        self._num_blocks[placed.segment] -= placed.num_blocks
        placed.segment, placed.place = segment, next(self._places)
        self._order[segment][run] = None
        self._num_blocks[segment] += placed.num_blocks
        if placed.is_exposed:
            self._exposed[segment].add(run, (placed.place,))
        protected = self._order[_Segment.PROTECTED]
        limit = PROTECTED_SHARE * (1.0 - WINDOW_SHARE) * self._num_resident
        while segment is _Segment.PROTECTED and self._num_blocks[segment] > limit and len(protected) > 1:
            self._place(next(iter(protected)), _Segment.PROBATION)

"""Least recently used first.

Knows when runs were last used. Does not know how often, how deep or of what kind.
"""

from __future__ import annotations

from prefix_store.blocks import BlockName
from prefix_store.policy.exposed import ExposedRuns
from prefix_store.policy.protocol import RunFacts, RunKey


class LruPolicy:
    """Exposed runs by the time of last use."""

    def __init__(self) -> None:
        self._exposed = ExposedRuns()

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
        self._exposed.add(run, (last_used,))

    def cover(self, run: RunKey) -> None:
        self._exposed.discard(run)

    def evict(self, run: RunKey, name: BlockName, num_blocks: int, now: float) -> None:
        pass

    def remove(self, run: RunKey) -> None:
        self._exposed.discard(run)

    def victim(self, now: float) -> RunKey | None:
        return self._exposed.lowest()

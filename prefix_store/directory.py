"""Which blocks another process says it has: the index rebuilt from its events.

Knows names, their parents and tokens as they were announced. Does not know
block ids, holders or how the events arrived. Names may be another engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from prefix_store.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, NumberedBatch

AnyName = bytes | int


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    """A block as its owner announced it."""

    parent: AnyName | None
    token_ids: tuple[int, ...]


class Applied(Enum):
    """What became of a batch."""

    APPLIED = "applied"
    REPEATED = "repeated"
    """It was known already: nothing changed."""
    GAP = "gap"
    """Batches before it are missing: nothing changed; ask for a replay or a snapshot."""


class BlockDirectory:
    """The blocks of one worker. `behind → current` by a snapshot or the batches from the start on."""

    def __init__(self) -> None:
        self.epoch: str | None = None
        self.next_sequence = 0
        self.blocks: dict[AnyName, Announced] = {}

    def apply(self, numbered: NumberedBatch) -> Applied:
        """Takes in the next batch. A new epoch drops all that the former one had."""
        if numbered.epoch != self.epoch:
            self.epoch, self.next_sequence, self.blocks = numbered.epoch, 0, {}
        if numbered.sequence < self.next_sequence:
            return Applied.REPEATED
        if numbered.sequence > self.next_sequence:
            return Applied.GAP
        self._take_in(numbered.batch.events)
        self.next_sequence += 1
        return Applied.APPLIED

    def restore(self, snapshot: NumberedBatch) -> None:
        """Replaces everything by a snapshot; batches after it apply next."""
        self.epoch, self.next_sequence, self.blocks = snapshot.epoch, snapshot.sequence + 1, {}
        self._take_in(snapshot.batch.events)

    def match(self, names: Sequence[AnyName]) -> int:
        """How many of the leading names are there."""
        for count, name in enumerate(names):
            if name not in self.blocks:
                return count
        return len(names)

    def _take_in(self, events: Sequence[KvEvent]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    self.blocks.pop(name, None)
            else:
                assert isinstance(event, AllBlocksCleared)
                self.blocks.clear()

    def _store(self, event: BlockStored) -> None:
        parent = event.parent_block_hash
        for number, name in enumerate(event.block_hashes):
            tokens = event.token_ids[number * event.block_size : (number + 1) * event.block_size]
            self.blocks[name] = Announced(parent=parent, token_ids=tuple(tokens))
            parent = name

"""Which block ids are free.

Knows ids and counts. Does not know names, tokens or what a block holds.

A block is in one of three states:

    free   → held     `take`: a sequence writes into it
    held   → cached   `park`: the last holder let go, the index still finds it
    cached → held     `unpark`: a prompt hit it
    held, cached → free   `give_back`: nobody can find it any more

Some cached blocks are pinned (`pin`, `unpin`): findable, and not evictable.

Only the free blocks are listed here; which blocks are cached and which are
held follows from the index and the leases. Counts are kept so that every move
costs O(1) a block and no look costs more than O(1).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prefix_store.blocks import BlockId, BlockIds, block_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCounts:
    """Every block is in exactly one class: `free + cached + held == total`.

    `pinned` blocks are those of the cached ones that may not be evicted.
    """

    free: int
    cached: int
    held: int
    total: int
    pinned: int = 0


class OutOfBlocks(Exception):
    """More blocks are asked for than are free or evictable. Nothing was changed."""

    def __init__(self, *, wanted: int, available: int) -> None:
        super().__init__(f"{wanted} blocks wanted, {available} free or evictable")
        self.wanted = wanted
        self.available = available


class BlockPool:
    """A fixed number of blocks, preallocated. States and moves: see the module."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError("a pool needs at least one block")
        self.total = num_blocks
        self.num_cached = 0
        self.num_pinned = 0
        self._free = block_ids(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.total - len(self._free) - self.num_cached

    @property
    def num_available(self) -> int:
        """How many blocks `take` can give once everything evictable is evicted."""
        return len(self._free) + self.num_cached - self.num_pinned

    @property
    def counts(self) -> BlockCounts:
        return BlockCounts(
            free=self.num_free,
            cached=self.num_cached,
            held=self.num_held,
            total=self.total,
            pinned=self.num_pinned,
        )

    def take(self, num_blocks: int) -> BlockIds:
        """free → held."""
        free = self._free
        assert 0 <= num_blocks <= len(free), (num_blocks, len(free))
        first = len(free) - num_blocks
        taken = free[first:]
        del free[first:]
        return taken

    def park(self, num_blocks: int) -> None:
        """held → cached."""
        assert 0 <= num_blocks <= self.num_held, (num_blocks, self.num_held)
        self.num_cached += num_blocks

    def unpark(self, num_blocks: int) -> None:
        """cached → held."""
        assert 0 <= num_blocks <= self.num_cached, (num_blocks, self.num_cached)
        self.num_cached -= num_blocks

    def pin(self, num_blocks: int) -> None:
        """cached → cached and pinned."""
        self.num_pinned += num_blocks
        assert 0 <= self.num_pinned <= self.num_cached, (self.num_pinned, self.num_cached)

    def unpin(self, num_blocks: int) -> None:
        """cached and pinned → cached."""
        self.num_pinned -= num_blocks
        assert self.num_pinned >= 0, self.num_pinned

    def give_back(self, blocks: Iterable[BlockId]) -> None:
        """held → free. A cached block is unparked first."""
        self._free.extend(blocks)
        assert self.num_held >= 0, "more blocks came back than were held"

    def free_blocks(self) -> frozenset[BlockId]:
        """For checks: O(n)."""
        return frozenset(self._free)

    def check(self) -> None:
        """Asserts what must hold between calls."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert all(0 <= block < self.total for block in free), "a free block does not exist"
        assert 0 <= self.num_pinned <= self.num_cached
        assert self.num_held >= 0

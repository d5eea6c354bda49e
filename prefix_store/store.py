"""The prefix store: which K/V blocks a prompt can reuse, and where new ones go.

Knows scopes (opaque), tokens, block ids. Does not know tensors, requests or
tenants: it decides, and its caller moves bytes. Not thread-safe: one thread
owns a store, and every change is one synchronous call.

    acquire → extend → seal → … → release | discard

`acquire` holds the cached prefix of a prompt; `extend` makes room for what is
about to be written; `seal` makes what was written findable; `release` gives
everything back, findable; `discard` gives everything back and adds nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from prefix_store.blocks import TOKEN_BYTES, BlockId, BlockNamer, TokenIds, TokenKind, token_bytes
from prefix_store.index import IndexMatch, RadixIndex
from prefix_store.leases import Lease, LeaseEnded, LeaseState, PrefixMatch, RowCopy
from prefix_store.policy.lru import LruPolicy
from prefix_store.policy.protocol import EvictionPolicy
from prefix_store.pool import BlockCounts, BlockPool, OutOfBlocks


class PrefixStore:
    """Index, pool and leases of one worker's device memory."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        namer: BlockNamer,
        policy: EvictionPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if namer.block_size != block_size:
            raise ValueError("the namer's block size differs from the store's")
        self.block_size = block_size
        self._block_bytes = block_size * TOKEN_BYTES
        self._clock = clock
        self._pool = BlockPool(num_blocks)
        self._index = RadixIndex(namer=namer, pool=self._pool, policy=policy or LruPolicy())
        self._leases: dict[int, Lease] = {}

    @property
    def counts(self) -> BlockCounts:
        pool = self._pool
        return BlockCounts(free=pool.num_free, cached=pool.num_cached, held=pool.num_held, total=pool.total)

    def match(self, scope: str, tokens: TokenIds) -> PrefixMatch:
        """How many leading tokens are cached. Changes nothing."""
        data = token_bytes(tokens)
        match = self._index.match(scope, data, len(data))
        if match is None:
            return PrefixMatch(num_tokens=0)
        return PrefixMatch(num_tokens=match.num_bytes // TOKEN_BYTES + match.tail_rows)

    def acquire(
        self,
        scope: str,
        tokens: TokenIds,
        *,
        max_cached_tokens: int,
        num_prompt_tokens: int | None = None,
        num_system_tokens: int = 0,
    ) -> Lease:
        """Holds the longest cached prefix of `tokens`, at most `max_cached_tokens` of them.

        Tokens from `num_prompt_tokens` on count as generated (default: all given are
        prompt), the first `num_system_tokens` as system. The caller carries out the
        lease's `copies` at once. When no block is free for such a copy, the lease
        just has less credit.
        """
        if max_cached_tokens < 0:
            raise ValueError("max_cached_tokens must not be negative")
        data = token_bytes(tokens)
        now = self._clock()
        match = self._index.match(scope, data, min(len(data), max_cached_tokens * TOKEN_BYTES))
        if match is None:
            node = self._index.open_scope(scope, now)
            match = IndexMatch(path=[node], num_bytes=0)
        else:
            node = self._index.hold(match, now)
        block_table: list[BlockId] = []
        for step in match.path:
            block_table += step.blocks
        lease = Lease(
            scope=scope,
            cached_tokens=match.num_bytes // TOKEN_BYTES,
            num_prompt_tokens=len(tokens) if num_prompt_tokens is None else num_prompt_tokens,
            num_system_tokens=num_system_tokens,
            block_table=block_table,
            copies=(),
            num_indexed=len(block_table),
            node=node,
        )
        self._leases[id(lease)] = lease
        if match.tail_rows:
            self._copy_tail(lease, match, now)
        return lease

    def _copy_tail(self, lease: Lease, match: IndexMatch, now: float) -> None:
        """Copy on write: the equal rows of the block where the prompt leaves the tree go to a private one."""
        source, block = match.tail_node, match.tail_block
        assert source is not None
        assert block is not None
        # The source must outlive the search for room; its ancestors are held by the lease.
        self._index.hold_node(source, now)
        self._make_room(1, now)
        self._index.let_go_node(source)
        if not self._pool.num_free:
            return
        [target] = self._pool.take(1)
        lease.block_table.append(target)
        lease.copies = (RowCopy(source=block, target=target, num_rows=match.tail_rows),)
        lease.cached_tokens += match.tail_rows

    def extend(self, lease: Lease, num_tokens: int) -> None:
        """Grows the block table to cover `num_tokens`, evicting cached blocks when no more are free.

        Raises `OutOfBlocks`, and changes nothing, when even that is not enough.
        """
        self._require_open(lease)
        wanted = -(-num_tokens // self.block_size) - len(lease.block_table)
        if wanted <= 0:
            return
        available = self._pool.num_free + self._pool.num_cached
        if wanted > available:
            raise OutOfBlocks(wanted=wanted, available=available)
        if wanted > self._pool.num_free:
            self._make_room(wanted, self._clock())
        lease.block_table += self._pool.take(wanted)

    def _make_room(self, num_free: int, now: float) -> None:
        """Evicts, one step of the policy at a time, until that many blocks are free or nothing can go."""
        while (missing := num_free - self._pool.num_free) > 0:
            evicted = self._index.evict(missing, now)
            if not evicted:
                return
            self._pool.give_back(evicted)

    def seal(self, lease: Lease, tokens: TokenIds, num_written: int) -> None:
        """The K/V of `tokens[:num_written]` is in the pool: makes the full blocks of it findable.

        Where an equal block is in the index already, the block table changes over to it.
        """
        self._require_open(lease)
        self._check_written(lease, tokens, num_written)
        if num_written // self.block_size > lease.num_indexed:
            self._seal(lease, token_bytes(tokens), num_written, self._clock())

    def _seal(self, lease: Lease, data: bytes, num_written: int, now: float) -> None:
        """One growth of the index for each kind of tokens among the new full blocks."""
        num_full = num_written // self.block_size
        num_system = lease.num_system_tokens // self.block_size
        num_prompt = lease.num_prompt_tokens // self.block_size
        for kind, upto in (
            (TokenKind.SYSTEM, min(num_system, num_full)),
            (TokenKind.USER, min(num_prompt, num_full)),
            (TokenKind.GENERATED, num_full),
        ):
            first = lease.num_indexed
            if upto <= first:
                continue
            ours = lease.block_table[first:upto]
            start, end = first * self._block_bytes, upto * self._block_bytes
            lease.node, found = self._index.grow(lease.node, data, start, end, ours, kind, now)
            lease.num_indexed = upto
            if found != ours:
                duplicates = [mine for mine, theirs in zip(ours, found, strict=True) if mine != theirs]
                lease.block_table[first:upto] = found
                self._pool.give_back(duplicates)

    def release(self, lease: Lease, tokens: TokenIds, num_written: int) -> None:
        """Ends the lease and keeps all that was written findable, the last, incomplete block included."""
        self._require_open(lease)
        self._check_written(lease, tokens, num_written)
        data, now = token_bytes(tokens), self._clock()
        self._seal(lease, data, num_written, now)
        num_full, num_rows = divmod(num_written, self.block_size)
        if num_rows:
            assert num_full == lease.num_indexed
            kind = TokenKind.USER if num_written <= lease.num_prompt_tokens else TokenKind.GENERATED
            block = lease.block_table.pop(num_full)
            rest = data[num_full * self._block_bytes : num_written * TOKEN_BYTES]
            unneeded = self._index.add_tail(lease.node, rest, block, kind, now)
            if unneeded is not None:
                self._pool.give_back([unneeded])
        self._end(lease, now)

    def discard(self, lease: Lease) -> None:
        """Ends the lease and adds nothing to the index."""
        self._require_open(lease)
        self._end(lease, self._clock())

    def _end(self, lease: Lease, now: float) -> None:
        lease.state = LeaseState.ENDED
        del self._leases[id(lease)]
        self._pool.give_back(lease.block_table[lease.num_indexed :])
        self._index.let_go(lease.node, now)
        lease.block_table = []
        lease.num_indexed = 0

    def clear(self) -> None:
        """Forgets every cached block that nobody holds."""
        self._pool.give_back(self._index.clear())

    def _require_open(self, lease: Lease) -> None:
        if lease.state is not LeaseState.OPEN:
            raise LeaseEnded("the lease has ended")
        assert self._leases.get(id(lease)) is lease, "a lease of another store"

    def _check_written(self, lease: Lease, tokens: TokenIds, num_written: int) -> None:
        if not 0 <= num_written <= len(tokens):
            raise ValueError(f"{num_written} tokens written of {len(tokens)}")
        if num_written > len(lease.block_table) * self.block_size:
            raise ValueError(f"{num_written} tokens do not fit in {len(lease.block_table)} blocks")
        if num_written < lease.num_indexed * self.block_size:
            raise ValueError(
                f"{lease.num_indexed} full blocks are in the index, {num_written} tokens written"
            )

    def check(self) -> None:
        """Asserts every invariant of pool, index and leases together. O(blocks)."""
        self._pool.check()
        self._index.check()
        where: dict[BlockId, str] = dict.fromkeys(self._pool.free_blocks(), "free")
        for node in self._index.nodes():
            for block in node.blocks:
                assert block not in where, f"block {block} is in the index and {where[block]}"
                where[block] = "indexed"
        for lease in self._leases.values():
            self._check_lease(lease, where)
        assert len(where) == self._pool.total, "a block is lost"
        counts = self.counts
        assert counts.free + counts.cached + counts.held == counts.total

    def _check_lease(self, lease: Lease, where: dict[BlockId, str]) -> None:
        assert lease.state is LeaseState.OPEN
        path: list[BlockId] = []
        for node in reversed(self._index.path_of(lease.node)):
            assert node.holders > 0, "a leased path is not held"
            path += node.blocks
        assert lease.block_table[: lease.num_indexed] == path, "a lease and the index differ"
        for block in lease.block_table[lease.num_indexed :]:
            assert block not in where, f"private block {block} is also {where[block]}"
            where[block] = "private"

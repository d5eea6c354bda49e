"""The prefix store: which K/V blocks a prompt can reuse, and where new ones go.

Knows scopes (opaque), tokens, block ids. Does not know tensors, requests or
tenants: it decides, and its caller moves bytes. Not thread-safe: one thread
owns a store, and every change is one synchronous call.

    acquire → extend → seal → fork → … → release | discard

`acquire` holds the cached prefix of a prompt; `extend` makes room for what is
about to be written; `seal` makes what was written findable; `fork` lets another text go on from
there; `release` gives everything back, findable; `discard` gives everything
back and adds nothing.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator

from prefix_store.blocks import (
    TOKEN_BYTES,
    BlockId,
    BlockNamer,
    TokenIds,
    TokenKind,
    TokenView,
    block_ids,
    token_bytes,
    token_view,
)
from prefix_store.books import Books, block_before
from prefix_store.events import BlockStored, KvEventLog, NumberedBatch
from prefix_store.eviction import EvictionOrder, ScopeQuotas
from prefix_store.explain import MissExplainer, Question
from prefix_store.flights import FlightBoard, Role
from prefix_store.hottest import HotPrefix, hottest
from prefix_store.index import NODE_BYTES, PUBLIC_SCOPE, IndexMatch, RadixIndex
from prefix_store.leases import Lease, LeaseEnded, LeaseState, PrefixMatch, RowCopy
from prefix_store.misses import Cause, GhostNames, Miss
from prefix_store.node import Node
from prefix_store.pins import Pin, PinBoard, PinBudgetExceeded
from prefix_store.policy import DEFAULT_POLICY
from prefix_store.policy.protocol import EvictionPolicy
from prefix_store.pool import BlockCounts, BlockPool, OutOfBlocks
from prefix_store.public import PublicPrefixes
from prefix_store.statistics import Statistics

GHOSTS_PER_BLOCK = 1
"""Names of evicted blocks remembered, for each block of the pool."""


class PrefixStore:
    """Index, pool, leases and pins of one worker's device memory.

    `max_pinned_share` of the pool may be pinned. `max_index_bytes` caps the memory
    of the index itself: beyond it cached prefixes are evicted, and what does not fit
    even so stays private; only the root of a scope that an open lease begins in may
    come on top. `events`, where given, is told what comes and goes.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        namer: BlockNamer,
        policy: EvictionPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        quotas: ScopeQuotas | None = None,
        max_pinned_share: float = 0.5,
        max_index_bytes: int | None = None,
        events: KvEventLog | None = None,
    ) -> None:
        if namer.block_size != block_size:
            raise ValueError("the namer's block size differs from the store's")
        if policy is not None and quotas is not None:
            raise ValueError("with quotas each scope has a policy of its own: give them make_policy")
        if not 0.0 <= max_pinned_share < 1.0:
            raise ValueError("max_pinned_share must be in [0, 1)")
        self.block_size = block_size
        self._block_bytes = block_size * TOKEN_BYTES
        self._clock = clock
        self._max_pinned_blocks = int(max_pinned_share * num_blocks)
        self._max_index_bytes = math.inf if max_index_bytes is None else max_index_bytes
        self._pool = BlockPool(num_blocks)
        self._order = EvictionOrder(policy=policy or DEFAULT_POLICY(), quotas=quotas, num_blocks=num_blocks)
        self._books = Books(ghosts=GhostNames(capacity=GHOSTS_PER_BLOCK * num_blocks), events=events)
        self._index = RadixIndex(namer=namer, pool=self._pool, order=self._order, books=self._books)
        self._flights = FlightBoard(block_size=block_size)
        self._public = PublicPrefixes(block_size=block_size)
        self._explainer = MissExplainer(
            namer=namer, ghosts=self._books.ghosts, flights=self._flights, public=self._public
        )
        self._pins = PinBoard()
        self._num_pinned = 0
        self._leases: dict[Lease, None] = {}

    # ---- looks

    @property
    def counts(self) -> BlockCounts:
        return self._pool.counts

    @property
    def num_available(self) -> int:
        """Blocks that `extend` can still give: free ones, and cached ones that may be evicted."""
        return self._pool.num_available

    @property
    def index_bytes(self) -> int:
        """Memory of the index, by count."""
        return self._index.num_bytes

    @property
    def statistics(self) -> Statistics:
        return self._books.statistics

    def match(self, scope: str, tokens: TokenIds) -> PrefixMatch:
        """How many leading tokens are cached. Changes nothing."""
        match = self._look(scope, token_view(tokens), len(tokens) * TOKEN_BYTES)
        return PrefixMatch(num_tokens=0 if match is None else match.num_tokens)

    def _look(self, scope: str, data: TokenView, limit_bytes: int) -> IndexMatch | None:
        public_bytes = self._public.num_bytes(scope, data)
        return self._index.match(scope, data, min(limit_bytes, len(data)), public_bytes)

    def explain(self, scope: str, tokens: TokenIds, *, max_cached_tokens: int) -> Miss | None:
        """Why an `acquire` now would not find more. None when nothing that was or is cached was missed.

        Hashes as many blocks as were lost.
        """
        data = token_view(tokens)
        limit_bytes = min(len(data), max_cached_tokens * TOKEN_BYTES)
        match = self._look(scope, data, limit_bytes)
        question = Question(scope=scope, data=data, limit_bytes=limit_bytes, match=match)
        return self._explainer.explain(question, max_lost_blocks=len(data) // self._block_bytes)

    def hottest(self, limit: int) -> list[HotPrefix]:
        """The cached prefixes that were found most often, hottest first. Changes nothing."""
        return hottest(self._index.roots(), limit=limit)

    # ---- leases

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
        if scope == PUBLIC_SCOPE:
            raise ValueError("a scope must not be empty: that one is the deployment's")
        data, now = token_view(tokens), self._now()
        limit_bytes = min(len(data), max_cached_tokens * TOKEN_BYTES)
        match, miss = self._find(scope, data, limit_bytes, now)
        lease = Lease(
            scope=scope,
            num_prompt_tokens=len(tokens) if num_prompt_tokens is None else num_prompt_tokens,
            num_system_tokens=num_system_tokens,
            num_public_blocks=self._public.num_bytes(scope, data) // self._block_bytes,
            node=match.path[-1],
            miss=miss,
        )
        self._leases[lease] = None
        self._credit(lease, match, now)
        self._books.asked(scope, len(tokens), lease.cached_tokens, miss)
        return lease

    def _find(
        self, scope: str, data: TokenView, limit_bytes: int, now: float
    ) -> tuple[IndexMatch, Miss | None]:
        """What is cached of a prompt, held from now on, and why it is not more.

        Where nothing is, the root of the scope to begin in is held.
        """
        may_cut = self._fits_in_index(scope, 0, now)
        match = self._look(scope, data, limit_bytes)
        question = Question(scope=scope, data=data, limit_bytes=limit_bytes, match=match)
        miss = self._explainer.explain(question, max_lost_blocks=1)
        if match is None:
            owner = PUBLIC_SCOPE if self._public.num_bytes(scope, data) else scope
            return IndexMatch(path=[self._index.open_scope(owner, now)], num_bytes=0), miss
        if match.num_inside and not may_cut:
            self._index.forgo_cut(match)
        self._index.hold(match, now)
        return match, miss

    def _credit(self, lease: Lease, match: IndexMatch, now: float) -> None:
        """Adds what was found, and is held by now, to a lease that has no private blocks."""
        for step in match.path:
            lease.block_table += step.blocks
        lease.num_indexed = len(lease.block_table)
        lease.cached_tokens = match.num_bytes // TOKEN_BYTES
        lease.copies = ()
        if not match.tail_rows:
            return
        source, block = match.tail_node, match.tail_block
        assert source is not None
        assert block is not None
        if source.is_tail:
            self._index.hit_tail(source, now)
        if not self._pool.num_free:
            # The source must outlive the search for room.
            self._index.shield(source)
            self._make_room(lease.scope, 1, now)
            self._index.unshield(source)
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
        if wanted > self._pool.num_free:
            now = self._now()
            if wanted > self._pool.num_available:
                raise OutOfBlocks(wanted=wanted, available=self._pool.num_available)
            self._make_room(lease.scope, wanted, now)
        lease.block_table += self._pool.take(wanted)

    def fork(self, lease: Lease, num_written: int) -> Lease:
        """Another lease on the first `num_written` tokens of this one, all of them written.

        Indexed blocks are shared; of the private ones it has copies, in `copies`, for
        the caller to carry out at once. Raises `OutOfBlocks`, and changes nothing, when
        there is no room for them.
        """
        self._require_open(lease)
        num_blocks = -(-num_written // self.block_size)
        if not lease.num_indexed <= num_blocks <= len(lease.block_table):
            raise ValueError(f"{num_written} tokens are not what the lease has written")
        wanted, now = num_blocks - lease.num_indexed, self._now()
        if wanted > self._pool.num_available:
            raise OutOfBlocks(wanted=wanted, available=self._pool.num_available)
        self._make_room(lease.scope, wanted, now)
        twin = Lease(
            scope=lease.scope,
            num_prompt_tokens=lease.num_prompt_tokens,
            num_system_tokens=lease.num_system_tokens,
            num_public_blocks=lease.num_public_blocks,
            node=lease.node,
        )
        self._index.hold_again(lease.node, now)
        twin.num_indexed = lease.num_indexed
        twin.block_table = [*lease.block_table[: lease.num_indexed], *self._pool.take(wanted)]
        twin.copies = tuple(
            RowCopy(
                source=lease.block_table[index],
                target=twin.block_table[index],
                num_rows=min(self.block_size, num_written - index * self.block_size),
            )
            for index in range(lease.num_indexed, num_blocks)
        )
        self._leases[twin] = None
        return twin

    def seal(self, lease: Lease, tokens: TokenIds, num_written: int) -> None:
        """The K/V of `tokens[:num_written]` is in the pool: makes the full blocks of it findable.

        Where an equal block is in the index already, the block table changes over to it.
        """
        self._require_open(lease)
        self._check_written(lease, tokens, num_written)
        if num_written // self.block_size > lease.num_indexed:
            self._seal(lease, tokens, num_written // self.block_size, self._now())

    def _seal(self, lease: Lease, tokens: TokenIds, num_full: int, now: float) -> None:
        """One growth of the index for each stretch of blocks of one kind and one scope."""
        while (first := lease.num_indexed) < num_full:
            kind, upto = self._stretch(lease, first, num_full)
            if not self._fits_in_index(lease.scope, upto - first, now):
                break
            if first == lease.num_public_blocks:
                self._enter_scope(lease, now)
            ours = block_ids(lease.block_table[first:upto])
            data = token_bytes(tokens, first * self.block_size, upto * self.block_size)
            lease.node, found = self._index.grow(lease.node, data, ours, kind, now)
            lease.num_indexed = upto
            if found is not ours:
                duplicates = [mine for mine, theirs in zip(ours, found, strict=True) if mine != theirs]
                lease.block_table[first:upto] = found
                self._pool.give_back(duplicates)
        self._flights.moved(lease)

    def _stretch(self, lease: Lease, first: int, num_full: int) -> tuple[TokenKind, int]:
        """(kind, end) of the stretch that begins with block `first`: up to where kind or scope changes."""
        num_system = lease.num_system_tokens // self.block_size
        num_prompt = lease.num_prompt_tokens // self.block_size
        end = num_full
        for cut in (lease.num_public_blocks, num_system, num_prompt):
            if first < cut < end:
                end = cut
        if first >= num_prompt:
            return TokenKind.GENERATED, end
        return TokenKind.SYSTEM if first < num_system else TokenKind.USER, end

    def _enter_scope(self, lease: Lease, now: float) -> None:
        """Behind a public prefix a lease goes on in its own scope."""
        if lease.node.scope != lease.scope:
            lease.node = self._index.open_gate(lease.node, lease.scope, now)

    def release(self, lease: Lease, tokens: TokenIds, num_written: int) -> None:
        """Ends the lease and keeps all that was written findable, the last, incomplete block included."""
        self._require_open(lease)
        self._check_written(lease, tokens, num_written)
        now = self._now()
        num_full, num_rows = divmod(num_written, self.block_size)
        if num_full > lease.num_indexed:
            self._seal(lease, tokens, num_full, now)
        if num_rows and num_full == lease.num_indexed and self._fits_in_index(lease.scope, 1, now):
            if num_full == lease.num_public_blocks:
                self._enter_scope(lease, now)
            kind = TokenKind.USER if num_written <= lease.num_prompt_tokens else TokenKind.GENERATED
            rest = token_bytes(tokens, num_full * self.block_size, num_written)
            if self._index.add_tail(lease.node, rest, lease.block_table[num_full], kind, now):
                del lease.block_table[num_full]
        self._end(lease, now)

    def discard(self, lease: Lease) -> None:
        """Ends the lease and adds nothing to the index."""
        self._require_open(lease)
        self._end(lease, self._now())

    def _end(self, lease: Lease, now: float) -> None:
        lease.state = LeaseState.ENDED
        del self._leases[lease]
        self._flights.leave(lease)
        self._pool.give_back(lease.block_table[lease.num_indexed :])
        self._index.let_go(lease.node, now)
        lease.block_table = []
        lease.num_indexed = 0
        while (excess := self._order.num_over_cap(lease.scope)) > 0:
            victim = self._order.own_victim(lease.scope, now)
            if victim is None:
                return
            self._index.evict(victim, excess, Cause.QUOTA, now)

    # ---- single flight

    def join_flight(self, lease: Lease, tokens: TokenIds) -> Role:
        """Before computing `tokens`: `Leading`, compute; `Following`, another lease computes the next blocks.

        A follower asks again, and calls `catch_up`, after each step; it leads when what
        it waited for is there, or when its leader has ended. `leave_flight` stops waiting.
        """
        self._require_open(lease)
        return self._flights.join(lease, token_bytes(tokens))

    def leave_flight(self, lease: Lease) -> None:
        """Neither leads nor follows any more; a follower takes over."""
        self._require_open(lease)
        self._flights.leave(lease)

    def take_over_flight(self, lease: Lease) -> None:
        """A follower no longer waits for its leader: it computes its blocks itself, and others follow it."""
        self._require_open(lease)
        self._flights.take_over(lease)

    def catch_up(self, lease: Lease, tokens: TokenIds, *, max_cached_tokens: int) -> int:
        """Looks again for a lease that has computed nothing yet; returns the cached tokens gained.

        The lease's private blocks, if any, go back, and its `copies` are new.
        """
        self._require_open(lease)
        data, now = token_view(tokens), self._now()
        before = lease.cached_tokens
        may_cut = self._fits_in_index(lease.scope, 0, now)
        match = self._match_further(lease, data, min(len(data), max_cached_tokens * TOKEN_BYTES), now)
        if match.num_inside and not may_cut:
            self._index.forgo_cut(match)
        if match.num_tokens <= before:
            return 0
        lease.node = self._index.hold_further(match, now)
        self._pool.give_back(lease.block_table[lease.num_indexed :])
        del lease.block_table[lease.num_indexed :]
        match.path = match.path[1:]
        self._credit(lease, match, now)
        self._flights.moved(lease)
        return lease.cached_tokens - before

    def _match_further(self, lease: Lease, data: TokenView, limit_bytes: int, now: float) -> IndexMatch:
        """Below what the lease holds: first to the end of the public part, then in its own scope."""
        position = lease.num_indexed * self._block_bytes
        public_bytes = lease.num_public_blocks * self._block_bytes
        if position >= public_bytes:
            gate = lease.node.gates.get(lease.scope)
            behind = lease.node if gate is None else gate
            match = self._index.match_below(behind, data, position, limit_bytes)
            match.path = match.path if gate is None else [lease.node, *match.path]
            return match
        match = self._index.match_below(lease.node, data, position, min(limit_bytes, public_bytes))
        gate = match.path[-1].gates.get(lease.scope)
        if gate is None or match.inside is not None or match.num_bytes < public_bytes:
            return match
        behind_gate = self._index.match_below(gate, data, public_bytes, limit_bytes)
        behind_gate.path = match.path + behind_gate.path
        return behind_gate

    # ---- pins

    def pin(self, scope: str, tokens: TokenIds, *, ttl_seconds: float = math.inf) -> Pin | None:
        """Keeps the cached full blocks of `tokens` from eviction, until `ttl_seconds` after the last hit.

        Raises `PinBudgetExceeded`. The pin says how many tokens it covers; None when
        not one full block is cached.
        """
        if not ttl_seconds > 0.0:
            raise ValueError("ttl_seconds must be positive")
        data, now = token_view(tokens), self._now()
        may_cut = self._fits_in_index(scope, 0, now)
        match = self._look(scope, data, len(data))
        if match is not None and match.num_inside and not may_cut:
            self._index.forgo_cut(match)
        if match is None or match.num_bytes == 0:
            return None
        node = self._index.cut(match)
        while node.is_entry:
            match.path.pop()
            node = match.path[-1]
        wanted, left = self._index.num_unpinned(match.path), self._max_pinned_blocks - self._num_pinned
        if wanted > left:
            raise PinBudgetExceeded(wanted=wanted, left=left)
        self._num_pinned += wanted
        self._index.pin(node)
        pin = Pin(
            scope=scope,
            num_tokens=match.num_bytes // TOKEN_BYTES,
            ttl_seconds=ttl_seconds,
            expires_at=now + ttl_seconds,
            node=node,
        )
        self._pins.add(pin)
        return pin

    def unpin(self, pin: Pin) -> bool:
        """Ends a pin; False when it had ended before."""
        if not self._pins.remove(pin):
            return False
        self._index.unpin(pin.node)
        self._num_pinned -= self._index.num_unpinned(self._index.path_of(pin.node))
        return True

    def pins(self) -> list[Pin]:
        """The standing pins, oldest first."""
        self._now()
        return self._pins.standing()

    def _now(self) -> float:
        """The time; what was due until then has happened."""
        now = self._clock()
        while (pin := self._pins.next_due(now)) is not None:
            self._pins.remove(pin)
            self._index.lapse(pin.node)
            self._num_pinned -= self._index.num_unpinned(self._index.path_of(pin.node))
        return now

    # ---- public prefixes

    def declare_public(self, tokens: TokenIds) -> None:
        """Full blocks of prompts that begin like `tokens` are shared by all scopes, as far as they do."""
        self._public.declare(token_view(tokens))

    # ---- events

    def take_events(self, timestamp: float) -> NumberedBatch | None:
        """What happened since the last call, as the next numbered batch."""
        return None if self._books.events is None else self._books.events.close_batch(timestamp)

    def replay_events(self, sequence: int) -> list[NumberedBatch] | None:
        """The batches from number `sequence` on; None when the first of them is no longer kept."""
        return self._event_log().since(sequence)

    def snapshot(self, timestamp: float) -> NumberedBatch:
        """All indexed full blocks, in place of every batch up to now."""
        return self._event_log().snapshot(self._stored_events(), timestamp)

    def _event_log(self) -> KvEventLog:
        if self._books.events is None:
            raise ValueError("this store keeps no events")
        return self._books.events

    def _stored_events(self) -> Iterator[BlockStored]:
        log = self._event_log()
        for node in self._index.nodes():
            if node.blocks and not node.is_tail:
                parent = block_before(node, 0)
                yield log.stored_event(parent=parent, names=node.names, tokens=node.tokens)

    # ---- room

    def clear(self) -> None:
        """Forgets every cached block that nobody holds, and ends every pin."""
        now = self._now()
        for pin in self._pins.standing():
            self.unpin(pin)
        self._index.clear(now)
        if self._books.events is not None:
            self._books.events.cleared_but(self._stored_events())

    def _make_room(self, scope: str, num_free: int, now: float) -> None:
        """Evicts, one step of the policy at a time, until that many blocks are free or nothing can go."""
        while (missing := num_free - self._pool.num_free) > 0:
            victim = self._order.victim(scope, now)
            if victim is None:
                return
            self._index.evict(victim, missing, Cause.PRESSURE, now)

    def _fits_in_index(self, scope: str, num_blocks: int, now: float) -> bool:
        """Whether so many more blocks may be indexed, once what can go for them is gone."""
        limit = self._max_index_bytes - self._index.bytes_to_add(num_blocks)
        while self._index.num_bytes > limit:
            victim = self._order.victim(scope, now)
            if victim is None:
                return False
            self._index.evict(victim, max(num_blocks, 1), Cause.PRESSURE, now)
        return True

    # ---- invariants

    def _require_open(self, lease: Lease) -> None:
        if lease.state is not LeaseState.OPEN:
            raise LeaseEnded("the lease has ended")
        assert lease in self._leases, "a lease of another store"

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
        """Asserts every invariant of pool, index, leases, pins and flights together. O(blocks)."""
        self._pool.check()
        self._index.check()
        self._flights.check()
        where: dict[BlockId, str] = dict.fromkeys(self._pool.free_blocks(), "free")
        for node in self._index.nodes():
            for block in node.blocks:
                assert block not in where, f"block {block} is in the index and {where[block]}"
                where[block] = "indexed"
        for lease in self._leases:
            self._check_lease(lease, where)
        assert len(where) == self._pool.total, "a block is lost"
        self._check_holders()
        counts = self.counts
        assert counts.free + counts.cached + counts.held == counts.total
        assert self._index.num_bytes <= self._max_index_bytes + len(self._leases) * NODE_BYTES

    def _check_lease(self, lease: Lease, where: dict[BlockId, str]) -> None:
        assert lease.state is LeaseState.OPEN
        path = [block for node in reversed(self._index.path_of(lease.node)) for block in node.blocks]
        assert lease.block_table[: lease.num_indexed] == path, "a lease and the index differ"
        for block in lease.block_table[lease.num_indexed :]:
            assert block not in where, f"private block {block} is also {where[block]}"
            where[block] = "private"

    def _check_holders(self) -> None:
        """Every node counts exactly the leases and pins that end at it or below."""
        holders: Counter[Node] = Counter()
        for lease in self._leases:
            holders.update(self._index.path_of(lease.node))
        pins: Counter[Node] = Counter()
        for pin in self._pins.standing():
            assert pin in pin.node.pins_ending_here
            pins.update(self._index.path_of(pin.node))
        num_pinned = 0
        for node in self._index.nodes():
            assert node.holders == holders[node], "holders are miscounted"
            assert node.pins == pins[node], "pins are miscounted"
            num_pinned += len(node.blocks) if node.pins else 0
        assert num_pinned == self._num_pinned <= self._max_pinned_blocks

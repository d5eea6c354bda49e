"""A prefix store beside a brute-force model of it, driven by small numbers.

The model is a dictionary of prefixes: for every cached block the whole prefix
up to its end, when it was last used and what kind of tokens it holds. It knows
no runs, no tree and no counts; everything is recomputed. A memory of rows
stands for the K/V: a row's value is the whole prefix it was computed for, so
that a wrong block, a stale copy or a block that was reused too early shows.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace

from prefix_store.blocks import TOKEN_BYTES, BlockId, BlockNamer, TokenKind, token_ids
from prefix_store.events import KvEventLog
from prefix_store.eviction import GENERATED_AGES_FASTER
from prefix_store.index import PUBLIC_SCOPE
from prefix_store.leases import Lease
from prefix_store.node import Node
from prefix_store.pins import Pin, PinBudgetExceeded
from prefix_store.policy.lru import LruPolicy
from prefix_store.policy.protocol import EvictionPolicy
from prefix_store.pool import OutOfBlocks
from prefix_store.store import PrefixStore

BLOCK = 2
NUM_BLOCKS = 14
SCOPES = ("aa", "bb")
PUBLIC = (0, 0, 1, 1, 0, 0)
MAX_PINNED = NUM_BLOCKS // 2

Prefix = tuple[int, ...]
Key = tuple[str, Prefix, int]
"""(scope that owns the block, prefix up to its end, how much of the prefix is another's: public).

A tail's prefix has no whole number of blocks.
"""


@dataclass(eq=False)
class Cached:
    last_used: float
    kind: TokenKind


@dataclass(eq=False)
class Sequence:
    lease: Lease
    scope: str
    tokens: array[int]
    num_prompt: int
    written: int
    sealed: int = 0


@dataclass(eq=False)
class Pinned:
    pin: Pin
    keys: list[Key]
    expires_at: float
    ttl: float


@dataclass(eq=False)
class World:
    namer: BlockNamer = field(
        default_factory=lambda: BlockNamer(
            seed=7, model_fingerprint="m", dtype="f32", kv_codec="raw", block_size=BLOCK
        )
    )
    events: KvEventLog | None = None
    policy: EvictionPolicy = field(default_factory=LruPolicy)

    def __post_init__(self) -> None:
        self.now = 0.0
        self.store = PrefixStore(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK,
            namer=self.namer,
            clock=lambda: self.now,
            max_pinned_share=MAX_PINNED / NUM_BLOCKS,
            events=self.events,
            policy=self.policy,
        )
        self.store.declare_public(array("I", PUBLIC))
        self.cached: dict[Key, Cached] = {}
        self.live: list[Sequence] = []
        self.pinned: list[Pinned] = []
        self.memory: dict[tuple[BlockId, int], Prefix] = {}

    # ---- what the model knows

    def num_public(self, tokens: Prefix) -> int:
        return _common(tokens, PUBLIC) // BLOCK * BLOCK

    def key(self, scope: str, prefix: Prefix, num_public: int) -> Key:
        return (PUBLIC_SCOPE, prefix, 0) if len(prefix) <= num_public else (scope, prefix, num_public)

    def full_match(self, scope: str, tokens: Prefix, limit: int) -> list[Key]:
        keys: list[Key] = []
        public = self.num_public(tokens)
        for end in range(BLOCK, limit + 1, BLOCK):
            key = self.key(scope, tokens[:end], public)
            if key not in self.cached:
                break
            keys.append(key)
        return keys

    def best_tail(self, scope: str, tokens: Prefix, start: int, limit: int) -> tuple[int, list[Key]]:
        """(equal rows, blocks that have them) after `start`, below one block."""
        public = self.num_public(tokens)
        owner = (PUBLIC_SCOPE, 0) if start < public else (scope, public)
        limit = min(limit, public) if start < public else limit
        rest = tokens[start : min(start + BLOCK, limit)]
        rows: dict[Key, int] = {}
        for entry in self.cached:
            begins = (len(entry[1]) - 1) // BLOCK * BLOCK
            if (entry[0], entry[2]) == owner and begins == start and entry[1][:start] == tokens[:start]:
                rows[entry] = _common(entry[1][start:], rest)
        best = max(rows.values(), default=0)
        return best, [entry for entry, count in rows.items() if count == best]

    def held_keys(self) -> dict[Key, int]:
        held: dict[Key, int] = {}
        for seq in self.live:
            for key in self.sealed_keys(seq):
                held[key] = held.get(key, 0) + 1
        return held

    def sealed_keys(self, seq: Sequence) -> list[Key]:
        tokens, public = tuple(seq.tokens), self.num_public(tuple(seq.tokens[: seq.num_prompt]))
        return [self.key(seq.scope, tokens[:end], public) for end in range(BLOCK, seq.sealed + 1, BLOCK)]

    def pinned_keys(self) -> set[Key]:
        return {key for pin in self.pinned for key in pin.keys}

    def follows(self, later: Key, earlier: Key) -> bool:
        same_tree = later[0] == earlier[0] and later[2] == earlier[2]
        through_gate = earlier[0] == PUBLIC_SCOPE and len(earlier[1]) <= later[2]
        whole = len(earlier[1]) % BLOCK == 0 and len(later[1]) > len(earlier[1])
        return whole and (same_tree or through_gate) and later[1][: len(earlier[1])] == earlier[1]

    def evictable(self) -> list[Key]:
        held, pinned = self.held_keys(), self.pinned_keys()
        return [
            key
            for key in self.cached
            if key not in held
            and key not in pinned
            and not any(self.follows(other, key) for other in self.cached)
        ]

    def evict_one(self) -> bool:
        """Least recently used first; generated tokens age faster."""
        leaves = self.evictable()
        prompts = [key for key in leaves if self.cached[key].kind is not TokenKind.GENERATED]
        generated = [key for key in leaves if self.cached[key].kind is TokenKind.GENERATED]
        best_prompt = min(prompts, key=lambda key: self.cached[key].last_used, default=None)
        best_generated = min(generated, key=lambda key: self.cached[key].last_used, default=None)
        victim = best_prompt or best_generated
        if best_prompt and best_generated:
            idle = self.now - self.cached[best_generated].last_used
            if idle * GENERATED_AGES_FASTER >= self.now - self.cached[best_prompt].last_used:
                victim = best_generated
        if victim is None:
            return False
        del self.cached[victim]
        return True

    def num_private(self) -> int:
        return sum(len(seq.lease.block_table) - seq.sealed // BLOCK for seq in self.live)

    def num_free(self) -> int:
        return NUM_BLOCKS - len(self.cached) - self.num_private()

    # ---- what can happen

    def tick(self, seconds: float = 1.0) -> None:
        """Every call has its own time; pins whose time is over end with the next one."""
        self.now += seconds

    def expire(self) -> None:
        self.pinned = [pin for pin in self.pinned if pin.expires_at > self.now]

    def look(self, scope: str, tokens: list[int]) -> None:
        prompt = tuple(tokens)
        full = self.full_match(scope, prompt, len(prompt))
        rows, _ = self.best_tail(scope, prompt, len(full) * BLOCK, len(prompt))
        assert self.store.match(scope, array("I", tokens)).num_tokens == len(full) * BLOCK + rows

    def acquire(self, scope: str, tokens: list[int], limit: int) -> None:
        self.tick()
        self.expire()
        prompt = tuple(tokens)
        full = self.full_match(scope, prompt, min(limit, len(prompt)))
        start = len(full) * BLOCK
        rows, sources = self.best_tail(scope, prompt, start, min(limit, len(prompt)))
        free = self.num_free()
        lease = self.store.acquire(scope, array("I", tokens), max_cached_tokens=limit)
        seq = Sequence(
            lease=lease,
            scope=scope,
            tokens=array("I", tokens),
            num_prompt=len(tokens),
            written=lease.cached_tokens,
            sealed=start,
        )
        self.use(full)
        if rows and len(sources) == 1 and len(sources[0][1]) % BLOCK:
            self.use(sources)
        elif rows:
            self.use([self.source_key(lease, sources)] if self.tail_was_read(lease, sources) else [])
        self.refresh_pins(full)
        self.live.append(seq)
        if rows and free == 0:
            self.adopt_eviction(sources)
        else:
            assert lease.cached_tokens == start + rows, (lease.cached_tokens, start, rows)
        for copy in lease.copies:
            for row in range(copy.num_rows):
                self.memory[copy.target, row] = self.memory[copy.source, row]
        self.verify()

    def tail_was_read(self, lease: Lease, sources: list[Key]) -> bool:
        return bool(lease.copies) and any(len(key[1]) % BLOCK for key in sources)

    def source_key(self, lease: Lease, sources: list[Key]) -> Key:
        """Several blocks have the same rows: the store's choice is taken over."""
        resident = {block: key for key, block, _ in self.resident()}
        return resident[lease.copies[0].source]

    def use(self, keys: list[Key]) -> None:
        """A hit: used now, and a prompt from now on."""
        for key in keys:
            self.cached[key].last_used = self.now
            if self.cached[key].kind is TokenKind.GENERATED:
                self.cached[key].kind = TokenKind.USER

    def refresh_pins(self, hit: list[Key]) -> None:
        for pin in self.pinned:
            if all(key in hit for key in pin.keys):
                pin.expires_at = self.now + pin.ttl

    def adopt_eviction(self, sources: list[Key]) -> None:
        """Room for a copy was looked for while its source was kept: at most one leaf may have gone for it."""
        resident = {key for key, _, _ in self.resident()}
        gone = [key for key in self.cached if key not in resident]
        assert len(gone) <= 1
        assert all(key in self.evictable() for key in gone)
        assert not gone or any(key in resident for key in sources)
        for key in gone:
            del self.cached[key]

    def adopt_evictions(self, num_blocks: int) -> None:
        """Another policy chose: as many had to go, and each may go once what followed it has gone."""
        resident = {key for key, _, _ in self.resident()}
        gone = {key for key in self.cached if key not in resident}
        assert len(gone) == num_blocks
        while gone:
            leaves = gone.intersection(self.evictable())
            assert leaves, "a block went before what follows it, or while it was held or pinned"
            for key in leaves:
                del self.cached[key]
            gone -= leaves

    def extend(self, seq: Sequence, num_tokens: int) -> None:
        self.tick()
        wanted = -(-num_tokens // BLOCK) - len(seq.lease.block_table)
        table = list(seq.lease.block_table)
        try:
            if wanted > self.num_free():
                self.expire()
            self.store.extend(seq.lease, num_tokens)
        except OutOfBlocks:
            assert seq.lease.block_table == table
            assert wanted > self.num_free() + self.num_evictable()
        else:
            grown = seq.lease.block_table
            assert grown[: len(table)] == table
            seq.lease.block_table = table
            if isinstance(self.policy, LruPolicy):
                while wanted > self.num_free():
                    assert self.evict_one(), "a block came from nowhere"
            else:
                self.adopt_evictions(max(wanted - self.num_free(), 0))
            seq.lease.block_table = grown
        self.verify()

    def fork(self, seq: Sequence) -> None:
        """Another text goes on from what is written: sealed blocks are shared, the others copied."""
        self.tick()
        self.expire()
        wanted = -(-seq.written // BLOCK) - seq.sealed // BLOCK
        try:
            lease = self.store.fork(seq.lease, seq.written)
        except OutOfBlocks:
            assert wanted > self.num_free() + self.num_evictable()
        else:
            if isinstance(self.policy, LruPolicy):
                while wanted > self.num_free():
                    assert self.evict_one(), "a block came from nowhere"
            else:
                self.adopt_evictions(max(wanted - self.num_free(), 0))
            assert len(lease.copies) == wanted
            for copy in lease.copies:
                for row in range(copy.num_rows):
                    self.memory[copy.target, row] = self.memory[copy.source, row]
            shared = array("I", seq.tokens[: max(seq.written, seq.num_prompt)])
            self.live.append(replace(seq, lease=lease, tokens=shared))
        self.verify()

    def num_evictable(self) -> int:
        kept, count = dict(self.cached), 0
        while self.evict_one():
            count += 1
        self.cached = kept
        return count

    def write(self, seq: Sequence, num_tokens: int) -> None:
        """The forward pass: K/V of the next tokens, as far as there is room."""
        room = len(seq.lease.block_table) * BLOCK
        for position in range(seq.written, min(num_tokens, room, len(seq.tokens))):
            block = seq.lease.block_table[position // BLOCK]
            self.memory[block, position % BLOCK] = tuple(seq.tokens[: position + 1])
            seq.written = position + 1
        self.verify()

    def generate(self, seq: Sequence, token: int) -> None:
        seq.tokens.append(token)

    def seal(self, seq: Sequence) -> None:
        self.tick()
        if seq.written // BLOCK * BLOCK > seq.sealed:
            self.expire()
        self.store.seal(seq.lease, seq.tokens, seq.written)
        self.seal_in_model(seq)
        self.verify()

    def seal_in_model(self, seq: Sequence) -> None:
        tokens = tuple(seq.tokens)
        public = self.num_public(tokens[: seq.num_prompt])
        for end in range(seq.sealed + BLOCK, seq.written + 1, BLOCK):
            key = self.key(seq.scope, tokens[:end], public)
            if key in self.cached:
                self.cached[key].last_used = self.now
            else:
                self.supersede(key)
                kind = TokenKind.USER if end <= seq.num_prompt // BLOCK * BLOCK else TokenKind.GENERATED
                self.cached[key] = Cached(self.now, kind)
            seq.sealed = end

    def supersede(self, key: Key) -> None:
        """Drops tails that say less than `key`."""
        begins = (len(key[1]) - 1) // BLOCK * BLOCK
        for other in list(self.cached):
            is_tail_there = (other[0], other[2]) == (key[0], key[2]) and begins < len(other[1]) < len(key[1])
            if is_tail_there and key[1][: len(other[1])] == other[1]:
                del self.cached[other]

    def release(self, seq: Sequence) -> None:
        self.tick()
        self.expire()
        self.store.release(seq.lease, seq.tokens, seq.written)
        self.seal_in_model(seq)
        tokens = tuple(seq.tokens[: seq.written])
        if len(tokens) % BLOCK:
            self.add_tail(seq, tokens)
        self.let_go(seq)

    def add_tail(self, seq: Sequence, tokens: Prefix) -> None:
        begins = len(tokens) // BLOCK * BLOCK
        # A public prefix is whole blocks, so what follows the last of them is the scope's own.
        public = self.num_public(tuple(seq.tokens[: seq.num_prompt]))
        key = (PUBLIC_SCOPE, tokens, 0) if begins < public else (seq.scope, tokens, public)
        if key in self.cached:
            self.cached[key].last_used = self.now
            return
        says_as_much = any(
            (other[0], other[2]) == (key[0], key[2])
            and other[1][: len(tokens)] == tokens
            and (len(other[1]) - 1) // BLOCK * BLOCK == begins
            for other in self.cached
        )
        if not says_as_much:
            self.supersede(key)
            kind = TokenKind.USER if len(tokens) <= seq.num_prompt else TokenKind.GENERATED
            self.cached[key] = Cached(self.now, kind)

    def discard(self, seq: Sequence) -> None:
        self.tick()
        self.expire()
        self.store.discard(seq.lease)
        self.let_go(seq)

    def let_go(self, seq: Sequence) -> None:
        for key in self.sealed_keys(seq):
            self.cached[key].last_used = self.now
        self.live.remove(seq)
        assert seq.lease.block_table == []
        self.verify()

    def pin(self, scope: str, tokens: list[int], ttl: float) -> None:
        self.tick()
        self.expire()
        keys = self.full_match(scope, tuple(tokens), len(tokens))
        wanted = len(self.pinned_keys() | set(keys))
        try:
            pin = self.store.pin(scope, array("I", tokens), ttl_seconds=ttl)
        except PinBudgetExceeded:
            assert wanted > MAX_PINNED
        else:
            assert wanted <= MAX_PINNED
            assert (pin is None) == (not keys)
            if pin is not None:
                assert pin.num_tokens == len(keys) * BLOCK
                self.pinned.append(Pinned(pin, keys, self.now + ttl, ttl))
        self.verify()

    def unpin(self, pinned: Pinned) -> None:
        stands = pinned in self.pinned
        assert self.store.unpin(pinned.pin) == stands
        if stands:
            self.pinned.remove(pinned)
        self.verify()

    def clear(self) -> None:
        self.tick()
        self.pinned = []
        self.store.clear()
        held = self.held_keys()
        self.cached = {key: entry for key, entry in self.cached.items() if key in held}
        self.verify()

    # ---- what must hold

    def resident(self) -> list[tuple[Key, BlockId, int]]:
        """Every block in the store's index: its key, its id, its holders."""
        found: list[tuple[Key, BlockId, int]] = []
        before: dict[Node | None, tuple[Prefix, int]] = {None: ((), 0)}
        for node in self.store._index.nodes():
            prefix, public = before[node.parent]
            if node.is_entry and node.parent is not None:
                public = len(prefix)
            for number, block in enumerate(node.blocks):
                end = (number + 1) * BLOCK * TOKEN_BYTES
                key = (node.scope, prefix + tuple(token_ids(node.tokens[:end])), public)
                found.append((key, block, node.holders))
            before[node] = (prefix + tuple(token_ids(node.tokens)), public)
        return found

    def verify(self) -> None:
        self.store.check()
        resident = self.resident()
        assert {key for key, _, _ in resident} == set(self.cached), "the index and the model differ"
        assert len(resident) == len(self.cached)
        held = self.held_keys()
        for key, block, holders in resident:
            assert holders == held.get(key, 0), f"{key} has {holders} holders"
            first = (len(key[1]) - 1) // BLOCK * BLOCK
            for row, position in enumerate(range(first, len(key[1]))):
                assert self.memory[block, row] == key[1][: position + 1], "wrong K/V in the index"
        for seq in self.live:
            self.verify_sequence(seq)
        assert [pinned.pin for pinned in self.pinned] == self.store._pins.standing()
        assert all(pinned.pin.expires_at == pinned.expires_at for pinned in self.pinned)
        counts = self.store.counts
        assert counts.cached == sum(key not in held for key in self.cached)
        assert counts.free == self.num_free()
        assert counts.free + counts.cached + counts.held == counts.total == NUM_BLOCKS

    def verify_sequence(self, seq: Sequence) -> None:
        for position in range(seq.written):
            block = seq.lease.block_table[position // BLOCK]
            expected = tuple(seq.tokens[: position + 1])
            assert self.memory[block, position % BLOCK] == expected, "wrong K/V under a sequence"

    def finish(self) -> None:
        """Everybody goes: nothing is held, and everything can be freed."""
        for seq in list(self.live):
            self.discard(seq)
        assert self.store.counts.held == 0
        self.clear()
        assert self.store.counts.free == NUM_BLOCKS


def _common(left: Prefix, right: Prefix) -> int:
    count = 0
    for mine, theirs in zip(left, right, strict=False):
        if mine != theirs:
            break
        count += 1
    return count

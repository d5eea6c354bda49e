"""A trace through a cache of blocks: how much of it was found.

Knows traces and eviction policies. Does not know stores, files or figures.

The caches, all with the rule that what a prefix needs is there as long as what
continues it:

- `replay`: one pool of blocks under an `EvictionPolicy`, the one that a store would use;
- `belady_policy`: a policy that knows the future, the limit for all others;
- `replay_fifo`: blocks go in the order in which they came, whatever continues them
  (so this one breaks the rule);
- `replay_request_lru`: whole requests, least recently used first, room counted in tokens.

A hit is a block found with all blocks before it. Blocks of a request are used
the last one first; room is made after each request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from prefix_store.blocks import BlockName, TokenIds, TokenKind
from prefix_store.policy.lru import LruPolicy
from prefix_store.policy.protocol import EvictionPolicy, RunFacts, RunKey
from prefix_store.traces import Trace, TracedRequest

TICK_SECONDS = 1e-6
"""Requests of the same instant are told apart by so much, so that their order in the trace counts."""

Progress: TypeAlias = Callable[[int], None]
"""Told after each request how many were replayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """References and hits of each request: in blocks, or in tokens for whole requests."""

    references: tuple[int, ...]
    hits: tuple[int, ...]

    @property
    def hit_rate(self) -> float:
        total = sum(self.references)
        return sum(self.hits) / total if total else 0.0


def _no_progress(num_requests: int) -> None:
    pass


def replay(
    requests: Sequence[TracedRequest],
    policy: EvictionPolicy,
    *,
    capacity: int | None,
    progress: Progress = _no_progress,
) -> Replay:
    """One request at a time; `capacity` in blocks, None for no limit."""
    pool = BlockTree(policy)
    hits = []
    now = -TICK_SECONDS
    for number, request in enumerate(requests, 1):
        now = max(request.seconds, now + TICK_SECONDS)
        hits.append(pool.use(request.blocks, now))
        if capacity is not None:
            pool.shrink(capacity, now)
        progress(number)
    return Replay(references=tuple(len(request.blocks) for request in requests), hits=tuple(hits))


@dataclass(slots=True, kw_only=True)
class _Cached:
    before: int | None
    last_used: float
    num_after: int = 0


class BlockTree:
    """Cached blocks, each a run of its own for the policy; one without a successor is exposed."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._cached: dict[int, _Cached] = {}

    def __len__(self) -> int:
        return len(self._cached)

    def __contains__(self, block: int) -> bool:
        return block in self._cached

    def use(self, blocks: Sequence[int], now: float) -> int:
        """Finds or inserts all blocks of a request; how many were found."""
        cached, policy = self._cached, self._policy
        num_found = 0
        while num_found < len(blocks) and blocks[num_found] in cached:
            num_found += 1
        if num_found:
            end = cached[blocks[num_found - 1]]
            if not end.num_after:
                policy.cover(blocks[num_found - 1])
            end.num_after += num_found < len(blocks)
        for depth in range(len(blocks) - 1, num_found - 1, -1):
            block = blocks[depth]
            is_last = depth == len(blocks) - 1
            before = blocks[depth - 1] if depth else None
            cached[block] = _Cached(before=before, last_used=now, num_after=0 if is_last else 1)
            facts = RunFacts(name=_name(block), num_blocks=1, depth=depth, kind=TokenKind.USER)
            policy.insert(block, facts, now)
        for block in reversed(blocks[:num_found]):
            cached[block].last_used = now
            policy.hit(block, now)
        if blocks and not cached[blocks[-1]].num_after:
            policy.expose(blocks[-1], now)
        return num_found

    def shrink(self, capacity: int, now: float) -> list[int]:
        """Evicts until no more than that many blocks are left; which went."""
        cached, policy = self._cached, self._policy
        gone = []
        while len(cached) > capacity:
            block = policy.victim(now)
            assert isinstance(block, int)
            leaf = cached.pop(block)
            assert not leaf.num_after
            policy.evict(block, _name(block), 1, now)
            policy.remove(block)
            gone.append(block)
            if leaf.before is None:
                continue
            before = cached[leaf.before]
            before.num_after -= 1
            if not before.num_after:
                policy.expose(leaf.before, before.last_used)
        return gone


def _name(block: int) -> BlockName:
    return block.to_bytes(8, "little")


class BeladyPolicy(LruPolicy):
    """Evicts what is used again last. Knows the future, so it is a limit and no policy for a store.

    L. Belady, "A Study of Replacement Algorithms for a Virtual-Storage Computer", IBM
    Systems Journal 5(2), 1966.
    """

    def __init__(self, requests: Sequence[TracedRequest]) -> None:
        super().__init__()
        self._never = float(len(requests))
        self._future: dict[RunKey, list[float]] = {}
        for number in range(len(requests) - 1, -1, -1):
            for block in requests[number].blocks:
                self._future.setdefault(block, []).append(float(number))

    def insert(self, run: RunKey, facts: RunFacts, now: float) -> None:
        self._future[run].pop()

    def hit(self, run: RunKey, now: float) -> None:
        self._future[run].pop()

    def expose(self, run: RunKey, last_used: float) -> None:
        future = self._future[run]
        self._exposed.add(run, (-(future[-1] if future else self._never),))


def replay_fifo(
    requests: Sequence[TracedRequest], *, capacity: int | None, progress: Progress = _no_progress
) -> Replay:
    """First in, first out, blind to what continues a block. `capacity` in blocks."""
    cached: OrderedDict[int, None] = OrderedDict()
    hits = []
    for number, request in enumerate(requests, 1):
        num_found = 0
        while num_found < len(request.blocks) and request.blocks[num_found] in cached:
            num_found += 1
        hits.append(num_found)
        for block in reversed(request.blocks):
            cached.setdefault(block)
        while capacity is not None and len(cached) > capacity:
            cached.popitem(last=False)
        progress(number)
    return Replay(references=tuple(len(request.blocks) for request in requests), hits=tuple(hits))


def replay_request_lru(
    prompts: Sequence[TokenIds], *, capacity: int | None, progress: Progress = _no_progress
) -> Replay:
    """Whole requests in a pool with room for so many tokens.

    A request gets the longest token prefix it has in common with any in the pool, and
    only the one with the longest is used by that. Room is made before it is put in;
    one larger than the pool is not kept, and nothing is left beside it.
    """
    pool: OrderedDict[int, npt.NDArray[np.uint32]] = OrderedDict()
    num_pooled = 0
    hits = []
    for number, tokens in enumerate(prompts, 1):
        prompt = np.frombuffer(tokens, dtype=np.uint32)
        best, longest = None, 0
        for other, pooled in pool.items():
            length = _common_prefix(prompt, pooled)
            if length > longest:
                best, longest = other, length
        hits.append(longest)
        if best is not None:
            pool.move_to_end(best)
        while capacity is not None and pool and num_pooled + len(prompt) > capacity:
            num_pooled -= len(pool.popitem(last=False)[1])
        if capacity is None or len(prompt) <= capacity:
            pool[number] = prompt
            num_pooled += len(prompt)
        progress(number)
    return Replay(references=tuple(len(tokens) for tokens in prompts), hits=tuple(hits))


def _common_prefix(left: npt.NDArray[np.uint32], right: npt.NDArray[np.uint32]) -> int:
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    return int(differs.argmax()) if differs.any() else length


def prompts_of(trace: Trace) -> list[TokenIds]:
    """The tokens of each request. Raises ValueError when the trace has none."""
    prompts = [request.tokens for request in trace.requests if request.tokens is not None]
    if len(prompts) != len(trace.requests):
        raise ValueError(f"{trace.name} holds {trace.format.value}: there are no tokens to count")
    return prompts

"""Planted bugs in index, pool, pins and store, each of which the brute-force model must catch.

| mutant | what is wrong |
| --- | --- |
| trusts_the_first_block | a run is taken as equal when its first block is |
| ignores_the_scope | all scopes share one tree |
| counts_a_row_too_many | a tail is credited with one token more than is equal |
| forgets_holders_when_splitting | the upper part of a split run counts as held by nobody |
| leaks_duplicates | blocks that the index has already are not given back |
| frees_what_is_cached | a released tail is free and in the index at once |
| evicts_from_the_front | a run gives away the ids of its first blocks, not its last |
| evicts_the_most_recent | the policy is upside down |
| evicts_prompts_first | generated tokens outlive prompts |
| lets_the_source_go | the block to copy from is evicted to make room for the copy |
| pins_end_too_early | a hit does not put a pin's end off |
| pins_do_not_count | a pin protects nothing |
| merges_across_a_lease | two runs are joined though a lease ends between them |
| keeps_a_stale_tail | a tail stays beside the block that says the same and more |
| leaves_public_text_private | public prefixes are not shared |
| lets_a_scope_through_anothers_gate | what follows a public prefix is shared as well |
| forks_without_holding | a fork does not count as a holder of the blocks it shares |
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

import prefix_store.index as index_module
from prefix_store.eviction import _Group
from prefix_store.index import IndexMatch, RadixIndex
from prefix_store.misses import Cause
from prefix_store.node import Node
from prefix_store.pins import Pin
from prefix_store.policy.lru import LruPolicy
from prefix_store.pool import BlockPool
from prefix_store.public import PublicPrefixes
from prefix_store.store import PrefixStore
from tests.property.test_prefix_store import lives

Plant = Callable[[pytest.MonkeyPatch], None]


def trusts_the_first_block(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(index_module, "common_prefix", lambda left, right: min(len(left), len(right)))


def ignores_the_scope(patch: pytest.MonkeyPatch) -> None:
    match, open_scope = RadixIndex.match, RadixIndex.open_scope
    patch.setattr(RadixIndex, "match", lambda self, scope, *rest: match(self, scope and "aa", *rest))
    patch.setattr(RadixIndex, "open_scope", lambda self, scope, now: open_scope(self, scope and "aa", now))


def counts_a_row_too_many(patch: pytest.MonkeyPatch) -> None:
    match_tail = RadixIndex._match_tail

    def one_more(self: RadixIndex, match: IndexMatch, node: Node, rest: bytes) -> None:
        match_tail(self, match, node, rest)
        if match.tail_rows:
            match.tail_rows += 1

    patch.setattr(RadixIndex, "_match_tail", one_more)


def forgets_holders_when_splitting(patch: pytest.MonkeyPatch) -> None:
    split = RadixIndex._split

    def forgetful(self: RadixIndex, node: Node, num_upper: int) -> Node:
        upper = split(self, node, num_upper)
        upper.holders = 0
        return upper

    patch.setattr(RadixIndex, "_split", forgetful)


def leaks_duplicates(patch: pytest.MonkeyPatch) -> None:
    give_back, seal = BlockPool.give_back, PrefixStore._seal

    def leaky(self: PrefixStore, *args: object) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(BlockPool, "give_back", lambda pool, blocks: None)
            seal(self, *args)

    patch.setattr(PrefixStore, "_seal", leaky)
    assert BlockPool.give_back is give_back


def frees_what_is_cached(patch: pytest.MonkeyPatch) -> None:
    add_tail = RadixIndex.add_tail

    def forgetful(self: RadixIndex, *args: object) -> bool:
        add_tail(self, *args)
        return False

    patch.setattr(RadixIndex, "add_tail", forgetful)


def evicts_from_the_front(patch: pytest.MonkeyPatch) -> None:
    evict = RadixIndex.evict

    def backwards(self: RadixIndex, victim: Node, num_blocks: int, cause: Cause, now: float) -> list[int]:
        victim.blocks.reverse()
        return evict(self, victim, num_blocks, cause, now)

    patch.setattr(RadixIndex, "evict", backwards)


def evicts_the_most_recent(patch: pytest.MonkeyPatch) -> None:
    expose = LruPolicy.expose
    patch.setattr(LruPolicy, "expose", lambda self, run, last_used: expose(self, run, -last_used))


def evicts_prompts_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_Group, "victim", lambda self, now: self.prompts.victim(now) or self.generated.victim(now))


def lets_the_source_go(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RadixIndex, "shield", lambda self, node: None)
    patch.setattr(RadixIndex, "unshield", lambda self, node: None)


def pins_end_too_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pin, "refresh", lambda self, now: None)


def pins_do_not_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RadixIndex, "pin", lambda self, node: None)
    patch.setattr(RadixIndex, "unpin", lambda self, node: None)


def merges_across_a_lease(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(index_module, "_is_one_run", lambda upper, lower: bool(upper.blocks) and not lower.is_tail)


def forks_without_holding(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RadixIndex, "hold_again", lambda self, node, now: None)


def keeps_a_stale_tail(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RadixIndex, "_supersede_tail", lambda self, parent, key, now: None)


def leaves_public_text_private(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PublicPrefixes, "num_bytes", lambda self, scope, data: 0)


def lets_a_scope_through_anothers_gate(patch: pytest.MonkeyPatch) -> None:
    match = RadixIndex.match

    def careless(
        self: RadixIndex, scope: str, data: bytes, limit_bytes: int, public_bytes: int
    ) -> IndexMatch | None:
        return match(self, "aa" if public_bytes else scope, data, limit_bytes, public_bytes)

    patch.setattr(RadixIndex, "match", careless)


MUTANTS: tuple[Plant, ...] = (
    trusts_the_first_block,
    ignores_the_scope,
    counts_a_row_too_many,
    forgets_holders_when_splitting,
    leaks_duplicates,
    frees_what_is_cached,
    evicts_from_the_front,
    evicts_the_most_recent,
    evicts_prompts_first,
    lets_the_source_go,
    pins_end_too_early,
    pins_do_not_count,
    merges_across_a_lease,
    keeps_a_stale_tail,
    leaves_public_text_private,
    lets_a_scope_through_anothers_gate,
    forks_without_holding,
)


@pytest.mark.parametrize("plant", MUTANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, LookupError, ValueError)):
        lives(num_lives=60, num_steps=80)


def test_the_table_of_mutants_is_complete() -> None:
    assert __doc__ is not None
    assert all(f"| {plant.__name__} |" in __doc__ for plant in MUTANTS)

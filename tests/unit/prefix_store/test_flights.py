"""Blocks that are being written are waited for, and somebody always writes them."""

from __future__ import annotations

import random
from array import array

from prefix_store.blocks import TokenIds
from prefix_store.flights import Following, Leading
from prefix_store.leases import Lease
from prefix_store.misses import MissReason
from tests.unit.prefix_store.support import BLOCK, OTHER_SCOPE, SCOPE, Bench, prompt

SHARED = prompt(1, 4 * BLOCK)
FIRST, SECOND, THIRD = (SHARED + prompt(seed, 2 * BLOCK) for seed in (2, 3, 4))


def compute(bench: Bench, lease: Lease, ids: TokenIds, num_tokens: int) -> None:
    bench.store.extend(lease, num_tokens)
    bench.store.seal(lease, ids, num_tokens)
    bench.store.check()


def test_the_first_leads_and_the_next_follows_as_far_as_they_agree() -> None:
    bench = Bench()
    one, two = bench.acquire(FIRST), bench.acquire(SECOND)
    assert bench.store.join_flight(one, FIRST) == Leading()
    assert bench.store.join_flight(two, SECOND) == Following(leader=one, num_tokens=4 * BLOCK)
    bench.store.check()


def test_a_follower_gets_blocks_as_they_are_sealed() -> None:
    bench = Bench()
    one, two = bench.acquire(FIRST), bench.acquire(SECOND)
    bench.store.join_flight(one, FIRST)
    bench.store.join_flight(two, SECOND)
    compute(bench, one, FIRST, 2 * BLOCK)
    assert bench.store.catch_up(two, SECOND, max_cached_tokens=len(SECOND)) == 2 * BLOCK
    assert bench.store.join_flight(two, SECOND) == Following(leader=one, num_tokens=4 * BLOCK)
    compute(bench, one, FIRST, 4 * BLOCK)
    assert bench.store.catch_up(two, SECOND, max_cached_tokens=len(SECOND)) == 2 * BLOCK
    assert two.block_table == one.block_table[:4]
    assert bench.store.join_flight(two, SECOND) == Leading()
    bench.store.check()


def test_when_the_leader_is_cancelled_a_follower_takes_over() -> None:
    bench = Bench()
    one, two, three = bench.acquire(FIRST), bench.acquire(SECOND), bench.acquire(THIRD)
    bench.store.join_flight(one, FIRST)
    bench.store.join_flight(two, SECOND)
    bench.store.join_flight(three, THIRD)
    compute(bench, one, FIRST, BLOCK)
    bench.store.discard(one)
    bench.store.check()
    assert bench.store.catch_up(two, SECOND, max_cached_tokens=len(SECOND)) == BLOCK
    assert bench.store.join_flight(two, SECOND) == Leading()
    assert bench.store.join_flight(three, THIRD) == Following(leader=two, num_tokens=4 * BLOCK)
    compute(bench, two, SECOND, 4 * BLOCK)
    assert bench.store.catch_up(three, THIRD, max_cached_tokens=len(THIRD)) == 4 * BLOCK


def test_a_follower_that_leaves_is_not_waited_for() -> None:
    bench = Bench()
    one, two = bench.acquire(FIRST), bench.acquire(SECOND)
    bench.store.join_flight(one, FIRST)
    bench.store.join_flight(two, SECOND)
    bench.store.leave_flight(two)
    bench.store.discard(one)
    bench.store.check()
    compute(bench, two, SECOND, len(SECOND))


def test_a_leader_that_stops_waiting_for_nobody_frees_its_place() -> None:
    bench = Bench()
    one, two = bench.acquire(FIRST), bench.acquire(SECOND)
    bench.store.join_flight(one, FIRST)
    bench.store.leave_flight(one)
    assert bench.store.join_flight(two, SECOND) == Leading()


def test_tenants_do_not_wait_for_each_other() -> None:
    bench = Bench()
    one, two = bench.acquire(FIRST, SCOPE), bench.acquire(FIRST, OTHER_SCOPE)
    assert bench.store.join_flight(one, FIRST) == Leading()
    assert bench.store.join_flight(two, FIRST) == Leading()


def test_prompts_that_agree_on_less_than_a_block_do_not_wait() -> None:
    bench = Bench()
    one, two = prompt(1, BLOCK - 1) + prompt(2, BLOCK), prompt(1, BLOCK - 1) + prompt(3, BLOCK)
    first, second = bench.acquire(one), bench.acquire(two)
    assert bench.store.join_flight(first, one) == Leading()
    assert bench.store.join_flight(second, two) == Leading()


def test_a_prompt_that_misses_what_is_being_written_says_so() -> None:
    bench = Bench()
    one = bench.acquire(FIRST)
    bench.store.join_flight(one, FIRST)
    two = bench.acquire(SECOND)
    assert two.miss is not None
    assert two.miss.reason is MissReason.NOT_YET_WRITTEN
    other = bench.acquire(FIRST, OTHER_SCOPE)
    assert other.miss is not None
    assert other.miss.reason is MissReason.NO_SHARED_PREFIX


def test_catching_up_without_news_changes_nothing() -> None:
    bench = Bench()
    bench.serve(SHARED)
    lease = bench.acquire(FIRST)
    table = list(lease.block_table)
    assert bench.store.catch_up(lease, FIRST, max_cached_tokens=len(FIRST)) == 0
    assert lease.block_table == table


def test_a_tail_that_is_overtaken_is_given_back() -> None:
    bench = Bench()
    bench.serve(prompt(1, BLOCK + 2))
    lease = bench.acquire(FIRST)
    assert lease.cached_tokens == BLOCK + 2
    bench.serve(SHARED)
    assert bench.store.catch_up(lease, FIRST, max_cached_tokens=len(FIRST)) == 3 * BLOCK - 2
    assert len(lease.block_table) == 4
    bench.store.check()


def test_followers_catch_up_through_a_public_prefix() -> None:
    bench = Bench(num_blocks=32)
    bench.store.declare_public(prompt(1, 2 * BLOCK))
    one, two = bench.acquire(FIRST), bench.acquire(SECOND)
    bench.store.join_flight(one, FIRST)
    bench.store.join_flight(two, SECOND)
    for num_tokens in range(BLOCK, 4 * BLOCK + 1, BLOCK):
        compute(bench, one, FIRST, num_tokens)
        bench.store.catch_up(two, SECOND, max_cached_tokens=len(SECOND))
        bench.store.check()
        assert two.cached_tokens == num_tokens
    bench.store.release(one, FIRST, 4 * BLOCK)
    third = bench.acquire(SHARED)
    assert third.cached_tokens == 4 * BLOCK


def test_in_any_order_of_events_somebody_leads_and_all_get_done() -> None:
    for seed in range(60):
        _live(random.Random(seed))


def _live(rng: random.Random) -> None:
    """Twelve prompts over few tokens, computed by leaders only, cancelled now and then."""
    bench = Bench(num_blocks=64)
    store = bench.store
    prompts = [array("I", [rng.randint(0, 1) for _ in range(rng.randint(1, 6 * BLOCK))]) for _ in range(12)]
    waiting = {number: bench.acquire(ids) for number, ids in enumerate(prompts)}
    for _ in range(1000):
        if not waiting:
            break
        number = rng.choice(list(waiting))
        lease, ids = waiting[number], prompts[number]
        store.catch_up(lease, ids, max_cached_tokens=len(ids))
        role = store.join_flight(lease, ids)
        if rng.random() < 0.05:
            store.discard(lease)
            del waiting[number]
        elif role == Leading():
            written = min(lease.cached_tokens + rng.randint(1, BLOCK), len(ids))
            store.extend(lease, written)
            store.seal(lease, ids, written)
            lease.cached_tokens = written
            if written == len(ids):
                store.release(lease, ids, written)
                del waiting[number]
        store.check()
    assert not waiting
    assert store.counts.held == 0


def test_one_follower_takes_over_from_a_leader_that_gets_nowhere() -> None:
    bench = Bench(num_blocks=32)
    one, two, three = bench.acquire(FIRST), bench.acquire(SECOND), bench.acquire(THIRD)
    bench.store.join_flight(one, FIRST)
    bench.store.join_flight(two, SECOND)
    bench.store.join_flight(three, THIRD)
    bench.store.take_over_flight(two)
    bench.store.check()
    assert bench.store.join_flight(two, SECOND) == Leading()
    assert bench.store.join_flight(three, THIRD) == Following(leader=two, num_tokens=4 * BLOCK)
    assert bench.store.join_flight(one, FIRST) == Leading(), "it goes on where it is"
    compute(bench, one, FIRST, len(FIRST))
    compute(bench, two, SECOND, len(SECOND))
    assert one.block_table[:4] == two.block_table[:4], "of two equal blocks one is kept"
    bench.store.check()

"""Leases: what a prompt finds, what it may write, and what is left of it."""

from __future__ import annotations

from array import array

import pytest

from prefix_store.leases import LeaseEnded
from prefix_store.pool import OutOfBlocks
from prefix_store.store import PrefixStore
from tests.unit.prefix_store.support import BLOCK, OTHER_SCOPE, SCOPE, Bench, make_namer, prompt, tokens

BOUNDARIES = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1)


@pytest.mark.parametrize("shared", BOUNDARIES)
@pytest.mark.parametrize("length", [length for length in BOUNDARIES if length])
def test_a_prefix_is_found_to_the_token(shared: int, length: int) -> None:
    bench = Bench()
    bench.serve(prompt(1, length))
    later = prompt(1, min(shared, length)) + prompt(2, BLOCK)
    assert bench.cached(later) == min(shared, length)
    assert bench.serve(later) == min(shared, length)


@pytest.mark.parametrize("limit", BOUNDARIES)
def test_no_more_is_credited_than_allowed(limit: int) -> None:
    bench = Bench()
    bench.serve(prompt(1, 4 * BLOCK))
    lease = bench.acquire(prompt(1, 4 * BLOCK), limit=limit)
    assert lease.cached_tokens == limit
    assert len(lease.block_table) == -(-limit // BLOCK)
    bench.store.discard(lease)
    bench.store.check()


def test_the_same_tenant_hits_and_another_misses() -> None:
    bench = Bench()
    bench.serve(prompt(1, 3 * BLOCK))
    assert bench.cached(prompt(1, 3 * BLOCK), SCOPE) == 3 * BLOCK
    assert bench.cached(prompt(1, 3 * BLOCK), OTHER_SCOPE) == 0
    assert bench.serve(prompt(1, 3 * BLOCK), OTHER_SCOPE) == 0


def test_rows_behind_the_last_common_block_are_copied_not_shared() -> None:
    bench = Bench()
    bench.serve(prompt(1, 2 * BLOCK))
    lease = bench.acquire(prompt(1, BLOCK + 2) + prompt(2, BLOCK))
    [copy] = lease.copies
    assert copy.num_rows == 2
    assert copy.target == lease.block_table[1]
    assert copy.source != copy.target
    assert lease.cached_tokens == BLOCK + 2


def test_without_room_for_a_copy_there_is_just_less_credit() -> None:
    bench = Bench(num_blocks=4)
    bench.serve(prompt(1, 2 * BLOCK))
    other = bench.acquire(prompt(2, 2 * BLOCK))
    bench.store.extend(other, 2 * BLOCK)
    lease = bench.acquire(prompt(1, BLOCK + 2) + prompt(3, BLOCK))
    assert lease.cached_tokens == BLOCK
    assert lease.copies == ()
    bench.store.check()


def test_a_sealed_block_is_found_while_its_writer_goes_on() -> None:
    bench = Bench()
    ids = prompt(1, 3 * BLOCK)
    lease = bench.acquire(ids)
    bench.store.extend(lease, len(ids))
    bench.store.seal(lease, ids, 2 * BLOCK + 1)
    assert bench.cached(ids) == 2 * BLOCK
    follower = bench.acquire(ids)
    assert follower.block_table[:2] == lease.block_table[:2]


def test_of_two_equal_blocks_one_is_kept() -> None:
    bench = Bench()
    ids = prompt(1, 2 * BLOCK)
    first, second = bench.acquire(ids), bench.acquire(ids)
    for lease in (first, second):
        bench.store.extend(lease, len(ids))
    assert bench.store.counts.held == 4
    bench.store.seal(first, ids, len(ids))
    bench.store.seal(second, ids, len(ids))
    assert second.block_table == first.block_table
    assert bench.store.counts.held == 2
    bench.store.check()


def test_what_is_discarded_is_not_found() -> None:
    bench = Bench()
    ids = prompt(1, 3 * BLOCK)
    lease = bench.acquire(ids)
    bench.store.extend(lease, len(ids))
    bench.store.discard(lease)
    assert bench.cached(ids) == 0
    assert bench.store.counts.free == bench.store.counts.total


def test_what_was_sealed_before_a_discard_stays() -> None:
    bench = Bench()
    ids = prompt(1, 3 * BLOCK)
    lease = bench.acquire(ids)
    bench.store.extend(lease, len(ids))
    bench.store.seal(lease, ids, BLOCK)
    bench.store.discard(lease)
    assert bench.cached(ids) == BLOCK
    assert bench.store.counts.cached == 1


def test_a_cancelled_request_returns_every_block() -> None:
    bench = Bench()
    ids = prompt(1, 3 * BLOCK + 1)
    lease = bench.acquire(ids)
    bench.store.extend(lease, len(ids))
    bench.store.release(lease, ids, BLOCK + 1)
    counts = bench.store.counts
    assert counts.held == 0
    assert counts.cached == 2
    assert bench.cached(ids) == BLOCK + 1


def test_a_longer_tail_takes_the_place_of_a_shorter_one() -> None:
    bench = Bench()
    for length in (BLOCK + 1, BLOCK + 3, BLOCK + 2):
        bench.serve(prompt(1, length))
    assert bench.store.counts.cached == 2
    assert bench.cached(prompt(1, 2 * BLOCK)) == BLOCK + 3
    bench.serve(prompt(1, 2 * BLOCK))
    assert bench.store.counts.cached == 2


def test_when_blocks_run_out_nothing_changes() -> None:
    bench = Bench(num_blocks=4)
    bench.serve(prompt(1, 2 * BLOCK))
    lease = bench.acquire(prompt(2, 5 * BLOCK))
    with pytest.raises(OutOfBlocks) as caught:
        bench.store.extend(lease, 5 * BLOCK)
    assert (caught.value.wanted, caught.value.available) == (5, 4)
    assert lease.block_table == []
    assert bench.cached(prompt(1, 2 * BLOCK)) == 2 * BLOCK
    bench.store.extend(lease, 4 * BLOCK)
    assert bench.store.counts.held == 4


def test_held_blocks_are_never_evicted() -> None:
    bench = Bench(num_blocks=4)
    bench.serve(prompt(1, 2 * BLOCK))
    holder = bench.acquire(prompt(1, 2 * BLOCK))
    other = bench.acquire(prompt(2, 3 * BLOCK))
    with pytest.raises(OutOfBlocks):
        bench.store.extend(other, 3 * BLOCK)
    bench.store.extend(other, 2 * BLOCK)
    assert set(holder.block_table).isdisjoint(other.block_table)


def test_a_lease_ends_once() -> None:
    bench = Bench()
    ids = prompt(1, BLOCK)
    lease = bench.acquire(ids)
    bench.store.discard(lease)
    for again in (
        lambda: bench.store.release(lease, ids, 0),
        lambda: bench.store.discard(lease),
        lambda: bench.store.extend(lease, 1),
        lambda: bench.store.seal(lease, ids, 0),
    ):
        with pytest.raises(LeaseEnded):
            again()


@pytest.mark.parametrize("num_written", [-1, 3 * BLOCK, BLOCK + 1])
def test_more_than_was_given_or_has_room_cannot_be_written(num_written: int) -> None:
    bench = Bench()
    ids = prompt(1, 2 * BLOCK)
    lease = bench.acquire(ids)
    bench.store.extend(lease, BLOCK)
    with pytest.raises(ValueError, match=r"written|fit"):
        bench.store.seal(lease, ids, num_written)


def test_less_than_is_sealed_cannot_be_written() -> None:
    bench = Bench()
    bench.serve(prompt(1, 2 * BLOCK))
    lease = bench.acquire(prompt(1, 2 * BLOCK))
    with pytest.raises(ValueError, match="in the index"):
        bench.store.release(lease, prompt(1, 2 * BLOCK), BLOCK)


def test_clearing_keeps_only_what_is_held() -> None:
    bench = Bench()
    bench.serve(prompt(1, 3 * BLOCK))
    bench.serve(prompt(2, 3 * BLOCK))
    lease = bench.acquire(prompt(1, 2 * BLOCK))
    bench.store.clear()
    bench.store.check()
    assert bench.cached(prompt(1, 3 * BLOCK)) == 2 * BLOCK
    assert bench.cached(prompt(2, 3 * BLOCK)) == 0
    bench.store.discard(lease)


def test_an_empty_prompt_finds_nothing() -> None:
    bench = Bench()
    bench.serve(prompt(1, BLOCK))
    lease = bench.acquire(tokens())
    assert lease.cached_tokens == 0
    bench.store.release(lease, tokens(), 0)
    bench.store.check()


def test_arguments_that_cannot_be_meant_are_refused() -> None:
    bench = Bench()
    with pytest.raises(ValueError, match="negative"):
        bench.store.acquire(SCOPE, prompt(1, 1), max_cached_tokens=-1)
    with pytest.raises(ValueError, match="scope"):
        bench.store.acquire("", prompt(1, 1), max_cached_tokens=1)
    with pytest.raises(TypeError, match="array"):
        bench.store.match(SCOPE, array("q", [1]))
    with pytest.raises(ValueError, match="block size"):
        PrefixStore(num_blocks=4, block_size=BLOCK + 1, namer=make_namer())


def test_two_halves_of_a_run_grow_together_again() -> None:
    """A branch splits a run; when the branch is evicted nothing is left of the split."""
    bench = Bench(num_blocks=6)
    long, branch = prompt(1, 4 * BLOCK), prompt(1, 2 * BLOCK) + prompt(2, BLOCK)
    bench.serve(long)
    bench.serve(branch)
    bench.serve(long)
    nodes_when_split = bench.store.index_bytes
    pressure = bench.acquire(prompt(3, 2 * BLOCK))
    bench.store.extend(pressure, 2 * BLOCK)
    bench.store.check()
    assert bench.cached(branch) == 2 * BLOCK
    assert bench.cached(long) == 4 * BLOCK
    assert bench.store.index_bytes < nodes_when_split - 2 * BLOCK
    # The root, the scope's only run.
    assert sum(1 for _ in bench.store._index.nodes()) == 2


def test_a_fork_shares_full_blocks_and_copies_the_rest() -> None:
    bench = Bench()
    text = prompt(1, 2 * BLOCK + 3)
    lease = bench.acquire(text)
    bench.store.extend(lease, len(text))
    bench.store.seal(lease, text, len(text))
    twin = bench.store.fork(lease, len(text))
    assert twin.block_table[:2] == lease.block_table[:2]
    [copy] = twin.copies
    assert (copy.source, copy.target, copy.num_rows) == (lease.block_table[2], twin.block_table[2], 3)
    bench.store.discard(lease)
    bench.store.check()
    bench.store.release(twin, text, len(text))
    assert bench.cached(text) == len(text)
    bench.store.check()


def test_a_fork_of_what_is_not_findable_copies_it_all() -> None:
    bench = Bench()
    text = prompt(1, BLOCK + 1)
    lease = bench.acquire(text)
    bench.store.extend(lease, len(text))
    twin = bench.store.fork(lease, len(text))
    assert [copy.num_rows for copy in twin.copies] == [BLOCK, 1]
    assert not set(twin.block_table) & set(lease.block_table)
    bench.store.check()


def test_a_fork_without_room_changes_nothing() -> None:
    bench = Bench(num_blocks=3)
    text = prompt(1, 2 * BLOCK)
    lease = bench.acquire(text)
    bench.store.extend(lease, len(text))
    before = bench.store.counts
    with pytest.raises(OutOfBlocks):
        bench.store.fork(lease, len(text))
    assert bench.store.counts == before
    bench.store.check()

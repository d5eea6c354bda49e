"""Blocks are free, cached or held, and never lost."""

from __future__ import annotations

import pytest

from prefix_store.pool import BlockPool


def test_a_block_goes_from_free_to_held_to_cached_and_back() -> None:
    pool = BlockPool(4)
    blocks = pool.take(3)
    assert (pool.num_free, pool.num_cached, pool.num_held) == (1, 0, 3)
    pool.park(2)
    assert (pool.num_free, pool.num_cached, pool.num_held) == (1, 2, 1)
    pool.unpark(2)
    pool.give_back(blocks)
    assert (pool.num_free, pool.num_cached, pool.num_held) == (4, 0, 0)
    pool.check()


def test_every_block_is_handed_out_once() -> None:
    pool = BlockPool(8)
    assert sorted(pool.take(3) + pool.take(5)) == list(range(8))


def test_taking_nothing_takes_nothing() -> None:
    pool = BlockPool(2)
    assert len(pool.take(0)) == 0
    assert pool.num_free == 2


def test_pinned_blocks_are_cached_but_not_available() -> None:
    pool = BlockPool(4)
    pool.take(3)
    pool.park(3)
    pool.pin(2)
    assert pool.num_available == 2
    assert pool.counts.pinned == 2
    pool.unpin(2)
    assert pool.num_available == 4


def test_more_than_is_free_cannot_be_taken() -> None:
    with pytest.raises(AssertionError):
        BlockPool(2).take(3)


def test_a_block_that_is_free_twice_is_noticed() -> None:
    pool = BlockPool(4)
    pool.take(2)
    pool.give_back([3])
    pool.give_back([3])
    with pytest.raises(AssertionError, match="free twice"):
        pool.check()


def test_a_pool_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        BlockPool(0)

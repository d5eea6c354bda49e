"""Pins keep a prefix until their time is over, a hit starts it again, and a budget bounds them."""

from __future__ import annotations

import pytest

from prefix_store.pins import PinBudgetExceeded
from prefix_store.pool import OutOfBlocks
from tests.unit.prefix_store.support import BLOCK, SCOPE, Bench, prompt
from tests.unit.prefix_store.test_eviction import need


def flood(bench: Bench) -> None:
    for seed in range(20, 40):
        bench.serve(prompt(seed, 4 * BLOCK))


def test_a_pinned_prefix_stays_under_pressure() -> None:
    bench = Bench()
    bench.serve(prompt(1, 4 * BLOCK))
    pin = bench.store.pin(SCOPE, prompt(1, 4 * BLOCK + 2))
    assert pin is not None
    assert pin.num_tokens == 4 * BLOCK
    flood(bench)
    assert bench.cached(prompt(1, 4 * BLOCK)) == 4 * BLOCK


def test_only_what_is_pinned_stays() -> None:
    bench = Bench()
    bench.serve(prompt(1, 4 * BLOCK))
    bench.store.pin(SCOPE, prompt(1, 2 * BLOCK))
    flood(bench)
    assert bench.cached(prompt(1, 4 * BLOCK)) == 2 * BLOCK


def test_a_pin_ends_when_its_time_is_over() -> None:
    bench = Bench()
    bench.serve(prompt(1, 4 * BLOCK))
    bench.store.pin(SCOPE, prompt(1, 4 * BLOCK), ttl_seconds=300.0)
    bench.clock.wait(299.0)
    assert len(bench.store.pins()) == 1
    bench.clock.wait(1.0)
    assert bench.store.pins() == []
    flood(bench)
    assert bench.cached(prompt(1, 4 * BLOCK)) == 0


def test_a_hit_starts_the_time_again() -> None:
    bench = Bench()
    bench.serve(prompt(1, 4 * BLOCK))
    bench.store.pin(SCOPE, prompt(1, 4 * BLOCK), ttl_seconds=300.0)
    for _ in range(5):
        bench.clock.wait(250.0)
        bench.serve(prompt(1, 4 * BLOCK))
    flood(bench)
    assert bench.cached(prompt(1, 4 * BLOCK)) == 4 * BLOCK


def test_a_hit_on_less_than_all_of_it_does_not() -> None:
    bench = Bench()
    bench.serve(prompt(1, 4 * BLOCK))
    bench.store.pin(SCOPE, prompt(1, 4 * BLOCK), ttl_seconds=300.0)
    bench.clock.wait(250.0)
    bench.serve(prompt(1, 2 * BLOCK) + prompt(2, BLOCK))
    bench.clock.wait(60.0)
    assert bench.store.pins() == []


def test_pins_fit_in_their_budget_or_are_refused() -> None:
    bench = Bench(num_blocks=16, options={"max_pinned_share": 0.5})
    bench.serve(prompt(1, 6 * BLOCK))
    bench.serve(prompt(2, 6 * BLOCK))
    bench.store.pin(SCOPE, prompt(1, 6 * BLOCK))
    with pytest.raises(PinBudgetExceeded) as caught:
        bench.store.pin(SCOPE, prompt(2, 6 * BLOCK))
    assert (caught.value.wanted, caught.value.left) == (6, 2)
    bench.store.check()
    bench.store.pin(SCOPE, prompt(2, 2 * BLOCK))
    bench.store.pin(SCOPE, prompt(1, 3 * BLOCK))
    assert bench.store.counts.pinned == 8


def test_a_budget_freed_by_time_can_be_used_again() -> None:
    bench = Bench(num_blocks=16)
    for seed in (1, 2):
        bench.serve(prompt(seed, 8 * BLOCK))
    bench.store.pin(SCOPE, prompt(1, 8 * BLOCK), ttl_seconds=10.0)
    bench.clock.wait(10.0)
    bench.store.pin(SCOPE, prompt(2, 8 * BLOCK), ttl_seconds=10.0)
    assert bench.store.counts.pinned == 8
    bench.store.check()


def test_what_two_pins_cover_stays_until_both_end() -> None:
    bench = Bench()
    bench.serve(prompt(1, 4 * BLOCK))
    short = bench.store.pin(SCOPE, prompt(1, 2 * BLOCK))
    long = bench.store.pin(SCOPE, prompt(1, 4 * BLOCK))
    assert short is not None
    assert long is not None
    assert bench.store.unpin(long)
    assert not bench.store.unpin(long)
    flood(bench)
    assert bench.cached(prompt(1, 4 * BLOCK)) == 2 * BLOCK
    assert bench.store.unpin(short)
    flood(bench)
    assert bench.cached(prompt(1, 4 * BLOCK)) == 0


def test_there_is_nothing_to_pin_where_nothing_is_cached() -> None:
    bench = Bench()
    assert bench.store.pin(SCOPE, prompt(1, 4 * BLOCK)) is None
    bench.serve(prompt(1, 2))
    assert bench.store.pin(SCOPE, prompt(1, 4 * BLOCK)) is None
    bench.store.check()


def test_pinned_blocks_do_not_count_as_available() -> None:
    bench = Bench(num_blocks=8)
    bench.serve(prompt(1, 4 * BLOCK))
    bench.store.pin(SCOPE, prompt(1, 4 * BLOCK))
    lease = bench.acquire(prompt(2, 5 * BLOCK))
    with pytest.raises(OutOfBlocks) as caught:
        bench.store.extend(lease, 5 * BLOCK)
    assert caught.value.available == bench.store.num_available == 4


def test_clearing_ends_every_pin() -> None:
    bench = Bench()
    bench.serve(prompt(1, 4 * BLOCK))
    bench.store.pin(SCOPE, prompt(1, 4 * BLOCK))
    bench.store.clear()
    assert bench.store.pins() == []
    assert bench.store.counts.free == 16
    need(bench, 16)


@pytest.mark.parametrize("ttl_seconds", [0.0, -1.0, float("nan")])
def test_a_time_that_is_no_time_is_refused(ttl_seconds: float) -> None:
    with pytest.raises(ValueError, match="ttl_seconds"):
        Bench().store.pin(SCOPE, prompt(1, BLOCK), ttl_seconds=ttl_seconds)


def test_a_pool_that_may_be_pinned_whole_is_refused() -> None:
    with pytest.raises(ValueError, match="max_pinned_share"):
        Bench(options={"max_pinned_share": 1.0})

"""What the store counts, and why a prompt missed."""

from __future__ import annotations

import pytest

from prefix_store.misses import Cause, Departure, GhostNames, Miss, MissReason
from prefix_store.statistics import OTHER, Durations, Statistics
from tests.unit.prefix_store.support import BLOCK, OTHER_SCOPE, SCOPE, Bench, prompt
from tests.unit.prefix_store.test_eviction import need


def why(bench: Bench, ids: object, scope: str = SCOPE) -> Miss | None:
    """The reason by a look, which an `acquire` must confirm."""
    looked = bench.store.explain(scope, ids, max_cached_tokens=len(ids))
    lease = bench.acquire(ids, scope)
    assert (lease.miss is None) == (looked is None)
    if looked is not None:
        assert lease.miss is not None
        assert (lease.miss.reason, lease.miss.token_index) == (looked.reason, looked.token_index)
    bench.store.discard(lease)
    return looked


def test_queries_and_hits_are_counted_for_each_scope_and_in_total() -> None:
    bench = Bench()
    bench.serve(prompt(1, 2 * BLOCK))
    bench.serve(prompt(1, 2 * BLOCK + 2))
    bench.serve(prompt(1, BLOCK), OTHER_SCOPE)
    row = bench.store.statistics.rows()[SCOPE]
    assert (row.queries, row.query_tokens) == (2, 4 * BLOCK + 2)
    assert (row.hit_queries, row.hit_tokens) == (1, 2 * BLOCK)
    assert row.hit_share == 2 * BLOCK / (4 * BLOCK + 2)
    total = bench.store.statistics.total()
    assert (total.queries, total.hit_queries, total.hit_tokens) == (3, 1, 2 * BLOCK)


def test_the_gap_between_uses_is_measured() -> None:
    bench = Bench()
    bench.serve(prompt(1, 2 * BLOCK))
    bench.clock.wait(60.0)
    bench.serve(prompt(1, 2 * BLOCK))
    gap = bench.store.statistics.total().reuse_gap
    assert gap.count == 2
    assert gap.mean_seconds == 61.0


def test_how_long_blocks_were_idle_before_they_went_is_measured() -> None:
    bench = Bench()
    bench.serve(prompt(1, 2 * BLOCK))
    bench.clock.wait(29.0)
    need(bench, 16)
    idle = bench.store.statistics.total().idle_before_eviction
    assert (idle.count, idle.mean_seconds) == (2, 30.0)


def test_blocks_that_nobody_read_are_wasted() -> None:
    bench = Bench()
    bench.serve(prompt(1, 3 * BLOCK))
    bench.serve(prompt(2, 2 * BLOCK))
    bench.serve(prompt(1, BLOCK))
    need(bench, 16)
    total = bench.store.statistics.total()
    assert (total.stored_blocks, total.removed_blocks, total.evicted_blocks) == (5, 5, 5)
    assert total.wasted_blocks == 4
    assert total.resident_blocks == 0


def test_rows_add_up_to_the_total_beyond_any_number_of_scopes() -> None:
    statistics = Statistics(max_scopes=3)
    for number in range(10):
        tally = statistics.of(f"{number:02x}")
        tally.queries += 1
        tally.hit_tokens += number
        tally.misses[MissReason.EVICTED] += 1
        tally.reuse_gap.add(1.0, number)
    rows = statistics.rows()
    assert set(rows) == {"07", "08", "09", OTHER}
    assert rows[OTHER].queries == 7
    total = statistics.total()
    assert (total.queries, total.hit_tokens, total.misses[MissReason.EVICTED]) == (10, 45, 10)
    assert total.reuse_gap.count == 45


def test_a_scope_that_is_seen_again_keeps_its_row() -> None:
    statistics = Statistics(max_scopes=2)
    for scope in ("aa", "bb", "aa", "cc"):
        statistics.of(scope).queries += 1
    assert statistics.rows()["aa"].queries == 2
    assert "bb" not in statistics.rows()


@pytest.mark.parametrize(("share", "upper"), [(0.5, 2.0), (0.9, 2.0), (0.95, 1024.0)])
def test_quantiles_are_bounds(share: float, upper: float) -> None:
    durations = Durations()
    durations.add(1.0, 9)
    durations.add(1000.0, 1)
    assert durations.quantile_seconds(share) == upper


def test_durations_of_nothing_and_of_ages_have_a_place() -> None:
    durations = Durations()
    assert durations.quantile_seconds(0.5) == durations.mean_seconds == 0.0
    durations.add(0.0, 1)
    durations.add(1e12, 1)
    assert durations.count == sum(durations.counts) == 2


# ---- reasons


def test_a_full_hit_misses_nothing() -> None:
    bench = Bench()
    bench.serve(prompt(1, 2 * BLOCK))
    assert why(bench, prompt(1, 2 * BLOCK)) is None


def test_what_is_new_behind_a_cached_prompt_is_no_miss() -> None:
    bench = Bench()
    bench.serve(prompt(1, 2 * BLOCK))
    assert why(bench, prompt(1, 4 * BLOCK)) is None


def test_a_prompt_of_one_token_is_below_the_minimum() -> None:
    bench = Bench()
    miss = bench.store.explain(SCOPE, prompt(1, 1), max_cached_tokens=0)
    assert miss == Miss(reason=MissReason.BELOW_MINIMUM, token_index=0)


def test_nothing_in_common_is_no_shared_prefix() -> None:
    bench = Bench()
    bench.serve(prompt(1, 2 * BLOCK))
    assert why(bench, prompt(2, BLOCK)) == Miss(reason=MissReason.NO_SHARED_PREFIX, token_index=0)
    assert why(bench, prompt(1, BLOCK), OTHER_SCOPE) == Miss(
        reason=MissReason.NO_SHARED_PREFIX, token_index=0
    )


@pytest.mark.parametrize("shared", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1])
def test_a_prompt_that_leaves_the_nearest_cached_one_says_at_which_token(shared: int) -> None:
    bench = Bench()
    bench.serve(prompt(1, 2 * BLOCK))
    miss = why(bench, prompt(1, shared) + prompt(2, 2 * BLOCK))
    assert miss == Miss(reason=MissReason.DIVERGED, token_index=shared)


def test_an_evicted_prefix_says_when_and_how_much_of_it_there_was() -> None:
    bench = Bench()
    bench.serve(prompt(1, 6 * BLOCK))
    bench.clock.wait(10.0)
    need(bench, 14)
    gone_at = bench.clock.now
    bench.clock.wait(10.0)
    miss = why(bench, prompt(1, 5 * BLOCK))
    assert miss == Miss(
        reason=MissReason.EVICTED,
        token_index=2 * BLOCK,
        gone_at=gone_at,
        cause=Cause.PRESSURE,
        lost_tokens=3 * BLOCK,
    )


def test_a_prefix_that_went_after_its_pin_ended_has_expired() -> None:
    bench = Bench()
    bench.serve(prompt(1, 2 * BLOCK))
    bench.store.pin(SCOPE, prompt(1, 2 * BLOCK), ttl_seconds=10.0)
    bench.clock.wait(20.0)
    need(bench, 16)
    miss = why(bench, prompt(1, 2 * BLOCK))
    assert miss is not None
    assert (miss.reason, miss.cause) == (MissReason.EXPIRED, Cause.EXPIRED)


def test_a_cleared_prefix_was_evicted_by_clearing() -> None:
    bench = Bench()
    bench.serve(prompt(1, 2 * BLOCK))
    bench.store.clear()
    miss = why(bench, prompt(1, 2 * BLOCK))
    assert miss is not None
    assert (miss.reason, miss.cause) == (MissReason.EVICTED, Cause.CLEARED)


def test_an_evicted_prefix_behind_public_text_is_known() -> None:
    bench = Bench()
    bench.store.declare_public(prompt(1, 2 * BLOCK))
    ids = prompt(1, 2 * BLOCK) + prompt(2, 2 * BLOCK)
    bench.serve(ids)
    bench.serve(prompt(1, 2 * BLOCK), OTHER_SCOPE)
    need(bench, 14)
    miss = why(bench, ids)
    assert miss is not None
    assert (miss.reason, miss.token_index, miss.lost_tokens) == (MissReason.EVICTED, 2 * BLOCK, 2 * BLOCK)


def test_another_tenants_eviction_tells_nothing() -> None:
    bench = Bench()
    bench.serve(prompt(1, 2 * BLOCK))
    need(bench, 16)
    miss = why(bench, prompt(1, 2 * BLOCK), OTHER_SCOPE)
    assert miss == Miss(reason=MissReason.NO_SHARED_PREFIX, token_index=0)


def test_reasons_are_counted() -> None:
    bench = Bench()
    bench.serve(prompt(1, 2 * BLOCK))
    bench.serve(prompt(2, 2 * BLOCK))
    need(bench, 16)
    bench.serve(prompt(1, 2 * BLOCK))
    misses = bench.store.statistics.rows()[SCOPE].misses
    assert misses[MissReason.EVICTED] == 1
    assert misses[MissReason.NO_SHARED_PREFIX] == 2


def test_the_memory_of_what_is_gone_is_bounded() -> None:
    ghosts = GhostNames(capacity=10)
    departure = Departure(at=1.0, cause=Cause.PRESSURE)
    names = [number.to_bytes(16, "big") for number in range(1000)]
    for name in names[:500]:
        ghosts.add([name], departure)
        assert len(ghosts) <= 10
        assert ghosts.find(name) is departure
    ghosts.add(names[500:], departure)
    assert len(ghosts) <= 10
    assert ghosts.find(names[0]) is None
    with pytest.raises(ValueError, match="capacity"):
        GhostNames(capacity=0)

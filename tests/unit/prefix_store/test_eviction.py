"""What goes first when room is needed."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from prefix_store.blocks import BlockName, TokenKind, with_adapter
from prefix_store.eviction import GENERATED_AGES_FASTER, ScopeQuotas
from prefix_store.pins import PinBudgetExceeded
from prefix_store.policy.hazard import HazardPolicy, learning_together
from prefix_store.policy.lru import LruPolicy
from prefix_store.policy.protocol import EvictionPolicy, RunFacts
from prefix_store.store import PrefixStore
from tests.unit.prefix_store.support import BLOCK, OTHER_SCOPE, SCOPE, Bench, make_namer, prompt


def need(bench: Bench, num_blocks: int, scope: str = SCOPE) -> None:
    """Takes blocks for a moment, so that others have to go."""
    lease = bench.acquire(prompt(9, 0), scope)
    bench.store.extend(lease, num_blocks * BLOCK)
    bench.store.discard(lease)
    bench.store.check()


def test_the_least_recently_used_goes_first() -> None:
    bench = Bench(num_blocks=6)
    for seed in (1, 2, 3):
        bench.serve(prompt(seed, 2 * BLOCK))
    bench.serve(prompt(1, 2 * BLOCK))
    need(bench, 2)
    assert [bench.cached(prompt(seed, 2 * BLOCK)) for seed in (1, 2, 3)] == [2 * BLOCK, 0, 2 * BLOCK]


def test_a_prefix_outlives_what_continues_it() -> None:
    bench = Bench(num_blocks=8)
    bench.serve(prompt(1, 4 * BLOCK) + prompt(2, 4 * BLOCK))
    for num_evicted in range(1, 9):
        need(bench, num_evicted)
        assert bench.cached(prompt(1, 4 * BLOCK) + prompt(2, 4 * BLOCK)) == (8 - num_evicted) * BLOCK


def test_a_shared_prefix_outlives_every_branch() -> None:
    bench = Bench(num_blocks=6)
    system = prompt(1, 2 * BLOCK)
    bench.serve(system + prompt(2, 2 * BLOCK))
    bench.serve(system + prompt(3, 2 * BLOCK))
    need(bench, 4)
    assert bench.cached(system + prompt(2, BLOCK)) == 2 * BLOCK


def test_no_more_goes_than_is_needed() -> None:
    bench = Bench(num_blocks=8)
    bench.serve(prompt(1, 8 * BLOCK))
    need(bench, 1)
    assert bench.store.counts.cached == 7


def test_generated_tokens_go_before_prompts() -> None:
    bench = Bench(num_blocks=5)
    bench.serve(prompt(1, BLOCK))
    bench.serve(prompt(2, 4 * BLOCK), num_prompt=2 * BLOCK)
    bench.clock.wait(10.0)
    need(bench, 2)
    assert bench.cached(prompt(1, BLOCK)) == BLOCK, "the oldest, and a prompt"
    assert bench.cached(prompt(2, 4 * BLOCK)) == 2 * BLOCK


def test_an_answer_of_just_now_outlives_a_prompt_of_long_ago() -> None:
    bench = Bench(num_blocks=5)
    bench.serve(prompt(1, BLOCK))
    bench.clock.wait(100.0 * GENERATED_AGES_FASTER)
    bench.serve(prompt(2, 4 * BLOCK), num_prompt=2 * BLOCK)
    need(bench, 1)
    assert bench.cached(prompt(1, BLOCK)) == 0
    assert bench.cached(prompt(2, 4 * BLOCK)) == 4 * BLOCK


def test_an_answer_that_came_back_in_a_prompt_is_a_prompt() -> None:
    bench = Bench(num_blocks=5)
    bench.serve(prompt(2, 4 * BLOCK), num_prompt=2 * BLOCK)
    bench.serve(prompt(2, 4 * BLOCK))
    bench.clock.wait(1.0)
    bench.serve(prompt(1, BLOCK), num_prompt=0)
    need(bench, 1)
    assert bench.cached(prompt(2, 4 * BLOCK)) == 4 * BLOCK


def fair(**weights: float) -> Bench:
    return Bench(num_blocks=16, options={"quotas": ScopeQuotas(make_policy=LruPolicy, weights=weights)})


def test_one_tenant_cannot_flush_another() -> None:
    bench = fair()
    bench.serve(prompt(1, 6 * BLOCK), OTHER_SCOPE)
    for seed in range(2, 40):
        bench.serve(prompt(seed, 2 * BLOCK), SCOPE)
    assert bench.cached(prompt(1, 6 * BLOCK), OTHER_SCOPE) == 6 * BLOCK


def test_without_quotas_it_can() -> None:
    bench = Bench(num_blocks=16)
    bench.serve(prompt(1, 6 * BLOCK), OTHER_SCOPE)
    for seed in range(2, 40):
        bench.serve(prompt(seed, 2 * BLOCK), SCOPE)
    assert bench.cached(prompt(1, 6 * BLOCK), OTHER_SCOPE) == 0


def test_a_tenant_alone_may_use_the_whole_pool() -> None:
    bench = fair()
    bench.serve(prompt(1, 16 * BLOCK))
    assert bench.cached(prompt(1, 16 * BLOCK)) == 16 * BLOCK


def test_a_newcomer_takes_from_the_largest() -> None:
    bench = fair()
    bench.serve(prompt(1, 12 * BLOCK), "aa")
    bench.serve(prompt(2, 4 * BLOCK), "bb")
    bench.serve(prompt(3, 4 * BLOCK), "cc")
    assert bench.cached(prompt(1, 12 * BLOCK), "aa") == 8 * BLOCK
    assert bench.cached(prompt(2, 4 * BLOCK), "bb") == 4 * BLOCK


def test_shares_are_by_weight() -> None:
    bench = fair(aa=3.0, bb=1.0)
    for seed in range(1, 40):
        bench.serve(prompt(seed, 2 * BLOCK), "aa")
        bench.serve(prompt(seed, 2 * BLOCK), "bb")
    rows = bench.store.statistics.rows()
    assert rows["aa"].resident_blocks == 12
    assert rows["bb"].resident_blocks == 4


def test_a_scope_keeps_no_more_than_its_cap() -> None:
    bench = Bench(num_blocks=16, options={"quotas": ScopeQuotas(make_policy=LruPolicy, max_share=0.25)})
    bench.serve(prompt(1, 8 * BLOCK))
    assert bench.store.counts.cached == 4
    assert bench.cached(prompt(1, 8 * BLOCK)) == 4 * BLOCK


def test_adapters_share_the_cap_of_their_tenant() -> None:
    bench = Bench(num_blocks=16, options={"quotas": ScopeQuotas(make_policy=LruPolicy, max_share=0.25)})
    bench.serve(prompt(1, 3 * BLOCK), "aa")
    bench.serve(prompt(1, 3 * BLOCK), with_adapter("aa", "poet"))
    assert bench.store.counts.cached == 4
    bench.store.check()


def test_with_quotas_nothing_that_may_go_is_kept_from_who_needs_it() -> None:
    bench = fair()
    bench.serve(prompt(1, 8 * BLOCK), "aa")
    bench.serve(prompt(2, 8 * BLOCK), "bb")
    need(bench, 16, "cc")
    assert bench.store.counts.free == 16


def test_quotas_and_a_single_policy_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="make_policy"):
        PrefixStore(
            num_blocks=4, block_size=BLOCK, namer=make_namer(), policy=LruPolicy(), quotas=ScopeQuotas()
        )


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_impossible_shares_are_refused(share: float) -> None:
    with pytest.raises(ValueError, match="max_share"):
        ScopeQuotas(max_share=share)
    with pytest.raises(ValueError, match="weight"):
        ScopeQuotas(weights={"aa": 0.0})


def put(policy: EvictionPolicy, name: str, *, depth: int, now: float) -> None:
    facts = RunFacts(name=BlockName(name.encode()), num_blocks=1, depth=depth, kind=TokenKind.USER)
    policy.insert(name, facts, now)
    policy.expose(name, now)


@pytest.mark.parametrize("learns_together", [True, False])
def test_a_new_scope_profits_from_what_the_others_have_taught(learns_together: bool) -> None:
    """Deep runs come back, shallow ones never do; before anything is learnt the older one goes first."""
    make = learning_together() if learns_together else HazardPolicy
    teacher, pupil = make(), make()
    for number in range(200):
        now = 4.0 * number
        put(teacher, f"shallow {number}", depth=0, now=now)
        put(teacher, f"deep {number}", depth=100, now=now)
        if number > 2:
            teacher.hit(f"deep {number - 2}", now)
    put(pupil, "deep", depth=100, now=800.0)
    put(pupil, "shallow", depth=0, now=803.0)
    assert pupil.victim(806.0) == ("shallow" if learns_together else "deep")
    teacher.check()
    pupil.check()


def test_the_index_respects_its_cap() -> None:
    bench = Bench(num_blocks=64, options={"max_index_bytes": 6_000})
    for seed in range(1, 30):
        bench.serve(prompt(seed, 4 * BLOCK + 1))
        assert bench.store.index_bytes <= 6_000
    assert bench.cached(prompt(29, 4 * BLOCK)) == 4 * BLOCK


def test_an_index_too_small_for_a_prompt_leaves_it_private() -> None:
    bench = Bench(options={"max_index_bytes": 1_000})
    bench.serve(prompt(1, 8 * BLOCK))
    assert bench.cached(prompt(1, 8 * BLOCK)) == 0
    assert bench.store.counts.free == 16


def test_quotas_pins_public_text_and_a_small_index_together_keep_every_invariant() -> None:
    rng = random.Random(5)
    options = {"quotas": ScopeQuotas(max_share=0.5), "max_index_bytes": 12_000, "max_pinned_share": 0.3}
    bench = Bench(num_blocks=24, options=options)
    bench.store.declare_public(prompt(1, 2 * BLOCK))
    for _ in range(600):
        ids = prompt(rng.randint(1, 3), rng.randint(0, 3 * BLOCK)) + prompt(
            rng.randint(1, 3), rng.randint(1, 9)
        )
        scope = rng.choice(("aa", "bb", "cc"))
        dice = rng.random()
        if dice < 0.8:
            bench.serve(ids, scope, num_prompt=rng.randint(0, len(ids)))
        elif dice < 0.9:
            bench.clock.wait(5.0)
            with suppress(PinBudgetExceeded):
                bench.store.pin(scope, ids, ttl_seconds=20.0)
        else:
            lease = bench.acquire(ids, scope)
            bench.store.extend(lease, len(ids))
            bench.store.discard(lease)
        bench.store.check()
        assert bench.store.index_bytes <= 12_000
        assert bench.store.counts.held == 0

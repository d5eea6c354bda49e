"""The hottest prefixes, found from the roots down."""

from __future__ import annotations

from tests.unit.prefix_store.support import BLOCK, OTHER_SCOPE, SCOPE, Bench, prompt


def test_a_prefix_is_as_hot_as_the_prompts_that_found_all_of_it() -> None:
    bench = Bench(num_blocks=64)
    shared = prompt(1, 2 * BLOCK)
    for seed in range(2, 6):
        bench.serve(shared + prompt(seed, BLOCK))
    bench.serve(shared + prompt(2, BLOCK))
    first, second = bench.store.hottest(10)
    assert (first.hits, first.num_blocks, first.scope) == (4, 2, SCOPE)
    assert (second.hits, second.num_blocks) == (1, 3)
    assert bench.store.hottest(1) == [first]


def test_what_nobody_found_is_not_listed_and_scopes_are_apart() -> None:
    bench = Bench()
    bench.serve(prompt(1, 2 * BLOCK))
    assert bench.store.hottest(10) == []
    bench.serve(prompt(1, 2 * BLOCK), OTHER_SCOPE)
    bench.serve(prompt(1, 2 * BLOCK), OTHER_SCOPE)
    assert [prefix.scope for prefix in bench.store.hottest(10)] == [OTHER_SCOPE]


def test_a_public_prefix_tells_how_many_scopes_go_on_from_it() -> None:
    bench = Bench()
    public = prompt(1, 2 * BLOCK)
    bench.store.declare_public(public)
    for scope in (SCOPE, OTHER_SCOPE):
        bench.serve(public + prompt(2, BLOCK), scope)
    [prefix] = bench.store.hottest(10)
    assert (prefix.scope, prefix.num_scopes, prefix.hits) == ("", 2, 1)


def test_looking_changes_nothing_and_has_a_bound() -> None:
    bench = Bench(num_blocks=64)
    for seed in range(1, 9):
        bench.serve(prompt(seed, BLOCK))
        bench.serve(prompt(seed, BLOCK))
    before = bench.store.counts
    assert len(bench.store.hottest(5)) == 5
    assert len(bench.store.hottest(100)) == 8
    assert bench.store.counts == before
    bench.store.check()

"""Public prefixes are shared between tenants; everything after them is private."""

from __future__ import annotations

from prefix_store.blocks import with_adapter
from tests.unit.prefix_store.support import BLOCK, OTHER_SCOPE, SCOPE, Bench, prompt

PUBLIC = prompt(1, 3 * BLOCK)


def bench_with_public() -> Bench:
    bench = Bench()
    bench.store.declare_public(PUBLIC)
    return bench


def test_a_public_prefix_is_shared_between_tenants() -> None:
    bench = bench_with_public()
    bench.serve(PUBLIC + prompt(2, 2 * BLOCK), SCOPE)
    assert bench.serve(PUBLIC + prompt(3, BLOCK), OTHER_SCOPE) == 3 * BLOCK


def test_without_the_declaration_it_is_not() -> None:
    bench = Bench()
    bench.serve(PUBLIC + prompt(2, 2 * BLOCK), SCOPE)
    assert bench.serve(PUBLIC + prompt(3, BLOCK), OTHER_SCOPE) == 0


def test_a_public_prefix_that_an_adapter_computed_is_its_own() -> None:
    bench = bench_with_public()
    adapted = with_adapter(SCOPE, "poet")
    bench.serve(PUBLIC + prompt(2, BLOCK), adapted)
    assert bench.cached(PUBLIC, SCOPE) == 0
    assert bench.cached(PUBLIC, adapted) == 3 * BLOCK
    bench.serve(PUBLIC + prompt(2, BLOCK), SCOPE)
    assert bench.cached(PUBLIC, with_adapter(OTHER_SCOPE, "poet")) == 0


def test_what_follows_a_public_prefix_is_private() -> None:
    bench = bench_with_public()
    private = PUBLIC + prompt(2, 2 * BLOCK)
    bench.serve(private, SCOPE)
    assert bench.cached(private, OTHER_SCOPE) == 3 * BLOCK
    assert bench.cached(private, SCOPE) == 5 * BLOCK


def test_a_tail_behind_a_public_prefix_is_private() -> None:
    bench = bench_with_public()
    private = PUBLIC + prompt(2, 2)
    bench.serve(private, SCOPE)
    assert bench.cached(private, OTHER_SCOPE) == 3 * BLOCK
    assert bench.cached(private, SCOPE) == 3 * BLOCK + 2


def test_the_block_in_which_a_prompt_leaves_the_public_text_is_private() -> None:
    bench = bench_with_public()
    straying = prompt(1, 2 * BLOCK + 2) + prompt(2, 2 * BLOCK)
    bench.serve(straying, SCOPE)
    assert bench.cached(straying, OTHER_SCOPE) == 2 * BLOCK


def test_a_prompt_inside_the_public_text_is_shared_as_far_as_it_goes() -> None:
    bench = bench_with_public()
    bench.serve(prompt(1, 2 * BLOCK), SCOPE)
    assert bench.cached(PUBLIC, OTHER_SCOPE) == 2 * BLOCK


def test_of_several_public_prefixes_the_longest_counts() -> None:
    bench = bench_with_public()
    bench.store.declare_public(PUBLIC + prompt(5, 2 * BLOCK))
    bench.serve(PUBLIC + prompt(5, 2 * BLOCK) + prompt(6, BLOCK), SCOPE)
    assert bench.cached(PUBLIC + prompt(5, 2 * BLOCK), OTHER_SCOPE) == 5 * BLOCK
    bench.serve(PUBLIC + prompt(7, BLOCK), SCOPE)
    assert bench.cached(PUBLIC + prompt(7, BLOCK), SCOPE) == 4 * BLOCK
    assert bench.cached(PUBLIC + prompt(7, BLOCK), OTHER_SCOPE) == 3 * BLOCK


def test_less_than_a_block_cannot_be_public() -> None:
    bench = Bench()
    bench.store.declare_public(prompt(1, BLOCK - 1))
    bench.serve(prompt(1, BLOCK), SCOPE)
    assert bench.cached(prompt(1, BLOCK), OTHER_SCOPE) == 0


def test_public_blocks_stay_while_somebody_continues_them() -> None:
    bench = bench_with_public()
    bench.serve(PUBLIC + prompt(2, BLOCK), SCOPE)
    holder = bench.acquire(PUBLIC + prompt(2, BLOCK), SCOPE)
    for seed in range(10, 30):
        bench.serve(prompt(seed, 2 * BLOCK), OTHER_SCOPE)
    assert bench.cached(PUBLIC, OTHER_SCOPE) == 3 * BLOCK
    bench.store.discard(holder)
    bench.store.check()


def test_generated_text_goes_on_behind_a_public_prompt() -> None:
    bench = bench_with_public()
    ids = PUBLIC[:]
    lease = bench.acquire(ids, SCOPE)
    ids.extend(prompt(4, 2 * BLOCK))
    bench.store.extend(lease, len(ids))
    bench.store.release(lease, ids, len(ids))
    bench.store.check()
    assert bench.cached(ids, SCOPE) == 5 * BLOCK
    assert bench.cached(ids, OTHER_SCOPE) == 3 * BLOCK

"""Oracle 1: with reuse on, every token is the one that reuse off would have chosen.

Greedy float32 texts of random conversations on a tiny random Llama. Batches and
chunks group the sums differently, so a token may differ at a near-tie of logits;
each such case is verified against the logits and printed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from model_worker.models import LoadedModel
from tests.engines import EngineDriver, Generation, running_engine
from tests.near_ties import count_near_ties, plain_twin

BLOCK_SIZE = 16
SMALL_POOL_BLOCKS = 24
SHARED_LENGTHS = [0, 1, 15, 16, 17, 3 * 16 - 1, 3 * 16, 3 * 16 + 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    prompt: tuple[int, ...]
    max_tokens: int


def tokens_of(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(256) for _ in range(length))


def conversation(rng: random.Random) -> list[Turn]:
    """Prompts that share prefixes of every boundary length with an earlier one, and grow turn by turn."""
    base = tokens_of(rng, 3 * BLOCK_SIZE + rng.randrange(2, 20))
    turns = [Turn(prompt=base, max_tokens=rng.randrange(1, 20))]
    for length in rng.sample(SHARED_LENGTHS, k=4):
        prompt = base[:length] + tokens_of(rng, rng.randrange(1, 40))
        turns.append(Turn(prompt=prompt, max_tokens=rng.randrange(1, 20)))
        if rng.random() < 0.5:  # the same again: a hit of all but one token
            turns.append(Turn(prompt=prompt, max_tokens=rng.randrange(1, 20)))
    return turns


def run_all(driver: EngineDriver, turns: list[Turn], rng: random.Random) -> list[Generation]:
    """Sends the turns in order, up to three at once."""
    done: list[Generation] = []
    while len(done) < len(turns):
        group = turns[len(done) : len(done) + rng.choice([1, 1, 2, 3])]
        sent = [
            driver.submit(list(turn.prompt), max_tokens=turn.max_tokens, ignore_eos=True) for turn in group
        ]
        done += [generation.wait() for generation in sent]
    return done


def test_reuse_on_equals_reuse_off_over_sixty_conversations(tiny_model: LoadedModel) -> None:
    plain = plain_twin(tiny_model)
    forgiven = cached_tokens = written_tokens = 0
    with (
        running_engine(tiny_model, kv_cache_blocks=SMALL_POOL_BLOCKS) as reusing,
        running_engine(tiny_model, kv_cache_blocks=64) as computing,
    ):
        for seed in range(60):
            rng = random.Random(seed)
            turns = conversation(rng)
            results = run_all(reusing, turns, rng)
            for turn, result in zip(turns, results, strict=True):
                expected = computing.generate(
                    list(turn.prompt), max_tokens=turn.max_tokens, ignore_eos=True, cache="bypass"
                )
                assert expected.started.cached.total == 0
                forgiven += count_near_ties(plain, turn.prompt, result.tokens, expected.tokens)
                cached_tokens += result.started.cached.total
                written_tokens += result.started.uncached
    assert cached_tokens > 3000, "no claim about reuse without hits"
    assert written_tokens > 20 * SMALL_POOL_BLOCKS * BLOCK_SIZE, "no claim about eviction without pressure"
    assert forgiven <= 2


@pytest.mark.parametrize("shared", SHARED_LENGTHS)
def test_a_shared_prefix_of_a_boundary_length_is_found_to_the_token(
    tiny_model: LoadedModel, shared: int
) -> None:
    rng = random.Random(shared)
    base = list(tokens_of(rng, 4 * BLOCK_SIZE))
    other = [*base[:shared], (base[shared] + 1) % 256, *tokens_of(rng, 20)]
    with running_engine(tiny_model) as driver:
        driver.generate(base)
        warm = driver.generate(other)
        cold = driver.generate(other, cache="bypass")
    assert warm.started.cached.total == shared
    assert warm.tokens == cold.tokens


def test_a_prompt_that_is_wholly_cached_computes_its_last_token_only(tiny_model: LoadedModel) -> None:
    for length in [1, 2, 15, 16, 17, 31, 32, 33]:
        prompt = list(tokens_of(random.Random(length), length))
        with running_engine(tiny_model) as driver:
            cold = driver.generate(prompt)
            warm = driver.generate(prompt)
        assert warm.started.cached.total == length - 1
        assert warm.tokens == cold.tokens

"""Choosing tokens: greedy, nucleus, seeds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model_worker.protocol import SamplingParams
from model_worker.sampling import sample_token, uniform_draw

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0])


def params(**changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=1, **changes)  # type: ignore[arg-type]


def draws(settings: SamplingParams, count: int = 400) -> list[int]:
    return [sample_token(LOGITS, settings, seed=seed, position=0) for seed in range(count)]


def test_temperature_zero_is_greedy() -> None:
    assert sample_token(LOGITS, params(temperature=0.0), seed=1, position=1) == 1


def test_the_same_seed_and_position_choose_the_same_token() -> None:
    settings = params(temperature=1.5)
    first = [sample_token(LOGITS, settings, seed=7, position=at) for at in range(50)]
    assert first == [sample_token(LOGITS, settings, seed=7, position=at) for at in range(50)]
    assert len(set(first)) > 1


def test_top_k_keeps_the_k_likeliest() -> None:
    assert set(draws(params(temperature=2.0, top_k=2))) == {1, 3}


def test_top_p_keeps_the_shortest_run_that_reaches_p() -> None:
    probabilities = LOGITS.double().softmax(0)
    just_over_first = float(probabilities[1]) + 1e-6
    assert set(draws(params(top_p=float(probabilities[1]) - 1e-6))) == {1}
    assert set(draws(params(top_p=just_over_first))) == {1, 3}


def test_frequencies_follow_the_softmax() -> None:
    count = 20_000
    chosen = torch.bincount(torch.tensor(draws(params(), count)), minlength=5) / count
    expected = LOGITS.softmax(0)
    # Five standard deviations of a binomial share.
    tolerance = 5 * math.sqrt(0.25 / count)
    assert torch.allclose(chosen, expected, atol=tolerance)


@given(seed=st.integers(-(2**63), 2**63 - 1), position=st.integers(0, 2**40))
def test_a_draw_is_in_the_unit_interval(seed: int, position: int) -> None:
    assert 0.0 <= uniform_draw(seed, position) < 1.0


@pytest.mark.parametrize("top_p", [1e-9, 0.5, 1.0])
def test_extreme_logits_still_choose_a_token(top_p: float) -> None:
    logits = torch.tensor([float("-inf"), 1e4, float("-inf")])
    assert sample_token(logits, params(top_p=top_p), seed=0, position=0) == 1

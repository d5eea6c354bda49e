"""Choosing tokens: each parameter against `transformers`' own processors or exact arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from model_worker.protocol import SamplingParams
from model_worker.sampling import LOGPROB_FLOOR, Choice, Sampler, sample_token, uniform_draw

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0])


def params(**changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=1, **changes)  # type: ignore[arg-type]


def sampler(prompt: list[int] | None = None, eos: frozenset[int] = frozenset(), **changes: object) -> Sampler:
    settings = params(**({"temperature": 0.0} | changes))
    return Sampler(settings, prompt=prompt or [], eos_token_ids=eos)


def chosen(one: Sampler, logits: torch.Tensor, position: int = 0) -> Choice:
    choice = one.choose(logits, position=position)
    assert isinstance(choice, Choice)
    return choice


def warped(logits: torch.Tensor, settings: SamplingParams) -> torch.Tensor:
    """Probabilities after the warpers of `transformers`, in its order."""
    scores = logits.double()[None]
    tokens = torch.zeros(1, 1, dtype=torch.long)
    scores = TemperatureLogitsWarper(settings.temperature)(tokens, scores)
    if settings.top_k:
        scores = TopKLogitsWarper(settings.top_k)(tokens, scores)
    if settings.top_p < 1.0:
        scores = TopPLogitsWarper(settings.top_p)(tokens, scores)
    if settings.min_p:
        scores = MinPLogitsWarper(settings.min_p)(tokens, scores)
    return scores[0].softmax(0)


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
    count = 5_000
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


@pytest.mark.parametrize("temperature", [1e-300, 1e-310, 5e-324])
@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_a_temperature_next_to_zero_is_all_but_greedy(temperature: float, top_p: float) -> None:
    logits = LOGITS * 1e3
    chosen = sample_token(logits, params(temperature=temperature, top_p=top_p), seed=3, position=5)
    assert chosen == int(logits.argmax())


WARPERS = [
    {},
    {"temperature": 0.3},
    {"top_k": 7},
    {"top_k": 600, "temperature": 2.0},
    {"top_p": 0.4},
    {"top_p": 0.97, "temperature": 1.7},
    {"min_p": 0.2},
    {"min_p": 0.01, "top_p": 0.9, "top_k": 900},
    {"min_p": 1.0},
]


@pytest.mark.parametrize("spread", [0.05, 1.0, 6.0])
@pytest.mark.parametrize("changes", WARPERS)
def test_every_draw_is_the_inverse_of_what_transformers_would_draw_from(
    spread: float, changes: dict[str, object]
) -> None:
    logits = torch.randn(2000, generator=torch.Generator().manual_seed(3)) * spread
    settings = params(**changes)
    probabilities, tokens = warped(logits, settings).sort(descending=True, stable=True)
    cumulative = probabilities.cumsum(0)
    for seed in range(60):
        expected = tokens[int((cumulative <= uniform_draw(seed, 4)).sum())]
        assert sample_token(logits, settings, seed=seed, position=4) == expected


@pytest.mark.parametrize("temperature", [5e-324, 1e-9])
def test_a_temperature_near_zero_is_greedy_not_undefined(temperature: float) -> None:
    assert set(draws(params(temperature=temperature), count=20)) == {1}


LOGITS_8 = st.lists(st.floats(-20, 20, width=32), min_size=8, max_size=8).map(torch.tensor)
TOKENS_8 = st.lists(st.integers(0, 7), max_size=12)


@given(logits=LOGITS_8, prompt=TOKENS_8, output=TOKENS_8, penalty=st.floats(0.1, 3.0))
def test_the_repetition_penalty_is_that_of_transformers(
    logits: torch.Tensor, prompt: list[int], output: list[int], penalty: float
) -> None:
    one = sampler(prompt, repetition_penalty=penalty, top_logprobs=0)
    expected = logits
    if prompt + output:
        processor = RepetitionPenaltyLogitsProcessor(penalty)
        expected = processor(torch.tensor([prompt + output]), logits[None])[0]
    for token in output:
        one.choose(logits, position=0)  # looking between tokens changes nothing
        one.accept(token)
    choice = chosen(one, logits)
    assert expected[choice.token] == expected.max()


@given(
    logits=LOGITS_8,
    prompt=TOKENS_8,
    output=TOKENS_8,
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    bias=st.dictionaries(st.integers(0, 7), st.floats(-100, 100)),
)
def test_presence_frequency_and_bias_are_openais_formula(
    logits: torch.Tensor,
    prompt: list[int],
    output: list[int],
    presence: float,
    frequency: float,
    bias: dict[int, float],
) -> None:
    one = sampler(prompt, presence_penalty=presence, frequency_penalty=frequency, logit_bias=bias)
    for token in output:
        one.accept(token)
    expected = [
        float(logits[token])
        - output.count(token) * frequency
        - (output.count(token) > 0) * presence
        + bias.get(token, 0.0)
        for token in range(8)
    ]
    assert expected[chosen(one, logits).token] == pytest.approx(max(expected), abs=1e-4)


def test_a_bias_of_a_hundred_forces_and_of_minus_a_hundred_bans() -> None:
    assert chosen(sampler(logit_bias={4: 100.0}), LOGITS).token == 4
    assert chosen(sampler(logit_bias={1: -100.0}), LOGITS).token == 3


def test_no_end_is_chosen_before_min_tokens() -> None:
    one = sampler(eos=frozenset({1}), stop_token_ids=(3,), min_tokens=2)
    assert [chosen(one, LOGITS, position).token for position in range(4)] == [2, 2, 1, 1]


def test_an_ignored_end_is_a_token_like_any_other() -> None:
    one = sampler(eos=frozenset({1}), min_tokens=2, ignore_eos=True)
    assert chosen(one, LOGITS).token == 1
    one.accept(1)
    assert not one.has_ended


def test_end_and_stop_tokens_end_the_text() -> None:
    one = sampler(eos=frozenset({1}), stop_token_ids=(3,))
    ended = []
    for token in (0, 1, 2, 3):
        one.accept(token)
        ended.append(one.has_ended)
    assert ended == [False, True, False, True]


@given(LOGITS_8)
def test_log_probabilities_are_the_models_own(logits: torch.Tensor) -> None:
    plain = logits.double().log_softmax(0)
    settings = {"temperature": 2.0, "seed": 3, "top_k": 2, "presence_penalty": 1.0, "logit_bias": {0: 9.0}}
    one = sampler(top_logprobs=3, **settings)
    one.accept(5)
    choice = chosen(one, logits)
    assert choice.logprob == pytest.approx(float(plain[choice.token]), abs=1e-4)
    assert [value for _, value in choice.top] == pytest.approx(plain.topk(3).values.tolist(), abs=1e-4)
    assert all(value == pytest.approx(float(plain[token]), abs=1e-4) for token, value in choice.top)
    silent = sampler(**settings)
    silent.accept(5)
    assert chosen(silent, logits) == Choice(choice.token), "asking for log probabilities changes no token"


def test_a_log_probability_is_never_infinite() -> None:
    logits = torch.tensor([0.0, -torch.inf])
    assert chosen(sampler(top_logprobs=2), logits) == Choice(0, 0.0, ((0, 0.0), (1, LOGPROB_FLOOR)))


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1.5},
        {"frequency_penalty": 1.0},
        {"logit_bias": {1: -5.0}},
        {"min_tokens": 3, "stop_token_ids": (1,)},
        {"top_logprobs": 2},
        {"temperature": 1.0, "top_p": 0.5},
    ],
)
def test_the_models_logits_stay_as_they_are(changes: dict[str, object]) -> None:
    logits = LOGITS.clone()
    one = sampler(prompt=[1, 2], **changes)
    one.accept(1)
    one.choose(logits, position=1)
    assert torch.equal(logits, LOGITS)
    assert not one.is_plain


def test_greedy_with_nothing_asked_for_is_plain() -> None:
    one = sampler(eos=frozenset({4}), top_k=5, top_p=0.1, seed=3, stop=("x",))
    assert one.is_plain
    assert chosen(one, LOGITS) == Choice(1)

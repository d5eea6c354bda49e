"""Several texts of one prompt: it is computed once, and each text is the one it would be alone."""

from __future__ import annotations

import re
from dataclasses import replace

import httpx
import msgspec
import pytest
import torch

from model_worker.engine import RequestRefused
from model_worker.models import LoadedModel
from model_worker.protocol import (
    MAX_CHOICES,
    CacheMode,
    Failed,
    Finished,
    GenerateRequest,
    Regex,
    SamplingParams,
    Started,
    Token,
    decode_events,
)
from model_worker.sampling import choice_seed
from model_worker.server import create_app
from model_worker.settings import WorkerSettings
from model_worker.wiring import build_worker
from tests.engines import EngineDriver, Generation, prompt_of, running_engine

SAMPLED = {"temperature": 1.0, "seed": 11, "ignore_eos": True}


def alone(driver: EngineDriver, prompt: list[int], n: int, **options: object) -> list[list[int]]:
    """The texts of `n` requests of their own, with the seeds of `n` choices."""
    seed = options.pop("seed")
    assert isinstance(seed, int)
    sent = [
        driver.submit(prompt, cache="bypass", seed=choice_seed(seed, choice), **options)  # type: ignore[arg-type]
        for choice in range(n)
    ]
    return [generation.wait().tokens for generation in sent]


@pytest.mark.parametrize("cache", ["automatic", "bypass"])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 50])
def test_n_choices_are_n_requests_with_their_seeds(
    tiny_model: LoadedModel, length: int, cache: CacheMode
) -> None:
    options = {**SAMPLED, "frequency_penalty": 0.7, "repetition_penalty": 1.2, "max_tokens": 20}
    with running_engine(tiny_model) as driver:
        together = driver.generate(prompt_of(length), n=4, cache=cache, **options)
        assert together.choices == alone(driver, prompt_of(length), 4, **options)
    assert len({tuple(text) for text in together.choices}) == 4
    assert sum(isinstance(event, Started) for event in together.events) == 1
    ends = [event for event in together.events if isinstance(event, Finished)]
    assert sorted((end.choice, end.output_tokens) for end in ends) == [(choice, 20) for choice in range(4)]


@pytest.mark.parametrize("cache", ["automatic", "bypass"])
def test_the_prompt_of_several_choices_is_computed_once(driver: EngineDriver, cache: CacheMode) -> None:
    before = driver.idle_stats()
    driver.generate(prompt_of(50), n=5, max_tokens=6, cache=cache, **SAMPLED)
    after = driver.idle_stats()
    assert after.prompt_tokens_computed - before.prompt_tokens_computed == 50 + 1  # and the one that asks
    assert after.output_tokens - before.output_tokens == 5 * 6 + 1
    assert after.requests_finished - before.requests_finished == 2
    assert after.tokens_recomputed == 0


def test_choices_share_the_prompts_full_blocks(tiny_model: LoadedModel) -> None:
    """A prompt of ten blocks with eight texts of one block each fits in twenty; eight prompts do not."""
    with running_engine(tiny_model, kv_cache_blocks=20) as driver:
        generation = driver.generate(prompt_of(160), n=8, max_tokens=16, **SAMPLED)
        assert all(len(text) == 16 for text in generation.choices)
        assert driver.idle_stats().preemptions == 0


@pytest.mark.parametrize("cache", ["automatic", "bypass"])
def test_choices_that_do_not_fit_wait_and_no_text_changes(tiny_model: LoadedModel, cache: CacheMode) -> None:
    prompt, options = prompt_of(40), {**SAMPLED, "max_tokens": 60}
    with running_engine(tiny_model, kv_cache_blocks=12, max_running=4) as driver:
        squeezed = driver.generate(prompt, n=6, cache=cache, **options)
        assert driver.idle_stats().tokens_recomputed > 0, "no claim about waiting without pressure"
    with running_engine(tiny_model) as driver:
        assert squeezed.choices == alone(driver, prompt, 6, **options)


def test_without_a_seed_choices_differ(driver: EngineDriver) -> None:
    generation = driver.generate(prompt_of(20), n=3, temperature=1.0, max_tokens=12, ignore_eos=True)
    assert len({tuple(text) for text in generation.choices}) == 3


def test_greedy_choices_are_all_the_same(driver: EngineDriver) -> None:
    generation = driver.generate(prompt_of(20), n=3, ignore_eos=True)
    assert len({tuple(text) for text in generation.choices}) == 1


def test_each_choice_follows_the_structure_on_its_own(driver: EngineDriver) -> None:
    options = {**SAMPLED, "ignore_eos": False, "structure": Regex(pattern="[a-c]{2,6}x"), "max_tokens": 20}
    generation = driver.generate(prompt_of(20), n=6, **options)
    texts = [""] * 6
    for event in generation.events:
        if isinstance(event, Token | Finished):
            texts[event.choice] += event.text
    assert all(re.fullmatch("[a-c]{2,6}x", text) for text in texts)
    assert len(set(texts)) > 1


def test_choices_end_one_by_one_and_the_others_go_on(driver: EngineDriver) -> None:
    free = driver.generate(prompt_of(20), n=3, max_tokens=12, **SAMPLED)
    stop = free.choices[1][4]
    cut = driver.generate(prompt_of(20), n=3, max_tokens=12, stop_token_ids=[stop], **SAMPLED)
    for text, whole in zip(cut.choices, free.choices, strict=True):
        assert text == whole[: whole.index(stop) + 1 if stop in whole else 12]
    assert len(cut.choices[1]) < len(max(cut.choices, key=len))


@pytest.mark.parametrize("moment", [Started, Token])
def test_a_hang_up_ends_every_choice(tiny_model: LoadedModel, moment: type[Started | Token]) -> None:
    with running_engine(tiny_model, step_tokens=16) as driver:
        generation = driver.submit(prompt_of(90), n=4, max_tokens=100, **SAMPLED)
        generation.wait_for(moment)
        driver.engine.cancel(generation.request_id)
        stats = driver.idle_stats()
        assert (stats.requests_cancelled, stats.blocks_held) == (1, 0)
        assert not generation.has_ended


def test_a_failing_step_ends_all_choices_with_one_failure(tiny_model: LoadedModel) -> None:
    class FailsWhenLong(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.config = inner.config

        def forward(self, position_ids: torch.Tensor, cache: object, **inputs: object) -> object:
            if position_ids.max() >= 30:
                raise RuntimeError("planted fault")
            return self.inner(position_ids=position_ids, cache=cache, **inputs)

    with running_engine(replace(tiny_model, network=FailsWhenLong(tiny_model.network))) as driver:
        generation: Generation = driver.generate(prompt_of(20), n=4, max_tokens=50, **SAMPLED)
        assert generation.end == Failed(
            code="engine_failed", message="the forward pass failed: planted fault"
        )
        stats = driver.idle_stats()
        assert (stats.requests_failed, stats.blocks_held) == (1, 0)


@pytest.mark.parametrize("n", [0, MAX_CHOICES + 1])
def test_a_number_of_choices_outside_its_range_is_refused_by_name(n: int) -> None:
    body = b'{"request_id":"a","scope":"aa","token_ids":[1],"sampling":{"max_tokens":1},"n":%d}' % n
    with pytest.raises(msgspec.ValidationError, match=r"\$\.n"):
        msgspec.json.decode(body, type=GenerateRequest)


def test_choices_count_as_open_texts(tiny_model: LoadedModel) -> None:
    with running_engine(tiny_model, max_open=4) as driver:
        with pytest.raises(RequestRefused, match="n: 5 is over") as never:
            driver.submit(prompt_of(9), n=5)
        driver.submit(prompt_of(9), n=3, max_tokens=200, ignore_eos=True)
        with pytest.raises(RequestRefused, match="texts are open") as later:
            driver.submit(prompt_of(9), n=2)
    assert (never.value.refusal.code, later.value.refusal.code) == ("invalid_request", "queue_full")


async def test_a_stream_ends_with_its_last_choice(tiny_model: LoadedModel) -> None:
    worker = build_worker(tiny_model, WorkerSettings(kv_cache_blocks=64))
    worker.engine.start()
    app = create_app(engine=worker.engine, card=worker.card, files={}, max_body_bytes=2**20)
    request = GenerateRequest(
        request_id="one",
        scope="aa",
        token_ids=prompt_of(9),
        sampling=SamplingParams(max_tokens=5, seed=1, ignore_eos=True),
        n=3,
    )
    try:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://worker.example"
        ) as client:
            answer = await client.post("/v1/generate", content=msgspec.json.encode(request))
    finally:
        worker.engine.stop()
    lines = answer.content.splitlines()
    events = decode_events(lines)
    assert isinstance(events[-1], Finished)
    assert sum(isinstance(event, Finished) for event in events) == 3
    for line, event in zip(lines, events, strict=True):
        assert (b'"choice"' in line) == bool(getattr(event, "choice", 0)), "the default is not sent"

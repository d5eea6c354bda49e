"""What a request gets from the engine, and what the engine keeps of it."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch

from model_worker.engine import EngineStopped, RequestRefused
from model_worker.kv_shape import DTYPES
from model_worker.models import LoadedModel
from model_worker.protocol import (
    Event,
    Failed,
    Finished,
    GenerateRequest,
    Prefilled,
    SamplingParams,
    Started,
    Token,
)
from model_worker.settings import WorkerSettings
from model_worker.wiring import build_worker
from tests.engines import DEADLINE_SECONDS, SCOPE, EngineDriver, Generation, prompt_of, running_engine
from tests.near_ties import count_near_ties, greedy_of, plain_twin


def assert_texts(
    model: LoadedModel, prompts: list[list[int]], together: list[Generation], alone: list[list[int]]
) -> None:
    """Each text is the one it has alone; at most one may part from it, at a near-tie."""
    plain = plain_twin(model)
    texts = [generation.wait().tokens for generation in together]
    parted = [count_near_ties(plain, *one) for one in zip(prompts, texts, alone, strict=True)]
    assert sum(parted) <= 1


def test_a_repeated_prompt_computes_one_token(driver: EngineDriver) -> None:
    prompt = prompt_of(100)
    cold = driver.generate(prompt)
    computed = driver.engine.stats.prompt_tokens_computed
    warm = driver.generate(prompt)
    assert cold.started.cached.total == 0
    assert warm.started == Started(cached=type(warm.started.cached)(device=99), uncached=1)
    assert driver.idle_stats().prompt_tokens_computed - computed == 1 + 1  # one of them is idle_stats' own
    assert warm.tokens == cold.tokens


def test_the_next_turn_finds_the_answer_of_the_last(driver: EngineDriver) -> None:
    first = driver.generate(prompt_of(40), max_tokens=20, ignore_eos=True)
    turn = prompt_of(40) + first.tokens + prompt_of(10, seed=1)
    # The last token generated was never an input, so its keys and values do not exist.
    assert driver.generate(turn).started.cached.total == 40 + 20 - 1


def test_greedy_tokens_are_those_of_transformers(driver: EngineDriver, tiny_model: LoadedModel) -> None:
    plain = plain_twin(tiny_model)
    for seed in range(5):
        prompt = prompt_of(30 + seed, seed)
        assert driver.generate(prompt, max_tokens=12).tokens == greedy_of(plain, prompt, 12)


def test_long_prompts_are_computed_in_chunks_and_tell_their_progress(tiny_model: LoadedModel) -> None:
    with running_engine(tiny_model, step_tokens=32) as driver:
        chunked = driver.generate(prompt_of(100))
    progress = [event.computed_tokens for event in chunked.events if isinstance(event, Prefilled)]
    assert progress == [32, 64, 96]
    with running_engine(tiny_model, step_tokens=512) as driver:
        assert driver.generate(prompt_of(100)).tokens == chunked.tokens


def test_a_cancelled_request_returns_every_block(driver: EngineDriver) -> None:
    generation = driver.submit(prompt_of(64), max_tokens=900, ignore_eos=True)
    generation.wait_for(Token)
    driver.engine.cancel(generation.request_id)
    stats = driver.idle_stats()
    assert stats.blocks_held == 0
    assert stats.requests_cancelled == 1
    assert stats.output_tokens < 900


def test_a_request_cancelled_while_it_waits_computes_nothing(tiny_model: LoadedModel) -> None:
    with running_engine(tiny_model, max_running=1) as driver:
        first = driver.submit(prompt_of(20), max_tokens=200, ignore_eos=True)
        first.wait_for(Token)
        second = driver.submit(prompt_of(30, seed=1))
        driver.engine.cancel(second.request_id)
        first.wait()
        stats = driver.idle_stats()
    assert stats.requests_cancelled == 1
    assert stats.prompt_tokens_computed == 20 + 1


@pytest.mark.parametrize("shared", [0, 48, 100, 160])
def test_many_at_once_give_what_each_gives_alone(tiny_model: LoadedModel, shared: int) -> None:
    prompts = [prompt_of(shared) + prompt_of(5 + 3 * seed, seed) for seed in range(8)]
    options: dict[str, object] = {"max_tokens": 30, "ignore_eos": True}
    with running_engine(tiny_model, kv_cache_blocks=256) as driver:
        alone = [driver.generate(prompt, cache="bypass", **options).tokens for prompt in prompts]
    with running_engine(tiny_model, kv_cache_blocks=256, step_tokens=64) as driver:
        together = [driver.submit(prompt, **options) for prompt in prompts]
        assert_texts(tiny_model, prompts, together, alone)
        stats = driver.idle_stats()
    assert stats.blocks_held == 0
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total


def test_when_blocks_run_out_the_youngest_waits_and_no_text_changes(tiny_model: LoadedModel) -> None:
    prompts = [prompt_of(60, seed) for seed in range(4)]
    options: dict[str, object] = {"max_tokens": 60, "ignore_eos": True}
    with running_engine(tiny_model, kv_cache_blocks=64) as driver:
        alone = [driver.generate(prompt, cache="bypass", **options).tokens for prompt in prompts]
    with running_engine(tiny_model, kv_cache_blocks=18) as driver:
        together = [driver.submit(prompt, **options) for prompt in prompts]
        assert_texts(tiny_model, prompts, together, alone)
        stats = driver.idle_stats()
    assert stats.preemptions > 0
    assert stats.prompt_tokens_computed == sum(map(len, prompts)) + 1
    for generation in together:
        assert generation.started.uncached == 60, "a preemption is no customer hit"


def test_seeded_text_repeats_and_does_not_depend_on_company(tiny_model: LoadedModel) -> None:
    options: dict[str, object] = {"max_tokens": 20, "temperature": 1.0, "top_p": 0.9, "seed": 5}
    with running_engine(tiny_model, kv_cache_blocks=256) as driver:
        alone = driver.generate(prompt_of(33), cache="bypass", **options)
        others = [driver.submit(prompt_of(33, seed), max_tokens=30) for seed in range(1, 5)]
        beside = driver.generate(prompt_of(33), **options)
        for other in others:
            other.wait()
        unseeded = {
            tuple(driver.generate(prompt_of(33), max_tokens=20, temperature=2.0).tokens) for _ in range(5)
        }
    assert beside.tokens == alone.tokens
    assert len(unseeded) > 1


def test_two_scopes_share_nothing_and_one_scope_does(driver: EngineDriver) -> None:
    prompt = prompt_of(80)
    driver.generate(prompt, scope="aa")
    assert driver.generate(prompt, scope="bb").started.cached.total == 0
    assert driver.generate(prompt, scope="aa").started.cached.total == 79


def test_a_bypass_neither_reads_nor_leaves_anything(driver: EngineDriver) -> None:
    prompt = prompt_of(80)
    driver.generate(prompt, cache="bypass")
    assert driver.generate(prompt).started.cached.total == 0
    assert driver.generate(prompt, cache="bypass").started.cached.total == 0


def test_a_stop_string_ends_the_text_before_it(driver: EngineDriver) -> None:
    plain = driver.generate(prompt_of(20), max_tokens=40, ignore_eos=True)
    stop = plain.text[10:13]
    stopped = driver.generate(prompt_of(20), max_tokens=40, ignore_eos=True, stop=(stop,))
    assert stopped.text == plain.text[: plain.text.index(stop)]
    assert isinstance(stopped.end, Finished)
    assert stopped.end.reason == "stop"


def test_the_end_of_text_token_stops(tiny_model: LoadedModel) -> None:
    class EndsAtOnce(torch.nn.Module):
        """The same network, with one token's logit raised."""

        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.config = inner.config

        def forward(self, cache: object, **inputs: object) -> object:
            output = self.inner(cache=cache, **inputs)
            output.logits[..., 256] += 1e6
            return output

    with running_engine(replace(tiny_model, network=EndsAtOnce(tiny_model.network))) as driver:
        ended = driver.generate(prompt_of(10), max_tokens=9)
        ignoring = driver.generate(prompt_of(10), max_tokens=9, ignore_eos=True)
    assert (ended.tokens, ended.end) == ([256], Finished(reason="stop", text="", output_tokens=1))
    assert ignoring.end == Finished(reason="length", text="", output_tokens=9)


def test_what_can_never_be_served_is_refused_at_once(driver: EngineDriver) -> None:
    with pytest.raises(RequestRefused, match="context window of 1024") as refused:
        driver.submit(prompt_of(1020), max_tokens=5)
    assert refused.value.refusal.code == "context_length_exceeded"
    with pytest.raises(RequestRefused, match="outside the vocabulary"):
        driver.submit([257])


def test_a_full_queue_refuses(tiny_model: LoadedModel) -> None:
    with running_engine(tiny_model, max_open=1) as driver:
        first = driver.submit(prompt_of(10), max_tokens=200, ignore_eos=True)
        with pytest.raises(RequestRefused) as refused:
            driver.submit(prompt_of(10))
        assert refused.value.refusal.code == "queue_full"
        first.wait()
        driver.generate(prompt_of(10))


def test_stopping_tells_everybody(tiny_model: LoadedModel) -> None:
    with running_engine(tiny_model, max_running=1) as driver:
        running = driver.submit(prompt_of(10), max_tokens=900, ignore_eos=True)
        waiting = driver.submit(prompt_of(10), max_tokens=900)
        running.wait_for(Token)
        driver.stop()
        assert [type(one.wait().end) for one in (running, waiting)] == [Failed, Failed]
        with pytest.raises(RequestRefused):
            driver.submit(prompt_of(10))


def test_an_engine_with_a_broken_invariant_dies_and_nobody_waits_for_ever(
    tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = threading.Event()
    worker = build_worker(tiny_model, WorkerSettings(kv_cache_blocks=64))
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # the traceback is expected

    def broken(*_: object) -> None:
        raise AssertionError("planted defect")

    monkeypatch.setattr(worker.engine._scheduler, "commit", broken)
    worker.engine.start(on_death=dead.set)
    driver = EngineDriver(worker.engine)
    assert driver.generate(prompt_of(10)).end == Failed(code="engine_failed", message="the engine stopped")
    assert dead.wait(DEADLINE_SECONDS)
    with pytest.raises(RequestRefused):
        driver.submit(prompt_of(10))
    worker.engine.stop()


def test_a_failing_forward_pass_ends_its_requests_and_no_others(tiny_model: LoadedModel) -> None:
    class FailsOnZero(torch.nn.Module):
        """The same network; token 255 in a step is a fault."""

        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.config = inner.config

        def forward(self, input_ids: torch.Tensor, cache: object, **inputs: object) -> object:
            if (input_ids == 255).any():
                raise RuntimeError("planted fault")
            return self.inner(input_ids=input_ids, cache=cache, **inputs)

    sound = [token % 255 for token in prompt_of(40)]
    with running_engine(replace(tiny_model, network=FailsOnZero(tiny_model.network))) as driver:
        before = driver.generate(sound)
        failed = driver.generate([*sound, 255])
        assert failed.end == Failed(code="engine_failed", message="the forward pass failed: planted fault")
        assert driver.generate(sound).tokens == before.tokens
        assert driver.idle_stats().blocks_held == 0


def test_identical_cold_prompts_at_once_compute_the_prefix_once(tiny_model: LoadedModel) -> None:
    prompt = prompt_of(8 * 16 + 5)
    with running_engine(tiny_model, kv_cache_blocks=256, step_tokens=32) as driver:
        alone = driver.generate(prompt, cache="bypass")
        before = driver.idle_stats().prompt_tokens_computed
        together = [driver.submit(prompt) for _ in range(6)]
        assert {tuple(one.wait().tokens) for one in together} == {tuple(alone.tokens)}
        computed = driver.idle_stats().prompt_tokens_computed - before - 1
    # The leader computes all; each follower the tokens behind the last full block, at most.
    assert computed == sum(one.started.uncached for one in together)
    assert sorted(one.started.uncached for one in together) == [5] * 5 + [len(prompt)]


def test_a_follower_takes_over_when_its_leader_is_cancelled(tiny_model: LoadedModel) -> None:
    prompt = prompt_of(40 * 16)
    with running_engine(tiny_model, kv_cache_blocks=256, step_tokens=16) as driver:
        leader, follower = driver.submit(prompt), driver.submit(prompt)
        leader.wait_for(Prefilled)
        driver.engine.cancel(leader.request_id)
        follower.wait()
        alone = driver.generate(prompt, cache="bypass")
        stats = driver.idle_stats()
    assert follower.tokens == alone.tokens
    assert 0 < follower.started.cached.total < len(prompt), "it kept what the leader had computed"
    assert stats.requests_cancelled == 1
    assert stats.blocks_held == 0


def test_of_many_followers_exactly_one_goes_on_where_a_cancelled_leader_stopped(
    tiny_model: LoadedModel,
) -> None:
    prompt = prompt_of(40 * 16 + 3)
    with running_engine(tiny_model, kv_cache_blocks=256, step_tokens=16) as driver:
        leader, *followers = (driver.submit(prompt) for _ in range(5))
        leader.wait_for(Prefilled)
        driver.engine.cancel(leader.request_id)
        texts = {tuple(follower.wait().tokens) for follower in followers}
        uncached = sorted(follower.started.uncached for follower in followers)
        computed = driver.idle_stats().prompt_tokens_computed - 1
    assert len(texts) == 1
    assert uncached[:-1] == [3, 3, 3], "of full blocks they find what one of them has computed"
    rest_of_leader = computed - sum(uncached)
    assert 0 < rest_of_leader == len(prompt) - uncached[-1], "nothing of the leader's part was computed again"


def test_prompts_that_part_share_what_they_have_in_common(tiny_model: LoadedModel) -> None:
    shared = prompt_of(6 * 16)
    prompts = [shared + prompt_of(20, seed) for seed in range(1, 5)]
    with running_engine(tiny_model, kv_cache_blocks=256, step_tokens=32) as driver:
        alone = [driver.generate(prompt, cache="bypass").tokens for prompt in prompts]
        together = [driver.submit(prompt) for prompt in prompts]
        assert_texts(tiny_model, prompts, together, alone)
    assert sorted(one.started.uncached for one in together) == [20] * 3 + [len(prompts[0])]


def test_followers_in_a_tiny_pool_come_to_an_end(tiny_model: LoadedModel) -> None:
    prompts = [prompt_of(100) + prompt_of(10, seed % 3) for seed in range(9)]
    with running_engine(tiny_model, kv_cache_blocks=64) as driver:
        alone = [
            driver.generate(prompt, max_tokens=30, cache="bypass", ignore_eos=True).tokens
            for prompt in prompts
        ]
    with running_engine(tiny_model, kv_cache_blocks=14, step_tokens=32) as driver:
        together = [driver.submit(prompt, max_tokens=30, ignore_eos=True) for prompt in prompts]
        assert_texts(tiny_model, prompts, together, alone)
        assert driver.idle_stats().blocks_held == 0


def test_progress_never_runs_backwards_when_a_prefill_is_preempted(tiny_model: LoadedModel) -> None:
    with running_engine(tiny_model, kv_cache_blocks=20, step_tokens=4) as driver:
        older = driver.submit(prompt_of(16), max_tokens=290, ignore_eos=True)
        while len(older.tokens) < 120:
            older.next_event()
        younger = driver.submit(prompt_of(160, seed=1), max_tokens=4)
        older.wait()
        younger.wait()
        stats = driver.idle_stats()
    assert stats.preemptions > 0
    assert stats.tokens_recomputed > 0, "no claim without something that was computed twice"
    progress = [event.computed_tokens for event in younger.events if isinstance(event, Prefilled)]
    assert progress == sorted(progress)
    assert progress[-1] < younger.started.uncached


def test_a_conversation_takes_less_memory_where_it_shares(tiny_model: LoadedModel) -> None:
    with running_engine(tiny_model) as driver:
        assert driver.engine.stats.kv_bytes_per_conversation == 0
        generation = driver.submit(prompt_of(160), n=4, max_tokens=300, temperature=1.0, ignore_eos=True)
        while min(map(len, generation.choices)) < 3:
            generation.next_event()
        stats = driver.engine.stats
        driver.engine.cancel(generation.request_id)
    assert stats.kv_bytes_per_token == tiny_model.kv_shape.bytes_per_token(DTYPES["float32"])
    block_bytes = 16 * stats.kv_bytes_per_token
    assert stats.sequences_running == 4
    assert stats.kv_bytes_held == stats.blocks_held * block_bytes
    assert stats.kv_bytes_per_conversation == stats.kv_bytes_held // 4
    assert 10 / 4 * block_bytes < stats.kv_bytes_per_conversation < 10 * block_bytes


@pytest.mark.parametrize(("max_scope_share", "kept"), [(1.0, 10 * 16), (0.125, 8 * 16)])
def test_no_tenant_flushes_another_or_keeps_more_than_its_share(
    tiny_model: LoadedModel, max_scope_share: float, kept: int
) -> None:
    with running_engine(tiny_model, max_scope_share=max_scope_share) as driver:
        driver.generate(prompt_of(10 * 16), max_tokens=1, scope="aa")
        for seed in range(1, 20):
            driver.generate(prompt_of(10 * 16, seed), max_tokens=1, scope="bb")
        again = driver.generate([*prompt_of(10 * 16), 1], max_tokens=1, scope="aa")
    assert again.started.cached.total == kept


def test_a_step_that_nobody_waits_for_any_more_ends_at_the_next_layer(tiny_model: LoadedModel) -> None:
    with running_engine(tiny_model, kv_cache_blocks=256, step_tokens=2048) as driver:
        given_up = GenerateRequest(
            request_id="given-up",
            scope=SCOPE,
            token_ids=prompt_of(1500),
            sampling=SamplingParams(max_tokens=4, temperature=0.0),
        )
        # `Started` comes from the engine's own thread, right before the step that computes the prompt.
        driver.engine.submit(given_up, lambda _: driver.engine.cancel("given-up"))
        deadline = time.monotonic() + DEADLINE_SECONDS
        while driver.engine.stats.requests_cancelled == 0:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        stats = driver.idle_stats()
        assert (stats.prompt_tokens_computed, stats.steps) == (1, 1), "only what idle_stats asks for"
        # Nothing that the step had begun to write can be found.
        assert driver.generate(prompt_of(1500), max_tokens=1).started.cached.total == 0


def test_a_step_goes_on_for_the_one_who_still_waits(tiny_model: LoadedModel) -> None:
    with running_engine(tiny_model, kv_cache_blocks=256, step_tokens=2048) as driver:
        expected = driver.generate(prompt_of(700, seed=1), cache="bypass").tokens
        given_up = GenerateRequest(
            request_id="given-up",
            scope=SCOPE,
            token_ids=prompt_of(700),
            sampling=SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True),
        )

        def give_up(event: Event) -> None:
            if isinstance(event, Started):
                driver.engine.cancel("given-up")

        driver.engine.submit(given_up, give_up)
        assert driver.generate(prompt_of(700, seed=1)).tokens == expected


def test_the_cache_is_told_about_while_the_engine_runs(driver: EngineDriver) -> None:
    empty = driver.engine.look().result(timeout=60)
    assert (empty.total.queries, empty.scopes, empty.prefixes) == (0, [], [])
    for _ in range(3):
        driver.generate(prompt_of(100))
    driver.generate(prompt_of(50, seed=1), scope="bb")
    seen = driver.engine.look().result(timeout=60)
    assert (seen.total.queries, seen.total.hit_queries) == (4, 2)
    assert seen.total.hit_tokens == 2 * 99
    assert seen.total.misses == {"no_shared_prefix": 2}
    assert {row.scope: row.queries for row in seen.scopes} == {"aa": 3, "bb": 1}
    assert sum(row.resident_blocks for row in seen.scopes) == seen.total.resident_blocks
    assert (seen.prefixes[0].scope, seen.prefixes[0].hits) == ("aa", 2)
    assert seen.reuse_gap.total > 0


def test_a_stopped_engine_leaves_nobody_waiting_for_a_look(driver: EngineDriver) -> None:
    driver.stop()
    with pytest.raises(EngineStopped):
        driver.engine.look().result(timeout=60)


def test_the_start_tells_why_not_more_was_found(driver: EngineDriver) -> None:
    def missed(prompt: list[int], **options: object) -> tuple[str, int] | None:
        found = driver.generate(prompt, **options).started.missed
        return None if found is None else (found.reason, found.token_index)

    assert missed(prompt_of(100)) == ("no_shared_prefix", 0)
    assert missed(prompt_of(100)) is None
    assert missed(prompt_of(64) + prompt_of(40, seed=2)) == ("diverged", 64)
    assert missed(prompt_of(100), cache="bypass") == ("bypass", 0)

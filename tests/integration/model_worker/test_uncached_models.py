"""Models whose prefixes cannot be reused: served all the same, right, and with the reason told."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
import torch

from model_worker.models import LoadedModel, load_model
from model_worker.protocol import Missed, Started, TierTokens, Token
from model_worker.settings import WorkerSettings
from model_worker.uncached import UncachedRunner
from model_worker.wiring import build_worker
from tests.engines import EngineDriver, prompt_of, running_engine
from tests.near_ties import count_near_ties, greedy_of
from tests.tiny_models import FAMILIES, UNCACHED_FAMILIES, WINDOW, byte_tokenizer, tiny

REASONS = {
    "mistral, windowed": f"mistral attends within a sliding window of {WINDOW} tokens",
    "gemma2, every other layer windowed": "gemma2 has layers of sliding_attention",
    "gemma3": "gemma3_text has layers of sliding_attention",
    "gpt-oss, with sinks": r"GptOssForCausalLM cannot be given a paged cache .*: its attention takes s_aux.*",
    "mamba": "mamba has layers of linear_attention",
    "mamba2": "mamba2 has layers of linear_attention",
    "lfm2": "lfm2 has layers of conv",
    "qwen3-next": "qwen3_next has layers of linear_attention",
    "falcon": "FalconForCausalLM computes its attention by itself",
}


def runner_of(driver: EngineDriver) -> UncachedRunner:
    runner = driver.engine._runner
    assert isinstance(runner, UncachedRunner)
    return runner


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny(UNCACHED_FAMILIES["mistral, windowed"], tmp_path_factory.mktemp("windowed"))


@pytest.mark.parametrize("family", UNCACHED_FAMILIES)
def test_texts_are_those_of_generate_and_the_reason_is_told(family: str, tmp_path: Path) -> None:
    model = tiny(UNCACHED_FAMILIES[family], tmp_path)
    plain = tiny(UNCACHED_FAMILIES[family], tmp_path, attention=None)
    prompts = [prompt_of(2 * WINDOW + seed) + prompt_of(10, seed) for seed in range(3)]
    with running_engine(model, kv_cache_blocks=256, step_tokens=32) as driver:
        together = [driver.submit(prompt, max_tokens=6) for prompt in prompts]
        near_ties = [
            count_near_ties(plain, prompt, generation.wait().tokens, greedy_of(plain, prompt, 6))
            for prompt, generation in zip(prompts, together, strict=True)
        ]
        again = driver.generate(prompts[0], max_tokens=6)
    card = build_worker(model, WorkerSettings(kv_cache_blocks=8)).card
    assert card.uncached_reason is not None
    assert re.fullmatch(REASONS[family], card.uncached_reason)
    assert sum(near_ties) <= 1
    assert again.started == Started(
        cached=TierTokens(), uncached=len(prompts[0]), missed=Missed(reason="bypass", token_index=0)
    )


def test_a_full_attention_model_has_no_reason(tmp_path: Path) -> None:
    model = tiny(FAMILIES["mistral"], tmp_path)
    assert build_worker(model, WorkerSettings(kv_cache_blocks=8)).card.uncached_reason is None


def test_a_folder_is_loaded_with_the_attention_that_fits(windowed: LoadedModel, tmp_path: Path) -> None:
    windowed.network.save_pretrained(tmp_path)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    loaded = load_model(name="w", folder=tmp_path, device=torch.device("cpu"), dtype=torch.float32)
    assert loaded.uncached_reason == REASONS["mistral, windowed"]
    with running_engine(loaded) as loaded_driver, running_engine(windowed) as driver:
        assert loaded_driver.generate(prompt_of(60)).tokens == driver.generate(prompt_of(60)).tokens


def test_what_ends_is_cancelled_or_waits_keeps_no_state(windowed: LoadedModel) -> None:
    prompts = [prompt_of(60, seed) for seed in range(4)]
    with running_engine(windowed, kv_cache_blocks=64) as driver:
        alone = [driver.generate(prompt, max_tokens=40, ignore_eos=True).tokens for prompt in prompts]
    with running_engine(windowed, kv_cache_blocks=16) as driver:
        together = [driver.submit(prompt, max_tokens=40, ignore_eos=True) for prompt in prompts]
        cancelled = driver.submit(prompts[0], max_tokens=180, ignore_eos=True)
        texts = [generation.wait().tokens for generation in together]
        cancelled.wait_for(Token)
        assert runner_of(driver).num_states == 1
        driver.engine.cancel(cancelled.request_id)
        stats = driver.idle_stats()
        assert stats.preemptions > 0
        assert stats.blocks_held == 0
        gc.collect()
        assert runner_of(driver).num_states == 0
    assert texts == alone, "each sequence is computed by itself: nothing regroups its sums"


def test_several_texts_of_one_prompt_compute_it_once(windowed: LoadedModel) -> None:
    prompt = prompt_of(50)
    with running_engine(windowed) as driver:
        alone = driver.generate(prompt, max_tokens=12, ignore_eos=True)
        several = driver.generate(prompt, max_tokens=12, ignore_eos=True, n=3)
        sampled = driver.generate(prompt, max_tokens=12, ignore_eos=True, n=3, temperature=2.0, seed=1)
        computed = driver.idle_stats().prompt_tokens_computed
    assert several.choices == [alone.tokens] * 3
    assert len({tuple(text) for text in sampled.choices}) == 3, "forks have states of their own"
    assert computed == 3 * 50 + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_that_forgets_its_state_in_chunks_goes_on_token_by_token(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    mamba = UncachedRunner(tiny(UNCACHED_FAMILIES["mamba"], tmp_path, dtype=dtype))
    windowed = UncachedRunner(tiny(UNCACHED_FAMILIES["mistral, windowed"], tmp_path))
    assert list(mamba._pieces(8, 11)) == [(8, 9), (9, 10), (10, 11)]
    assert list(mamba._pieces(0, 11)) == list(windowed._pieces(0, 11)) == [(0, 11)]
    assert list(windowed._pieces(8, 11)) == [(8, 11)]

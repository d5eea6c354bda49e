"""An engine with packed keys and values: what it reuses is what it would compute."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from model_worker.kv_shape import CODECS
from model_worker.models import LoadedModel, ModelUnavailable
from model_worker.settings import WorkerSettings
from model_worker.wiring import build_worker
from tests.engines import EngineDriver, Generation, prompt_of, running_engine
from tests.tiny_models import FAMILIES, UNCACHED_FAMILIES, tiny, tiny_llama

codecs = pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)


def ask(driver: EngineDriver, prompt: list[int], **options: object) -> Generation:
    return driver.submit(prompt, max_tokens=16, ignore_eos=True, **options)  # type: ignore[arg-type]


@codecs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reuse_changes_no_token(tmp_path: Path, codec: object, dtype: torch.dtype) -> None:
    """In exact mode, so that any difference would be the codec's."""
    rng = random.Random(0)
    base = prompt_of(120)
    prompts = [base[:cut] + prompt_of(rng.randrange(1, 40), seed=cut) for cut in (0, 17, 64, 95, 119)] * 2
    model = tiny(FAMILIES["llama"], tmp_path, dtype=dtype)
    with running_engine(model, compute="exact", kv_dtype=codec.name, kv_cache_blocks=24) as driver:
        cold = [ask(driver, prompt, cache="bypass").wait().tokens for prompt in prompts]
        warm = [one.wait() for one in [ask(driver, prompt, n=rng.choice([1, 2])) for prompt in prompts]]
    for expected, found in zip(cold, warm, strict=True):
        assert all(text == expected for text in found.choices)
    assert sum(found.started.cached.total for found in warm) > 500, "no claim about reuse without hits"


def test_what_is_lost_grows_with_what_is_saved(tmp_path: Path) -> None:
    """And something is lost: the packed pool is what attention reads."""
    prompt = prompt_of(200)
    likely: dict[str, float] = {}
    for kv_dtype in ("auto", "int8", "int4"):
        with running_engine(tiny_llama(tmp_path), kv_dtype=kv_dtype) as driver:
            [logprobs] = (
                event.logprobs
                for event in driver.generate(prompt, max_tokens=1, top_logprobs=0).events
                if getattr(event, "logprobs", None)
            )
            likely[kv_dtype] = logprobs[0].chosen.logprob
    lost = {name: abs(likely[name] - likely["auto"]) for name in ("int8", "int4")}
    assert 0 < lost["int8"] < 0.1
    assert lost["int8"] < lost["int4"] < 0.5


@codecs
def test_the_card_says_what_is_lost(tiny_model: LoadedModel, codec: object) -> None:
    def card_of(**settings: object) -> object:
        options = WorkerSettings(kv_cache_blocks=8, **settings)  # type: ignore[arg-type]
        return build_worker(tiny_model, options).card

    packed, plain = card_of(kv_dtype=codec.name, compute="exact"), card_of(compute="exact")
    assert (packed.kv_codec, packed.exact) == (codec.name, False)
    assert (plain.kv_codec, plain.exact) == ("none", True)
    assert packed.kv_bytes_per_token < plain.kv_bytes_per_token / 2


def test_a_model_that_is_served_uncached_has_nothing_packed(tmp_path: Path) -> None:
    model = tiny(UNCACHED_FAMILIES["mistral, windowed"], tmp_path)
    card = build_worker(model, WorkerSettings(kv_cache_blocks=8, kv_dtype="int4")).card
    assert card.kv_codec == "none"


def test_heads_that_cannot_be_packed_are_refused(tmp_path: Path) -> None:
    model = tiny(FAMILIES["gpt2"], tmp_path, hidden_size=60, num_attention_heads=4)
    assert model.kv_shape.head_dim == 15
    with pytest.raises(ModelUnavailable, match=r"HEADSTART_KV_DTYPE=int4 .* heads have 15"):
        build_worker(model, WorkerSettings(kv_cache_blocks=8, kv_dtype="int4"))

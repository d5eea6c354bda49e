"""Models whose keys would depend on the longest text beside them are held to where they do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import MistralConfig, Phi3Config, Phi3ForCausalLM

from model_worker.engine import RequestRefused
from model_worker.models import LoadedModel, load_model, wrap_network
from model_worker.reuse import forget_idle_window, why_not_by_configuration
from tests.engines import prompt_of, running_engine
from tests.near_ties import greedy_of
from tests.tiny_models import USUAL, byte_tokenizer

SHORT, LONG = 96, 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Phi 3 with LongRoPE, and a window that is wider than its context, as the real ones have."""
    folder = tmp_path_factory.mktemp("phi3")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0 + index for index in range(8)]}
    settings = USUAL | {
        "num_key_value_heads": 2,
        "max_position_embeddings": LONG,
        "original_max_position_embeddings": SHORT,
        "sliding_window": 2 * LONG,
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 10_000.0, **factors},
    }
    torch.manual_seed(0)
    Phi3ForCausalLM(Phi3Config(**settings)).save_pretrained(folder)
    return folder


@pytest.fixture
def model(folder: Path) -> LoadedModel:
    return load_model(name="phi3", folder=folder, device=torch.device("cpu"), dtype=torch.float32)


def test_long_rope_is_served_with_reuse_up_to_its_first_window(model: LoadedModel, folder: Path) -> None:
    network = Phi3ForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    plain = wrap_network(network, name="plain", folder=folder, fingerprint="plain")
    assert model.uncached_reason is None
    with running_engine(model) as driver:
        prompt = prompt_of(SHORT - 8)
        cold, warm = driver.generate(prompt, max_tokens=8), driver.generate(prompt, max_tokens=8)
        assert warm.started.cached.total == len(prompt) - 1
        with pytest.raises(RequestRefused, match=f"context window of {SHORT} tokens"):
            driver.submit(prompt, max_tokens=9)
    assert cold.tokens == warm.tokens == greedy_of(plain, prompt, 8)


def test_a_window_is_none_where_the_context_fits_in() -> None:
    for window, reason in ((512, None), (511, "mistral attends within a sliding window of 511 tokens")):
        config = MistralConfig(sliding_window=window, max_position_embeddings=512)
        forget_idle_window(config)
        assert why_not_by_configuration(config) == reason

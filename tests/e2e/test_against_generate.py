"""The real model: what the engine says is what `generate` of plain `transformers` says, token for token.

The tiny families are compared on many more prompts: `tests/property/test_model_families.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from model_worker.models import LoadedModel, load_model, resolve_model_folder, wrap_network
from model_worker.settings import WorkerSettings
from tests.engines import running_engine
from tests.near_ties import count_near_ties, greedy_of

MAX_TOKENS = 6
HOUSE_RULES = (
    "You are the concierge of a small hotel by the sea. Breakfast is from seven to ten, the sauna opens at "
    "four, dogs are welcome on the ground floor, and bicycles are lent for half a day at most. "
)
QUESTIONS = (
    "When is breakfast?",
    "When is breakfast on the ground floor?",
    "May I bring my dog?",
    "How long can I keep a bicycle?",
    "Is the sauna open at noon?",
    "What is the capital of France?",
    "Say hello in Spanish.",
    "Count from one to ten.",
)
PROMPTS = (
    *(HOUSE_RULES + question for question in QUESTIONS),
    "Once upon a time there was",
    "def fibonacci(n):\n    ",
    "The three primary colours are",
    "Dear Sir or Madam,\n",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    settings = WorkerSettings(_cli_parse_args=[])
    return resolve_model_folder(settings.model, settings.models_folder)


def plain_model(folder: Path) -> LoadedModel:
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return wrap_network(network, name="plain", folder=folder, fingerprint="plain")


@pytest.mark.slow
def test_greedy_tokens_of_the_real_model_are_those_of_generate(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]
    model = load_model(name="ours", folder=folder, device=torch.device("cpu"), dtype=torch.float32)
    assert model.uncached_reason is None
    with running_engine(model, kv_cache_blocks=256) as driver:
        generations = [driver.submit(prompt, max_tokens=MAX_TOKENS) for prompt in prompts]
        texts = [generation.wait().tokens for generation in generations]
        cached = driver.idle_stats().prompt_tokens_cached
    plain = plain_model(folder)
    near_ties = [
        count_near_ties(plain, prompt, text, greedy_of(plain, prompt, MAX_TOKENS))
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    assert cached > 7 * 32, "no claim about reuse without hits"
    assert sum(near_ties) <= 1

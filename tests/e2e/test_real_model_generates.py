"""The real model, as the product serves it, against `generate` of plain `transformers`."""

from __future__ import annotations

import concurrent.futures

import httpx
import msgspec
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from model_worker.models import LoadedModel, model_fingerprint, resolve_model_folder, wrap_network
from model_worker.protocol import GenerateRequest, SamplingParams, Started, Token, decode_events
from model_worker.settings import WorkerSettings
from tests.e2e.conftest import WITHIN_SECONDS, Product
from tests.near_ties import count_near_ties, greedy_of

MAX_TOKENS = 8
LEADING = "The keeper of the island wrote a letter every evening, and the market boat carried it away. "
PROMPTS = [
    *(LEADING * 3 + ending for ending in ("It said", "In winter", "The boat", "Nobody", "One day", "She")),
    "Water boils at",
    "def fibonacci(n):",
    "Ein Hund und eine Katze",
    "1, 1, 2, 3, 5, 8,",
    "Dear customer,",
    "The capital of France is",
]


@pytest.fixture(scope="module")
def plain(product: Product) -> LoadedModel:
    folder = resolve_model_folder(product.model, WorkerSettings().models_folder)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return wrap_network(
        network.eval(), name=product.model, folder=folder, fingerprint=model_fingerprint(folder)
    )


def ask(product: Product, index: int, token_ids: list[int]) -> tuple[Started, list[int]]:
    request = GenerateRequest(
        request_id=f"against-generate-{index}",
        scope="e2",
        token_ids=token_ids,
        sampling=SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True),
    )
    answer = httpx.post(
        f"{product.worker_url}/v1/generate", content=msgspec.json.encode(request), timeout=WITHIN_SECONDS
    )
    started, *events = decode_events(answer.content.splitlines())
    assert isinstance(started, Started)
    return started, [token for event in events if isinstance(event, Token) for token in event.token_ids]


def test_greedy_tokens_of_twelve_prompts_are_those_of_generate(product: Product, plain: LoadedModel) -> None:
    tokenizer = Tokenizer.from_file(str(plain.folder / "tokenizer.json"))
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    with concurrent.futures.ThreadPoolExecutor(4) as clients:
        answers = list(clients.map(lambda one: ask(product, *one), enumerate(prompts)))
    expected = [greedy_of(plain, prompt, MAX_TOKENS, eos_token_id=None) for prompt in prompts]
    near_ties = [
        count_near_ties(plain, prompt, tokens, wanted)
        for prompt, (_, tokens), wanted in zip(prompts, answers, expected, strict=True)
    ]
    assert sum(near_ties) <= 1
    cached = [started.cached.total for started, _ in answers]
    assert sum(tokens >= 32 for tokens in cached) >= 5, "prompts that share a beginning find it"

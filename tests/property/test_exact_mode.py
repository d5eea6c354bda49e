"""Exact mode: whatever was computed beside it, in whatever pieces, a token has the same bits.

Every forward pass is recorded: the logits after a prefix, and the keys and values of
its last token, by the prefix. A prefix that is computed again, or read in a hit, must
have the very bits it had before.
"""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from model_worker import exact, wiring
from model_worker.models import LoadedModel
from model_worker.runner import ModelRunner, Part
from tests.engines import EngineDriver, Generation, running_engine
from tests.tiny_models import FAMILIES, tiny

BLOCK_SIZE = 16
TINY_POOL_BLOCKS = 24


class Records:
    """What was computed, by prefix; counts how often what was known was found again, and found different."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, bytes], torch.Tensor] = {}
        self.confirmed = {"logits": 0, "rows": 0}
        self.differences = {"logits": 0, "rows": 0}

    def add(self, kind: str, prefix: bytes, found: torch.Tensor) -> None:
        known = self.known.get((kind, prefix))
        if known is None:
            self.known[kind, prefix] = found.clone()
        elif torch.equal(known, found):
            self.confirmed[kind] += 1
        else:
            self.differences[kind] += 1


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Records:
    """All that engines compute from now on, in spans so short that texts have several."""
    records = Records()
    monkeypatch.setattr(exact, "SPAN_TOKENS", 64)
    monkeypatch.setattr(exact, "TILE_TOKENS", 32)

    class RecordingRunner(ModelRunner):
        def forward(self, parts: list[Part], *arguments: Any) -> torch.Tensor:
            logits = super().forward(parts, *arguments)
            rows = iter(logits)
            for part in parts:
                tokens = array("I", part.tokens[: part.stop]).tobytes()
                slots = self._cache.slots(part.block_table, 0, part.stop)
                written = torch.cat([self._cache.keys[:, :, slots], self._cache.values[:, :, slots]], -1)
                for position in range(part.stop):
                    records.add("rows", tokens[: 4 * position + 4], written[:, :, position])
                if part.samples:
                    records.add("logits", tokens, next(rows))
            return logits

    monkeypatch.setattr(wiring, "ModelRunner", RecordingRunner)
    return records


MODELS = [
    ("llama", torch.float32),
    ("llama", torch.bfloat16),
    ("llama, all key heads", torch.float32),
    ("qwen3", torch.bfloat16),
]


@pytest.fixture(params=MODELS, ids=str)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> LoadedModel:
    family, dtype = request.param
    return tiny(FAMILIES[family], tmp_path, dtype=dtype)


def test_reuse_neighbours_preemption_and_choices_change_no_bit(model: LoadedModel, records: Records) -> None:
    rng = random.Random(0)
    base = tokens_of(rng, 150)
    prompts = [base[:cut] + tokens_of(rng, rng.randrange(1, 60)) for cut in (0, 17, 64, 127, 128, 149)]
    cold: dict[int, list[int]] = {}
    with running_engine(model, compute="exact", kv_cache_blocks=64) as driver:
        for index, prompt in enumerate(prompts):
            cold[index] = ask(driver, prompt, cache="bypass").wait().tokens
    confirmed_cold = dict(records.confirmed)
    cached = preemptions = 0
    with running_engine(
        model, compute="exact", kv_cache_blocks=TINY_POOL_BLOCKS, step_tokens=96, max_scope_share=1.0
    ) as driver:
        for _ in range(4):
            order = [rng.randrange(len(prompts)) for _ in range(4)]
            sent = [ask(driver, prompts[index], n=rng.choice([1, 1, 2])) for index in order]
            for index, generation in zip(order, sent, strict=True):
                generation.wait()
                assert all(text == cold[index] for text in generation.choices)
                cached += generation.started.cached.total
        preemptions = driver.engine.stats.preemptions
    assert cached > 600, "no claim about reuse without hits"
    assert preemptions > 0, "no claim about preemption without any"
    assert records.differences == {"logits": 0, "rows": 0}
    for kind in ("logits", "rows"):
        assert records.confirmed[kind] > confirmed_cold[kind] + 100


def ask(driver: EngineDriver, prompt: list[int], **options: object) -> Generation:
    return driver.submit(prompt, max_tokens=24, ignore_eos=True, **options)  # type: ignore[arg-type]


def tokens_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(256) for _ in range(length)]


def test_in_fast_mode_the_same_records_find_differences(tmp_path: Path, records: Records) -> None:
    prompt = tokens_of(random.Random(1), 100)
    with running_engine(tiny(FAMILIES["llama"], tmp_path), compute="fast") as driver:
        driver.generate(prompt[:50], max_tokens=1)
        driver.generate(prompt, max_tokens=1)
        driver.generate(prompt, max_tokens=1, cache="bypass")
    assert records.differences["rows"] > 0

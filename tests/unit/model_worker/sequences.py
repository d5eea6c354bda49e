"""Sequences without a model: prompts that wait and are scheduled, but never generate."""

from __future__ import annotations

import itertools

from model_worker.detokenizer import Detokenizer
from model_worker.protocol import GenerateRequest, SamplingParams
from model_worker.sampling import Sampler
from model_worker.sequence import Sequence
from tests.tiny_models import byte_tokenizer

_TOKENIZER = byte_tokenizer()
_IDS = itertools.count()


def sequence_of(prompt: list[int], *, scope: str = "aa", priority: int = 0) -> Sequence:
    sampling = SamplingParams(max_tokens=4, temperature=0.0)
    request = GenerateRequest(
        request_id=f"request-{next(_IDS)}",
        scope=scope,
        token_ids=prompt,
        sampling=sampling,
        priority=priority,
    )
    sampler = Sampler(sampling, prompt=prompt, eos_token_ids=frozenset())
    return Sequence.of(request, Detokenizer(_TOKENIZER, ()), sampler)

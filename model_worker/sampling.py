"""Choosing the next token from logits.

Pure functions: the randomness of a draw is a function of (seed, position), so a
seeded text is the same whatever shares the batch, after a preemption, and on
another worker.
"""

from __future__ import annotations

import torch
import xxhash

from model_worker.protocol import SamplingParams


def uniform_draw(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on `seed` and `position` alone."""
    digest = xxhash.xxh3_64_intdigest(position.to_bytes(8, "little"), seed=seed % 2**64)
    return (digest >> 11) * 2.0**-53


def sample_token(logits: torch.Tensor, params: SamplingParams, *, seed: int, position: int) -> int:
    """The next token for one row of logits `[vocab]`.

    Temperature, then top-k, then top-p, then inverse-CDF sampling in float64
    over tokens in order of falling probability.
    """
    if params.temperature == 0.0:
        return int(logits.argmax())
    scaled = logits.double() / params.temperature
    limit = min(params.top_k or scaled.numel(), scaled.numel())
    values, tokens = (
        scaled.topk(limit) if limit < scaled.numel() else scaled.sort(descending=True, stable=True)
    )
    cumulative = values.softmax(0).cumsum(0)
    # The nucleus is the shortest run that reaches top_p; it always holds at least one token.
    kept = int((cumulative < params.top_p).sum()) + 1 if params.top_p < 1.0 else limit
    kept = min(kept, limit)
    target = uniform_draw(seed, position) * float(cumulative[kept - 1])
    chosen = min(int((cumulative[:kept] <= target).sum()), kept - 1)
    return int(tokens[chosen])

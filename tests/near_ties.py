"""Comparing greedy texts where sums may be grouped differently.

Batches, chunks and merged segments add the same numbers in another order, so
logits differ in their last bits and a token may differ at a near-tie. Such a
difference is forgiven only when the logits say so, and then it is printed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from model_worker.models import LoadedModel
from tests.tiny_models import tiny_llama

NEAR_TIE_LOGITS = 1e-4
NEAR_TIE_LOGITS_OF = {torch.float32: NEAR_TIE_LOGITS, torch.bfloat16: 0.2}
"""Per dtype. bfloat16 has 8 bits of precision: a logit of 10 is rounded by up to 0.03, its sums by more."""


def plain_twin(model: LoadedModel) -> LoadedModel:
    """The same random network with transformers' own attention, to ask for logits."""
    return tiny_llama(model.folder, attention="eager")


def greedy_of(plain: LoadedModel, prompt: list[int], max_tokens: int, **options: object) -> list[int]:
    """What `generate` of transformers continues a prompt with."""
    whole = plain.network.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    return whole[0, len(prompt) :].tolist()


def count_near_ties(
    plain: LoadedModel, prompt: Sequence[int], got: Sequence[int], expected: Sequence[int]
) -> int:
    """0 for equal texts, 1 for texts that part at a near-tie; fails for any other difference."""
    if list(got) == list(expected):
        return 0
    at = next(index for index, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1])
    with torch.inference_mode():
        logits = plain.network(torch.tensor([[*prompt, *expected[:at]]])).logits[0, -1]
    gap = float(logits[expected[at]] - logits[got[at]])
    print(f"near-tie: {got[at]} for {expected[at]}, logits apart by {gap:.2e}")
    assert abs(gap) <= NEAR_TIE_LOGITS_OF[plain.dtype], (
        f"token {at} after {prompt} differs by {gap} in logits"
    )
    return 1

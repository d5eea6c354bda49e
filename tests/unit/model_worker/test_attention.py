"""The attention that this project computes itself, against the formula written out."""

from __future__ import annotations

import pytest
import torch

from model_worker import attention
from model_worker.attention import (
    UnsupportedAttention,
    attention_with_log_sum,
    capped_attention,
    causal_mask,
    paged_attention,
)

FIRST, TOKENS, GROUP, HEAD_DIM = 20, 25, 2, 8
SCALING, SOFTCAP = 0.3, 2.0


@pytest.fixture
def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    query = torch.randn(1, 2, GROUP * (TOKENS - FIRST), HEAD_DIM)
    key, value = torch.randn(2, 1, 2, TOKENS, HEAD_DIM)
    device = torch.device("cpu")
    mask = causal_mask(
        first=FIRST,
        num_rows=TOKENS - FIRST,
        start=0,
        stop=TOKENS,
        group=GROUP,
        dtype=torch.float32,
        device=device,
    )
    return query, key, value, mask


@pytest.mark.parametrize("tile_tokens", [1, 7, 25, 512])
def test_capped_scores_give_the_formula_in_any_tiles(
    operands: tuple[torch.Tensor, ...], tile_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "TILE_TOKENS", tile_tokens)
    query, key, value, mask = operands
    output, log_sum = capped_attention(query, key, value, mask, SCALING, SOFTCAP)
    scores = SOFTCAP * torch.tanh(query @ key.mT * SCALING / SOFTCAP) + mask
    torch.testing.assert_close(output, scores.softmax(-1) @ value)
    torch.testing.assert_close(log_sum, scores.logsumexp(-1))


@pytest.mark.parametrize("softcap", [None, SOFTCAP])
def test_two_parts_merge_to_the_whole(operands: tuple[torch.Tensor, ...], softcap: float | None) -> None:
    query, key, value, _ = operands
    whole, _ = attention_with_log_sum(query, key, value, None, SCALING, softcap)
    parts = [
        attention_with_log_sum(query, key[:, :, part], value[:, :, part], None, SCALING, softcap)
        for part in (slice(0, 9), slice(9, TOKENS))
    ]
    shares = torch.stack([log_sum for _, log_sum in parts]).softmax(0)[..., None]
    merged = sum(share * output for share, (output, _) in zip(shares, parts, strict=True))
    torch.testing.assert_close(merged, whole)


def test_a_mask_that_a_model_makes_itself_is_refused(operands: tuple[torch.Tensor, ...]) -> None:
    query, key, value, mask = operands
    with pytest.raises(UnsupportedAttention, match="mask of its own"):
        paged_attention(torch.nn.Identity(), query, key, value, mask)


@pytest.mark.parametrize("argument", ["s_aux", "sliding_window", "position_bias", "something_new"])
def test_an_argument_that_is_not_known_is_refused_by_name(
    operands: tuple[torch.Tensor, ...], argument: str
) -> None:
    query, key, value, _ = operands
    with pytest.raises(UnsupportedAttention, match=argument):
        paged_attention(torch.nn.Identity(), query, key, value, None, **{argument: 1})

"""How an unmodified `transformers` model attends over block tables.

Knows `transformers`' two seams: the cache object that a model hands its new
keys and values to, and the attention function registered by name. Does not
know scheduling, sampling or HTTP.

All sequences of a step lie packed in one row, each token with its own
position. The cache object writes keys and values into pool slots; the
attention function then computes each sequence's part over the slots of its
block table. No mask is registered for our name, so `transformers` builds none
(`masking_utils` returns early for custom implementations).
Checked on transformers 5.24.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from model_worker.kv_cache import KVCache

ATTENTION_NAME = "headstart_paged"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSequence:
    """One sequence's part of a step.

    `rows` are its places in the packed row; `context_slots` the pool slots of
    tokens 0 to the last one computed now (`[context]`); `mask` is additive,
    `[group x n, context]`, or None where every query sees the whole context.
    """

    rows: slice
    context_slots: torch.Tensor
    mask: torch.Tensor | None


class PagedCache:
    """What the model sees as its cache during one step: writes go to pool slots, reads to block tables."""

    is_compileable = False

    def __init__(self, pool: KVCache, new_slots: torch.Tensor, sequences: list[PackedSequence]) -> None:
        self.pool = pool
        self.new_slots = new_slots
        self.sequences = sequences

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores `[1, num_kv_heads, n, head_dim]` new rows; returns them unchanged."""
        self.pool.write(layer, self.new_slots, keys[0], values[0])
        return keys, values

    def get_seq_length(self, layer: int = 0) -> int:
        """Only asked for by models that make positions themselves; ours are always given."""
        return 0


def causal_mask(
    *, start: int, stop: int, group: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """Additive mask for queries at `start` to `stop` over keys 0 to `stop`, once per query head of a group.

    Shape `[group x (stop - start), stop]`. None for a single query: it sees everything.
    """
    if stop - start == 1:
        return None
    visible = torch.ones(stop - start, stop, dtype=torch.bool, device=device).tril(start)
    mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, float("-inf"))
    return mask.repeat(group, 1)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`transformers`' attention signature: `[1, heads, n, head_dim]` in, `[1, n, heads, head_dim]` out.

    Query heads that share a key head are folded into the query length, so keys
    and values are never repeated in memory.
    """
    cache: PagedCache = kwargs["paged"]
    layer: int = module.layer_idx  # type: ignore[assignment]
    num_heads, head_dim = query.shape[1], query.shape[3]
    output = query.new_empty(query.shape[2], num_heads, head_dim)
    for sequence in cache.sequences:
        keys, values = cache.pool.read(layer, sequence.context_slots)
        num_kv_heads = keys.shape[0]
        part = query[0, :, sequence.rows]
        num_rows = part.shape[1]
        folded = part.reshape(1, num_kv_heads, -1, head_dim)
        attended = F.scaled_dot_product_attention(
            folded, keys[None], values[None], attn_mask=sequence.mask, scale=scaling
        )
        output[sequence.rows] = attended.view(num_heads, num_rows, head_dim).transpose(0, 1)
    return output[None], None


AttentionInterface.register(ATTENTION_NAME, paged_attention)


def cache_argument(network: torch.nn.Module) -> str:
    """The forward argument that takes the cache: `cache` in new releases, `past_key_values` before."""
    parameters = inspect.signature(network.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"

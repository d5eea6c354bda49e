"""How an unmodified `transformers` model attends over block tables.

Knows `transformers`' two seams: the cache object that a model hands its new
keys and values to, and the attention function registered by name. Does not
know scheduling, sampling or HTTP.

All sequences of a step lie packed in one row, each token with its own
position. The cache object writes keys and values into pool slots; the
attention function then computes each segment's part over its slots. No mask is
registered for our name, so `transformers` builds none (`masking_utils` returns
early for custom implementations).
Checked on transformers 5.17 and 5.24.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from model_worker.kv_cache import KVPool

ATTENTION_NAME = "headstart_paged"

TILE_TOKENS = 512
"""Keys whose scores are in memory at once where this module computes them itself."""

HARMLESS_ARGUMENTS = frozenset(
    {
        "paged",
        # Ours from the runner's call, passed on by models to their attention.
        *("cache", "past_key_values", "position_ids", "use_cache", "logits_to_keep"),
        # Positions that are in query and key already.
        *("position_embeddings", "cache_position"),
        # Nothing in a forward pass without training: what is hidden, the segments say.
        *("dropout", "is_causal", "output_attentions", "output_hidden_states", "return_dict"),
        "output_router_logits",
    }
)
"""What attention may ignore. Any other argument that is set changes the result: a window, sinks, a bias."""


class UnsupportedAttention(Exception):
    """A model's attention is more than this module computes; the message says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentTensors:
    """A `Segment` on the device: which rows, which slots, and what is hidden.

    `rows` are places in the packed row, `slots` the pool slots of the segment's
    tokens (a slice where they lie side by side: a view instead of a copy).
    `mask` is additive, `[group x rows + num_padding, tokens]`, None where all see all:
    after a group's rows `num_padding` more are computed and dropped.

    Short segments of one row each are computed in one batch: then `slots` has
    `num_batched` times as many tokens, row by row, and `mask` is `[num_batched, 1, group, tokens]`.
    """

    rows: torch.Tensor | slice
    slots: torch.Tensor | slice
    mask: torch.Tensor | None
    num_batched: int = 1
    num_padding: int = 0


class PagedCache:
    """What the model sees as its cache during one step: writes go to pool slots, reads to block tables."""

    is_compileable = False

    def __init__(
        self,
        pool: KVPool,
        new_slots: torch.Tensor,
        segments: list[SegmentTensors],
        *,
        merges: bool,
        before_layer: Callable[[], None] = lambda: None,
    ) -> None:
        """`before_layer` is called in each layer, and may raise to end the pass."""
        self.pool = pool
        self.new_slots = new_slots
        self.segments = segments
        # Whether some row is in several segments.
        self.merges = merges
        self._before_layer = before_layer

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores `[1, num_kv_heads, n, head_dim]` new rows; returns them unchanged."""
        self._before_layer()
        self.pool.write(layer, self.new_slots, keys[0], values[0])
        return keys, values

    def get_seq_length(self, layer: int = 0) -> int:
        """Only asked for by models that make positions themselves; ours are always given."""
        return 0


def causal_mask(
    *,
    first: int,
    num_rows: int,
    start: int,
    stop: int,
    group: int,
    num_padding: int = 0,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Additive mask for `num_rows` queries from position `first` on, over keys `start` to `stop`.

    Shape `[group x num_rows + num_padding, stop - start]`: once per query head of a group; the rows
    that follow hide nothing.
    """
    visible = torch.ones(num_rows, stop - start, dtype=torch.bool, device=device).tril(first - start)
    mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, float("-inf"))
    return _padded(mask.repeat(group, 1), num_padding)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`transformers`' attention signature: `[1, heads, n, head_dim]` in, `[1, n, heads, head_dim]` out.

    Raises `UnsupportedAttention` for an argument that would change the result and is not known here.
    """
    _refuse_unknown({"a mask of its own": attention_mask, **kwargs})
    cache: PagedCache = kwargs["paged"]
    layer: int = module.layer_idx  # type: ignore[assignment]
    attend = _attend_merging if cache.merges else _attend
    attended = attend(cache, layer, cache.pool.turn(query[0]), scaling, softcap)
    return cache.pool.turn_back(attended).transpose(0, 1)[None], None


def _refuse_unknown(arguments: dict[str, Any]) -> None:
    for name in arguments.keys() - HARMLESS_ARGUMENTS:
        if arguments[name] is not None:
            raise UnsupportedAttention(f"its attention takes {name}")


def _attend(
    cache: PagedCache, layer: int, query: torch.Tensor, scaling: float | None, softcap: float | None
) -> torch.Tensor:
    """Every row in one segment: query and output `[heads, n, head_dim]`."""
    if len(cache.segments) == 1:
        return _attend_to(cache, layer, cache.segments[0], query, scaling, softcap)
    output = torch.empty_like(query)
    for segment in cache.segments:
        rows = query[:, segment.rows]
        output[:, segment.rows] = _attend_to(cache, layer, segment, rows, scaling, softcap)
    return output


def _attend_to(
    cache: PagedCache,
    layer: int,
    segment: SegmentTensors,
    query: torch.Tensor,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """One segment's rows over its tokens: query and output `[heads, n, head_dim]`."""
    keys, values = _read(cache, layer, segment)
    folded = _folded(query, keys.shape[1], segment.num_batched)
    folded, num_folded = _padded(folded, segment.num_padding), folded.shape[2]
    if softcap is not None:
        attended, _ = capped_attention(folded, keys, values, segment.mask, scaling, softcap)
    else:
        attended = F.scaled_dot_product_attention(folded, keys, values, attn_mask=segment.mask, scale=scaling)
    return _unfolded(attended[:, :, :num_folded], query.shape[1])


def _attend_merging(
    cache: PagedCache, layer: int, query: torch.Tensor, scaling: float | None, softcap: float | None
) -> torch.Tensor:
    """Rows in several segments: parts are weighted by their share of the softmax's denominator.

    A row's bits depend on its own parts and their order alone. Of what is computed here
    only `exp` is rounded in a way of its own, and it gives a number the same bits
    wherever it stands in a tensor; `logaddexp` does not.
    """
    num_heads, num_rows, _ = query.shape
    output = query.new_zeros(query.shape, dtype=torch.float32)
    weight = query.new_zeros((num_heads, num_rows, 1), dtype=torch.float32)
    largest = torch.full_like(weight, float("-inf"))
    for segment in cache.segments:
        keys, values = _read(cache, layer, segment)
        rows = query[:, segment.rows]
        folded = _folded(rows, keys.shape[1], segment.num_batched)
        folded, num_folded = _padded(folded, segment.num_padding), folded.shape[2]
        attended, log_sums = attention_with_log_sum(folded, keys, values, segment.mask, scaling, softcap)
        part = _unfolded(attended[:, :, :num_folded], rows.shape[1]).float()
        log_sum = _unfolded(log_sums[:, :, :num_folded, None], rows.shape[1])
        before = largest[:, segment.rows]
        after = torch.maximum(before, log_sum)
        kept, added = (before - after).exp_(), (log_sum - after).exp_()
        output[:, segment.rows] = kept * output[:, segment.rows] + added * part
        weight[:, segment.rows] = kept * weight[:, segment.rows] + added
        largest[:, segment.rows] = after
    return (output / weight).to(query.dtype)


def _read(cache: PagedCache, layer: int, segment: SegmentTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Two `[num_batched, num_kv_heads, tokens, head_dim]`."""
    keys, values = cache.pool.read(layer, segment.slots)
    if segment.num_batched == 1:
        return keys[None], values[None]
    batch = (keys.shape[0], segment.num_batched, -1, keys.shape[2])
    return keys.view(batch).transpose(0, 1), values.view(batch).transpose(0, 1)


def _folded(query: torch.Tensor, num_kv_heads: int, num_batched: int) -> torch.Tensor:
    """`[heads, n, head_dim]` as `[num_batched, num_kv_heads, group x n / num_batched, head_dim]`.

    Query heads that share a key head are folded into the query length, so keys
    and values are never repeated in memory.
    """
    if num_batched == 1:
        return query.reshape(1, num_kv_heads, -1, query.shape[2])
    by_member = query.reshape(num_kv_heads, -1, num_batched, query.shape[2])
    return by_member.permute(2, 0, 1, 3)


def _padded(rows: torch.Tensor, num_padding: int) -> torch.Tensor:
    """`[..., n, size]` with rows of zeros after the others."""
    return F.pad(rows, (0, 0, 0, num_padding)) if num_padding else rows


def _unfolded(folded: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The inverse of `_folded`, for any last dimension."""
    num_batched, size = folded.shape[0], folded.shape[3]
    if num_batched == 1:
        return folded.reshape(-1, num_rows, size)
    return folded.permute(1, 2, 0, 3).reshape(-1, num_rows, size)


def attention_with_log_sum(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention `[b, heads, n, head_dim]` and the log-sum-exp of its scores, float32 `[b, heads, n]`.

    `mask` broadcasts to `[b, heads, n, tokens]`.
    """
    if softcap is not None:
        return capped_attention(query, key, value, mask, scaling, softcap)
    if query.device.type == "cpu":
        output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, False, attn_mask=mask, scale=scaling
        )
        return output, log_sum
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query @ key.transpose(-1, -2)).float() * scale
    if mask is not None:
        scores = scores + mask
    log_sum = scores.logsumexp(-1)
    return (scores - log_sum[..., None]).exp().to(value.dtype) @ value, log_sum


def capped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention_with_log_sum` with scores held within ±`softcap` by a tanh, as in Gemma 2.

    Torch's own attention has no such thing. Scores exist for `TILE_TOKENS` keys
    at a time; a running maximum holds the tiles together (Milakov, Gimelshein 2018).
    Every row sees the first key.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    total = query.new_zeros(query.shape[:-1], dtype=torch.float32)
    largest = torch.full_like(total, float("-inf"))
    output = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=torch.float32)
    for start in range(0, key.shape[2], TILE_TOKENS):
        tile = slice(start, start + TILE_TOKENS)
        scores = (query @ key[:, :, tile].transpose(-1, -2)).float().mul_(scale / softcap).tanh_()
        scores.mul_(softcap)
        if mask is not None:
            scores.add_(mask[..., tile])
        before, largest = largest, torch.maximum(largest, scores.amax(-1))
        weights = scores.sub_(largest[..., None]).exp_()
        kept = (before - largest).exp_()
        total = total.mul_(kept).add_(weights.sum(-1))
        output.mul_(kept[..., None]).add_((weights.to(value.dtype) @ value[:, :, tile]).float())
    return (output / total[..., None]).to(query.dtype), largest + total.log()


AttentionInterface.register(ATTENTION_NAME, paged_attention)


def cache_argument(network: torch.nn.Module) -> str:
    """The forward argument that takes the cache: `cache` in new releases, `past_key_values` before."""
    parameters = inspect.signature(network.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"

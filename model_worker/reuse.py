"""Whether a model's prefixes can be reused block by block, and if not, why.

Knows `transformers` configurations and networks. Does not know sequences,
requests or HTTP.

Reuse is right where a token's keys and values are all that later tokens need
of it, and where attention goes through `transformers`' attention interface.
What a configuration says is believed; what it may leave out (a model with an
attention or a state of its own) is tried: a few tokens are computed in two
parts through a paged cache, and must give the logits of the model's own way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from model_worker.attention import (
    ATTENTION_NAME,
    PagedCache,
    SegmentTensors,
    UnsupportedAttention,
    cache_argument,
    causal_mask,
)
from model_worker.kv_cache import KVCache
from model_worker.kv_shape import KvShape, KvShapeUnknown

TRIAL_TOKENS, FIRST_PART = 24, 16

TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
"""How far logits may be apart, as a share of their norm: rounding, and not another computation."""

LAYER_KINDS_OF = ("layer_types", "layers_block_type", "block_types")
_TRIAL_ERRORS = (UnsupportedAttention, RuntimeError, TypeError, AttributeError, LookupError, ValueError)
"""How a network that was not made for a paged cache fails; each means the same."""

FULL_ATTENTION = {"full_attention", "attention"}


def shape_of(config: Any) -> KvShape:
    """From a configuration of `transformers`, which knows the names each model has for the same thing.

    Raises `KvShapeUnknown`.
    """
    text_config = config.get_text_config()
    shape = KvShape.of(lambda name: getattr(text_config, name, None))
    window = min([shape.context_window_tokens, *_long_rope_beginnings(text_config)])
    return replace(shape, context_window_tokens=window)


def _long_rope_beginnings(text_config: Any) -> list[int]:
    """From how many tokens on a model with LongRoPE turns every position otherwise than before.

    `transformers` decides it by the longest text of a forward pass: keys would depend on their company. A
    window that ends there leaves one way to turn them. (Dynamic scaling begins where windows end anyway.)
    """
    settings = getattr(text_config, "rope_parameters", None) or {}
    by_layer_kind = [one for one in settings.values() if isinstance(one, dict)] or [settings]
    return [
        one["original_max_position_embeddings"] for one in by_layer_kind if one.get("rope_type") == "longrope"
    ]


def forget_idle_window(config: Any) -> None:
    """A sliding window as wide as the context hides nothing: without it the attention is full."""
    text_config = config.get_text_config()
    window = getattr(text_config, "sliding_window", None)
    context = getattr(text_config, "max_position_embeddings", None)
    if window is not None and context is not None and window >= context:
        text_config.sliding_window = None


def why_not_by_configuration(config: Any) -> str | None:
    """What in a configuration forbids reuse; None if nothing does."""
    text_config = config.get_text_config()
    name = text_config.model_type
    kinds = {
        kind for attribute in LAYER_KINDS_OF for kind in getattr(text_config, attribute, None) or () if kind
    }
    if others := sorted(kinds - FULL_ATTENTION):
        return f"{name} has layers of {', '.join(others)}"
    # Where layers have kinds, a window is only for those of a windowed kind.
    if not kinds and (window := getattr(text_config, "sliding_window", None)):
        return f"{name} attends within a sliding window of {window} tokens"
    try:
        shape_of(config)
    except KvShapeUnknown as error:
        return f"{name} is no attention model that is known: {error}"
    return None


def why_not_by_class(network_class: type[Any]) -> str | None:
    """Whether a model hands its attention over to a function that it is told by name."""
    if getattr(network_class, "_supports_attention_backend", False):
        return None
    return f"{network_class.__name__} computes its attention by itself"


def why_not_by_trial(network: Any) -> str | None:
    """Computes a few tokens in both ways. The network has our attention before and after."""
    vocab_size = network.config.get_text_config().vocab_size
    token_ids = torch.tensor([trial_tokens(vocab_size)], device=network.device)
    name = type(network).__name__
    with torch.inference_mode():
        with _own_attention(network):
            own = network(input_ids=token_ids, use_cache=False).logits[0].float()
        try:
            paged = _in_two_parts(network, token_ids)
        except _TRIAL_ERRORS as error:
            return f"{name} cannot be given a paged cache ({type(error).__name__}: {_first_line(error)})"
    apart = relative_distance(paged, own)
    if not apart <= TOLERANCES[network.dtype]:
        return f"{name} depends on more than keys and values: logits are apart by {apart:.1%} in a trial"
    return None


def trial_tokens(vocab_size: int) -> list[int]:
    """Tokens from all over the vocabulary."""
    return [index * 7919 % vocab_size for index in range(1, TRIAL_TOKENS + 1)]


def relative_distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def use_own_attention(network: Any) -> None:
    """Gives a network the attention that `transformers` would choose for it.

    Before 5.24 it chose torch's where scores are capped, which leaves them as they are.
    """
    is_capped = getattr(network.config.get_text_config(), "attn_logit_softcapping", None) is not None
    takes_torchs = network._supports_sdpa and not is_capped
    network.set_attn_implementation("sdpa" if takes_torchs else "eager")


@contextmanager
def _own_attention(network: Any) -> Iterator[None]:
    use_own_attention(network)
    try:
        yield
    finally:
        network.set_attn_implementation(ATTENTION_NAME)


def _in_two_parts(network: Any, token_ids: torch.Tensor) -> torch.Tensor:
    """Logits `[tokens, vocab]`: the second part finds the first one's keys and values in a pool."""
    shape = shape_of(network.config)
    pool = KVCache(shape, num_blocks=1, block_size=TRIAL_TOKENS, dtype=network.dtype, device=network.device)
    parts = []
    for start, stop in ((0, FIRST_PART), (FIRST_PART, TRIAL_TOKENS)):
        rows = torch.arange(start, stop, device=network.device)
        mask = causal_mask(
            first=start,
            num_rows=stop - start,
            start=0,
            stop=stop,
            group=shape.group,
            dtype=network.dtype,
            device=network.device,
        )
        segment = SegmentTensors(rows=slice(0, stop - start), slots=slice(0, stop), mask=mask)
        paged = PagedCache(pool, rows, [segment], merges=False)
        output = network(
            input_ids=token_ids[:, start:stop],
            position_ids=rows[None],
            use_cache=True,
            logits_to_keep=torch.arange(stop - start, device=network.device),
            paged=paged,
            **{cache_argument(network): paged},
        )
        parts.append(output.logits[0].float())
    return torch.cat(parts)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]

"""The size of a token's keys and values, from what a model's configuration says.

Knows arithmetic. Does not know tensors, folders or libraries.

Every full-attention layer keeps, per token, one key and one value of `head_dim`
numbers for each key-value head:

    bytes per token = 2 x layers x key-value heads x head_dim x bytes per number

Fewer key-value heads than query heads is grouped-query attention (Ainslie et
al. 2023); one is multi-query attention (Shazeer 2019).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

UNLIMITED_TOKENS = 2**31
"""The context window of a model that states none: what memory holds decides."""


class KvShapeUnknown(Exception):
    """A configuration does not state what decides the shape; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """What decides the size of a token's keys and values."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_window_tokens: int

    @classmethod
    def of(cls, setting: Callable[[str], Any]) -> KvShape:
        """From a configuration, by what it has under a name: None where it has nothing.

        Names are those of `transformers`. Raises `KvShapeUnknown`.
        """

        def stated(name: str) -> int:
            value = setting(name)
            if not isinstance(value, int):
                raise KvShapeUnknown(f"the configuration does not state {name}")
            return value

        num_heads = stated("num_attention_heads")
        return cls(
            num_layers=stated("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=setting("num_key_value_heads") or num_heads,
            head_dim=setting("head_dim") or stated("hidden_size") // num_heads,
            context_window_tokens=stated("max_position_embeddings"),
        )

    @classmethod
    def at_most(cls, config: Any) -> KvShape:
        """For a model of another kind: its state, whatever it takes, is accounted for as multi-head."""
        return cls(
            num_layers=config.num_hidden_layers,
            num_heads=1,
            num_kv_heads=1,
            head_dim=config.hidden_size,
            context_window_tokens=getattr(config, "max_position_embeddings", None) or UNLIMITED_TOKENS,
        )

    @property
    def kind(self) -> str:
        if self.num_kv_heads == self.num_heads:
            return "multi-head"
        return "multi-query" if self.num_kv_heads == 1 else "grouped-query"

    @property
    def group(self) -> int:
        """Query heads that share a key-value head."""
        return self.num_heads // self.num_kv_heads

    def bytes_per_token(self, bytes_per_number: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_number

    def arithmetic(self, bytes_per_number: int) -> str:
        """The product, spelled out."""
        factors = (2, self.num_layers, self.num_kv_heads, self.head_dim, bytes_per_number)
        return " x ".join(map(str, factors))

    def variants(self) -> list[KvShape]:
        """This shape, and the same model with all, and with one, of its key-value heads."""
        counts = dict.fromkeys([self.num_kv_heads, self.num_heads, 1])
        return [replace(self, num_kv_heads=count) for count in counts]

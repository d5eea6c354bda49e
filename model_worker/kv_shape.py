"""The size of a token's keys and values, from what a model's configuration says.

Knows arithmetic. Does not know tensors, folders or libraries.

Every full-attention layer keeps, per token, one key and one value of `head_dim`
numbers for each key-value head:

    bytes per token = 2 x layers x key-value heads x bytes of `head_dim` numbers

Numbers are those of a dtype, or codes of a few bits with what decodes them.
Fewer key-value heads than query heads is grouped-query attention (Ainslie et
al. 2023); one is multi-query attention (Shazeer 2019).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

UNLIMITED_TOKENS = 2**31
"""The context window of a model that states none: what memory holds decides."""


class KvShapeUnknown(Exception):
    """A configuration does not state what decides the shape; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberFormat:
    """How the numbers of a key or value are kept: as they are, or as codes.

    Of codes, `max_group` numbers or fewer share a scale and a smallest number of
    `SCALE_BYTES` together; it is 0 where numbers are kept as they are.
    """

    name: str
    bits: int
    max_group: int = 0

    @property
    def is_codec(self) -> bool:
        return self.max_group > 0

    def group(self, head_dim: int) -> int:
        """Numbers that share a scale."""
        return math.gcd(head_dim, self.max_group)

    def fits(self, head_dim: int) -> bool:
        """Whether a row is a whole number of bytes."""
        return head_dim * self.bits % 8 == 0

    def row_bytes(self, head_dim: int) -> int:
        """Of `head_dim` numbers."""
        scales = head_dim // self.group(head_dim) * SCALE_BYTES if self.is_codec else 0
        return head_dim * self.bits // 8 + scales

    def arithmetic(self, head_dim: int) -> str:
        bytes_each, codes_per_byte = self.bits // 8, 8 // self.bits
        numbers = f"{head_dim} x {bytes_each}" if bytes_each else f"{head_dim} / {codes_per_byte}"
        if not self.is_codec:
            return numbers
        return f"({numbers} + {head_dim // self.group(head_dim)} x {SCALE_BYTES})"


SCALE_BYTES: Final = 4
"""Two float16 numbers."""

DTYPES: Final = {
    dtype.name: dtype
    for dtype in (
        NumberFormat(name="float32", bits=32),
        NumberFormat(name="bfloat16", bits=16),
        NumberFormat(name="float16", bits=16),
    )
}
CODECS: Final = {
    codec.name: codec
    for codec in (
        NumberFormat(name="int8", bits=8, max_group=256),
        NumberFormat(name="int4", bits=4, max_group=32),
    )
}


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

    def bytes_per_token(self, numbers: NumberFormat) -> int:
        return 2 * self.num_layers * self.num_kv_heads * numbers.row_bytes(self.head_dim)

    def arithmetic(self, numbers: NumberFormat) -> str:
        """The product, spelled out."""
        return f"2 x {self.num_layers} x {self.num_kv_heads} x {numbers.arithmetic(self.head_dim)}"

    def variants(self) -> list[KvShape]:
        """This shape, and the same model with all, and with one, of its key-value heads."""
        counts = dict.fromkeys([self.num_kv_heads, self.num_heads, 1])
        return [replace(self, num_kv_heads=count) for count in counts]

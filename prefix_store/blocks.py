"""What a block is called, and how its tokens look as bytes.

Knows token ids, the deployment's hash seed and the chain of names. Does not
know which blocks exist or who holds them.

A block is `block_size` tokens. Its name stands for the whole prefix up to its
end: `name[i] = hash(name[i-1] ‖ tokens[i])`, starting from a root that says
what the K/V depends on besides tokens. The hash is keyed but not collision
resistant, so a name is never proof: tokens are compared wherever blocks are
looked up.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Iterable
from enum import IntEnum
from itertools import chain
from typing import TypeAlias

import xxhash

BlockId: TypeAlias = int
"""Index of a block in the pool: `0 <= id < num_blocks`."""

BlockIds: TypeAlias = "array[int]"
"""Many of them, as `array('i')`: four bytes each, and moved without touching a Python object a block."""

BlockName = bytes
TokenView: TypeAlias = bytes | memoryview
"""Tokens as bytes, to look at: see `token_view`."""

TokenIds: TypeAlias = "array[int]"
"""Token ids as `array('I')`: four bytes each."""

Hash128 = Callable[[bytes, int], bytes]
"""(buffer, seed) -> 16 bytes."""

NAME_BYTES = 16
TOKEN_BYTES = 4
SEED_LIMIT = 2**64

_BLOCKS_PER_CUT = 128
_ADAPTER_MARK = "+"


class TokenKind(IntEnum):
    """Where a block's tokens came from. A block with one generated token counts as generated."""

    SYSTEM = 0
    USER = 1
    GENERATED = 2


def token_view(tokens: TokenIds) -> memoryview:
    """Token ids as little-endian uint32, byte by byte: the form in which they are hashed and compared.

    Nothing is copied on most machines. The array cannot grow while the view is in use.
    """
    if tokens.typecode != "I" or tokens.itemsize != TOKEN_BYTES:
        raise TypeError(f"token ids must be array('I') of {TOKEN_BYTES} bytes each, not {tokens.typecode!r}")
    if sys.byteorder == "big":
        tokens = tokens[:]
        tokens.byteswap()
    return memoryview(tokens).cast("B")


def token_bytes(tokens: TokenIds, start: int = 0, end: int | None = None) -> bytes:
    """A copy of tokens `start` to `end` in that form, to keep."""
    view = token_view(tokens)
    return bytes(view[start * TOKEN_BYTES : None if end is None else end * TOKEN_BYTES])


def block_ids(blocks: Iterable[BlockId]) -> BlockIds:
    return array("i", blocks)


def token_ids(data: bytes) -> TokenIds:
    """The inverse of `token_bytes`."""
    tokens = array("I", data)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def common_prefix(left: bytes, right: TokenView) -> int:
    """Length of the longest common prefix, by bisection over bulk comparisons."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left.startswith(right[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low


def with_adapter(scope: str, adapter: str) -> str:
    """The scope of what an adapter computed of another scope's tokens: no block is in both."""
    return f"{scope}{_ADAPTER_MARK}{adapter}"


def without_adapter(scope: str) -> str:
    """Whose a scope is, whatever the adapter."""
    return scope.partition(_ADAPTER_MARK)[0]


def has_adapter(scope: str) -> bool:
    return _ADAPTER_MARK in scope


class BlockNamer:
    """Gives blocks their names. Equal across processes, machines and restarts for equal arguments.

    `seed` is the deployment's secret of 64 bits. `hash128` is replaceable so that
    tests can force collisions.
    """

    def __init__(
        self,
        *,
        seed: int,
        model_fingerprint: str,
        dtype: str,
        kv_codec: str,
        block_size: int,
        adapter: str = "",
        hash128: Hash128 = xxhash.xxh3_128_digest,
    ) -> None:
        if not 0 <= seed < SEED_LIMIT:
            raise ValueError("seed must be an unsigned 64-bit integer")
        if block_size < 1:
            raise ValueError("block_size must be at least 1 token")
        self.block_size = block_size
        self.adapter = adapter
        self._seed = seed
        self._hash128 = hash128
        block_format = f"{block_size * TOKEN_BYTES}s"
        self._cutters = tuple(struct.Struct(block_format * count) for count in range(_BLOCKS_PER_CUT + 1))
        self._fields = (
            ("model", model_fingerprint),
            ("dtype", dtype),
            ("kv_codec", kv_codec),
            ("block_size", str(block_size)),
        )

    def root(self, scope: str) -> BlockName:
        """The name before the first block of a scope, `with_adapter` or without."""
        plain, _, adapter = scope.partition(_ADAPTER_MARK)
        fields = (*self._fields, ("adapter", adapter or self.adapter), ("scope", plain))
        return self._hash128(_tagged(fields), self._seed)

    def enter_scope(self, parent: BlockName, scope: str) -> BlockName:
        """The name a scope's own blocks continue from, after a public prefix that ends at `parent`."""
        return self._hash128(_tagged((("public", parent.hex()), ("scope", scope))), self._seed)

    def name(self, parent: BlockName, block: bytes) -> BlockName:
        """Name of one block, by its token bytes."""
        return self._hash128(parent + block, self._seed)

    def chain(self, parent: BlockName, tokens: TokenIds) -> list[BlockName]:
        """Names of the full blocks of `tokens`, which follow the block called `parent`."""
        return split_names(self.chain_bytes(parent, token_view(tokens)))

    def chain_bytes(self, parent: BlockName, data: TokenView) -> bytes:
        """Like `chain`, from token bytes to names joined.

        One hash a block is the cost of naming, and the rest of the loop matters as much:
        prepared formats cut blocks out faster than slices do, and joining a hundred
        names at a time keeps what is touched in the processor's cache.
        """
        hash128, seed, cutters = self._hash128, self._seed, self._cutters
        block_bytes = self.block_size * TOKEN_BYTES
        num_blocks = len(data) // block_bytes
        num_rest = num_blocks % _BLOCKS_PER_CUT
        cut_bytes = (num_blocks - num_rest) * block_bytes
        name = parent
        cuts = cutters[_BLOCKS_PER_CUT].iter_unpack(memoryview(data)[:cut_bytes])
        rest = cutters[num_rest].unpack_from(data, cut_bytes)
        return b"".join(
            b"".join([name := hash128(name + block, seed) for block in blocks])
            for blocks in chain(cuts, [rest])
        )


def split_names(names: bytes) -> list[BlockName]:
    """Single names out of joined ones."""
    return [names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)]


def _tagged(fields: tuple[tuple[str, str], ...]) -> bytes:
    """Tag and value of each field behind their lengths, so that no two lists of fields look alike."""
    parts: list[bytes] = []
    for tag, value in fields:
        for text in (tag.encode(), value.encode()):
            parts.append(len(text).to_bytes(8, "little"))
            parts.append(text)
    return b"".join(parts)

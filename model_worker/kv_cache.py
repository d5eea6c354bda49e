"""The tensors behind block ids: keys and values of every slot, per layer.

Knows shapes, slots and row copies. Does not know names, scopes or sequences.

A slot is the place of one token: slot = block id x block_size + offset. Per
layer, keys and values are `[num_kv_heads, num_slots, head_dim]`, so one head's
rows of neighbouring blocks lie side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from prefix_store.leases import RowCopy


class KVCacheTooLarge(Exception):
    """The memory asked for cannot be had."""


class KVCache:
    """Preallocated keys and values for `num_blocks` blocks of `block_size` tokens."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        shape = (num_layers, num_kv_heads, num_blocks * block_size, head_dim)
        try:
            # Zeroed, not empty: a stray NaN times a zero attention weight would still be NaN.
            self.keys = torch.zeros(shape, dtype=dtype, device=device)
            self.values = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:  # torch's own words end in a stack trace of its C++
            num_bytes = 2 * torch.Size(shape).numel() * dtype.itemsize
            raise KVCacheTooLarge(
                f"{num_bytes / 2**30:.1f} GiB for keys and values cannot be had: "
                "set HEADSTART_KV_CACHE_GIB or HEADSTART_KV_CACHE_BLOCKS lower"
            ) from error

    def slots(self, block_table: Sequence[int], start: int, stop: int) -> torch.Tensor:
        """Slot numbers of tokens `start` to `stop` (exclusive) of a sequence: int64 `[stop - start]`."""
        size = self.block_size
        first = start // size
        blocks = torch.tensor(block_table[first : (stop + size - 1) // size], dtype=torch.int64)
        rows = (blocks[:, None] * size + torch.arange(size)).flatten()
        return rows[start - first * size : stop - first * size].to(self.device)

    def copy_rows(self, copies: Iterable[RowCopy]) -> None:
        """Copies the first rows of one block to another over all layers, in order."""
        for copy in copies:
            source = slice(copy.source * self.block_size, copy.source * self.block_size + copy.num_rows)
            target = slice(copy.target * self.block_size, copy.target * self.block_size + copy.num_rows)
            self.keys[:, :, target] = self.keys[:, :, source]
            self.values[:, :, target] = self.values[:, :, source]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores `[num_kv_heads, n, head_dim]` rows at `slots` (`[n]`)."""
        self.keys[layer].index_copy_(1, slots, keys)
        self.values[layer].index_copy_(1, slots, values)

    def run(self, block_table: Sequence[int], start: int, stop: int) -> slice | torch.Tensor:
        """`slots`, as a slice where the blocks lie side by side: then reading them copies nothing."""
        first, last = start // self.block_size, (stop - 1) // self.block_size
        blocks = block_table[first : last + 1]
        if all(block == blocks[0] + index for index, block in enumerate(blocks)):
            begin = blocks[0] * self.block_size + start - first * self.block_size
            return slice(begin, begin + stop - start)
        return self.slots(block_table, start, stop)

    def read(self, layer: int, slots: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at `slots`: two `[num_kv_heads, n, head_dim]`, views where `slots` is a slice."""
        if isinstance(slots, slice):
            return self.keys[layer][:, slots], self.values[layer][:, slots]
        return self.keys[layer].index_select(1, slots), self.values[layer].index_select(1, slots)

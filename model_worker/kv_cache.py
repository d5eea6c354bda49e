"""The tensors behind block ids: keys and values of every slot, per layer.

Knows shapes, slots and row copies. Does not know names, scopes or sequences.

A slot is the place of one token: slot = block id x block_size + offset. Per
layer, keys and values are `[num_kv_heads, num_slots, head_dim]`, so one head's
rows of neighbouring blocks lie side by side.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch

from model_worker.kv_shape import KvShape
from prefix_store.leases import RowCopy


class KVCacheTooLarge(Exception):
    """The memory asked for cannot be had."""


class KVPool(ABC):
    """Keys and values of `num_blocks` blocks of `block_size` tokens, in whatever form.

    What a slot's row is read as depends on what was written there, and on nothing else.
    """

    def __init__(self, *, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self._tensors: list[torch.Tensor] = []

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    def _allocate(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """`[layers, heads, num_slots, …]`: the third dimension is that of slots."""
        try:
            # Zeroed, not empty: a stray NaN times a zero attention weight would still be NaN.
            tensor = torch.zeros(shape, dtype=dtype, device=self.device)
        except RuntimeError as error:  # torch's own words end in a stack trace of its C++
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            raise KVCacheTooLarge(
                f"{num_bytes / 2**30:.1f} GiB for keys or values cannot be had: "
                "set HEADSTART_KV_CACHE_GIB or HEADSTART_KV_CACHE_BLOCKS lower"
            ) from error
        self._tensors.append(tensor)
        return tensor

    def turn(self, queries: torch.Tensor) -> torch.Tensor:
        """Queries `[heads, n, head_dim]` in the coordinates in which keys are read."""
        return queries

    def turn_back(self, attended: torch.Tensor) -> torch.Tensor:
        """What attention made of values `[heads, n, head_dim]`, in the model's coordinates again."""
        return attended

    @abstractmethod
    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores `[num_kv_heads, n, head_dim]` rows at `slots` (`[n]`)."""

    @abstractmethod
    def read(self, layer: int, slots: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at `slots`: two `[num_kv_heads, n, head_dim]`, not to be written to."""

    def slots(self, block_table: Sequence[int], start: int, stop: int) -> torch.Tensor:
        """Slot numbers of tokens `start` to `stop` (exclusive) of a sequence: int64 `[stop - start]`."""
        size = self.block_size
        first = start // size
        blocks = torch.tensor(block_table[first : (stop + size - 1) // size], dtype=torch.int64)
        rows = (blocks[:, None] * size + torch.arange(size)).flatten()
        return rows[start - first * size : stop - first * size].to(self.device)

    def run(self, block_table: Sequence[int], start: int, stop: int) -> slice | torch.Tensor:
        """`slots`, as a slice where the blocks lie side by side: then reading them copies nothing.

        Of tokens beyond the block table some slots are given, for the caller to hide.
        """
        first, last = start // self.block_size, (stop - 1) // self.block_size
        blocks = [*block_table[first : last + 1]]
        while len(blocks) <= last - first:
            # The neighbour where there is one, so that what lay side by side still does.
            blocks.append(min(blocks[-1] + 1, self.num_blocks - 1))
        if all(block == blocks[0] + index for index, block in enumerate(blocks)):
            begin = blocks[0] * self.block_size + start - first * self.block_size
            return slice(begin, begin + stop - start)
        return self.slots([*block_table[:first], *blocks], start, stop)

    def copy_rows(self, copies: Iterable[RowCopy]) -> None:
        """Copies the first rows of one block to another over all layers, in order."""
        for copy in copies:
            source = slice(copy.source * self.block_size, copy.source * self.block_size + copy.num_rows)
            target = slice(copy.target * self.block_size, copy.target * self.block_size + copy.num_rows)
            for tensor in self._tensors:
                tensor[:, :, target] = tensor[:, :, source]


class KVCache(KVPool):
    """Keys and values in the model's own numbers."""

    def __init__(
        self, shape: KvShape, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(num_blocks=num_blocks, block_size=block_size, device=device)
        rows = (shape.num_layers, shape.num_kv_heads, num_blocks * block_size, shape.head_dim)
        self.keys = self._allocate(*rows, dtype=dtype)
        self.values = self._allocate(*rows, dtype=dtype)

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys[layer].index_copy_(1, slots, keys)
        self.values[layer].index_copy_(1, slots, values)

    def read(self, layer: int, slots: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Views where `slots` is a slice."""
        if isinstance(slots, slice):
            return self.keys[layer][:, slots], self.values[layer][:, slots]
        return self.keys[layer].index_select(1, slots), self.values[layer].index_select(1, slots)

"""Keys and values in 8 or 4 bits a number: more conversations in the same memory, at some loss.

Knows how a row is packed, and what a packed row is read as. Does not know
blocks, sequences or models.

Each head's key, and each value, of a token is packed by itself when it is
written: groups of neighbouring numbers share a scale and a smallest number. So
what is read does not depend on the neighbours, on the order of writes or on what
comes later in a block, and a hit reads what the first request read. That rules
out scales per channel over many tokens (KIVI: Liu et al. 2024), which are not
known before a block is full. What they are for, channels that are far larger
than the others, is met by a rotation: a Hadamard matrix spreads each channel over
all (QuaRot: Ashkboos et al. 2024). Queries are rotated likewise, so that their
products with keys stay what they were, and only what attention makes of the
values is rotated back.
"""

from __future__ import annotations

import torch

from model_worker.kv_cache import KVCache, KVPool
from model_worker.kv_shape import KvShape, NumberFormat
from model_worker.packed_linear import pack_linear_layers

NIBBLE_BITS, NIBBLE = 4, 15
LARGEST_SCALE = torch.finfo(torch.float16).max
SMALLEST_SCALE = 2.0**-24


def make_pool(
    shape: KvShape,
    codec: NumberFormat | None,
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVPool:
    """A pool for a model's keys and values, packed or as they are. Raises `KVCacheTooLarge`."""
    if codec is not None:
        return PackedKVCache(
            shape, codec, num_blocks=num_blocks, block_size=block_size, dtype=dtype, device=device
        )
    return KVCache(shape, num_blocks=num_blocks, block_size=block_size, dtype=dtype, device=device)


class PackedKVCache(KVPool):
    """Keys and values as codes; `read` gives numbers of `dtype`, rotated."""

    def __init__(
        self,
        shape: KvShape,
        codec: NumberFormat,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(num_blocks=num_blocks, block_size=block_size, device=device)
        assert codec.fits(shape.head_dim), "a row is a whole number of bytes"
        self._dtype = dtype
        self._bits = codec.bits
        self._group = codec.group(shape.head_dim)
        self._rotation = _rotation(shape.head_dim, device)
        # Keys and values in one tensor, heads of the ones before heads of the others: half the calls.
        rows = (shape.num_layers, 2 * shape.num_kv_heads, num_blocks * block_size)
        self._codes = self._allocate(*rows, shape.head_dim * codec.bits // 8, dtype=torch.uint8)
        self._scales = self._allocate(*rows, shape.head_dim // self._group, 2, dtype=torch.float16)

    def turn(self, queries: torch.Tensor) -> torch.Tensor:
        return self._rotated(queries).to(queries.dtype)

    def turn_back(self, attended: torch.Tensor) -> torch.Tensor:
        return self._rotated(attended).to(attended.dtype)

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        rows = self._rotated(torch.cat([keys, values]))
        codes, scales = pack(rows, bits=self._bits, group=self._group)
        self._codes[layer].index_copy_(1, slots, codes)
        self._scales[layer].index_copy_(1, slots, scales)

    def read(self, layer: int, slots: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Unpacked, in new memory."""
        codes, scales = self._codes[layer], self._scales[layer]
        if isinstance(slots, slice):
            codes, scales = codes[:, slots], scales[:, slots]
        else:
            codes, scales = codes.index_select(1, slots), scales.index_select(1, slots)
        rows = unpack(codes, scales, bits=self._bits, group=self._group).to(self._dtype)
        keys, values = rows.chunk(2)
        return keys, values

    def _rotated(self, rows: torch.Tensor) -> torch.Tensor:
        """In float32. The rotation is its own inverse."""
        rotated: torch.Tensor = self._rotation(rows.float())
        return rotated


def pack(numbers: torch.Tensor, *, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 `[..., d]` as codes, and what decodes each group: (scale, smallest number).

    They are uint8 `[..., d x bits / 8]` and float16 `[..., d / group, 2]`. Two codes of
    four bits share a byte: one of the first half of a row and one of the second.
    """
    grouped = _in_groups(numbers, group)
    num_steps = 2**bits - 1
    smallest, largest = grouped.aminmax(dim=-1, keepdim=True)
    # Each number fits those that are kept, not those before their rounding.
    smallest = smallest.clamp(-LARGEST_SCALE, LARGEST_SCALE).half()
    scale = ((largest - smallest) / num_steps).clamp(0, LARGEST_SCALE).half()
    # Where all are equal the scale is 0, and any code will do.
    steps = (grouped - smallest).div_(scale.float().clamp_min_(SMALLEST_SCALE))
    codes = steps.round_().clamp_(0, num_steps).to(torch.uint8).flatten(-2)
    if bits == NIBBLE_BITS:
        low, high = codes.chunk(2, -1)
        codes = low | high << NIBBLE_BITS
    return codes, torch.cat([scale, smallest], -1)


def unpack(codes: torch.Tensor, scales: torch.Tensor, *, bits: int, group: int) -> torch.Tensor:
    """What `pack` packed, within half a step: float32 `[..., d]`."""
    if bits == NIBBLE_BITS:
        codes = torch.cat([codes & NIBBLE, codes >> NIBBLE_BITS], -1)
    scale, smallest = scales.float().chunk(2, -1)
    grouped = _in_groups(codes.float(), group)
    return grouped.mul_(scale).add_(smallest).flatten(-2)


def _in_groups(numbers: torch.Tensor, group: int) -> torch.Tensor:
    return numbers.view(*numbers.shape[:-1], -1, group)


def _rotation(head_dim: int, device: torch.device) -> torch.nn.Module:
    """Products with an orthogonal, symmetric matrix: Hadamard blocks as large as `head_dim` allows."""
    size = head_dim & -head_dim
    block = torch.ones(1, 1)
    while block.shape[0] < size:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    layer = torch.nn.Linear(head_dim, head_dim, bias=False)
    matrix = torch.kron(torch.eye(head_dim // size), block * size**-0.5)
    layer.weight = torch.nn.Parameter(matrix, requires_grad=False)
    rotation = torch.nn.Sequential(layer.to(device))
    # As the model's own layers are, so that a row's product does not depend on how many there are.
    pack_linear_layers(rotation)
    return rotation

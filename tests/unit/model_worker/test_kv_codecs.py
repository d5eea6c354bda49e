"""Packed keys and values: what is lost is bounded, and depends on a row alone."""

from __future__ import annotations

import pytest
import torch

from model_worker.kv_cache import KVPool
from model_worker.kv_codecs import make_pool, pack, unpack
from model_worker.kv_shape import CODECS, DTYPES, KvShape, NumberFormat
from prefix_store.leases import RowCopy

BLOCK_SIZE, NUM_BLOCKS = 16, 6
NUM_SLOTS = BLOCK_SIZE * NUM_BLOCKS
FORMATS = [None, *CODECS.values()]
HALF_ROUNDING = 2**-11
"""A float16 number is off by this share of itself."""

codecs = pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
formats = pytest.mark.parametrize("codec", FORMATS, ids=lambda codec: codec.name if codec else "plain")


def shape_of(head_dim: int) -> KvShape:
    return KvShape(num_layers=2, num_heads=6, num_kv_heads=3, head_dim=head_dim, context_window_tokens=1000)


def pool_of(codec: NumberFormat | None, *, head_dim: int = 64, dtype: torch.dtype = torch.float32) -> KVPool:
    return make_pool(
        shape_of(head_dim),
        codec,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        dtype=dtype,
        device=torch.device("cpu"),
    )


def rows_of(seed: int, num_rows: int, *, head_dim: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys with one channel far larger than the others, as real ones have, and values."""
    draws = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 3, num_rows, head_dim, generator=draws)
    keys[..., 5] *= 20
    return keys, values


@codecs
@pytest.mark.parametrize("magnitude", [1e-6, 1.0, 1e4])
def test_each_number_is_within_half_a_step_of_what_it_was(codec: NumberFormat, magnitude: float) -> None:
    numbers = torch.randn(3, 50, 64, generator=torch.Generator().manual_seed(0)) * magnitude
    group = codec.group(64)
    codes, scales = pack(numbers, bits=codec.bits, group=group)
    found = unpack(codes, scales, bits=codec.bits, group=group)
    grouped = numbers.view(3, 50, -1, group)
    spread = grouped.amax(-1) - grouped.amin(-1)
    step = spread / (2**codec.bits - 1)
    # Scale and smallest number are float16: normal ones, and very small ones of one step's size.
    rounding = 2 * HALF_ROUNDING * (grouped.abs().amax(-1) + spread) + 2**-24 * 2**codec.bits
    bound = (step / 2 + rounding)[..., None]
    assert ((found.view_as(grouped) - grouped).abs() <= bound).all()


@codecs
def test_numbers_that_are_equal_or_enormous_stay_finite(codec: NumberFormat) -> None:
    numbers = torch.stack([torch.zeros(64), torch.full((64,), 3.3), torch.linspace(-1e9, 1e9, 64)])
    codes, scales = pack(numbers, bits=codec.bits, group=codec.group(64))
    found = unpack(codes, scales, bits=codec.bits, group=codec.group(64))
    assert found.isfinite().all()
    assert torch.equal(found[0], numbers[0])
    assert torch.allclose(found[1], numbers[1], rtol=2 * HALF_ROUNDING)


@formats
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_keys_and_values_do_as_if_nothing_were_turned(codec: NumberFormat | None, head_dim: int) -> None:
    pool = pool_of(codec, head_dim=head_dim)
    keys, values = rows_of(1, NUM_SLOTS, head_dim=head_dim)
    pool.write(1, torch.arange(NUM_SLOTS), keys, values)
    read_keys, read_values = pool.read(1, slice(0, NUM_SLOTS))
    queries = torch.randn(3, 7, head_dim, generator=torch.Generator().manual_seed(2))
    products, expected = pool.turn(queries) @ read_keys.mT, queries @ keys.mT
    tolerance = 1e-6 if codec is None else 2.0 / 2**codec.bits
    assert (products - expected).norm() <= tolerance * expected.norm()
    assert (pool.turn_back(read_values) - values).norm() <= tolerance * values.norm()


@codecs
def test_a_channel_that_is_far_larger_does_not_drown_the_others(codec: NumberFormat) -> None:
    pool = pool_of(codec)
    keys, values = rows_of(3, NUM_SLOTS)
    pool.write(0, torch.arange(NUM_SLOTS), keys, values)
    turned, _ = pool.read(0, slice(0, NUM_SLOTS))
    others = [channel for channel in range(64) if channel != 5]
    lost = (pool.turn_back(turned) - keys)[..., others].norm()
    codes, scales = pack(keys, bits=codec.bits, group=codec.group(64))
    lost_unturned = (unpack(codes, scales, bits=codec.bits, group=codec.group(64)) - keys)[..., others].norm()
    assert lost < 0.8 * lost_unturned


@formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_is_read_the_same_whatever_is_written_beside_it_and_when(
    codec: NumberFormat | None, dtype: torch.dtype
) -> None:
    keys, values = (rows.to(dtype) for rows in rows_of(4, NUM_SLOTS))
    at_once, one_by_one = pool_of(codec, dtype=dtype), pool_of(codec, dtype=dtype)
    at_once.write(0, torch.arange(NUM_SLOTS), keys, values)
    order = torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(0))
    for slot in order:
        before = one_by_one.read(0, order[:3])
        rows = slice(int(slot), int(slot) + 1)
        one_by_one.write(0, slot[None], keys[:, rows], values[:, rows])
        if int(slot) not in order[:3].tolist():
            assert all(map(torch.equal, one_by_one.read(0, order[:3]), before))
    assert all(
        map(torch.equal, one_by_one.read(0, slice(0, NUM_SLOTS)), at_once.read(0, order.sort().values))
    )


@formats
def test_copied_rows_are_read_as_the_ones_they_were_copied_from(codec: NumberFormat | None) -> None:
    pool = pool_of(codec)
    for layer in range(2):
        pool.write(layer, torch.arange(BLOCK_SIZE), *rows_of(layer, BLOCK_SIZE))
    pool.copy_rows([RowCopy(source=0, target=4, num_rows=11)])
    for layer in range(2):
        source = pool.read(layer, slice(0, 11))
        assert all(map(torch.equal, pool.read(layer, slice(4 * BLOCK_SIZE, 4 * BLOCK_SIZE + 11)), source))
        behind, _ = pool.read(layer, slice(4 * BLOCK_SIZE + 11, 5 * BLOCK_SIZE))
        assert not behind.any()


@formats
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_a_pool_takes_the_bytes_that_are_foretold(codec: NumberFormat | None, head_dim: int) -> None:
    foretold = shape_of(head_dim).bytes_per_token(codec or DTYPES["float32"])
    assert pool_of(codec, head_dim=head_dim).num_bytes == foretold * NUM_SLOTS

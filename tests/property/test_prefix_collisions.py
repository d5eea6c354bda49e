"""Names that collide never give wrong blocks: tokens decide."""

from __future__ import annotations

import pytest
import xxhash

from prefix_store.blocks import BlockNamer, Hash128
from tests.property.prefix_world import BLOCK, World
from tests.property.test_prefix_store import lives


def always_the_same(data: bytes, seed: int) -> bytes:
    return b"\x07" * 16


def one_of_two(data: bytes, seed: int) -> bytes:
    return bytes([xxhash.xxh3_64_intdigest(data, seed) % 2]) * 16


def one_of_sixteen(data: bytes, seed: int) -> bytes:
    return bytes([xxhash.xxh3_64_intdigest(data, seed) % 16]) * 16


@pytest.mark.parametrize("weak", [always_the_same, one_of_two, one_of_sixteen])
def test_colliding_names_never_return_wrong_blocks(weak: Hash128) -> None:
    """The model compares the rows behind every token that is credited, of both scopes."""
    namer = BlockNamer(
        seed=7, model_fingerprint="m", dtype="f32", kv_codec="raw", block_size=BLOCK, hash128=weak
    )
    assert len({namer.root("aa"), namer.root("bb"), namer.root("cc")}) <= 3
    lives(num_lives=25, num_steps=80, make_world=lambda: World(namer=namer))

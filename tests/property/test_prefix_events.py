"""Replaying a store's events rebuilds its index; so does a snapshot, at any time."""

from __future__ import annotations

import random

from prefix_store.directory import Applied, BlockDirectory
from prefix_store.events import KvEventLog
from tests.property.prefix_world import BLOCK, World
from tests.property.test_prefix_store import live


def announced(world: World) -> set[tuple[int, ...]]:
    """The whole prefixes of full blocks, as often as scopes have them apart."""
    return {key for key, _, _ in world.resident() if len(key[1]) % BLOCK == 0}


def rebuilt(directory: BlockDirectory) -> list[tuple[int, ...]]:
    """The whole prefix of every block that the directory has, from the parents it was told."""
    prefixes = []
    for block in directory.blocks.values():
        tokens, parent = block.token_ids, block.parent
        while parent is not None:
            tokens = directory.blocks[parent].token_ids + tokens
            parent = directory.blocks[parent].parent
        prefixes.append(tokens)
    return sorted(prefixes)


def test_a_replayed_stream_rebuilds_the_index() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        world = World(events=KvEventLog(epoch="one", block_size=BLOCK))
        reader, late = BlockDirectory(), BlockDirectory()
        for number in range(80):
            live(world, rng)
            if rng.random() < 0.05:
                world.clear()
            batch = world.store.take_events(float(number))
            if batch is not None:
                assert reader.apply(batch) is Applied.APPLIED
            if number == 40:
                late.restore(world.store.snapshot(float(number)))
            elif number > 40 and batch is not None:
                assert late.apply(batch) is Applied.APPLIED
            expected = sorted(key[1] for key in announced(world))
            assert rebuilt(reader) == expected
            assert number < 40 or rebuilt(late) == expected
        assert reader.blocks == late.blocks
        world.finish()

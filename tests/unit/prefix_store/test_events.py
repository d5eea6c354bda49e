"""What routers are told: in order, numbered, replayable, in vLLM's words."""

from __future__ import annotations

import msgspec
import pytest

from prefix_store.blocks import split_names
from prefix_store.directory import Applied, BlockDirectory
from prefix_store.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    KvEventLog,
    NumberedBatch,
    decode_batch,
    encode_batch,
)
from tests.unit.prefix_store.support import BLOCK, SCOPE, Bench, make_namer, prompt
from tests.unit.prefix_store.test_eviction import need


def bench_with_events(**limits: int) -> Bench:
    log = KvEventLog(epoch="one", block_size=BLOCK, **limits)
    return Bench(num_blocks=8, options={"events": log})


def told(bench: Bench) -> list[KvEvent]:
    batch = bench.store.take_events(1.0)
    return [] if batch is None else batch.batch.events


def names(ids_seed: int, num_blocks: int) -> list[bytes]:
    namer = make_namer()
    return namer.chain(namer.root(SCOPE), prompt(ids_seed, num_blocks * BLOCK))


def test_new_blocks_are_told_with_their_tokens_and_what_they_follow() -> None:
    bench = bench_with_events()
    bench.serve(prompt(1, 2 * BLOCK))
    [stored] = told(bench)
    assert stored == BlockStored(
        block_hashes=[*names(1, 2)],
        parent_block_hash=None,
        token_ids=prompt(1, 2 * BLOCK).tolist(),
        block_size=BLOCK,
        lora_id=None,
        medium="GPU",
        lora_name=None,
    )
    bench.serve(prompt(1, 3 * BLOCK))
    [more] = told(bench)
    assert isinstance(more, BlockStored)
    assert more.parent_block_hash == names(1, 2)[-1]
    assert more.block_hashes == names(1, 3)[2:]


def test_evicted_blocks_are_told() -> None:
    bench = bench_with_events()
    bench.serve(prompt(1, 3 * BLOCK))
    told(bench)
    need(bench, 7)
    assert told(bench) == [BlockRemoved(block_hashes=[*names(1, 3)[1:]], medium="GPU")]


def test_incomplete_blocks_are_not_told() -> None:
    bench = bench_with_events()
    bench.serve(prompt(1, BLOCK - 1))
    bench.serve(prompt(1, BLOCK - 2))
    assert told(bench) == []


def test_a_split_run_is_not_news() -> None:
    bench = bench_with_events()
    bench.serve(prompt(1, 4 * BLOCK))
    told(bench)
    bench.serve(prompt(1, 2 * BLOCK))
    assert told(bench) == []


def test_clearing_is_told_and_what_is_held_is_told_again() -> None:
    bench = bench_with_events()
    bench.serve(prompt(1, 2 * BLOCK))
    bench.serve(prompt(2, 2 * BLOCK))
    bench.acquire(prompt(1, BLOCK))
    told(bench)
    bench.store.clear()
    events = told(bench)
    at = events.index(AllBlocksCleared())
    [stored] = events[at + 1 :]
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == names(1, 1)


def test_batches_are_numbered_without_gaps_and_empty_ones_are_none() -> None:
    bench = bench_with_events()
    assert bench.store.take_events(1.0) is None
    numbers = []
    for seed in (1, 2, 3):
        bench.serve(prompt(seed, BLOCK))
        batch = bench.store.take_events(float(seed))
        assert batch is not None
        numbers.append((batch.epoch, batch.sequence, batch.batch.ts))
    assert numbers == [("one", 0, 1.0), ("one", 1, 2.0), ("one", 2, 3.0)]


def test_a_batch_on_the_wire_has_the_fields_that_vllm_sends() -> None:
    bench = bench_with_events()
    bench.serve(prompt(1, BLOCK))
    need(bench, 8)
    batch = bench.store.take_events(5.0)
    assert batch is not None
    wire = msgspec.msgpack.decode(encode_batch(batch.batch))
    assert wire == [
        5.0,
        [
            {
                "type": "BlockStored",
                "block_hashes": names(1, 1),
                "parent_block_hash": None,
                "token_ids": prompt(1, BLOCK).tolist(),
                "block_size": BLOCK,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
            },
            {"type": "BlockRemoved", "block_hashes": names(1, 1), "medium": "GPU"},
        ],
        None,
    ]
    assert decode_batch(encode_batch(batch.batch)) == batch.batch


def test_a_batch_of_vllm_is_understood() -> None:
    wire = msgspec.msgpack.encode(
        [
            7.5,
            [
                {
                    "type": "BlockStored",
                    "block_hashes": [11, 12],
                    "parent_block_hash": None,
                    "token_ids": [1, 2, 3, 4],
                    "block_size": 2,
                    "lora_id": None,
                    "medium": "GPU",
                    "lora_name": None,
                    "extra_keys": [["salt"], None],
                    "group_idx": 0,
                    "kv_cache_spec_kind": "full_attention",
                },
                {"type": "BlockRemoved", "block_hashes": [12], "medium": "GPU"},
                {"type": "AllBlocksCleared"},
            ],
            0,
        ]
    )
    batch = decode_batch(wire)
    assert [type(event) for event in batch.events] == [BlockStored, BlockRemoved, AllBlocksCleared]
    directory = BlockDirectory()
    directory.apply(NumberedBatch(epoch="vllm", sequence=0, batch=decode_batch(wire[:])))
    assert directory.blocks == {}


def test_what_is_no_batch_is_refused() -> None:
    for payload in (
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"ts": 1}),
        msgspec.msgpack.encode([1.0, [{"type": "X"}]]),
    ):
        with pytest.raises(msgspec.DecodeError):
            decode_batch(payload)


def batches(bench: Bench, seeds: range) -> list[NumberedBatch]:
    found = []
    for seed in seeds:
        bench.serve(prompt(seed, BLOCK))
        batch = bench.store.take_events(float(seed))
        assert batch is not None
        found.append(batch)
    return found


def test_a_reader_who_missed_a_batch_asks_for_it_again() -> None:
    bench = bench_with_events()
    first, second, third = batches(bench, range(1, 4))
    directory = BlockDirectory()
    assert directory.apply(first) is Applied.APPLIED
    assert directory.apply(third) is Applied.GAP
    replay = bench.store.replay_events(directory.next_sequence)
    assert replay == [second, third]
    assert [directory.apply(batch) for batch in replay] == [Applied.APPLIED, Applied.APPLIED]
    assert directory.apply(second) is Applied.REPEATED
    assert directory.match(names(3, 1)) == 1


def test_a_reader_who_missed_too_much_takes_a_snapshot() -> None:
    bench = bench_with_events(max_batches=2)
    batches(bench, range(1, 6))
    assert bench.store.replay_events(0) is None
    assert bench.store.replay_events(5) == []
    directory = BlockDirectory()
    bench.serve(prompt(6, BLOCK))
    directory.restore(bench.store.snapshot(9.0))
    assert len(directory.blocks) == 6
    [later] = batches(bench, range(7, 8))
    assert directory.apply(later) is Applied.APPLIED
    assert directory.match(names(7, 1)) == 1


def test_a_new_epoch_drops_all_that_was_known() -> None:
    old, new = bench_with_events(), Bench(options={"events": KvEventLog(epoch="two", block_size=BLOCK)})
    directory = BlockDirectory()
    for batch in batches(old, range(1, 3)):
        directory.apply(batch)
    [batch] = batches(new, range(3, 4))
    assert directory.apply(batch) is Applied.APPLIED
    assert list(directory.blocks) == names(3, 1)


def test_events_that_nobody_takes_close_their_batch_themselves() -> None:
    bench = bench_with_events(max_pending=2, max_batches=3)
    for seed in range(1, 8):
        bench.serve(prompt(seed, BLOCK))
    replay = bench.store.replay_events(0)
    assert replay is not None
    assert [len(batch.batch.events) for batch in replay] == [2, 2, 2]


def test_matching_stops_at_the_first_name_that_is_not_there() -> None:
    bench = bench_with_events()
    [batch] = batches(bench, range(1, 2))
    directory = BlockDirectory()
    directory.apply(batch)
    assert directory.match(names(1, 3)) == 1
    assert directory.match(names(2, 3)) == 0
    assert split_names(b"".join(names(1, 3))) == names(1, 3)


def test_a_store_without_events_has_none() -> None:
    bench = Bench()
    bench.serve(prompt(1, BLOCK))
    assert bench.store.take_events(1.0) is None
    with pytest.raises(ValueError, match="no events"):
        bench.store.snapshot(1.0)
    with pytest.raises(ValueError, match="no events"):
        bench.store.replay_events(0)

"""What routers are told about blocks that come and go.

Knows names, tokens, the order of events. Does not know sockets: whoever
publishes takes numbered batches from here and sends them.

Field names and encoding are those of vLLM's KV events (`vllm.distributed.kv_events`,
read from 0.32), so that routers made for it understand us and ours understands
it. A batch has a number, one higher than the last; a restart begins a new
epoch. A reader who misses a number asks for a replay, and when that is gone
for a snapshot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec

from prefix_store.blocks import BlockName, split_names, token_ids

MEDIUM_DEVICE = "GPU"
"""What vLLM calls the memory that the model computes in, whatever it is."""


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Full blocks that follow one another, the first after `parent_block_hash`; None is a prompt's start."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Blocks that can no longer be found."""

    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Nothing can be found any more; events that follow say what can."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Events in order, with the wall-clock time in seconds at which the batch was closed."""

    ts: float
    events: list[KvEvent]
    data_parallel_rank: int | None = None


class NumberedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch and its place: batches of an epoch are numbered from 0 without gaps."""

    epoch: str
    sequence: int
    batch: EventBatch


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(EventBatch)


def encode_batch(batch: EventBatch) -> bytes:
    return _ENCODER.encode(batch)


def decode_batch(payload: bytes) -> EventBatch:
    """Raises `msgspec.DecodeError` or `msgspec.ValidationError` when it is no batch."""
    return _DECODER.decode(payload)


class KvEventLog:
    """Collects events into numbered batches and keeps the last ones for replay.

    Bounded twice: `max_pending` events close a batch by themselves, and
    `max_batches` batches are kept.
    """

    def __init__(
        self,
        *,
        epoch: str,
        block_size: int,
        medium: str = MEDIUM_DEVICE,
        lora_name: str | None = None,
        max_batches: int = 10_000,
        max_pending: int = 1_000,
    ) -> None:
        self.epoch = epoch
        self.next_sequence = 0
        self._block_size = block_size
        self._medium = medium
        self._lora_name = lora_name
        self._max_pending = max_pending
        self._pending: list[KvEvent] = []
        self._batches: deque[NumberedBatch] = deque(maxlen=max_batches)
        self._last_time = 0.0

    def stored(self, *, parent: BlockName | None, names: bytes, tokens: bytes) -> None:
        self._add(self.stored_event(parent=parent, names=names, tokens=tokens))

    def stored_event(self, *, parent: BlockName | None, names: bytes, tokens: bytes) -> BlockStored:
        return BlockStored(
            block_hashes=_hashes(names),
            parent_block_hash=parent,
            token_ids=token_ids(tokens).tolist(),
            block_size=self._block_size,
            lora_id=None,
            medium=self._medium,
            lora_name=self._lora_name,
        )

    def removed(self, names: bytes) -> None:
        self._add(BlockRemoved(block_hashes=_hashes(names), medium=self._medium))

    def cleared_but(self, stored: Iterable[BlockStored]) -> None:
        """Everything went but what is told here: blocks that are held."""
        self._add(AllBlocksCleared())
        for event in stored:
            self._add(event)

    def _add(self, event: KvEvent) -> None:
        self._pending.append(event)
        if len(self._pending) >= self._max_pending:
            self.close_batch(self._last_time)

    def close_batch(self, timestamp: float) -> NumberedBatch | None:
        """Numbers the events collected so far; None when there are none."""
        self._last_time = timestamp
        if not self._pending:
            return None
        batch = NumberedBatch(
            epoch=self.epoch,
            sequence=self.next_sequence,
            batch=EventBatch(ts=timestamp, events=self._pending),
        )
        self._pending = []
        self.next_sequence += 1
        self._batches.append(batch)
        return batch

    def since(self, sequence: int) -> list[NumberedBatch] | None:
        """The closed batches from number `sequence` on; None when the first of them is gone."""
        if sequence >= self.next_sequence:
            return []
        first = self.next_sequence - len(self._batches)
        if sequence < first:
            return None
        return [batch for batch in self._batches if batch.sequence >= sequence]

    def snapshot(self, stored: Iterable[BlockStored], timestamp: float) -> NumberedBatch:
        """All that is there, as one batch that stands for every batch up to its number.

        Events collected so far are closed first: the snapshot has them.
        """
        self.close_batch(timestamp)
        events: list[KvEvent] = [AllBlocksCleared(), *stored]
        return NumberedBatch(
            epoch=self.epoch,
            sequence=self.next_sequence - 1,
            batch=EventBatch(ts=timestamp, events=events),
        )


def _hashes(names: bytes) -> list[bytes | int]:
    return [*split_names(names)]

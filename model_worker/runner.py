"""One forward pass over packed chunks, and the tokens it chooses.

Knows tensors and the model. Sees sequences only as integers: tokens, block
tables, positions.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

import torch

from model_worker.attention import PagedCache, SegmentTensors, cache_argument, causal_mask
from model_worker.kv_cache import KVPool
from model_worker.models import LoadedModel
from model_worker.sampling import Choice, DeadEnd
from model_worker.scheduler import Chunk, Step
from model_worker.segments import Segment, Span, segments_of, split_off_short
from prefix_store.leases import Lease, RowCopy


class Runner(Protocol):
    """What an engine asks of whoever computes its steps."""

    def copy(self, copies: Items[RowCopy]) -> None:
        """Carries out copies, before anything else is written."""

    def fork(self, first: Lease, fork: Lease) -> None:
        """Another text goes on from where one is."""

    def execute(self, step: Step) -> list[list[Choice | DeadEnd]]:
        """Computes the step; per chunk what comes next: nothing where the prompt goes on, else one
        choice for its sequence and one for each of its forks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """`tokens[start:stop]` of a text whose keys and values lie in `block_table`, computed in one step."""

    tokens: Items[int]
    block_table: Items[int]
    start: int
    stop: int
    samples: bool


class ModelRunner:
    """Executes steps on one model and one KV pool. `segments_of` says who attends to what together."""

    def __init__(
        self,
        model: LoadedModel,
        cache: KVPool,
        segments_of: Callable[[list[Span], int], list[Segment]] = segments_of,
    ) -> None:
        self._model = model
        self._cache = cache
        self._segments_of = segments_of
        self._cache_argument = cache_argument(model.network)
        self._group = model.kv_shape.group

    @torch.inference_mode()
    def copy(self, copies: Items[RowCopy]) -> None:
        self._cache.copy_rows(copies)

    def fork(self, first: Lease, fork: Lease) -> None:
        self.copy(fork.copies)

    @torch.inference_mode()
    def execute(self, step: Step) -> list[list[Choice | DeadEnd]]:
        logits = self.forward([_part_of(chunk) for chunk in step.chunks], step.go_on_or_raise)
        rows = iter(logits)
        return [next_tokens(chunk, next(rows)) if chunk.samples else [] for chunk in step.chunks]

    @torch.inference_mode()
    def forward(self, parts: Items[Part], before_layer: Callable[[], None] = lambda: None) -> torch.Tensor:
        """Logits `[parts that sample, vocab]` in float32; their keys and values are in the pool."""
        device = self._model.device
        token_ids: list[int] = []
        positions: list[int] = []
        new_slots: list[torch.Tensor] = []
        spans: list[Span] = []
        last_rows: list[int] = []
        for part in parts:
            spans.append(
                Span(
                    block_table=part.block_table,
                    first_row=len(token_ids),
                    start=part.start,
                    stop=part.stop,
                )
            )
            token_ids.extend(part.tokens[part.start : part.stop])
            positions.extend(range(part.start, part.stop))
            new_slots.append(self._cache.slots(part.block_table, part.start, part.stop))
            if part.samples:
                last_rows.append(len(token_ids) - 1)
        paged = self._paged_cache(spans, torch.cat(new_slots), before_layer)
        output = self._model.network(
            input_ids=torch.tensor([token_ids], device=device),
            position_ids=torch.tensor([positions], device=device),
            use_cache=True,
            # A step that only continues prompts samples nothing; one row is the least a model accepts.
            logits_to_keep=torch.tensor(last_rows or [0], device=device),
            paged=paged,
            **{self._cache_argument: paged},
        )
        logits: torch.Tensor = output.logits[0, : len(last_rows)]
        return logits.float()

    def _paged_cache(
        self, spans: list[Span], new_slots: torch.Tensor, before_layer: Callable[[], None]
    ) -> PagedCache:
        segments = self._segments_of(spans, self._cache.block_size)
        num_rows = sum(span.num_rows for span in spans)
        short, others = split_off_short(segments)
        tensors = [self._segment_tensors(segment) for segment in others]
        if short:
            tensors.append(self._batch_tensors(short))
        return PagedCache(
            self._cache,
            new_slots,
            tensors,
            merges=sum(len(segment.rows) for segment in segments) > num_rows,
            before_layer=before_layer,
        )

    def _batch_tensors(self, segments: list[Segment]) -> SegmentTensors:
        """Single rows, each over tokens of its own, padded to the longest with slots that nobody sees."""
        device = self._model.device
        lengths = torch.tensor([segment.stop - segment.start for segment in segments], device=device)
        slots = torch.nn.utils.rnn.pad_sequence(
            [self._cache.slots(each.block_table, each.start, each.stop) for each in segments],
            batch_first=True,
        )
        hidden = torch.arange(slots.shape[1], device=device) >= lengths[:, None]
        mask = torch.zeros(hidden.shape, dtype=self._model.dtype, device=device)
        mask = mask.masked_fill_(hidden, float("-inf"))[:, None, None]
        return SegmentTensors(
            rows=torch.tensor([segment.rows[0] for segment in segments], device=device),
            slots=slots.flatten(),
            mask=mask.expand(-1, 1, self._group, -1),
            num_batched=len(segments),
        )

    def _segment_tensors(self, segment: Segment) -> SegmentTensors:
        rows = segment.rows
        side_by_side = rows[-1] - rows[0] == len(rows) - 1
        num_padding = -len(rows) * self._group % segment.row_multiple
        mask = None
        if segment.causal_from is not None:
            mask = causal_mask(
                first=segment.causal_from,
                num_rows=len(rows),
                start=segment.start,
                stop=segment.stop,
                group=self._group,
                num_padding=num_padding,
                dtype=self._model.dtype,
                device=self._model.device,
            )
        return SegmentTensors(
            rows=slice(rows[0], rows[-1] + 1)
            if side_by_side
            else torch.tensor(rows, device=self._model.device),
            slots=self._cache.run(segment.block_table, segment.start, segment.stop),
            mask=mask,
            num_padding=num_padding,
        )


def _part_of(chunk: Chunk) -> Part:
    lease = chunk.sequence.lease
    assert lease is not None, "a scheduled sequence holds its blocks"
    return Part(
        tokens=chunk.sequence.tokens,
        block_table=lease.block_table,
        start=chunk.start,
        stop=chunk.stop,
        samples=chunk.samples,
    )


def next_tokens(chunk: Chunk, logits: torch.Tensor) -> list[Choice | DeadEnd]:
    """What a chunk's sequence and each of its forks choose from logits `[vocab]`."""
    first = chunk.sequence
    return [
        sequence.sampler.choose(logits, position=sequence.num_output) for sequence in (first, *first.forks)
    ]

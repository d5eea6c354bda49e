"""Exact mode: a token's keys, values and logits are the same bits, however they are computed.

Knows spans and their rows as integers, and how to try a model out. Does not know
scheduling: nothing there depends on it.

What a row gets must not depend on how many rows are computed beside it, on what
is in them, nor on where the row stands. Two things decide that:

- The layers that treat each row by itself. oneDNN's products, in float32 with
  packed weights and in bfloat16, add the same numbers in the same order for any
  number of rows. That is a property of a machine's kernels: `computes_exactly`
  tries the model out on this one.
- Attention. Its sums run over keys, so every row attends to a number of keys that
  its position alone decides: up to the end of its tile of `TILE_TOKENS`, with what
  lies behind the row hidden. Below four query rows a kernel takes other steps, so
  there are always `ROW_MULTIPLE`, or a multiple of it.

So a hit, a chunk, a neighbour or a preemption changes nothing, and decoding a
token gives what prefilling it would: its block may be shared like any other.
Shared-prefix attention merges parts that depend on who shares: exact mode has none.
The idea of kernels that do not depend on the batch: "Defeating Nondeterminism in
LLM Inference", Thinking Machines 2025.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from model_worker.kv_cache import KVCache
from model_worker.models import LoadedModel
from model_worker.runner import ModelRunner, Part
from model_worker.segments import Segment, Span

TILE_TOKENS = 128
ROW_MULTIPLE = 8

TRIAL_TOKENS = TILE_TOKENS + 12
TRIAL_BLOCK_TOKENS = 16
TRIAL_CUTS = (1, 4, 9, 64, 65, 67, 128, 129, TRIAL_TOKENS)


def tiles_of(spans: Iterable[Span], block_size: int) -> list[Segment]:
    """Segments whose shape depends on positions alone: `segments_of` for exact mode."""
    del block_size
    return [tile for span in spans for tile in _tiles(span)]


def _tiles(span: Span) -> Iterator[Segment]:
    start = span.start
    while start < span.stop:
        tile_end = (start // TILE_TOKENS + 1) * TILE_TOKENS
        stop = min(span.stop, tile_end)
        first_row = span.first_row + start - span.start
        yield Segment(
            rows=list(range(first_row, first_row + stop - start)),
            block_table=span.block_table,
            start=0,
            stop=tile_end,
            causal_from=start,
            row_multiple=ROW_MULTIPLE,
        )
        start = stop


def computes_exactly(model: LoadedModel) -> bool:
    """Whether a text computed in one go, and in pieces between strangers, gives the same bits here."""
    trial = _Trial(model)
    return all(map(torch.equal, trial.alone(), trial.in_company()))


class _Trial:
    """One text and a stranger in a small pool of their own."""

    def __init__(self, model: LoadedModel) -> None:
        num_blocks = -(-TRIAL_TOKENS // TRIAL_BLOCK_TOKENS)
        shape = model.kv_shape
        self._cache = KVCache(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            num_blocks=3 * num_blocks,
            block_size=TRIAL_BLOCK_TOKENS,
            dtype=model.dtype,
            device=model.device,
        )
        self._runner = ModelRunner(model, self._cache, tiles_of)
        draws = torch.Generator().manual_seed(0)
        self._text, self._stranger = torch.randint(
            model.vocab_size, (2, TRIAL_TOKENS), generator=draws
        ).tolist()
        self._tables = [list(range(first * num_blocks, (first + 1) * num_blocks)) for first in range(3)]

    def alone(self) -> tuple[torch.Tensor, ...]:
        table = self._tables[0]
        self._runner.forward([_part(self._text, table, 0, TILE_TOKENS)])
        logits = self._runner.forward([_part(self._text, table, TILE_TOKENS, TRIAL_TOKENS)])
        return logits[0], *self._written(table)

    def in_company(self) -> tuple[torch.Tensor, ...]:
        """In pieces, the stranger's before and after them by turns, in blocks that do not lie in order."""
        table = self._tables[1][::-1]
        before = 0
        for turn, cut in enumerate(TRIAL_CUTS):
            parts = [_part(self._text, table, before, cut)]
            parts.insert(turn % 2, _part(self._stranger, self._tables[2], 0, 1 + 5 * turn))
            logits = self._runner.forward(parts)[1 - turn % 2]
            before = cut
        return logits, *self._written(table)

    def _written(self, table: list[int]) -> tuple[torch.Tensor, ...]:
        slots = self._cache.slots(table, 0, TRIAL_TOKENS)
        return self._cache.keys[:, :, slots], self._cache.values[:, :, slots]


def _part(tokens: list[int], table: list[int], start: int, stop: int) -> Part:
    return Part(tokens=tokens, block_table=table, start=start, stop=stop, samples=True)

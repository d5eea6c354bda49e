"""Exact mode: a token's keys, values and logits are the same bits, however they are computed.

Knows spans and their rows as integers, and how to try a model out. Does not know
scheduling: nothing there depends on it.

What a row gets must not depend on how many rows are computed beside it, on what
is in them, nor on where the row stands. Two things decide that:

- The layers that treat each row by itself. oneDNN's products, in float32 with
  packed weights and in bfloat16, add the same numbers in the same order for any
  number of rows. That is a property of a machine's kernels: `computes_exactly`
  tries the model out on this one.
- Attention. Its sums run over keys, so which keys are summed together is decided by
  the row's position alone: each full span of `SPAN_TOKENS` before it, and its own span
  up to the end of the row's tile of `TILE_TOKENS`, with what lies behind the row
  hidden. The parts are merged in this order. Below four query rows a kernel takes
  other steps, so there are always `ROW_MULTIPLE`, or a multiple of it.

So a hit, a chunk, a neighbour or a preemption changes nothing, and decoding a
token gives what prefilling it would: its block may be shared like any other. Rows
whose texts have the blocks of a full span in common attend to it together.
The idea of kernels that do not depend on the batch: "Defeating Nondeterminism in
LLM Inference", Thinking Machines 2025.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise

import torch

from model_worker.kv_codecs import make_pool
from model_worker.kv_shape import NumberFormat
from model_worker.models import LoadedModel
from model_worker.runner import ModelRunner, Part
from model_worker.segments import Segment, Span

SPAN_TOKENS = 512
TILE_TOKENS = 128
ROW_MULTIPLE = 8

TRIAL_START = SPAN_TOKENS - 30
"""The trial's texts begin here, behind keys and values made up."""
TRIAL_STOP = TRIAL_START + TILE_TOKENS + 40
TRIAL_BLOCK_TOKENS = 16
TRIAL_PIECES = (1, 3, 5, 25, 1, 2, 57, 64)
"""Tokens of the pieces; what is left is the last one."""


def tiles_of(spans: Iterable[Span], block_size: int) -> list[Segment]:
    """Segments whose shape depends on positions alone: `segments_of` for exact mode.

    A row's parts come in the order of their keys.
    """
    full: defaultdict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
    own: list[Segment] = []
    for span in spans:
        for tile in _tiles(span):
            own.append(tile)
            for start in range(0, tile.start, SPAN_TOKENS):
                blocks = span.block_table[start // block_size : -(-(start + SPAN_TOKENS) // block_size)]
                full[start, tuple(blocks)] += tile.rows
    return [
        *(_full_span(start % block_size, blocks, rows) for (start, blocks), rows in sorted(full.items())),
        *own,
    ]


def _full_span(first: int, blocks: tuple[int, ...], rows: list[int]) -> Segment:
    """`first` is where the span begins in its first block: block sizes need not divide spans."""
    return Segment(
        rows=rows, block_table=blocks, start=first, stop=first + SPAN_TOKENS, row_multiple=ROW_MULTIPLE
    )


def _tiles(span: Span) -> Iterator[Segment]:
    """A span's rows, each with the keys of its own `SPAN_TOKENS`."""
    start = span.start
    while start < span.stop:
        tile_end = (start // TILE_TOKENS + 1) * TILE_TOKENS
        stop = min(span.stop, tile_end)
        first_row = span.first_row + start - span.start
        yield Segment(
            rows=list(range(first_row, first_row + stop - start)),
            block_table=span.block_table,
            start=start // SPAN_TOKENS * SPAN_TOKENS,
            stop=tile_end,
            causal_from=start,
            row_multiple=ROW_MULTIPLE,
        )
        start = stop


def computes_exactly(model: LoadedModel, codec: NumberFormat | None = None) -> bool:
    """Whether a text computed in one go, and in pieces between strangers, gives the same bits here.

    With a codec they are the same lossy ones.
    """
    trial = _Trial(model, codec)
    return all(map(torch.equal, trial.alone(), trial.in_company()))


class _Trial:
    """Two texts with one made-up beginning, in a small pool of their own."""

    def __init__(self, model: LoadedModel, codec: NumberFormat | None) -> None:
        num_blocks = -(-TRIAL_STOP // TRIAL_BLOCK_TOKENS)
        shape = model.kv_shape
        self._num_layers = shape.num_layers
        self._pool = make_pool(
            shape,
            codec,
            num_blocks=3 * num_blocks,
            block_size=TRIAL_BLOCK_TOKENS,
            dtype=model.dtype,
            device=model.device,
        )
        self._runner = ModelRunner(model, self._pool, tiles_of)
        draws = torch.Generator().manual_seed(0)
        self._text, self._stranger = torch.randint(
            model.vocab_size, (2, TRIAL_STOP), generator=draws
        ).tolist()
        self._tables = [list(range(first * num_blocks, (first + 1) * num_blocks)) for first in range(3)]
        self._tables[1].reverse()
        rows = (2, shape.num_kv_heads, TRIAL_START, shape.head_dim)
        for layer in range(self._num_layers):
            keys, values = torch.randn(rows, generator=draws).to(device=model.device, dtype=model.dtype)
            for table in self._tables:
                self._pool.write(layer, self._pool.slots(table, 0, TRIAL_START), keys, values)

    def alone(self) -> tuple[torch.Tensor, ...]:
        table, middle = self._tables[0], TRIAL_START + TILE_TOKENS
        self._runner.forward([_part(self._text, table, TRIAL_START, middle)])
        logits = self._runner.forward([_part(self._text, table, middle, TRIAL_STOP)])
        return logits[0], *self._written(table)

    def in_company(self) -> tuple[torch.Tensor, ...]:
        """In pieces, the stranger's before and after them by turns, in blocks that do not lie in order."""
        own, others = self._tables[1:]
        cuts = [*accumulate(TRIAL_PIECES, initial=TRIAL_START), TRIAL_STOP]
        for turn, (start, stop) in enumerate(pairwise(cuts)):
            parts = [_part(self._text, own, start, stop)]
            first = TRIAL_START + 7 * turn
            parts.insert(turn % 2, _part(self._stranger, others, first, first + 1 + 3 * turn))
            logits = self._runner.forward(parts)[1 - turn % 2]
        return logits, *self._written(own)

    def _written(self, table: list[int]) -> tuple[torch.Tensor, ...]:
        slots = self._pool.slots(table, TRIAL_START, TRIAL_STOP)
        return tuple(rows for layer in range(self._num_layers) for rows in self._pool.read(layer, slots))


def _part(tokens: list[int], table: list[int], start: int, stop: int) -> Part:
    return Part(tokens=tokens, block_table=table, start=start, stop=stop, samples=True)

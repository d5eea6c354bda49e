"""Which rows of a step attend to which runs of blocks.

Knows block tables, positions and rows as integers. Does not know tensors.

Every row attends to its whole context, once. Sequences that hold the same leading
blocks attend to those in one segment together, where some part, to the next ones in
one for each branch, and to the rest each in its own. Blocks that lie side by side are
a segment of their own where they are many: they are read in place, and only what lies
scattered is copied together. A row with several segments gets its parts merged.
The idea of computing attention over a shared prefix once: ChunkAttention,
Ye et al. 2024; the merge by log-sum-exp: FlashAttention-2, Dao 2023.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

MIN_SHARED_BLOCKS = 4
"""Below this a shared segment saves less than its merge costs."""

MAX_BATCHED_TOKENS = 256
"""Single rows over no more tokens than this are computed in one batch: copying them together costs less
than a call for each. Longer ones are read where they lie."""

MIN_RUN_TOKENS = 256
"""Below this, copying a run with its neighbours costs less than a part of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One sequence's part of a step: tokens `start` to `stop`, at rows `first_row` and on."""

    block_table: Items[int]
    first_row: int
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    @property
    def rows(self) -> list[int]:
        return list(range(self.first_row, self.first_row + self.num_rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """`rows` attend to tokens `start` to `stop` of a block table.

    `causal_from` is the position of the first row where later rows see more than
    earlier ones; None where every row sees the whole segment. The rows of each key
    head's queries are padded to a multiple of `row_multiple`.
    """

    rows: list[int]
    block_table: Items[int]
    start: int
    stop: int
    causal_from: int | None = None
    row_multiple: int = 1


def segments_of(spans: Items[Span], block_size: int, min_run_tokens: int = MIN_RUN_TOKENS) -> list[Segment]:
    """The segments of a step. Each (row, visible token) pair is in exactly one."""
    alike: defaultdict[int, list[Span]] = defaultdict(list)
    for span in spans:
        alike[span.block_table[0]].append(span)
    return [
        part
        for group in alike.values()
        for segment in _of_group(group, block_size)
        for part in _at_runs(segment, block_size, min_run_tokens)
    ]


def split_off_short(segments: Items[Segment]) -> tuple[list[Segment], list[Segment]]:
    """Segments that are computed in one batch, none or two at least, and the others.

    The batch is in the order of its rows: where it is all there is, nothing else puts them in place.
    A row is in it once, with the first of its short parts.
    """
    first_of = {one.rows[0]: one for one in reversed(segments) if _is_short(one)}
    if len(first_of) <= 1:
        return [], list(segments)
    short = [first_of[row] for row in sorted(first_of)]
    return short, [one for one in segments if one is not first_of.get(one.rows[0])]


def _is_short(segment: Segment) -> bool:
    single = len(segment.rows) == segment.row_multiple == 1 and segment.causal_from is None
    return single and segment.stop - segment.start <= MAX_BATCHED_TOKENS


def _at_runs(segment: Segment, block_size: int, min_run_tokens: int) -> list[Segment]:
    """A segment's parts: the long ones lie side by side, and what some rows do not see is in the last."""
    bounds = _run_bounds(segment.block_table, segment.start, segment.stop, block_size, min_run_tokens)
    if len(bounds) == 1:
        return [segment]
    if segment.causal_from is not None:
        last = next(index for index, (_, stop) in enumerate(bounds) if stop > segment.causal_from)
        bounds[last:] = [(bounds[last][0], segment.stop)]
    parts = [replace(segment, start=start, stop=stop, causal_from=None) for start, stop in bounds]
    parts[-1] = replace(parts[-1], causal_from=segment.causal_from)
    return parts


def _run_bounds(
    block_table: Items[int], start: int, stop: int, block_size: int, min_run_tokens: int
) -> list[tuple[int, int]]:
    """Where tokens `start` to `stop` are cut: around each long run of blocks that lie side by side."""
    bounds: list[tuple[int, int]] = []
    scattered_from = run_from = start
    for index in range(start // block_size + 1, -(-stop // block_size) + 1):
        end = min(index * block_size, stop)
        if end < stop and block_table[index] == block_table[index - 1] + 1:
            continue
        if end - run_from >= min_run_tokens:
            if scattered_from < run_from:
                bounds.append((scattered_from, run_from))
            bounds.append((run_from, end))
            scattered_from = end
        run_from = end
    if scattered_from < stop:
        bounds.append((scattered_from, stop))
    return bounds


def _whole(span: Span, start: int = 0) -> Segment:
    """A span's tokens from `start` on."""
    return Segment(
        rows=span.rows,
        block_table=span.block_table,
        start=start,
        stop=span.stop,
        causal_from=span.start if span.num_rows > 1 else None,
    )


def _of_group(group: list[Span], block_size: int, num_common: int = 0, start: int = 0) -> list[Segment]:
    """Segments from token `start` on of spans that have `num_common` leading blocks in common, or more."""
    if len(group) == 1:
        return [_whole(group[0], start)]
    num_common = _common_blocks(group, block_size, num_common)
    segments: list[Segment] = []
    stop = num_common * block_size
    if stop - start >= MIN_SHARED_BLOCKS * block_size:
        rows = [row for span in group for row in span.rows]
        segments.append(Segment(rows=rows, block_table=group[0].block_table, start=start, stop=stop))
        start = stop
    alike: defaultdict[int, list[Span]] = defaultdict(list)
    for span in group:
        if span.start < stop + block_size:  # its own tokens are in the next block
            segments.append(_whole(span, start))
        else:
            alike[span.block_table[num_common]].append(span)
    for branch in alike.values():
        segments.extend(_of_group(branch, block_size, num_common, start))
    return segments


def _common_blocks(group: list[Span], block_size: int, num_known: int) -> int:
    """Leading blocks that all of a group hold, each before its own tokens: those are being written."""
    first, *others = (span.block_table for span in group)
    limit = min(span.start // block_size for span in group)
    for index in range(num_known, limit):
        if any(table[index] != first[index] for table in others):
            return index
    return limit

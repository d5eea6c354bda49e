"""Attention is split into segments without changing what any row sees."""

from __future__ import annotations

import random
from collections import Counter
from itertools import chain, pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from model_worker.attention import attention_with_log_sum
from model_worker.kv_cache import KVCache, KVCacheTooLarge
from model_worker.kv_shape import KvShape
from model_worker.segments import (
    MAX_BATCHED_TOKENS,
    MIN_RUN_TOKENS,
    MIN_SHARED_BLOCKS,
    Segment,
    Span,
    segments_of,
    split_off_short,
)

BLOCK_SIZE = 4


@st.composite
def steps(draw: st.DrawFn) -> list[Span]:
    """Chunks and decoding sequences over block tables that may begin alike."""
    runs = st.builds(
        lambda first, length: list(range(first, first + length)), st.integers(0, 50), st.integers(1, 4)
    )
    blocks = st.lists(runs, min_size=1, max_size=4).map(lambda found: [*chain(*found)])
    prefixes = draw(st.lists(blocks, min_size=1, max_size=3))
    spans: list[Span] = []
    row = 0
    for number in range(draw(st.integers(1, 6))):
        common = draw(st.sampled_from(prefixes))
        num_common = draw(st.integers(0, len(common)))
        own = [1000 + 10 * number + index for index in range(draw(st.integers(1, 4)))]
        table = common[:num_common] + own
        stop = draw(st.integers(num_common * BLOCK_SIZE + 1, len(table) * BLOCK_SIZE))
        start = stop - 1 if draw(st.booleans()) else draw(st.integers(0, stop - 1))
        spans.append(Span(block_table=table, first_row=row, start=start, stop=stop))
        row += stop - start
    return spans


def visible(segment: Segment) -> list[tuple[int, int]]:
    """The (row, slot) pairs of a segment."""
    pairs = []
    for index, row in enumerate(segment.rows):
        stop = segment.stop if segment.causal_from is None else segment.causal_from + index + 1
        for token in range(segment.start, stop):
            slot = segment.block_table[token // BLOCK_SIZE] * BLOCK_SIZE + token % BLOCK_SIZE
            pairs.append((row, slot))
    return pairs


@given(steps(), st.sampled_from([1, 2 * BLOCK_SIZE, MIN_RUN_TOKENS]))
def test_each_row_sees_each_token_before_it_exactly_once(spans: list[Span], min_run_tokens: int) -> None:
    segments = segments_of(spans, BLOCK_SIZE, min_run_tokens)
    got = Counter(pair for segment in segments for pair in visible(segment))
    expected = Counter(
        (row, span.block_table[token // BLOCK_SIZE] * BLOCK_SIZE + token % BLOCK_SIZE)
        for span in spans
        for row, position in zip(span.rows, range(span.start, span.stop), strict=True)
        for token in range(position + 1)
    )
    assert got == expected


def test_decoding_sequences_attend_to_what_they_share_together() -> None:
    shared = list(range(MIN_SHARED_BLOCKS + 2))
    spans = [
        Span(
            block_table=[*shared, 100 + index],
            first_row=index,
            start=len(shared) * BLOCK_SIZE + index,
            stop=len(shared) * BLOCK_SIZE + index + 1,
        )
        for index in range(3)
    ]
    common, *own = segments_of(spans, BLOCK_SIZE)
    assert (common.rows, common.stop) == ([0, 1, 2], len(shared) * BLOCK_SIZE)
    assert [segment.rows for segment in own] == [[0], [1], [2]]
    assert [segment.start for segment in own] == [common.stop] * 3


@given(steps(), st.sampled_from([1, 2 * BLOCK_SIZE, MIN_RUN_TOKENS]))
def test_splitting_off_short_segments_loses_none(spans: list[Span], min_run_tokens: int) -> None:
    segments = segments_of(spans, BLOCK_SIZE, min_run_tokens)
    short, others = split_off_short(segments)
    assert len(short) != 1, "a batch of one is only a detour"
    assert all(len(segment.rows) == 1 for segment in short)
    assert sorted(map(id, short + others)) == sorted(map(id, segments))
    rows = [segment.rows[0] for segment in short]
    assert rows == sorted(set(rows)), "each row once"


@given(steps(), st.sampled_from([1, 2 * BLOCK_SIZE]))
def test_a_long_run_of_blocks_is_read_in_place(spans: list[Span], min_run_tokens: int) -> None:
    for segment in segments_of(spans, BLOCK_SIZE, min_run_tokens):
        blocks = segment.block_table[segment.start // BLOCK_SIZE : -(-segment.stop // BLOCK_SIZE)]
        is_scattered = any(after != before + 1 for before, after in pairwise(blocks))
        if is_scattered and segment.causal_from is None:
            assert all(length < min_run_tokens for length in run_lengths(segment))


def run_lengths(segment: Segment) -> list[int]:
    """Tokens in each of a segment's runs of blocks that lie side by side."""
    lengths = [0]
    for token in range(segment.start, segment.stop):
        index, place = divmod(token, BLOCK_SIZE)
        begins = token > segment.start and place == 0
        if begins and segment.block_table[index] != segment.block_table[index - 1] + 1:
            lengths.append(0)
        lengths[-1] += 1
    return lengths


def test_a_tree_of_prefixes_is_attended_to_branch_by_branch() -> None:
    trunk, branch = list(range(4)), list(range(10, 14))
    tables = [[*trunk, *branch, 20], [*trunk, *branch, 30], [*trunk, 40], [50]]
    spans = [
        Span(
            block_table=table,
            first_row=row,
            start=len(table) * BLOCK_SIZE - 2,
            stop=len(table) * BLOCK_SIZE - 1,
        )
        for row, table in enumerate(tables)
    ]
    shared = [one for one in segments_of(spans, BLOCK_SIZE) if len(one.rows) > 1]
    assert [(one.rows, one.start, one.stop) for one in shared] == [([0, 1, 2], 0, 16), ([0, 1], 16, 32)]


def test_prompts_that_are_computed_share_a_prefix_with_those_that_decode() -> None:
    shared = list(range(MIN_SHARED_BLOCKS))
    start = MIN_SHARED_BLOCKS * BLOCK_SIZE
    decoding = Span(block_table=[*shared, 100], first_row=0, start=start, stop=start + 1)
    chunk = Span(block_table=[*shared, 200], first_row=1, start=start, stop=start + 3)
    common, *own = segments_of([decoding, chunk], BLOCK_SIZE)
    assert (common.rows, common.stop, common.causal_from) == ([0, 1, 2, 3], start, None)
    assert [(one.start, one.stop, one.causal_from) for one in own] == [
        (start, start + 1, None),
        (start, start + 3, start),
    ]


def test_after_a_hit_only_what_is_new_is_copied_together() -> None:
    table = [*range(100), 900, 700]
    [decoding] = [Span(block_table=table, first_row=0, start=405, stop=406)]
    [chunk] = [Span(block_table=table, first_row=0, start=400, stop=406)]
    assert [(one.start, one.stop) for one in segments_of([decoding], BLOCK_SIZE)] == [(0, 400), (400, 406)]
    seen, own = segments_of([chunk], BLOCK_SIZE)
    assert (seen.stop, seen.causal_from, seen.rows) == (400, None, chunk.rows)
    assert (own.start, own.stop, own.causal_from) == (400, 406, 400)


def test_a_batch_is_in_the_order_of_its_rows_whoever_begins_alike() -> None:
    tables = ([7, 1], [0, 2], [7, 3])
    spans = [Span(block_table=table, first_row=row, start=5, stop=6) for row, table in enumerate(tables)]
    short, _ = split_off_short(segments_of(spans, BLOCK_SIZE))
    assert [segment.rows for segment in short] == [[0], [1], [2]]


def test_long_contexts_are_read_where_they_lie() -> None:
    def decoding(row: int, num_tokens: int) -> Span:
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        table = range(1000 * row, 1000 * row + num_blocks)
        return Span(block_table=table, first_row=row, start=num_tokens - 1, stop=num_tokens)

    lengths = [9, MAX_BATCHED_TOKENS + 1, MAX_BATCHED_TOKENS]
    spans = [decoding(row, length) for row, length in enumerate(lengths)]
    short, others = split_off_short(segments_of(spans, BLOCK_SIZE))
    assert [segment.stop for segment in short] == [9, MAX_BATCHED_TOKENS]
    assert [segment.stop for segment in others] == [MAX_BATCHED_TOKENS + 1]


def shape_of(*, num_layers: int, num_kv_heads: int, head_dim: int) -> KvShape:
    return KvShape(
        num_layers=num_layers,
        num_heads=num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        context_window_tokens=64,
    )


def test_blocks_side_by_side_are_read_without_a_copy() -> None:
    cache = KVCache(
        shape_of(num_layers=1, num_kv_heads=2, head_dim=8),
        num_blocks=10,
        block_size=BLOCK_SIZE,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    assert cache.run([3, 4, 5], 1, 11) == slice(13, 23)
    keys, _ = cache.read(0, slice(13, 23))
    assert keys.untyped_storage().data_ptr() == cache.keys.untyped_storage().data_ptr()
    scattered = cache.run([3, 5, 4], 1, 11)
    assert isinstance(scattered, torch.Tensor)
    assert scattered.tolist() == [13, 14, 15, 20, 21, 22, 23, 16, 17, 18]


def test_parts_merged_by_log_sum_are_the_whole() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 16)
    cut = random.Random(0).randrange(1, 39)
    parts = [
        attention_with_log_sum(query, key[:, :, at], value[:, :, at], None, None)
        for at in (slice(0, cut), slice(cut, 40))
    ]
    total = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum((log_sum - total).exp()[..., None] * part for part, log_sum in parts)
    assert torch.allclose(merged, F.scaled_dot_product_attention(query, key, value), atol=1e-6)


def test_memory_that_cannot_be_had_is_told_plainly() -> None:
    with pytest.raises(KVCacheTooLarge, match="HEADSTART_KV_CACHE_GIB"):
        KVCache(
            shape_of(num_layers=1000, num_kv_heads=1000, head_dim=1000),
            num_blocks=10**7,
            block_size=16,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )

"""Exact mode: what a row gets depends on its text and its position alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model_worker.exact import ROW_MULTIPLE, SPAN_TOKENS, TILE_TOKENS, computes_exactly, tiles_of
from model_worker.models import ModelUnavailable
from model_worker.packed_linear import pack_linear_layers
from model_worker.segments import Span
from model_worker.settings import WorkerSettings
from model_worker.wiring import build_worker
from tests.tiny_models import UNCACHED_FAMILIES, tiny, tiny_llama


def test_a_row_attends_to_the_end_of_its_own_tile_wherever_the_chunk_is_cut() -> None:
    span = Span(block_table=[0], first_row=5, start=TILE_TOKENS - 2, stop=TILE_TOKENS + 3)
    before, after = tiles_of([span], 16)
    assert (before.rows, before.start, before.stop) == ([5, 6], 0, TILE_TOKENS)
    assert (after.rows, after.start, after.stop) == ([7, 8, 9], 0, 2 * TILE_TOKENS)
    assert (before.causal_from, after.causal_from) == (TILE_TOKENS - 2, TILE_TOKENS)
    assert before.row_multiple == ROW_MULTIPLE


def test_texts_with_the_blocks_of_a_full_span_in_common_attend_to_it_together() -> None:
    num_blocks = SPAN_TOKENS // 16
    common, other = list(range(num_blocks)), list(range(50, 50 + num_blocks))
    tables = [[*common, 100], [*common, 101], [*other, 102]]
    spans = [
        Span(block_table=table, first_row=row, start=SPAN_TOKENS, stop=SPAN_TOKENS + 1)
        for row, table in enumerate(tables)
    ]
    tiles = tiles_of(spans, 16)
    assert [tile.rows for tile in tiles] == [[0, 1], [2], [0], [1], [2]]
    assert {(tile.start, tile.stop) for tile in tiles[:2]} == {(0, SPAN_TOKENS)}
    assert {(tile.start, tile.stop) for tile in tiles[2:]} == {(SPAN_TOKENS, SPAN_TOKENS + TILE_TOKENS)}


@pytest.mark.parametrize("block_size", [16, 24, 100])
def test_a_rows_parts_are_its_whole_context_in_order(block_size: int) -> None:
    position = 2 * SPAN_TOKENS + 70
    table = list(range(500, 500 + position // block_size + 1))
    span = Span(block_table=table, first_row=0, start=position, stop=position + 1)
    seen = [
        (tile.block_table[at // block_size], at % block_size)
        for tile in tiles_of([span], block_size)
        for at in range(tile.start, min(tile.stop, position + 1 if tile.causal_from else tile.stop))
    ]
    assert seen == [(table[at // block_size], at % block_size) for at in range(position + 1)]


def test_the_trial_passes_with_packed_layers(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path)
    pack_linear_layers(model.network)
    assert computes_exactly(model)


def test_the_trial_tells_a_layer_whose_rows_depend_on_their_number(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path)
    pack_linear_layers(model.network)
    model.network.model.layers[1].mlp.down_proj.register_forward_hook(_adds_what_depends_on_rows)
    assert not computes_exactly(model)


def _adds_what_depends_on_rows(
    module: torch.nn.Module, given: tuple[torch.Tensor], output: torch.Tensor
) -> torch.Tensor:
    return output * (1 + 1e-6 * output.shape[1] % 3)


def test_the_card_says_whether_bits_are_kept(tmp_path: Path) -> None:
    for compute in ("fast", "exact"):
        settings = WorkerSettings(compute=compute, kv_cache_blocks=8)
        assert build_worker(tiny_llama(tmp_path), settings).card.exact == (compute == "exact")


def test_what_cannot_be_exact_is_refused_with_the_reason(tmp_path: Path) -> None:
    settings = WorkerSettings(compute="exact", kv_cache_blocks=8)
    windowed = tiny(UNCACHED_FAMILIES["mistral, windowed"], tmp_path)
    with pytest.raises(ModelUnavailable, match=r"HEADSTART_COMPUTE=exact: .*window"):
        build_worker(windowed, settings)
    unsteady = tiny_llama(tmp_path)
    unsteady.network.model.norm.register_forward_hook(_adds_what_depends_on_rows)
    with pytest.raises(ModelUnavailable, match="depend on what is computed beside"):
        build_worker(unsteady, settings)

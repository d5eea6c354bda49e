"""Exact mode: what a row gets depends on its text and its position alone."""

from __future__ import annotations

from pathlib import Path

import torch

from model_worker.exact import ROW_MULTIPLE, TILE_TOKENS, computes_exactly, tiles_of
from model_worker.packed_linear import pack_linear_layers
from model_worker.segments import Span
from tests.tiny_models import tiny_llama


def test_a_row_attends_to_the_end_of_its_own_tile_wherever_the_chunk_is_cut() -> None:
    span = Span(block_table=[0], first_row=5, start=TILE_TOKENS - 2, stop=TILE_TOKENS + 3)
    before, after = tiles_of([span], 16)
    assert (before.rows, before.start, before.stop) == ([5, 6], 0, TILE_TOKENS)
    assert (after.rows, after.start, after.stop) == ([7, 8, 9], 0, 2 * TILE_TOKENS)
    assert (before.causal_from, after.causal_from) == (TILE_TOKENS - 2, TILE_TOKENS)
    assert before.row_multiple == ROW_MULTIPLE


def test_sequences_that_share_a_prefix_attend_to_it_each_for_itself() -> None:
    spans = [
        Span(block_table=list(range(20)), first_row=row, start=300 + row, stop=301 + row) for row in range(3)
    ]
    assert [tile.rows for tile in tiles_of(spans, 16)] == [[0], [1], [2]]


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

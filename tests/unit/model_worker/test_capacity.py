"""What fits in memory is what the worker will really allocate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from model_worker.capacity import CapacityRefused, capacity_of, command, parse_bytes
from model_worker.kv_shape import CODECS, DTYPES, KvShape, KvShapeUnknown, NumberFormat
from model_worker.models import LoadedModel
from tests.engines import running_engine
from tests.tiny_models import tiny_llama_config

SMOLLM2 = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "max_position_embeddings": 8192,
}


def test_bytes_per_token_are_the_product_that_is_shown() -> None:
    shape = KvShape.of(SMOLLM2.get)
    assert shape.bytes_per_token(DTYPES["float32"]) == 46_080
    assert shape.bytes_per_token(DTYPES["bfloat16"]) == 23_040
    assert shape.arithmetic(DTYPES["float32"]) == "2 x 30 x 3 x 64 x 4"
    assert [one.kind for one in shape.variants()] == ["grouped-query", "multi-head", "multi-query"]


def test_codecs_count_their_scales() -> None:
    shape = KvShape.of(SMOLLM2.get)
    assert shape.bytes_per_token(CODECS["int8"]) == 2 * 30 * 3 * (64 + 4)
    assert shape.bytes_per_token(CODECS["int4"]) == 2 * 30 * 3 * (32 + 2 * 4)
    assert shape.arithmetic(CODECS["int8"]) == "2 x 30 x 3 x (64 x 1 + 1 x 4)"
    assert shape.arithmetic(CODECS["int4"]) == "2 x 30 x 3 x (64 / 2 + 2 x 4)"
    for head_dim in (16, 80, 96, 128, 256):
        for codec in CODECS.values():
            assert head_dim % codec.group(head_dim) == 0


@pytest.mark.parametrize("numbers", [DTYPES["float32"], *CODECS.values()], ids=lambda numbers: numbers.name)
def test_the_running_engine_takes_what_was_foretold(tiny_model: LoadedModel, numbers: NumberFormat) -> None:
    shape = KvShape.of(tiny_llama_config().to_dict().get)
    gib = 0.01
    foretold = capacity_of(
        shape, numbers=numbers, memory_bytes=int(gib * 2**30), context_tokens=100, block_size=16
    )
    kv_dtype = numbers.name if numbers.is_codec else "auto"
    with running_engine(tiny_model, kv_cache_blocks=None, kv_cache_gib=gib, kv_dtype=kv_dtype) as driver:
        assert driver.engine.stats.blocks_total == foretold.num_blocks
        assert driver.engine.stats.kv_bytes_per_token == shape.bytes_per_token(numbers)
    assert foretold.conversations == foretold.num_blocks // 7


@pytest.mark.parametrize(
    ("text", "expected"), [("80GiB", 80 * 2**30), ("1.5 GB", 1_500_000_000), ("4096", 4096)]
)
def test_amounts_have_units(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "much", "-1GiB", "10 parsecs", "1e9GiB"])
def test_other_amounts_are_refused(text: str) -> None:
    with pytest.raises(CapacityRefused, match="--memory"):
        parse_bytes(text)


def test_a_configuration_that_does_not_say_is_refused() -> None:
    with pytest.raises(KvShapeUnknown, match="num_hidden_layers"):
        KvShape.of({"num_attention_heads": 2}.get)


def shown_for(folder: Path, config: dict[str, object]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, ["--model", str(folder), "--memory", "80GiB", "--context", "1000"])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_table_names_every_dtype(tmp_path: Path) -> None:
    output = shown_for(tmp_path, SMOLLM2 | {"model_type": "llama"})
    # 80 GiB / (46,080 x 16) blocks; 63 blocks a conversation.
    blocks = 80 * 2**30 // (46_080 * 16)
    assert f"{blocks * 16:,}" in output
    assert f"{blocks // 63:,}" in output
    for name in ("float32", "bfloat16", "int8", "int4"):
        assert name in output
    assert "No prefix is reused" not in output


def test_a_model_without_reuse_is_told_with_the_reason(tmp_path: Path) -> None:
    windowed = shown_for(tmp_path, SMOLLM2 | {"model_type": "mistral", "sliding_window": 4096})
    assert "No prefix is reused: mistral attends within a sliding window of 4096 tokens." in windowed
    stateful = shown_for(tmp_path, {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2})
    assert "No prefix is reused: mamba has layers of linear_attention." in stateful

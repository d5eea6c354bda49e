"""How much memory keys and values take, and how many conversations fit: `headstart capacity`.

Knows a model's configuration and arithmetic. Loads no weights.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic_settings import CliApp
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from model_worker.kv_shape import CODECS, DTYPES, KvShape, NumberFormat
from model_worker.models import ModelUnavailable, kv_shape, resolve_model_folder, uncached_reason
from model_worker.reuse import forget_idle_window
from model_worker.settings import WorkerSettings

SHOWN_FORMATS = (DTYPES["float32"], DTYPES["bfloat16"], *CODECS.values())
"""float16 takes what bfloat16 takes."""
_UNITS = {
    "": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}
_AMOUNT = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[A-Za-z]*)")
TABLE_WIDTH = 120


class CapacityRefused(Exception):
    """The question cannot be answered; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What fits in some memory, in whole blocks."""

    num_blocks: int
    block_size: int
    context_tokens: int

    @property
    def tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def conversations(self) -> int:
        """Whole conversations of `context_tokens`, each in blocks of its own."""
        return self.num_blocks // -(-self.context_tokens // self.block_size)


def capacity_of(
    shape: KvShape, *, numbers: NumberFormat, memory_bytes: int, context_tokens: int, block_size: int
) -> Capacity:
    """Blocks, tokens and conversations that fit in `memory_bytes`."""
    block_bytes = shape.bytes_per_token(numbers) * block_size
    return Capacity(
        num_blocks=memory_bytes // block_bytes, block_size=block_size, context_tokens=context_tokens
    )


def parse_bytes(text: str) -> int:
    """ "80GiB", "512 MB" or plain bytes. Raises `CapacityRefused`."""
    found = _AMOUNT.fullmatch(text.strip())
    if found is None or found["unit"] not in _UNITS:
        units = ", ".join(unit for unit in _UNITS if unit)
        raise CapacityRefused(f"--memory {text!r} is not an amount like 80GiB (units: {units})")
    return int(float(found["number"]) * _UNITS[found["unit"]])


def command(
    model: Annotated[str | None, typer.Option(help="Built-in name, model folder or hub id.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory for keys and values, like 80GiB.")] = None,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens of a conversation.")] = None,
) -> None:
    """Show bytes per token, and how many tokens and conversations fit, with the arithmetic."""
    settings = CliApp.run(WorkerSettings, cli_args=[])
    folder = resolve_model_folder(model or settings.model, settings.models_folder)
    config = _read_config(folder)
    shape = kv_shape(config)
    memory_bytes = parse_bytes(memory) if memory else int(settings.kv_cache_gib * 2**30)
    context_tokens = context or shape.context_window_tokens
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    console.print(
        f"{folder.name}: {shape.num_layers} layers, {shape.num_heads} query heads, "
        f"{shape.num_kv_heads} key-value heads of {shape.head_dim} ({shape.kind}). "
        f"{memory_bytes:,} bytes, conversations of {context_tokens:,} tokens, "
        f"blocks of {settings.block_size} tokens.",
        soft_wrap=True,
        highlight=False,
    )
    if (reason := uncached_reason(config)) is not None:
        console.print(f"No prefix is reused: {reason}.", soft_wrap=True, highlight=False)
    console.print(_table(shape, memory_bytes, context_tokens, settings.block_size))


def _read_config(folder: Path) -> Any:
    path = folder / "config.json"
    if not path.is_file():
        raise CapacityRefused(f"{folder} is not a model folder: config.json is missing")
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise CapacityRefused(f"{path} is no configuration that transformers knows: {error}") from error
    forget_idle_window(config)
    return config


def _table(shape: KvShape, memory_bytes: int, context_tokens: int, block_size: int) -> Table:
    table = Table(box=box.SIMPLE)
    for heading in ("key-value heads", "dtype", "layers x heads x dim x bytes"):
        table.add_column(heading, no_wrap=True)
    for heading in ("bytes per token", "tokens", "conversations"):
        table.add_column(heading, justify="right", no_wrap=True)
    for variant in shape.variants():
        label = f"{variant.num_kv_heads} ({variant.kind})" + (" *" if variant == shape else "")
        for numbers in SHOWN_FORMATS:
            fits = capacity_of(
                variant,
                numbers=numbers,
                memory_bytes=memory_bytes,
                context_tokens=context_tokens,
                block_size=block_size,
            )
            table.add_row(
                label,
                numbers.name,
                variant.arithmetic(numbers),
                f"{variant.bytes_per_token(numbers):,}",
                f"{fits.tokens:,}",
                f"{fits.conversations:,}",
            )
    table.caption = (
        "* this model; the others are the same model with other heads, for comparison. "
        "int8 and int4 (HEADSTART_KV_DTYPE): codes, and the scales that groups of them share"
    )
    return table


def main() -> None:
    """`python -m model_worker.capacity`."""
    try:
        typer.run(command)
    except (CapacityRefused, ModelUnavailable) as error:
        sys.stderr.write(f"headstart capacity: {error}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()

"""The engine's forward passes on a GPU: cold, after a hit, and decoding with and without a shared prefix.

    python benchmarks/gpu.py                  on CUDA, under five minutes; needs no weights
    python benchmarks/gpu.py --device cpu --layers 2   the same on a small model, to try the script

A Llama with random weights, by default of one billion parameters' shape (16 layers, 32 query and 8
key-value heads of 64) in bfloat16: times depend on shapes alone. Engine only: no web packages, no
other side. Where there is no GPU it says so and exits with 0. Exits with 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from peers.record import write_result
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from model_worker.attention import ATTENTION_NAME
from model_worker.kv_cache import KVCache
from model_worker.models import LoadedModel, wrap_network
from model_worker.runner import ModelRunner, Part
from model_worker.segments import Segment, Span, segments_of

BLOCK = 16
SUFFIX_TOKENS = 12
VOCABULARY = 32_000

console = Console(width=110)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison; `goal` is the largest ratio allowed."""

    what: str
    against: str
    ours_ms: float
    other_ms: float
    goal: float

    @property
    def ratio(self) -> float:
        return self.ours_ms / self.other_ms


def random_model(device: torch.device, num_layers: int) -> LoadedModel:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=32_768,
    )
    config._attn_implementation = ATTENTION_NAME
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.set_default_dtype(dtype)
    with device:
        network = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return wrap_network(network, name="random-llama", folder=Path(), fingerprint="random")


def without_sharing(spans: list[Span], block_size: int) -> list[Segment]:
    """Each sequence for itself, as if nothing were common."""
    return [segment for span in spans for segment in segments_of([span], block_size)]


class Bench:
    """A pool in which sequences share a prefix, each with one block row of its own behind it."""

    def __init__(self, model: LoadedModel, prefix_tokens: int, sequences: int) -> None:
        self._model = model
        self._prefix = list(range(prefix_tokens // BLOCK))
        self._own_blocks = -(-(SUFFIX_TOKENS + 1) // BLOCK)
        self.prefix_tokens = prefix_tokens
        self._tokens = [at % VOCABULARY for at in range(prefix_tokens + 2 * SUFFIX_TOKENS)]
        cache = KVCache(
            model.kv_shape,
            num_blocks=len(self._prefix) + sequences * self._own_blocks,
            block_size=BLOCK,
            dtype=model.dtype,
            device=model.device,
        )
        self.sharing = ModelRunner(model, cache)
        self.separate = ModelRunner(model, cache, without_sharing)

    def part(self, sequence: int, start: int, stop: int) -> Part:
        first = len(self._prefix) + sequence * self._own_blocks
        table = [*self._prefix, *range(first, first + self._own_blocks)]
        return Part(tokens=self._tokens, block_table=table, start=start, stop=stop, samples=True)

    def milliseconds(self, call: Callable[[], object], repeats: int) -> float:
        """The median, after two to warm up."""
        taken = []
        for _ in range(repeats + 2):
            self._wait()
            begin = time.perf_counter()
            call()
            self._wait()
            taken.append(time.perf_counter() - begin)
        return 1e3 * statistics.median(taken[2:])

    def _wait(self) -> None:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize()


def rows_of(bench: Bench, sequences: int, repeats: int) -> list[Row]:
    prefix, end = bench.prefix_tokens, bench.prefix_tokens + SUFFIX_TOKENS
    cold = bench.milliseconds(lambda: bench.sharing.forward([bench.part(0, 0, end)]), repeats)
    hit = bench.milliseconds(lambda: bench.sharing.forward([bench.part(0, prefix, end)]), repeats)
    steps = [bench.part(number, end, end + 1) for number in range(sequences)]
    shared = bench.milliseconds(lambda: bench.sharing.forward(steps), repeats)
    separate = bench.milliseconds(lambda: bench.separate.forward(steps), repeats)
    at = f"{prefix:,} tokens"
    return [
        Row(
            what=f"suffix of {SUFFIX_TOKENS} after {at}", against="cold", ours_ms=hit, other_ms=cold, goal=0.5
        ),
        Row(
            what=f"decode step, {sequences} on {at}",
            against="without sharing",
            ours_ms=shared,
            other_ms=separate,
            goal=1.0,
        ),
    ]


def show(rows: list[Row], device: str) -> None:
    table = Table("what", "against", "ours", "other", "ratio", "goal", title=f"Forward passes on {device}")
    for row in rows:
        shown = (f"{value:.2f} ms" for value in (row.ours_ms, row.other_ms))
        table.add_row(row.what, row.against, *shown, f"{row.ratio:.2f}", f"≤ {row.goal}")
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, default=16)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        console.print("no GPU here: not run")
        return 0
    on_gpu = options.device == "cuda"
    device = torch.device(options.device)
    model = random_model(device, options.layers)
    lengths, sequences, repeats = ((2048, 8192, 16_384), (8, 64), 20) if on_gpu else ((512,), (4,), 3)
    rows = [
        row
        for length in lengths
        for number in sequences
        for row in rows_of(Bench(model, length, number), number, repeats)
    ]
    name = torch.cuda.get_device_name() if on_gpu else "the CPU"
    show(rows, name)
    missed = [row.what for row in rows if row.ratio > row.goal]
    for what in missed:
        console.print(f"[red]missed[/red] {what}")
    if on_gpu:
        figures = [{name: getattr(row, name) for name in Row.__slots__} for row in rows]
        versions = {"torch": torch.__version__}
        write_result("gpu", {"device": name, "versions": versions, "rows": figures, "missed": missed})
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

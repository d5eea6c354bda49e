"""The price of exact mode: the same work in fast and in exact mode, by turns.

    python benchmarks/exact.py            about five minutes
    python benchmarks/exact.py --quick    two rounds, no file written

One thread, and its processor time rather than the clock's: what else the machine does counts little.
In one process, on the real model in float32, without scheduling: forward passes alone. A round measures
each case in one mode, then in the other, the order turning; figures are medians over rounds.
Before that the bits are tried: exact mode that is not exact has no price.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from peers.engine import default_folder, load_packed, random_tokens
from peers.record import write_result
from rich.console import Console
from rich.table import Table

from model_worker.exact import computes_exactly, tiles_of
from model_worker.kv_cache import KVCache
from model_worker.models import LoadedModel
from model_worker.runner import ModelRunner, Part
from model_worker.segments import segments_of
from model_worker.settings import WorkerSettings

BLOCK_SIZE = 16
PREFIX_TOKENS = 1600
SUFFIX_TOKENS = 12
SEQUENCES = 8
DECODE_STEPS = 4
MAX_PREFILL_PRICE = 0.10
"""Exact mode may cost this share of prefill throughput and still be the default, by the plan."""

console = Console(width=110)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Work whose time is told for each `count` of `unit`."""

    what: str
    unit: str
    count: int
    work: Callable[[ModelRunner], None]


def runner_of(model: LoadedModel, mode: str) -> ModelRunner:
    cache = KVCache(
        model.kv_shape,
        num_blocks=2 * PREFIX_TOKENS // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        dtype=model.dtype,
        device=model.device,
    )
    return ModelRunner(model, cache, tiles_of if mode == "exact" else segments_of)


def cases(step_tokens: int) -> list[Case]:
    tokens = random_tokens(0, PREFIX_TOKENS + 100)
    prefix_blocks = PREFIX_TOKENS // BLOCK_SIZE
    private = 8
    on_one_prefix = [
        [*range(prefix_blocks), *range(first, first + private)]
        for first in range(prefix_blocks, prefix_blocks + SEQUENCES * private, private)
    ]
    own = PREFIX_TOKENS // SEQUENCES // BLOCK_SIZE
    each_its_own = [list(range(first, first + own)) for first in range(0, SEQUENCES * own, own)]

    def prefill(runner: ModelRunner) -> None:
        for start in range(0, PREFIX_TOKENS, step_tokens):
            stop = min(PREFIX_TOKENS, start + step_tokens)
            runner.forward([part(tokens, on_one_prefix[0], start, stop)])

    def hit(runner: ModelRunner) -> None:
        runner.forward([part(tokens, on_one_prefix[0], PREFIX_TOKENS, PREFIX_TOKENS + SUFFIX_TOKENS)])

    def decode(tables: list[list[int]], start: int) -> Callable[[ModelRunner], None]:
        def steps(runner: ModelRunner) -> None:
            for at in range(start, start + DECODE_STEPS):
                runner.forward([part(tokens, table, at, at + 1) for table in tables])

        return steps

    after = PREFIX_TOKENS + SUFFIX_TOKENS
    several, own_tokens = f"decode, {SEQUENCES} sequences", own * BLOCK_SIZE
    return [
        Case(what=f"prefill of {PREFIX_TOKENS:,}", unit="token", count=PREFIX_TOKENS, work=prefill),
        Case(what=f"hit: {SUFFIX_TOKENS} after {PREFIX_TOKENS:,}", unit="forward", count=1, work=hit),
        Case(
            what="decode, 1 sequence", unit="step", count=DECODE_STEPS, work=decode(on_one_prefix[:1], after)
        ),
        Case(
            what=f"{several} of {own_tokens} tokens",
            unit="step",
            count=DECODE_STEPS,
            work=decode(each_its_own, own_tokens - DECODE_STEPS),
        ),
        Case(
            what=f"{several} on one prefix of {PREFIX_TOKENS:,}",
            unit="step",
            count=DECODE_STEPS,
            work=decode(on_one_prefix, after),
        ),
    ]


def part(tokens: list[int], table: list[int], start: int, stop: int) -> Part:
    return Part(tokens=tokens, block_table=table, start=start, stop=stop, samples=True)


def measure(model: LoadedModel, rounds: int, step_tokens: int) -> list[dict[str, object]]:
    runners = {mode: runner_of(model, mode) for mode in ("fast", "exact")}
    found: list[dict[str, object]] = []
    for case in cases(step_tokens):
        milliseconds: dict[str, list[float]] = {mode: [] for mode in runners}
        for number in range(rounds + 1):
            for mode in runners if number % 2 else reversed(runners):
                begin = time.process_time()
                case.work(runners[mode])
                taken = 1e3 * (time.process_time() - begin) / case.count
                if number:  # the first one warms both
                    milliseconds[mode].append(taken)
        found.append({"what": case.what, "unit": case.unit} | milliseconds)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    model = load_packed(default_folder())
    if not computes_exactly(model):
        console.print("[red]missed[/red] on this machine a token's bits depend on what is computed beside it")
        return 1
    found = measure(model, 2 if quick else 7, WorkerSettings(_cli_parse_args=[]).step_tokens)
    table = Table(title="Exact mode, one thread, float32 (processor time, medians)")
    for heading in ("what", "fast", "exact", "ratio", "rounds"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for row in found:
        fast, exact = (statistics.median(row[mode]) for mode in ("fast", "exact"))
        row["ratio"] = exact / fast
        ratios = [ours / theirs for ours, theirs in zip(row["exact"], row["fast"], strict=True)]
        shown = (f"{value:.2f} ms/{row['unit']}" for value in (fast, exact))
        table.add_row(row["what"], *shown, f"{exact / fast:.2f}", f"{min(ratios):.2f}–{max(ratios):.2f}")
    console.print(table)
    price = 1 - 1 / found[0]["ratio"]
    console.print(
        f"prefill throughput lost: {price:.1%} (the plan's limit for a default: {MAX_PREFILL_PRICE:.0%})"
    )
    if not quick:
        write_result("exact", {"versions": {"torch": torch.__version__}, "cases": found, "price": price})
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`headstart simulate`: a trace under policies and capacities, as a table, JSON and a plot.

Knows the command line and what to print. Does not know how a policy or a trace
format works.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from prefix_store.policy import POLICIES
from prefix_store.replay import (
    BeladyPolicy,
    Replay,
    prompts_of,
    replay,
    replay_fifo,
    replay_request_lru,
)
from prefix_store.text_tokens import TokenizerUnusable, load_encode
from prefix_store.traces import TEXT_BLOCK_SIZE, Trace, TraceError, read_trace

BELADY, FIFO, REQUEST_LRU = "belady", "fifo", "request-lru"
POLICY_NAMES = (*POLICIES, FIFO, BELADY, REQUEST_LRU)
DEFAULT_POLICIES = ("hazard", "lru", BELADY)
DEFAULT_CAPACITIES = (3000, 5859, 10000)
UNLIMITED = "inf"

Capacity: TypeAlias = int | None
"""In blocks, or tokens for `request-lru`; None is no limit."""
Advance: TypeAlias = Callable[[int], None]
"""Told how many more requests were replayed."""

_REPORT_EVERY = 64


class SimulationRefused(ValueError):
    """What was asked cannot be simulated. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Hits and references are blocks, or tokens with `request-lru`, as is the capacity."""

    policy: str
    capacity: Capacity
    unit: str
    references: int
    hits: int
    hit_rate: float


def simulate(
    trace: Trace,
    policies: Sequence[str],
    capacities: Sequence[Capacity],
    *,
    advance: Advance = lambda num_requests: None,
) -> tuple[Outcome, ...]:
    """Replays the trace once for each policy and capacity. Raises `SimulationRefused`."""
    for policy in policies:
        if policy not in POLICY_NAMES:
            raise SimulationRefused(f"no policy {policy!r}; there are {', '.join(POLICY_NAMES)}")
    for capacity in capacities:
        if capacity is not None and capacity < 1:
            raise SimulationRefused(f"a capacity must be 1 or more, or {UNLIMITED}, not {capacity}")
    return tuple(
        _outcome(policy, capacity, _replay(trace, policy, capacity, advance))
        for policy in policies
        for capacity in capacities
    )


def _replay(trace: Trace, policy: str, capacity: Capacity, advance: Advance) -> Replay:
    num_told = 0

    def progress(num_requests: int) -> None:
        nonlocal num_told
        if num_requests - num_told >= _REPORT_EVERY or num_requests == len(trace.requests):
            advance(num_requests - num_told)
            num_told = num_requests

    requests = trace.requests
    if policy == REQUEST_LRU:
        try:
            prompts = prompts_of(trace)
        except ValueError as error:
            raise SimulationRefused(f"{REQUEST_LRU}: {error}") from error
        return replay_request_lru(prompts, capacity=capacity, progress=progress)
    if policy == FIFO:
        return replay_fifo(requests, capacity=capacity, progress=progress)
    chosen = BeladyPolicy(requests) if policy == BELADY else POLICIES[policy]()
    return replay(requests, chosen, capacity=capacity, progress=progress)


def _outcome(policy: str, capacity: Capacity, replayed: Replay) -> Outcome:
    return Outcome(
        policy=policy,
        capacity=capacity,
        unit="tokens" if policy == REQUEST_LRU else "blocks",
        references=sum(replayed.references),
        hits=sum(replayed.hits),
        hit_rate=replayed.hit_rate,
    )


def command(
    trace: Annotated[
        Path, typer.Option(help="A trace: Mooncake, coding-agent sessions or agent text; .gz too.")
    ],
    policy: Annotated[
        list[str] | None, typer.Option(metavar="NAME...", help=f"Of {', '.join(POLICY_NAMES)}.")
    ] = None,
    capacity: Annotated[
        list[str] | None, typer.Option(metavar="N...|inf", help="Blocks; tokens for request-lru.")
    ] = None,
    more: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME|N]...", help="More policies and capacities.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="For text: a tokenizer.json, or a tokenizer.model of ranks.")
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="For text: tokens a block.")] = TEXT_BLOCK_SIZE,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    plot_path: Annotated[Path | None, typer.Option("--plot", help="Write a plot here, as PNG.")] = None,
) -> None:
    """Replay a trace through eviction policies and pool sizes: how much would have been found."""
    try:
        names, sizes = _sorted_out(policy, capacity, more)
        _require_plotting(plot_path)
        encode = None if tokenizer is None else load_encode(tokenizer)
        requests = read_trace(trace, encode=encode, text_block_size=block_size)
        outcomes = _simulate_with_bar(requests, names, sizes)
        console = Console()
        console.print(f"{requests.name} ({requests.format.value}): share found in a cache of so many blocks")
        console.print(table_of(outcomes))
        if json_path is not None:
            json_path.write_text(json.dumps(document_of(requests, outcomes), indent=2) + "\n")
        if plot_path is not None:
            write_plot(plot_path, requests, outcomes)
    except (TraceError, TokenizerUnusable, SimulationRefused) as error:
        _refuse(str(error), error)
    except OSError as error:
        _refuse(f"{error.filename}: {error.strerror}", error)


def _refuse(message: str, error: Exception) -> None:
    typer.echo(f"headstart simulate: {message}", err=True)
    raise typer.Exit(1) from error


def _sorted_out(
    policy: Sequence[str] | None, capacity: Sequence[str] | None, more: Sequence[str] | None
) -> tuple[tuple[str, ...], tuple[Capacity, ...]]:
    """`--policy lru lfu --capacity 10 20` leaves `lfu` and `20` over: numbers are capacities."""
    names, sizes = list(policy or ()), list(capacity or ())
    for word in more or ():
        (sizes if word == UNLIMITED or word.lstrip("-").isdigit() else names).append(word)
    return (
        tuple(dict.fromkeys(names)) or DEFAULT_POLICIES,
        tuple(dict.fromkeys(_capacity(size) for size in sizes)) or DEFAULT_CAPACITIES,
    )


def _capacity(text: str) -> Capacity:
    if text == UNLIMITED:
        return None
    try:
        return int(text)
    except ValueError as error:
        raise SimulationRefused(f"a capacity is a number or {UNLIMITED}, not {text!r}") from error


def _simulate_with_bar(trace: Trace, names: Sequence[str], sizes: Sequence[Capacity]) -> tuple[Outcome, ...]:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        total = len(trace.requests) * len(names) * len(sizes)
        task = bar.add_task(trace.name, total=total)
        return simulate(trace, names, sizes, advance=lambda num_requests: bar.advance(task, num_requests))


def table_of(outcomes: Sequence[Outcome]) -> Table:
    """Hit rates: a policy a row, a capacity a column."""
    table = Table()
    table.add_column("policy")
    capacities = list(dict.fromkeys(outcome.capacity for outcome in outcomes))
    for capacity in capacities:
        table.add_column(UNLIMITED if capacity is None else str(capacity), justify="right")
    for policy in dict.fromkeys(outcome.policy for outcome in outcomes):
        rates = {one.capacity: one.hit_rate for one in outcomes if one.policy == policy}
        label = f"{policy} (of tokens)" if policy == REQUEST_LRU else policy
        table.add_row(label, *(f"{rates[capacity]:.4f}" for capacity in capacities))
    return table


def document_of(trace: Trace, outcomes: Sequence[Outcome]) -> dict[str, object]:
    """What `--json` writes. A capacity of null is no limit."""
    return {
        "trace": trace.name,
        "format": trace.format.value,
        "block_size": trace.block_size,
        "requests": len(trace.requests),
        "block_references": trace.num_references,
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }


def _require_plotting(plot_path: Path | None) -> None:
    if plot_path is not None and importlib.util.find_spec("matplotlib") is None:
        raise SimulationRefused("--plot needs matplotlib: pip install 'headstart[simulate]'")


def write_plot(path: Path, trace: Trace, outcomes: Sequence[Outcome]) -> None:
    """Hit rate over capacity, a line a policy; a policy without limit is a dashed level."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - an extra
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    figure = Figure(figsize=(8.0, 5.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, policy in enumerate(dict.fromkeys(outcome.policy for outcome in outcomes)):
        color = f"C{number % 10}"
        points = sorted(
            (one.capacity, one.hit_rate)
            for one in outcomes
            if one.policy == policy and one.capacity is not None
        )
        axes.plot([size for size, _ in points], [rate for _, rate in points], "o-", color=color, label=policy)
        for one in outcomes:
            if one.policy == policy and one.capacity is None:
                axes.axhline(one.hit_rate, linestyle="--", linewidth=0.8, color=color)
    if any(one.capacity is not None for one in outcomes):
        axes.set_xscale("log")
    axes.set_xlabel("capacity (blocks)")
    axes.set_ylabel("share of blocks found")
    axes.set_title(trace.name)
    axes.set_ylim(bottom=0.0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png", dpi=120)

"""Eviction policies on recorded requests: ours, the plain ones, and Belady's limit.

    python benchmarks/eviction.py            all of it, about ten minutes
    python benchmarks/eviction.py --quick    the synthetic trace alone, no file written

The README's figures are reproduced first: LRU, FIFO, LFU and Belady on two Mooncake traces, and two
published curves of agent sessions. Then the default policy is compared with the best of the plain
ones at each size, on both traces, with one-off requests mixed in, on coding-agent sessions, and in
the prefix store itself rather than in the simulator. Exits with 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import sys
from array import array
from dataclasses import dataclass, field

from peers.record import REPOSITORY, write_result
from rich.console import Console
from rich.table import Table

from prefix_store.blocks import BlockNamer
from prefix_store.policy import POLICIES
from prefix_store.replay import TICK_SECONDS, BeladyPolicy, prompts_of, replay, replay_request_lru
from prefix_store.simulate import simulate
from prefix_store.store import PrefixStore
from prefix_store.text_tokens import load_encode
from prefix_store.traces import Trace, mix_in_scan, read_trace

sys.path.insert(0, str(REPOSITORY))

from tests.llama_tokenizer import llama_tokenizer_path

TRACES = REPOSITORY / "tests" / "traces"

OURS, LIMIT = "hazard", "belady"
BASELINES = ("lru", "lfu", "s3-fifo", "w-tinylfu", "gdsf", "gdsf-cost")
COMPARED_AT = (3000, 5859, 10000)
CAPACITIES = (None, 100_000, 50_000, 30_000, 10_000, 5859, 3000, 1000)
SESSION_CAPACITIES = (3000, 10_000, 30_000, 100_000)
SCAN_BLOCKS, SCAN_CAPACITY, SCAN_SEEDS = 100, 10_000, (1, 2, 3)

FIGURES_WITHIN, CURVES_WITHIN = 0.005, 0.005
UNDER_LRU_AT_MOST, GAIN_GOAL, SCAN_GOAL = 0.005, 0.03, 0.9

README_FIGURES = {
    "conversation": {
        "lru": (0.3664, 0.3637, 0.3546, 0.3257, 0.2116, 0.1361, 0.0653, 0.0445),
        "fifo": (0.3664, 0.3563, 0.3335, 0.2937, 0.1813, 0.1250, 0.0633, 0.0436),
        "lfu": (0.3664, 0.3631, 0.3439, 0.2760, 0.1317, 0.0969, 0.0750, 0.0481),
        "belady": (0.3664, 0.3664, 0.3664, 0.3664, 0.3664, 0.3532, 0.2945, 0.1907),
    },
    "synthetic": {
        "lru": (0.6396, 0.6396, 0.6396, 0.6242, 0.4239, 0.3094, 0.1906, 0.0841),
        "fifo": (0.6396, None, 0.6396, 0.5941, 0.3986, 0.3010, 0.1857, 0.0842),
        "lfu": (0.6396, None, 0.6396, 0.6260, 0.3585, 0.2428, 0.1288, 0.0418),
        "belady": (0.6396, 0.6396, 0.6396, 0.6396, 0.6180, 0.5500, 0.4467, 0.2767),
    },
}
"""At CAPACITIES."""

TOKENS_PER_GB = 8200
PUBLISHED_CURVES = {
    "miniswe-063925220f0d": {0.2: 0.031, 0.4: 0.201, 0.8: 0.697, 1.0: 0.920, 2.0: 0.936},
    "magagent-46e404f0f6d0": {2.0: 0.515, 4.0: 0.877},
}
"""Hit rates by "GB"."""

Rates = dict[str, dict[int | None, float]]


@dataclass(slots=True, kw_only=True)
class Report:
    """Rows of one table, what goes into the file, and which goals were missed."""

    rows: list[tuple[str, str, str, str, str, str]] = field(default_factory=list)
    results: dict[str, object] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)

    def add(
        self, what: str, at: str, ours: str, best: str, limit: str, goal: str, *, met: bool = True
    ) -> None:
        self.rows.append((what, at, ours, best, limit, goal if met else f"{goal} MISSED"))
        if not met:
            self.missed.append(f"{what}, {at}: {ours} (goal {goal})")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    report = Report()
    report_agent_curves(report)
    for name in ("synthetic",) if quick else ("conversation", "synthetic"):
        trace = read_trace(TRACES / f"mooncake_{name}_trace.jsonl.gz")
        rates = measured(trace, (OURS, *BASELINES, "fifo", LIMIT), CAPACITIES)
        report.results[name] = as_json(rates)
        report_figures(report, name, rates)
        report_comparison(report, name, rates)
        report_scans(report, name, trace)
        report_store(report, name, trace)
    if not quick:
        report_sessions(report)
        write_result("eviction", {"missed": report.missed, **report.results})
    show(report)
    return 1 if report.missed else 0


def measured(trace: Trace, policies: tuple[str, ...], capacities: tuple[int | None, ...]) -> Rates:
    rates: Rates = {}
    for policy in policies:
        note(f"{trace.name}: {policy}")
        outcomes = simulate(trace, [policy], capacities)
        rates[policy] = {outcome.capacity: outcome.hit_rate for outcome in outcomes}
    return rates


def report_agent_curves(report: Report) -> None:
    """Two published curves of whole requests under LRU."""
    encode = load_encode(llama_tokenizer_path())
    for name, curve in PUBLISHED_CURVES.items():
        prompts = prompts_of(read_trace(TRACES / f"{name}.jsonl.gz", encode=encode))
        for size, published in curve.items():
            rate = replay_request_lru(prompts, capacity=round(size * TOKENS_PER_GB)).hit_rate
            met = abs(rate - published) <= CURVES_WITHIN
            goal = f"{published:.1%} ± .5 points"
            report.add(f"{name}, request LRU", f"{size:g} GB", f"{rate:.2%}", "", "", goal, met=met)
            report.results[f"{name} at {size:g} GB"] = rate


def report_figures(report: Report, name: str, rates: Rates) -> None:
    for policy, figures in README_FIGURES[name].items():
        pairs = [
            (one, rates[policy][size])
            for size, one in zip(CAPACITIES, figures, strict=True)
            if one is not None
        ]
        furthest = max(abs(figure - rate) for figure, rate in pairs)
        exact = round(rates[policy][None], 4) == figures[0]
        met = exact and furthest <= FIGURES_WITHIN
        goal = f"README's, exact at inf, ± {FIGURES_WITHIN}"
        report.add(f"{name}: {policy}", "all sizes", f"off by {furthest:.5f}", "", "", goal, met=met)


def report_comparison(report: Report, name: str, rates: Rates) -> None:
    gains = []
    for size in CAPACITIES:
        ours, lru = rates[OURS][size], rates["lru"][size]
        best = max(BASELINES, key=lambda policy: rates[policy][size])
        gain = ours / rates[best][size] - 1.0
        if size in COMPARED_AT:
            gains.append(gain)
        met = ours >= lru - UNDER_LRU_AT_MOST
        report.add(
            f"{name}: {OURS}",
            label(size),
            f"{ours:.4f} ({gain:+.1%})",
            f"{best} {rates[best][size]:.4f}",
            f"{rates[LIMIT][size]:.4f}",
            f"LRU {lru:.4f} − .005",
            met=met,
        )
    mean = sum(gains) / len(gains)
    met = mean >= GAIN_GOAL
    sizes = ", ".join(str(size) for size in COMPARED_AT)
    report.add(f"{name}: {OURS}, mean gain", sizes, f"{mean:+.1%}", "best at each size", "", "+3.0%", met=met)
    report.results[f"{name}: mean gain"] = mean


def report_scans(report: Report, name: str, trace: Trace) -> None:
    """As many blocks again of one-off requests: what the original ones keep of their hits, at worst."""
    kept: dict[str, float] = {}
    for policy in (OURS, "lru", LIMIT):
        [alone] = simulate(trace, [policy], [SCAN_CAPACITY])
        shares = []
        for seed in SCAN_SEEDS if policy == OURS else SCAN_SEEDS[:1]:
            note(f"{trace.name}: {policy} with a scan")
            mixed, originals = mix_in_scan(trace, blocks_per_request=SCAN_BLOCKS, seed=seed)
            shares.append(hits_of(mixed, originals, policy) / alone.hits)
        kept[policy] = min(shares)
    met = kept[OURS] >= SCAN_GOAL
    others = (f"lru {kept['lru']:.1%}", f"{kept[LIMIT]:.1%}")
    report.add(f"{name}: kept under scans", str(SCAN_CAPACITY), f"{kept[OURS]:.1%}", *others, "90%", met=met)
    report.results[f"{name}: kept under scans"] = kept


def hits_of(mixed: Trace, originals: tuple[bool, ...], policy: str) -> int:
    chosen = BeladyPolicy(mixed.requests) if policy == LIMIT else POLICIES[policy]()
    replayed = replay(mixed.requests, chosen, capacity=SCAN_CAPACITY)
    return sum(hits for hits, is_original in zip(replayed.hits, originals, strict=True) if is_original)


def report_store(report: Report, name: str, trace: Trace) -> None:
    """The same requests through the prefix store, with blocks of one token; runs are its index's edges."""
    for size in COMPARED_AT:
        note(f"{trace.name}: the store at {size}")
        ours, lru = (store_hit_rate(trace, policy, size) for policy in (OURS, "lru"))
        met = ours >= lru - UNDER_LRU_AT_MOST
        best = f"lru {lru:.4f}"
        report.add(f"{name}: {OURS} in the store", str(size), f"{ours:.4f}", best, "", "LRU − .005", met=met)
        report.results[f"{name}: in the store at {size}"] = {OURS: ours, "lru": lru}


def store_hit_rate(trace: Trace, policy: str, size: int) -> float:
    now = 0.0
    namer = BlockNamer(seed=1, model_fingerprint="trace", dtype="none", kv_codec="none", block_size=1)
    store = PrefixStore(
        num_blocks=size, block_size=1, namer=namer, policy=POLICIES[policy](), clock=lambda: now
    )
    num_found = 0
    for request in trace.requests:
        now = max(request.seconds, now + TICK_SECONDS)
        tokens = array("I", request.blocks)
        lease = store.acquire("trace", tokens, max_cached_tokens=len(tokens))
        num_found += lease.cached_tokens
        store.extend(lease, len(tokens))
        store.release(lease, tokens, len(tokens))
    store.check()
    return num_found / trace.num_references


def report_sessions(report: Report) -> None:
    trace = read_trace(TRACES / "coding_agent_sessions.jsonl.gz")
    rates = measured(trace, (OURS, *BASELINES, LIMIT), SESSION_CAPACITIES)
    report.results["coding sessions"] = as_json(rates)
    for size in SESSION_CAPACITIES:
        best = max(BASELINES, key=lambda policy: rates[policy][size])
        gain = rates[OURS][size] / rates[best][size] - 1.0
        ours = f"{rates[OURS][size]:.4f} ({gain:+.1%})"
        limit = f"{rates[LIMIT][size]:.4f}"
        lru = f"(LRU {rates['lru'][size]:.4f})"
        report.add(
            f"coding sessions: {OURS}", label(size), ours, f"{best} {rates[best][size]:.4f}", limit, lru
        )


def as_json(rates: Rates) -> dict[str, dict[str, float]]:
    return {policy: {label(size): rate for size, rate in row.items()} for policy, row in rates.items()}


def label(size: int | None) -> str:
    return "inf" if size is None else str(size)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def show(report: Report) -> None:
    table = Table("what", "at", "ours", "best other", "Belady", "goal", title="Share of blocks found")
    for row in report.rows:
        table.add_row(*row)
    Console(width=140).print(table)
    for missed in report.missed:
        print("missed:", missed)


if __name__ == "__main__":
    sys.exit(main())

"""Half an hour of mixed traffic over a pool that is too small: does anything fail, leak or grow?

    python benchmarks/churn.py               30 minutes
    python benchmarks/churn.py --minutes 3   a first look, no file written

One engine on a tiny random model, its pool at 110 % demand: shared and unshared prompts, several
choices, structures, priorities, scopes, the cache by-passed, one request in five hung up
(`tests/churn.py`). Every few hundred requests all of them end: then no block may be held and the
store's invariants must hold. The process's memory is sampled at those moments; the first third of
the time, and at least 3,000 requests, warm up. Exits with 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import gc
import queue
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peers.record import REPOSITORY, write_result
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(REPOSITORY))

from model_worker.engine import RequestRefused
from model_worker.protocol import WorkerStats
from tests.churn import BLOCK_SIZE, DEMAND_SHARE, POOL_BLOCKS, Churn
from tests.engines import running_engine
from tests.tiny_models import tiny_llama

REQUESTS_PER_LULL = 500
WARM_UP_SHARE, WARM_UP_REQUESTS = 1 / 3, 3000
COMPARED_SHARE = 1 / 4
"""Of the samples after the warm-up: the last ones are compared with the first ones."""
GROWTH_GOAL_MIB = 8.0
FULL_MINUTES = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The process at a moment when no request is open."""

    minutes: float
    rss_mib: float
    requests: int


@dataclass(slots=True, kw_only=True)
class Outcome:
    samples: list[Sample] = field(default_factory=list)
    stats: WorkerStats | None = None
    cached_tokens: int = 0
    hung_up: int = 0
    fault: str | None = None

    @property
    def settled(self) -> list[Sample]:
        """Samples after the warm-up."""
        begin = WARM_UP_SHARE * self.samples[-1].minutes
        warm = [one for one in self.samples if one.minutes >= begin and one.requests >= WARM_UP_REQUESTS]
        return warm or self.samples[-1:]

    @property
    def growth_mib(self) -> float:
        """By medians of the first and the last samples: one sample has a few MiB of luck in it."""
        settled = [one.rss_mib for one in self.settled]
        count = max(1, round(COMPARED_SHARE * len(settled)))
        return statistics.median(settled[-count:]) - statistics.median(settled[:count])


def rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def churn(minutes: float, seed: int) -> Outcome:
    """Goes on for so long, or until the first thing that must not happen."""
    outcome = Outcome()
    faults: list[str] = []
    threading.excepthook = lambda args: faults.append(f"{args.exc_type.__name__}: {args.exc_value}")
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_llama(Path(folder))
        try:
            with running_engine(model, kv_cache_blocks=POOL_BLOCKS, block_size=BLOCK_SIZE) as driver:
                traffic = Churn(driver, seed=seed)
                began = time.monotonic()
                while (passed := (time.monotonic() - began) / 60.0) < minutes:
                    traffic.send(REQUESTS_PER_LULL)
                    outcome.stats = traffic.lull()
                    outcome.cached_tokens, outcome.hung_up = traffic.cached_tokens, traffic.num_hung_up
                    gc.collect()
                    passed = (time.monotonic() - began) / 60.0
                    outcome.samples.append(
                        Sample(minutes=passed, rss_mib=rss_mib(), requests=traffic.num_sent)
                    )
                    note(f"{passed:5.1f} min  {traffic.num_sent:>7,} requests  {rss_mib():7.1f} MiB")
        except (AssertionError, queue.Empty, RequestRefused) as error:  # the finding: see `Churn`
            outcome.fault = f"{type(error).__name__}: {error}"
    # The engine's thread checks every invariant once more as it stops.
    outcome.fault = "; ".join([outcome.fault, *faults] if outcome.fault else faults) or None
    return outcome


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def report(outcome: Outcome, minutes: float) -> tuple[Table, list[str]]:
    """One row for each claim: ours, the goal, and what is the best that could be."""
    stats = outcome.stats
    held = stats.blocks_held if stats else 0
    failed = stats.requests_failed if stats else 0
    preemptions = stats.preemptions if stats else 0
    growth = outcome.growth_mib if outcome.samples else 0.0
    sent = outcome.samples[-1].requests if outcome.samples else 0
    rows = [
        ("requests, all of them ended", f"{sent:,}", "1,000", "", sent >= 1000),
        ("of these hung up", f"{outcome.hung_up:,}", "> 0", "", outcome.hung_up > 0),
        ("of these failed", str(failed), "0", "0", failed == 0),
        ("broken invariants, deadlocks", outcome.fault or "none", "none", "none", outcome.fault is None),
        ("preemptions", f"{preemptions:,}", "> 0", "", preemptions > 0),
        ("prompt tokens found", f"{outcome.cached_tokens:,}", "> 0", "", outcome.cached_tokens > 0),
        ("blocks held at rest", str(held), "0", "0", held == 0),
        (
            "memory grown after warm-up, MiB",
            f"{growth:+.1f}",
            f"≤ {GROWTH_GOAL_MIB:g}",
            "0",
            growth <= GROWTH_GOAL_MIB,
        ),
    ]
    table = Table("what", "ours", "goal", "limit", title=f"{minutes:g} minutes at {DEMAND_SHARE:.0%} demand")
    for what, ours, goal, limit, met in rows:
        table.add_row(what, ours, goal if met else f"{goal} MISSED", limit)
    missed = [f"{what}: {ours} (goal {goal})" for what, ours, goal, _, met in rows if not met]
    return table, missed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=FULL_MINUTES)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    outcome = churn(options.minutes, options.seed)
    table, missed = report(outcome, options.minutes)
    Console(width=110).print(table)
    for miss in missed:
        print("missed:", miss)
    if options.minutes >= FULL_MINUTES:
        write_result("churn", document(options, outcome, missed))
    return 1 if missed else 0


def document(options: argparse.Namespace, outcome: Outcome, missed: list[str]) -> dict[str, object]:
    return {
        "versions": {"torch": torch.__version__},
        "minutes": options.minutes,
        "seed": options.seed,
        "pool_blocks": POOL_BLOCKS,
        "demand_share": DEMAND_SHARE,
        "growth_mib": outcome.growth_mib if outcome.samples else None,
        "rss_mib": [[round(one.minutes, 2), round(one.rss_mib, 1)] for one in outcome.samples],
        "requests": outcome.samples[-1].requests if outcome.samples else 0,
        "hung_up": outcome.hung_up,
        "cached_tokens": outcome.cached_tokens,
        "preemptions": outcome.stats.preemptions if outcome.stats else None,
        "fault": outcome.fault,
        "missed": missed,
    }


if __name__ == "__main__":
    sys.exit(main())

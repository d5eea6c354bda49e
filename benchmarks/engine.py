"""The engine beside vLLM's CPU build, beside a bare forward pass, and beside itself without sharing.

    python benchmarks/engine.py            all of it, about fifteen minutes, and five more the first time
    python benchmarks/engine.py --quick    fewer rounds, no file written

Against vLLM: its server in its best setting on this machine (compiled, prefix caching on, float32)
and our worker, both over HTTP with token ids, the same weights and two threads each, greedy, 32 tokens
whatever they are. A round measures one side, then the other: a cold prompt of 1,612 tokens, prompts that
share its first 1,600, the time between tokens, eight such requests at once. Figures are medians over rounds.

A hit inside the engine is compared with one bare forward of the same suffix over a contiguous cache, as
`transformers` does it, and the same with our packed linear layers: what is left is what the engine adds.
A decode step of eight sequences is measured with shared-prefix attention and without.

vLLM is installed on first use into an environment of its own outside the repository
(HEADSTART_BENCH_HOME, by default ~/.cache/headstart-bench). Exits with 1 when a limit is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import httpx
import torch
from peers.engine import SUFFIX_TOKENS, compare_sharing, compare_suffixes, default_folder, random_tokens
from peers.environments import VLLM, vllm_python
from peers.record import REPOSITORY, write_result
from rich.console import Console
from rich.table import Table

THREADS = 2
PREFIX_TOKENS = 1600
OUTPUT_TOKENS = 32
CONCURRENT = 8
HITS_PER_ROUND = 4
CACHED_LENGTHS = (800, 1600, 3200)
START_SECONDS = 900.0

console = Console(width=120)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A figure of ours over a peer's: the ratio aimed at, and the one that may not be passed."""

    what: str
    unit: str
    goal: float
    limit: float
    higher_is_better: bool = False

    def is_missed(self, ratio: float) -> bool:
        return ratio < self.limit if self.higher_is_better else ratio > self.limit


CLAIMS = {
    "cold": Claim(what="cold, time to first token", unit="ms", goal=0.5, limit=0.75),
    "hit": Claim(what="hit, time to first token", unit="ms", goal=0.4, limit=0.6),
    "between": Claim(what="between tokens", unit="ms", goal=0.55, limit=0.8),
    "rate": Claim(
        what=f"requests per second, {CONCURRENT} at once",
        unit="/s",
        goal=2.5,
        limit=1.5,
        higher_is_better=True,
    ),
}
BARE_LIMIT = 1.15


# ---- the two servers


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where a side listens, and how to ask it for tokens: `stream` yields once per event with tokens."""

    name: str
    stream: Callable[[list[int]], Iterator[None]]


@contextmanager
def our_worker(folder: Path, logs: Path) -> Iterator[Server]:
    port_file = logs / "worker.port"
    command = [sys.executable, "-m", "model_worker", "--model", str(folder), "--worker-port", "0"]
    command += ["--port-file", str(port_file), "--threads", str(THREADS)]
    with running(command, logs / "worker.log") as process, httpx.Client(timeout=600) as client:
        wait_until(process, port_file.exists, logs / "worker.log")
        url = f"http://127.0.0.1:{port_file.read_text().strip()}"

        def stream(tokens: list[int]) -> Iterator[None]:
            sampling = {"max_tokens": OUTPUT_TOKENS, "temperature": 0.0, "ignore_eos": True}
            body = {
                "request_id": os.urandom(8).hex(),
                "scope": "aa",
                "token_ids": tokens,
                "sampling": sampling,
            }
            with client.stream("POST", f"{url}/v1/generate", json=body) as response:
                assert response.status_code == 200, response.read()
                for line in response.iter_lines():
                    kind = json.loads(line)["type"]
                    assert kind != "failed", line
                    if kind == "token":
                        yield

        yield Server(name="ours", stream=stream)


@contextmanager
def vllm_server(folder: Path, logs: Path) -> Iterator[Server]:
    python, port = vllm_python(), free_port()
    command = [str(python.with_name("vllm")), "serve", str(folder), "--served-model-name", "smol"]
    command += [
        "--dtype",
        "float32",
        "--max-model-len",
        "8192",
        "--enable-prefix-caching",
        "--port",
        str(port),
    ]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_NO_USAGE_STATS": "1"}
    # By itself it keeps a core free: on two cores, both of its threads then share one.
    environment["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{THREADS - 1}"
    url, log = f"http://127.0.0.1:{port}", logs / "vllm.log"
    with running(command, log, environment) as process, httpx.Client(timeout=600) as client:
        wait_until(process, lambda: answers(f"{url}/health"), log)

        def stream(tokens: list[int]) -> Iterator[None]:
            body = {"model": "smol", "prompt": tokens, "max_tokens": OUTPUT_TOKENS}
            body |= {"temperature": 0.0, "ignore_eos": True, "stream": True}
            with client.stream("POST", f"{url}/v1/completions", json=body) as response:
                assert response.status_code == 200, response.read()
                for line in response.iter_lines():
                    if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                        yield

        yield Server(name="vLLM", stream=stream)


@contextmanager
def running(
    command: list[str], log: Path, changes: dict[str, str] | None = None
) -> Iterator[subprocess.Popen]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(THREADS))
    environment = {**os.environ, **threads, "HF_HUB_OFFLINE": "1", "PYTHONPATH": "", **(changes or {})}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=REPOSITORY
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until(process: subprocess.Popen, ready: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{process.args[0]} did not become ready:\n{log.read_text()[-4000:]}")
        time.sleep(0.2)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


# ---- rounds


def one_round(server: Server, seed: int) -> dict[str, float]:
    """Milliseconds, and requests per second."""
    prefix = random_tokens(seed, PREFIX_TOKENS)
    cold, _ = timed(server, prefix + random_tokens(seed + 1, SUFFIX_TOKENS))
    hits, between = zip(
        *(
            timed(server, prefix + random_tokens(seed + 2 + index, SUFFIX_TOKENS))
            for index in range(HITS_PER_ROUND)
        ),
        strict=True,
    )
    together = [prefix + random_tokens(seed + 50 + index, SUFFIX_TOKENS) for index in range(CONCURRENT)]
    begin = time.perf_counter()
    with ThreadPoolExecutor(CONCURRENT) as pool:
        list(pool.map(lambda tokens: timed(server, tokens), together))
    rate = CONCURRENT / (time.perf_counter() - begin)
    return {
        "cold": 1e3 * cold,
        "hit": 1e3 * statistics.median(hits),
        "between": 1e3 * statistics.median(between),
        "rate": rate,
    }


def timed(server: Server, tokens: list[int]) -> tuple[float, float]:
    """Seconds to the first token, and between tokens after it."""
    begin = time.perf_counter()
    moments = [time.perf_counter() for _ in server.stream(tokens)]
    # The last event may carry an end and no token; between tokens it makes no difference.
    return moments[0] - begin, (moments[-1] - moments[0]) / (OUTPUT_TOKENS - 1)


def against_vllm(folder: Path, rounds: int) -> dict[str, list[dict[str, float]]]:
    with tempfile.TemporaryDirectory() as logs, ExitStack() as stack:
        servers = [
            stack.enter_context(vllm_server(folder, Path(logs))),
            stack.enter_context(our_worker(folder, Path(logs))),
        ]
        found: dict[str, list[dict[str, float]]] = {server.name: [] for server in servers}
        for number in range(rounds + 1):
            for server in servers if number % 2 else reversed(servers):
                figures = one_round(server, 1000 * (number + 1))
                if number:  # the first one warms both
                    found[server.name].append(figures)
                    console.print(server.name, {name: round(value, 2) for name, value in figures.items()})
    return found


# ---- the report


def show(
    vllm: dict[str, list[dict[str, float]]], hits: list[dict[str, float]], steps: dict[str, float]
) -> list[str]:
    """Prints the table; the limits that were missed."""
    missed = []
    table = Table(title=f"The engine, {THREADS} threads, float32 (medians)")
    for heading in ("what", "against", "ours", "peer", "ratio", "rounds", "goal", "limit"):
        table.add_column(heading, justify="left" if heading in {"what", "against"} else "right")
    for name, claim in CLAIMS.items():
        ours, peer = ([each[name] for each in vllm[side]] for side in ("ours", "vLLM"))
        ratio = statistics.median(ours) / statistics.median(peer)
        ratios = [mine / theirs for mine, theirs in zip(ours, peer, strict=True)]
        sign = "≥" if claim.higher_is_better else "≤"
        table.add_row(
            claim.what,
            "vLLM",
            f"{statistics.median(ours):,.1f} {claim.unit}",
            f"{statistics.median(peer):,.1f} {claim.unit}",
            f"{ratio:.2f}",
            f"{min(ratios):.2f}–{max(ratios):.2f}",
            f"{sign} {claim.goal}",
            f"{sign} {claim.limit}",
        )
        if claim.is_missed(ratio):
            missed.append(f"{claim.what}: {ratio:.2f}, limit {claim.limit}")
    for row in hits:
        for peer, limit in (("bare", BARE_LIMIT), ("bare_packed", BARE_LIMIT)):
            ratio = row["ours"] / row[peer]
            what = f"suffix of {SUFFIX_TOKENS} after {row['cached_tokens']:,} cached"
            against = "bare forward" if peer == "bare" else "the same, packed"
            table.add_row(
                what,
                against,
                f"{row['ours']:.1f} ms",
                f"{row[peer]:.1f} ms",
                f"{ratio:.2f}",
                "",
                "",
                f"≤ {limit}",
            )
            if ratio > limit:
                missed.append(f"{what}, against {against}: {ratio:.2f}, limit {limit}")
    ratio = steps["shared"] / steps["separate"]
    what = f"decode step, {CONCURRENT} on {PREFIX_TOKENS:,} shared"
    shown = (f"{steps[name]:.1f} ms" for name in ("shared", "separate"))
    table.add_row(what, "without sharing", *shown, f"{ratio:.2f}", "", "", "< 1")
    if ratio >= 1:
        missed.append(f"{what}: {ratio:.2f}")
    console.print(table)
    for miss in missed:
        console.print(f"[red]missed[/red] {miss}")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    rounds, repeats = (2, 5) if options.quick else (5, 15)
    torch.set_num_threads(THREADS)
    folder = default_folder()
    hits = compare_suffixes(folder, CACHED_LENGTHS, repeats)
    steps = compare_sharing(folder, prefix_tokens=PREFIX_TOKENS, sequences=CONCURRENT, repeats=3)
    vllm = against_vllm(folder, rounds)
    missed = show(vllm, hits, steps)
    if not options.quick:
        versions = {"torch": torch.__version__, "transformers": version("transformers"), "vllm": VLLM}
        write_result(
            "engine",
            {
                "versions": versions,
                "threads": THREADS,
                "vllm": vllm,
                "hits": hits,
                "steps": steps,
                "missed": missed,
            },
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

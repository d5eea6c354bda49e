"""Load on two gateways, a worker, a poster and a PostgreSQL, all killed now and then, and what must hold.

Knows how to start, load, kill and restart every part, and how to compare what clients
received with what was billed. Does not know how often to kill, or what is printed.

Faults: kill -9 of a gateway (its poster with it), of a process that does nothing but meter,
and of the database; and a full disk under a gateway's journal (no file of the process may
grow), which ends in a kill or in room again.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

import httpx
import msgspec
from sqlalchemy import func, select

from billing import instants, schema
from billing.accounts import find_tenant, list_keys
from billing.calendar import UTC_ZONE, month_of
from billing.db import Database, open_database
from billing.issuing import preview_statement
from billing.usage import Admission
from gateway.bootstrap import FIRST_TENANT
from gateway.meter import OBSERVE_EVERY_TOKENS
from tests.integration.billing.ledger_checks import check_ledger, rows
from tests.integration.gateway.scripted_worker import MODEL
from tests.processes import clean_environment, wait_for_file
from tests.servers import PostgresCluster, free_port, postgres_cluster
from tests.unit.billing.builders import admission

SECRET = "chaos " * 8
ANSWER_TOKENS = 120
GATEWAYS = 2
READY_SECONDS = 60.0
SETTLE_SECONDS = 120.0
WEIGHTS = {"gateway": 4, "full disk": 2, "poster": 2, "database": 1}


@dataclass(slots=True, kw_only=True)
class Received:
    """What one client got of one answer. `usage` came with its end, and only then."""

    port: int = 0
    ended_at: float = 0.0
    request_id: UUID | None = None
    status: int | None = None
    num_pieces: int = 0
    usage: dict[str, int] | None = None


@dataclass(slots=True, kw_only=True)
class Balance:
    """What was found when everything had settled. `differences` is empty when all agree."""

    figures: dict[str, int]
    differences: list[str]


class Poster:
    """A process that admits and settles without end, and says when it did."""

    def __init__(self, url: str, journal: Path, model: Admission) -> None:
        self._command = [sys.executable, "-m", "tests.integration.billing.killed_meter", url, str(journal)]
        self._model = msgspec.json.encode(model).decode()
        self.settled: set[UUID] = set()

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._reader = threading.Thread(target=self._read, args=(self._process,))
        self._reader.start()
        self._say(f"rush {self._model}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None, "it is a pipe"
            with suppress(BrokenPipeError):
                pipe.close()

    def post_what_is_left(self) -> None:
        """Its journal, by a process that does nothing else and ends by itself."""
        script = "import sys; from pathlib import Path; from billing.db import open_database;"
        script += "from billing.meter import Meter; m = Meter(open_database(sys.argv[1]), Path(sys.argv[2]));"
        script += "m.start(); m.sweep(0); m.close(timeout_seconds=60)"
        subprocess.run([sys.executable, "-c", script, *self._command[3:]], check=True, timeout=180)

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None, "it is a pipe"
        with suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None, "it is a pipe"
        for line in process.stdout:
            word, _, request_id = line.strip().partition(" ")
            if word == "settled" and len(request_id) == 36:
                self.settled.add(UUID(request_id))


class Gateway:
    """One gateway with a home of its own, restarted on the same port."""

    def __init__(self, home: Path, environment: dict[str, str]) -> None:
        self.port = free_port()
        self._environment = environment | {"HEADSTART_HOME": str(home), "HEADSTART_PORT": str(self.port)}
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        # No file for its output: on a full disk that would fail before anything else.
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from gateway.cli import main; main()", "gateway"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=clean_environment(self._environment),
        )

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not self.is_ready():
            assert self._process.poll() is None, f"the gateway ended: {self._process.returncode}"
            assert time.monotonic() < deadline, "the gateway does not become ready"
            time.sleep(0.1)

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health/readiness", timeout=2).status_code == 200
        except httpx.TransportError:
            return False

    def fill_disk(self) -> None:
        self._limit_files(1)

    def free_disk(self) -> None:
        self._limit_files(resource.RLIM_INFINITY)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def _limit_files(self, soft: int) -> None:
        with suppress(ProcessLookupError):
            resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))


@dataclass(slots=True, kw_only=True)
class World:
    """Everything that runs, and what clients received so far."""

    rng: random.Random
    cluster: PostgresCluster
    database_url: str
    gateways: list[Gateway]
    poster: Poster
    key: str
    received: list[Received] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    # Port, from and until when: a gateway that died on a full disk could note nothing of what it sent.
    blind: list[tuple[int, float, float]] = field(default_factory=list)

    def strike(self) -> str:
        """One fault, after a random while; what it hit runs again at the end. Returns what it was."""
        time.sleep(self.rng.uniform(0.05, 2.0))
        fault = self.rng.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))[0]
        gateway = self.rng.choice(self.gateways)
        if fault == "database":
            self.cluster.kill()
            time.sleep(self.rng.uniform(0.0, 1.0))
            self.cluster.start()
        elif fault == "poster":
            self.poster.kill()
            self.poster.start()
        elif fault == "full disk":
            self._fill_up(gateway)
        else:
            gateway.kill()
            gateway.start()
        self.faults[fault] += 1
        self.kills += fault != "full disk"
        return fault

    def _fill_up(self, gateway: Gateway) -> None:
        gateway.fill_disk()
        since = time.monotonic()
        time.sleep(self.rng.uniform(0.1, 1.0))
        if self.rng.random() < 0.5:
            self.faults["gateway on a full disk"] += 1
            self.kills += 1
            gateway.kill()
            self.blind.append((gateway.port, since, time.monotonic() + 1))
            gateway.start()
        else:
            gateway.free_disk()

    def settle(self) -> None:
        """No more faults: everybody starts once more, and whatever was begun comes to its end."""
        self.poster.kill()
        for gateway in self.gateways:
            gateway.kill()
            gateway.start()
        for gateway in self.gateways:
            gateway.wait_until_ready()
        self.poster.post_what_is_left()
        with open_database(self.database_url) as db:
            _wait_until_settled(db)
        for gateway in self.gateways:
            gateway.stop()

    def balance(self) -> Balance:
        """Compares what clients received with events, ledger, roll-ups and statements."""
        with open_database(self.database_url) as db:
            check_ledger(db)  # events, lines re-rated, roll-ups: asserts on any difference
            return _balance(db, self)


@contextmanager
def world(seed: int) -> Iterator[World]:
    """Everything running and ready; ended, process by process, when the block is left."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hs-chaos-")))
        cluster = stack.enter_context(postgres_cluster())
        url = cluster.start().url()
        worker_url = stack.enter_context(_running_worker(folder))
        environment = {
            "HEADSTART_DATABASE_URL": url,
            "HEADSTART_SECRET": SECRET,
            "HEADSTART_WORKER_URL": worker_url,
            "HEADSTART_LOG_LEVEL": "error",
        }
        homes = [folder / f"home-{number}" for number in range(GATEWAYS)]
        migrate = [sys.executable, "-c", "from gateway.cli import main; main()", "migrate", "--first-key"]
        subprocess.run(
            migrate,
            env=clean_environment(environment | {"HEADSTART_HOME": str(homes[0])}),
            stdout=subprocess.DEVNULL,
            check=True,
        )
        gateways = [Gateway(home, environment) for home in homes]
        poster = Poster(url, folder / "poster-journal", _poster_admission(url))
        made = World(
            rng=random.Random(seed),
            cluster=cluster,
            database_url=url,
            gateways=gateways,
            poster=poster,
            key=(homes[0] / "first-key").read_text().strip(),
        )
        for part in (*gateways, poster):
            part.start()
            stack.callback(part.kill)
        for gateway in gateways:
            gateway.wait_until_ready()
        yield made


@contextmanager
def load(made: World, num_clients: int, seed: int) -> Iterator[None]:
    """Clients that ask either gateway without end, stream or not, and hang up now and then."""
    stop = threading.Event()
    clients = [
        threading.Thread(target=_ask_on, args=(made, random.Random(f"{seed} {number}"), stop))
        for number in range(num_clients)
    ]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        stop.set()
        for client in clients:
            client.join()


def _ask_on(made: World, rng: random.Random, stop: threading.Event) -> None:
    headers = {"authorization": f"Bearer {made.key}"}
    with httpx.Client(headers=headers, timeout=10) as client:
        while not stop.is_set():
            gateway = rng.choice(made.gateways)
            got = Received(port=gateway.port)
            made.received.append(got)
            with suppress(httpx.TransportError, json.JSONDecodeError):
                _ask(client, gateway, rng, got)
            got.ended_at = time.monotonic()
            if got.status != 200:
                stop.wait(0.05)  # away, or refusing: not a busy loop


def _ask(client: httpx.Client, gateway: Gateway, rng: random.Random, got: Received) -> None:
    is_stream = rng.random() < 0.8
    hangs_up_after = rng.randrange(1, ANSWER_TOKENS) if rng.random() < 0.1 else None
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"{rng.choice('abc') * 100}{rng.random()}"}],
        "stream": is_stream,
        **({"stream_options": {"include_usage": True}} if is_stream else {}),
    }
    with client.stream("POST", f"{gateway.url}/v1/chat/completions", json=body) as response:
        got.status = response.status_code
        if response.status_code == 200:
            got.request_id = UUID(response.headers["x-request-id"])
        if not is_stream:
            answer = json.loads(response.read())
            got.usage = answer.get("usage")
            return
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            got.usage = chunk.get("usage") or got.usage
            got.num_pieces += any(choice["delta"].get("content") for choice in chunk.get("choices", ()))
            if hangs_up_after is not None and got.num_pieces >= hangs_up_after:
                return


@contextmanager
def _running_worker(folder: Path) -> Iterator[str]:
    port_file, log = folder / "worker.port", folder / "worker.log"
    command = [sys.executable, "-m", "tests.integration.gateway.scripted_worker"]
    command += ["--port-file", str(port_file), "--answer-tokens", str(ANSWER_TOKENS)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=dict(os.environ))
    try:
        yield f"http://127.0.0.1:{wait_for_file(port_file, process, log)}"
    finally:
        process.kill()
        process.wait()


def _poster_admission(url: str) -> Admission:
    with open_database(url) as db:
        tenant = find_tenant(db, name=FIRST_TENANT)
        [key] = list_keys(db, tenant_id=tenant.id)
    return admission(tenant_id=tenant.id, api_key_id=key.id, admitted_at=instants.now())


def _wait_until_settled(db: Database) -> None:
    deadline = time.monotonic() + SETTLE_SECONDS
    open_requests = (
        select(func.count()).select_from(schema.requests).where(schema.requests.c.state == "admitted")
    )
    while True:
        with db.read() as connection:
            num_open = connection.execute(open_requests).scalar_one()
        if num_open == 0:
            return
        assert time.monotonic() < deadline, f"{num_open} requests are never settled"
        time.sleep(0.2)


def _balance(db: Database, made: World) -> Balance:
    received, poster_settled = made.received, made.poster.settled
    events = {row.request_id: row for row in rows(db, schema.usage_events) if row.original_id is None}
    counts = _by_request(db)
    differences = [
        *_of_completed(received, counts),
        *_of_broken(made, counts),
        *(f"{one}: the poster said that it is settled" for one in poster_settled - events.keys()),
    ]
    lines = rows(db, schema.ledger_lines)
    rollups = rows(db, schema.class_rollups)
    stated = _stated_pusd(db)
    ledger_pusd = sum(line.amount_pusd for line in lines)
    rollup_pusd = sum(row.amount_pusd for row in rollups)
    if not ledger_pusd == rollup_pusd == stated:
        differences.append(f"ledger {ledger_pusd}, roll-ups {rollup_pusd}, statements {stated}")
    completed = [one for one in received if one.usage is not None]
    figures = {
        "requests sent": len(received),
        "answers completed": len(completed),
        "answers broken off": sum(one.request_id is not None and one.usage is None for one in received),
        "settled by the poster": len(poster_settled),
        "requests admitted": len(rows(db, schema.requests)),
        "events": len(events),
        "events, aborted": sum(row.kind == "aborted" for row in events.values()),
        "corrections": len(rows(db, schema.usage_events)) - len(events),
        "ledger lines": len(lines),
        "tokens that clients were told": sum(one.usage["total_tokens"] for one in completed if one.usage),
        "tokens billed for those": sum(
            sum(counts[one.request_id]) for one in completed if one.request_id in counts
        ),
        "picodollars in the ledger": ledger_pusd,
        "picodollars in the roll-ups": rollup_pusd,
        "picodollars in the statements": stated,
    }
    return Balance(figures=figures, differences=differences)


def _by_request(db: Database) -> dict[UUID, tuple[int, int, int]]:
    """Uncached, read and output tokens of each request, corrections included."""
    sums: dict[UUID, tuple[int, int, int]] = {}
    for row in rows(db, schema.usage_events):
        before = sums.get(row.request_id, (0, 0, 0))
        own = (row.uncached_tokens, row.read_tokens, row.output_tokens)
        sums[row.request_id] = tuple(map(sum, zip(before, own, strict=True)))  # type: ignore[assignment]
    return sums


def _of_completed(received: list[Received], counts: dict[UUID, tuple[int, int, int]]) -> Iterator[str]:
    """Whoever was told a usage is billed exactly that."""
    for one in received:
        if one.usage is None or one.request_id is None:
            continue
        cached = one.usage["prompt_tokens_details"]["cached_tokens"]  # type: ignore[index]
        told = (one.usage["prompt_tokens"] - cached, cached, one.usage["completion_tokens"])
        if counts.get(one.request_id) != told:
            yield f"{one.request_id}: told {told}, billed {counts.get(one.request_id)}"


def _of_broken(made: World, counts: dict[UUID, tuple[int, int, int]]) -> Iterator[str]:
    """An answer that broke off is billed: what came, less what a killed gateway had not noted yet."""
    for one in made.received:
        if one.usage is not None or one.request_id is None:
            continue
        if one.request_id not in counts:
            yield f"{one.request_id}: {one.num_pieces} tokens came, and nothing was billed"
            continue
        num_lost = one.num_pieces - counts[one.request_id][2]
        was_blind = any(
            port == one.port and since <= one.ended_at <= until for port, since, until in made.blind
        )
        if num_lost > OBSERVE_EVERY_TOKENS and not was_blind:
            yield f"{one.request_id}: {one.num_pieces} tokens came, billed {counts[one.request_id]}"


def _stated_pusd(db: Database) -> int:
    """The sum of the statements, as they would be if their months ended now."""
    now = instants.now()
    tenant = find_tenant(db, name=FIRST_TENANT)
    months = {month_of(row.accounted_at_us, UTC_ZONE) for row in rows(db, schema.usage_events)}
    return sum(
        preview_statement(db, tenant_id=tenant.id, period=month, now=now).amount_pusd for month in months
    )

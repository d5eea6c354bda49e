"""How fast usage is posted, and what an admission adds to a request, on both databases.

    python benchmarks/billing_throughput.py            about three minutes
    python benchmarks/billing_throughput.py --quick    a fifth of the events, no file written

Posting: events of requests that were admitted before, of ten tenants with two keys each and two models,
with four classes of tokens, settled at once; the time runs until the last is in the database with its
ledger lines, roll-ups and journal. Admission: 50 requests are open at any time, each half a second
long (so about 100 begin a second), settled at its end while others are admitted; the wait for the
commit of each admission is what it adds. Beside that the same without any time between requests, where
50 wait for each other.

Receipts are sealed meanwhile, as in a gateway. Both include the fsyncs that a durable commit needs;
what one costs on this disk is printed first. The databases are a SQLite file and a throw-away
PostgreSQL with its defaults (durable), on the same disk.
Exits with 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from peers.record import REPOSITORY, write_result
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(REPOSITORY))

from billing import instants
from billing.accounts import KeyHasher, create_key, create_tenant
from billing.db import Database, migrate, open_database
from billing.ids import new_request_id
from billing.meter import Meter, MeterLimits
from billing.price_sheet import default_price_sheet
from billing.prices import ensure_published
from billing.receipt_keys import SigningKey
from billing.sealer import Sealer
from billing.usage import Admission, TokenCounts, UsageEvent, UsageKind
from tests.servers import running_postgres

TENANTS, KEYS, MODELS = 10, 2, ("small", "large")
EVENTS = 20_000
OPEN_REQUESTS = 50
REQUEST_SECONDS = 0.5
ADMISSION_SECONDS = 10.0
FSYNCS = 200
POSTING_GOALS = {"postgresql": 2_000, "sqlite": 1_000}
ADMISSION_GOAL_MS = 3.0

console = Console(width=120)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Whose requests they are."""

    keys: list[tuple[object, object]]

    def admission(self, number: int) -> Admission:
        tenant_id, key_id = self.keys[number % len(self.keys)]
        return Admission(
            request_id=new_request_id(),
            tenant_id=tenant_id,
            api_key_id=key_id,
            model=MODELS[number // len(self.keys) % len(MODELS)],
            admitted_at=instants.now(),
        )


def ended(admission: Admission, number: int) -> UsageEvent:
    output = 50 + number % 100
    return UsageEvent(
        admission=admission,
        kind=UsageKind.FINAL,
        counts=TokenCounts(uncached=20 + number % 30, read=1_600, write_auto=number % 64, output=output),
        finished_at=instants.now(),
        delivered=output,
        finish_reason="stop",
        first_token_ns=80_000_000,
    )


@contextmanager
def databases() -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder, running_postgres(settings=()) as server:
        yield {"postgresql": server.url(), "sqlite": f"sqlite:///{folder}/headstart.db"}


@contextmanager
def metering(url: str) -> Iterator[tuple[Database, Meter, Traffic]]:
    migrate(url)
    with open_database(url) as db, tempfile.TemporaryDirectory() as journal:
        ensure_published(db, default_price_sheet(), clock=instants.now)
        meter = Meter(db, Path(journal), limits=MeterLimits(open_requests=10 * EVENTS))
        sealer = Sealer(db, SigningKey.new(), num_unposted=lambda: meter.stats().pending)
        meter.start()
        sealer.start()
        try:
            yield db, meter, Traffic(keys=[one for number in range(TENANTS) for one in new_keys(db, number)])
        finally:
            meter.close()
            sealer.close()


def new_keys(db: Database, number: int) -> list[tuple[object, object]]:
    now, hasher = instants.now(), KeyHasher(bytes(32))
    tenant = create_tenant(db, name=f"tenant {number} {os.urandom(4).hex()}", now=now)
    made = [
        create_key(db, tenant_id=tenant.id, label=f"k{key}", hasher=hasher, now=now) for key in range(KEYS)
    ]
    return [(tenant.id, key.id) for key, _ in made]


def posting_rate(meter: Meter, traffic: Traffic, events: int) -> float:
    """Events per second."""
    admissions = [traffic.admission(number) for number in range(events)]
    for first in range(0, events, 1_000):
        for outcome in [meter.admit(one) for one in admissions[first : first + 1_000]]:
            outcome.result(60)
    meter.flush(timeout_seconds=600)
    settled = [ended(one, number) for number, one in enumerate(admissions)]
    begin = time.perf_counter()
    for event in settled:
        meter.settle(event)
    meter.flush(timeout_seconds=600)
    return events / (time.perf_counter() - begin)


def admission_waits(meter: Meter, traffic: Traffic, *, seconds: float, request_seconds: float) -> list[float]:
    """Milliseconds that each admission waited."""
    waits: list[list[float]] = [[] for _ in range(OPEN_REQUESTS)]
    stop = time.perf_counter() + seconds

    def one_after_another(place: int) -> None:
        time.sleep(request_seconds * place / OPEN_REQUESTS)
        number = place
        while time.perf_counter() < stop:
            admission = traffic.admission(number)
            begin = time.perf_counter()
            meter.admit(admission).result(60)
            waits[place].append(1e3 * (time.perf_counter() - begin))
            time.sleep(request_seconds)
            meter.settle(ended(admission, number))
            number += OPEN_REQUESTS

    threads = [threading.Thread(target=one_after_another, args=(place,)) for place in range(OPEN_REQUESTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    meter.flush(timeout_seconds=600)
    return [wait for each in waits for wait in each]


def fsync_milliseconds() -> float:
    """The median of an append of 4 KiB made durable."""
    times = []
    with tempfile.TemporaryFile() as file:
        for _ in range(FSYNCS):
            begin = time.perf_counter()
            file.write(bytes(4096))
            file.flush()
            os.fdatasync(file.fileno())
            times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def measure(url: str, *, events: int, seconds: float) -> dict[str, float]:
    with metering(url) as (_, meter, traffic):
        posting_rate(meter, traffic, events // 10)  # warm
        paced = admission_waits(meter, traffic, seconds=seconds, request_seconds=REQUEST_SECONDS)
        crowded = admission_waits(meter, traffic, seconds=seconds / 2, request_seconds=0)
        rate = posting_rate(meter, traffic, events)
        stats = meter.stats()
        assert stats.conflicts == stats.rejected == stats.duplicates == 0, stats
    return {
        "events_per_second": rate,
        "admission_ms": statistics.median(paced),
        "admission_p95_ms": statistics.quantiles(paced, n=20)[-1],
        "admissions_per_second": len(paced) / seconds,
        "crowded_admission_ms": statistics.median(crowded),
        "crowded_admissions_per_second": len(crowded) / (seconds / 2),
    }


def show(found: dict[str, dict[str, float]], fsync_ms: float) -> list[str]:
    """Prints the table; the goals that were missed."""
    missed = []
    table = Table(title=f"Billing (an fsync of 4 KiB takes {fsync_ms:.2f} ms on this disk)")
    for heading in ("what", "database", "ours", "goal"):
        table.add_column(heading, justify="left" if heading in {"what", "database"} else "right")
    for database, figures in found.items():
        goal = POSTING_GOALS[database]
        table.add_row("posting", database, f"{figures['events_per_second']:,.0f} /s", f"≥ {goal:,} /s")
        if figures["events_per_second"] < goal:
            missed.append(f"posting on {database}: {figures['events_per_second']:,.0f} /s, goal {goal:,}")
        what = f"admission, {OPEN_REQUESTS} open, {figures['admissions_per_second']:.0f} /s, median"
        table.add_row(what, database, f"{figures['admission_ms']:.2f} ms", f"≤ {ADMISSION_GOAL_MS} ms")
        if figures["admission_ms"] > ADMISSION_GOAL_MS:
            missed.append(f"admission on {database}: {figures['admission_ms']:.2f} ms")
        table.add_row("the same, 95th percentile", database, f"{figures['admission_p95_ms']:.2f} ms", "")
        what = (
            f"admission, {OPEN_REQUESTS} at once, {figures['crowded_admissions_per_second']:,.0f} /s, median"
        )
        table.add_row(what, database, f"{figures['crowded_admission_ms']:.2f} ms", "")
    console.print(table)
    for miss in missed:
        console.print(f"[red]missed[/red] {miss}")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--database", choices=list(POSTING_GOALS))
    options = parser.parse_args()
    events, seconds = (EVENTS // 5, ADMISSION_SECONDS / 2) if options.quick else (EVENTS, ADMISSION_SECONDS)
    fsync_ms = fsync_milliseconds()
    with databases() as urls:
        chosen = [options.database] if options.database else list(urls)
        found = {name: measure(urls[name], events=events, seconds=seconds) for name in chosen}
    missed = show(found, fsync_ms)
    if not options.quick and not options.database:
        versions = {name: version(name) for name in ("sqlalchemy", "psycopg")}
        document = {"versions": versions, "fsync_ms": fsync_ms, "found": found, "missed": missed}
        write_result("billing_throughput", document)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

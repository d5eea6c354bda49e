"""How long the server takes for the dashboard's cache page, with five million events in the ledger.

    python benchmarks/dashboard.py                     5,000,000 events, some minutes
    python benchmarks/dashboard.py --home FOLDER       the same, and the next run need not fill it again
    python benchmarks/dashboard.py --events 200000     a first look, no file written

A SQLite file is filled by statements on whole sets: requests and events of 40 tenants with two keys each,
two models, two workers, over 30 days; then the roll-ups, from the events, as posting would have made
them. (Ledger lines are left out: nothing on the page reads them.) A real gateway serves the page
over HTTP on this machine, to one visitor at a time; the time runs from the request's first byte to the
answer's last. A real worker's statistics are asked for each time. Exits with 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import re
import sqlite3
import statistics
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
from alembic.script import ScriptDirectory
from peers.record import REPOSITORY, write_result
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(REPOSITORY))

from billing import instants
from billing.accounts import ApiKey, Role, create_key, create_tenant, find_tenant
from billing.db import alembic_config
from billing.ids import TenantId, new_id
from gateway.auth import key_hasher
from tests.browser.site import NOW, Site, running_site
from tests.browser.traffic import Traffic, running_worker

FULL_EVENTS = 5_000_000
TENANTS, KEYS, DAYS = 40, 2, 30
MODELS = ("small", "large")
WARM_UPS, VISITS = 3, 15
GOAL_MS = 300.0
PERIODS = ("day", "week", "days30")
UNITS = {"input": 150_000, "read": 15_000, "output": 600_000}
console = Console(width=110)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Milliseconds of one page for one visitor."""

    whose: str
    period: str
    median: float
    slowest: float


def fill(path: Path, keys: list[tuple[str, str]], num_events: int) -> None:
    """Requests and events of the tenants' keys, then every roll-up of them. Nobody else is there."""
    with closing(sqlite3.connect(path, isolation_level=None)) as file:
        file.execute("PRAGMA synchronous = OFF")
        file.execute("BEGIN IMMEDIATE")
        dropped = drop_triggers(file)
        file.execute("CREATE TEMP TABLE owners (n INTEGER PRIMARY KEY, tenant, api_key)")
        file.executemany("INSERT INTO owners VALUES (?, ?, ?)", [(n, *key) for n, key in enumerate(keys)])
        filling = (*rollups(), counting_statement(), *deployment_statements())
        for statement in (*usage(num_events, len(keys)), *filling, *dropped):
            began = time.monotonic()
            file.execute(statement)
            if statement not in dropped:
                console.print(f"  {time.monotonic() - began:6.1f} s  {' '.join(statement.split())[:60]}…")
        file.execute("COMMIT")
        file.execute("ANALYZE")


def keys_of(site: Site, name: str) -> list[tuple[str, str]]:
    """A new tenant's, as ids that SQLite keeps."""
    tenant = create_tenant(site.gateway.database, name=name, now=instants.now())
    return [(tenant.id.hex, new_key(site, tenant.id, Role.TENANT)[0].id.hex) for _ in range(KEYS)]


def new_key(site: Site, tenant_id: TenantId, role: Role) -> tuple[ApiKey, str]:
    return create_key(
        site.gateway.database,
        tenant_id=tenant_id,
        label=f"bench-{new_id()}",
        hasher=key_hasher(site.gateway.secret),
        now=instants.now(),
        role=role,
    )


def drop_triggers(file: sqlite3.Connection) -> list[str]:
    """They look at each row by itself; here nobody else writes. Returns what makes them again."""
    rows = file.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
    for name, _ in rows:
        file.execute(f"DROP TRIGGER {name}")
    return [sql for _, sql in rows]


def usage(num_events: int, num_keys: int) -> list[str]:
    """A request and its event for each number; what differs is spread by multiples of large primes."""
    end = instants.from_datetime(NOW)
    span = DAYS * 86_400 * instants.MICROSECONDS_PER_SECOND
    more = f"SELECT n + 1 FROM numbers WHERE n < {num_events - 1}"
    numbers = f"WITH RECURSIVE numbers(n) AS (SELECT 0 UNION ALL {more})"
    at = f"{end - span} + n * {span // num_events}"
    drawn = f"SELECT n AS number, n * 7919 % {num_keys} AS owner, {at} AS at FROM numbers"
    made = f"({drawn}) JOIN owners ON owners.n = owner"
    model = f"CASE WHEN number % 3 = 0 THEN '{MODELS[0]}' ELSE '{MODELS[1]}' END"
    read = "CASE WHEN number * 31 % 10 < 7 THEN 400 + number * 104729 % 3000 ELSE 0 END"
    reason = (
        "CASE WHEN number * 31 % 10 < 7 THEN CASE WHEN number % 5 = 0 THEN NULL ELSE 'diverged' END "
        "WHEN number % 4 = 0 THEN 'evicted' ELSE 'no_shared_prefix' END"
    )
    return [
        f"""{numbers} INSERT INTO requests (id, tenant_id, api_key_id, project_id, model, state,
        admitted_at_us, lease_until_us, settled_at_us, journal_id, process_id)
        SELECT printf('%032x', number), tenant, api_key, NULL, {model}, 'settled', at, at, at, tenant, tenant
        FROM {made}""",
        f"""{numbers} INSERT INTO usage_events (id, tenant_id, request_id, kind, original_id, model,
        uncached_tokens, read_tokens, read_host_tokens, read_disk_tokens, read_remote_tokens,
        write_auto_tokens, write_5m_tokens, write_1h_tokens, output_tokens, pin_token_hours,
        delivered_tokens, usage_state, finish_reason, first_token_ns, worker, miss_reason, deepest_block,
        admitted_at_us, accounted_at_us, finished_at_us, payload_digest, posted_at_us)
        SELECT printf('%032x', number), tenant, printf('%032x', number), 'final', NULL, {model},
        50 + number * 15485863 % 700, {read}, 0, 0, 0, 0, 0, 0, 20 + number % 300, 0, 20 + number % 300,
        'reported', 'stop', 40000000 + number * 7 % 900000000, 'worker-' || (number % 2), {reason}, NULL,
        at, at, at, zeroblob(32), at FROM {made}""",
    ]


def rollups() -> list[str]:
    """As posting would have made them: one pass over the events for each table, and for each class."""
    bucket = "accounted_at_us - accounted_at_us % 900000000"
    source = "usage_events AS e JOIN requests AS r ON r.id = e.request_id"
    key = f"e.tenant_id, {bucket}, r.api_key_id, e.model"
    counts = f"""INSERT INTO request_rollups (tenant_id, bucket_start_us, api_key_id, model, requests,
        aborted, usage_missing, delivered_tokens)
        SELECT {key}, count(*), 0, 0, sum(delivered_tokens) FROM {source} GROUP BY {key}"""
    columns = {"input": "uncached_tokens", "read": "read_tokens", "output": "output_tokens"}
    classes = [
        f"""INSERT INTO class_rollups (tenant_id, bucket_start_us, api_key_id, model, token_class,
        quantity_tokens, list_amount_pusd, amount_pusd, amount_without_cache_pusd)
        SELECT {key}, '{name}', sum({column}), sum({column}) * {UNITS[name]}, sum({column}) * {UNITS[name]},
        sum({column}) * {UNITS["input" if name == "read" else name]} FROM {source}
        WHERE {column} > 0 GROUP BY {key}"""
        for name, column in columns.items()
    ]
    return [counts, *classes]


def counting_statement() -> str:
    """The migration's own, which counts what was posted before it."""
    statement: str = migration_with("filling").filling()
    return statement


def deployment_statements() -> list[str]:
    """The migration's own, which add up all tenants."""
    statements: list[str] = migration_with("fillings").fillings()
    return statements


def migration_with(name: str) -> Any:
    scripts = ScriptDirectory.from_config(alembic_config()).walk_revisions()
    return next(one.module for one in scripts if hasattr(one.module, name))


def measure(site: Site, whose: str, secret: str) -> list[Measured]:
    with httpx.Client(base_url=site.url, timeout=120) as client:
        form = re.search(r'name="form_token" value="([^"]+)"', client.get("/dashboard/sign-in").text)
        assert form is not None
        client.post("/dashboard/sign-in", data={"form_token": form[1], "key": secret})
        return [measure_page(client, whose, period) for period in PERIODS]


def measure_page(client: httpx.Client, whose: str, period: str) -> Measured:
    taken = []
    for _ in range(WARM_UPS + VISITS):
        began = time.perf_counter()
        answer = client.get("/dashboard/cache", params={"period": period})
        taken.append((time.perf_counter() - began) * 1e3)
        assert answer.status_code == 200, answer.status_code
        assert "No requests in this period" not in answer.text
    taken = taken[WARM_UPS:]
    return Measured(whose=whose, period=period, median=statistics.median(taken), slowest=max(taken))


def report(measured: list[Measured], num_events: int) -> list[str]:
    table = Table(
        "whose", "period", "median, ms", "slowest, ms", "goal", title=f"the cache page, {num_events:,} events"
    )
    missed = []
    for one in measured:
        is_met = one.median <= GOAL_MS
        goal = f"≤ {GOAL_MS:g}" if is_met else f"≤ {GOAL_MS:g} MISSED"
        table.add_row(one.whose, one.period, f"{one.median:.0f}", f"{one.slowest:.0f}", goal)
        if not is_met:
            missed.append(f"{one.whose}, {one.period}: {one.median:.0f} ms (goal {GOAL_MS:g})")
    console.print(table)
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=FULL_EVENTS)
    parser.add_argument("--home", type=Path, help="a folder that is filled once, and kept for the next run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = options.home or Path(folder) / "home"
        if not (home / "headstart.db").exists():
            with running_site(home) as site:
                keys = [key for number in range(TENANTS) for key in keys_of(site, f"tenant-{number:02d}")]
            fill(home / "headstart.db", keys, options.events)
        with running_site(home) as site, running_worker(Traffic(site).statistics) as url:
            site.point_to(url)
            tenant = find_tenant(site.gateway.database, name="tenant-00")
            measured = [
                *measure(site, "one tenant's", new_key(site, tenant.id, Role.TENANT)[1]),
                *measure(site, "everybody's", new_key(site, tenant.id, Role.ADMIN)[1]),
            ]
    missed = report(measured, options.events)
    for miss in missed:
        console.print("missed:", miss)
    if options.events >= FULL_EVENTS:
        write_result("dashboard", document(options.events, measured, missed))
    return 1 if missed else 0


def document(num_events: int, measured: list[Measured], missed: list[str]) -> dict[str, object]:
    return {
        "versions": {name: version(name) for name in ("sqlalchemy", "starlette", "jinja2")},
        "database": "SQLite",
        "events": num_events,
        "tenants": TENANTS,
        "days": DAYS,
        "page": "/dashboard/cache",
        "goal_ms": GOAL_MS,
        "milliseconds": [
            {
                "whose": one.whose,
                "period": one.period,
                "median": round(one.median, 1),
                "slowest": round(one.slowest, 1),
            }
            for one in measured
        ],
        "missed": missed,
    }


if __name__ == "__main__":
    sys.exit(main())

"""How long reports take over five million events, which they read from roll-ups.

    python benchmarks/billing_reports.py            about three minutes
    python benchmarks/billing_reports.py --quick    a tenth of the buckets, no file written

Both databases are filled with the roll-ups that posting makes of five million events of one tenant in
November: four keys, two models, four classes of tokens, in every quarter of an hour; and of twenty
others beside it. (The events themselves are left out: a report whose ends are whole quarter-hours reads
none, and one with other ends reads those of two. Statements read all events of their month besides, to
reconcile them.) Each report is read 15 times; the median is shown.
Exits with 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from uuid import UUID
from zoneinfo import ZoneInfo

from peers.record import REPOSITORY, write_result
from rich.console import Console
from rich.table import Table
from sqlalchemy import insert, text

sys.path.insert(0, str(REPOSITORY))

from billing import instants, schema
from billing.accounts import KeyHasher, create_key, create_tenant
from billing.calendar import Span, days
from billing.db import Database, migrate, open_database
from billing.instants import BUCKET_MICROSECONDS, Microseconds
from billing.reports import Dimension, Selection, grouped_usage, usage_report
from tests.servers import running_postgres

EVENTS = 5_000_000
START = instants.from_datetime(datetime(2026, 11, 1, tzinfo=UTC))
END = instants.from_datetime(datetime(2026, 12, 1, tzinfo=UTC))
KEYS, MODELS = 4, ("small", "large")
OTHER_TENANTS = 20
CLASSES = {
    "input": (300, 150_000),
    "read": (1_500, 15_000),
    "write_auto": (40, 150_000),
    "output": (180, 600_000),
}
"""Tokens of one event, and picodollars of a token."""
INPUT_PUSD = 150_000
REPEATS = 15
GOAL_MS = 200.0

console = Console(width=110)


def fill(db: Database, *, num_buckets: int) -> UUID:
    """Roll-ups of the big tenant, whose id is returned, and of the others."""
    big, *others = (new_tenant(db, number) for number in range(1 + OTHER_TENANTS))
    groups = [(big[0], key, model) for key in big[1] for model in MODELS]
    fill_groups(db, groups, num_buckets, EVENTS // (len(groups) * num_buckets))
    fill_groups(db, [(tenant, keys[0], MODELS[0]) for tenant, keys in others], num_buckets, 10)
    if db.engine.dialect.name == "postgresql":
        with db.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("VACUUM ANALYZE"))
    else:
        with db.write() as connection:
            connection.execute(text("ANALYZE"))
    return big[0]


def new_tenant(db: Database, number: int) -> tuple[UUID, list[UUID]]:
    tenant = create_tenant(db, name=f"tenant {number}", now=START)
    hasher = KeyHasher(bytes(32))
    keys = [
        create_key(db, tenant_id=tenant.id, label=f"key {key}", hasher=hasher, now=START)[0].id
        for key in range(KEYS)
    ]
    return tenant.id, keys


def fill_groups(db: Database, groups: list[tuple[UUID, UUID, str]], num_buckets: int, events: int) -> None:
    for tenant_id, key_id, model in groups:
        keys = [
            {
                "tenant_id": tenant_id,
                "bucket_start_us": START + bucket * BUCKET_MICROSECONDS,
                "api_key_id": key_id,
                "model": model,
            }
            for bucket in range(num_buckets)
        ]
        counts = {"requests": events, "aborted": events // 50, "usage_missing": 0}
        requests = [key | counts | {"delivered_tokens": events * CLASSES["output"][0]} for key in keys]
        classes = [key | of_class(name, events) for key in keys for name in CLASSES]
        with db.write() as connection:
            connection.execute(insert(schema.request_rollups), requests)
            connection.execute(insert(schema.class_rollups), classes)


def of_class(name: str, events: int) -> dict[str, object]:
    tokens, unit = CLASSES[name]
    return {
        "token_class": name,
        "quantity_tokens": events * tokens,
        "list_amount_pusd": events * tokens * unit,
        "amount_pusd": events * tokens * unit,
        "amount_without_cache_pusd": events * tokens * (unit if name == "output" else INPUT_PUSD),
    }


def reports(db: Database, tenant_id: UUID, end: Microseconds) -> dict[str, Callable[[], object]]:
    whole = [Span(label="november", start=START, end=end)]
    every = (Dimension.PROJECT, Dimension.API_KEY, Dimension.MODEL)
    return {
        "a month": lambda: usage_report(db, tenant_id=tenant_id, start=START, end=end),
        "a month, by day in India": lambda: usage_report(
            db, tenant_id=tenant_id, start=START, end=end, cutter=days, zone=ZoneInfo("Asia/Kolkata")
        ),
        "a month, by project, key, model and class": lambda: grouped_usage(
            db, Selection(tenant_ids=[tenant_id]), whole, by=every
        ),
    }


def check(db: Database, tenant_id: UUID, end: Microseconds, num_buckets: int) -> int:
    """The report adds up to what was filled in; returns its requests."""
    totals = usage_report(db, tenant_id=tenant_id, start=START, end=end).totals
    groups = KEYS * len(MODELS)
    events = EVENTS // (groups * num_buckets) * groups * num_buckets
    assert totals.requests == events, totals
    assert totals.amount_pusd == events * sum(tokens * unit for tokens, unit in CLASSES.values())
    return totals.requests


def median_ms(report: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        report()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


@contextmanager
def databases() -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder, running_postgres() as server:
        yield {"postgresql": server.url(), "sqlite": f"sqlite:///{folder}/headstart.db"}


def measure(url: str, num_buckets: int) -> tuple[int, dict[str, float]]:
    migrate(url)
    end = instants.later(START, timedelta(microseconds=num_buckets * BUCKET_MICROSECONDS))
    with open_database(url) as db:
        tenant_id = fill(db, num_buckets=num_buckets)
        events = check(db, tenant_id, end, num_buckets)
        return events, {
            name: median_ms(report) for name, report in reports(db, tenant_id, min(end, END)).items()
        }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    num_buckets = (END - START) // BUCKET_MICROSECONDS // (10 if options.quick else 1)
    with databases() as urls:
        found = {name: measure(url, num_buckets) for name, url in urls.items()}
    table = Table(title=f"Reports over {found['sqlite'][0]:,} events (medians)")
    for heading in ("report", *found, "goal"):
        table.add_column(heading, justify="left" if heading == "report" else "right")
    missed = []
    for report in found["sqlite"][1]:
        shown = [figures[report] for _, figures in found.values()]
        table.add_row(report, *(f"{one:.0f} ms" for one in shown), f"≤ {GOAL_MS:.0f} ms")
        missed += [
            f"{report} on {name}: {figures[report]:.0f} ms"
            for name, (_, figures) in found.items()
            if figures[report] > GOAL_MS
        ]
    console.print(table)
    for miss in missed:
        console.print(f"[red]missed[/red] {miss}")
    if not options.quick:
        versions = {name: version(name) for name in ("sqlalchemy", "psycopg")}
        figures = {name: milliseconds for name, (_, milliseconds) in found.items()}
        write_result(
            "billing_reports",
            {"versions": versions, "events": found["sqlite"][0], "milliseconds": figures, "missed": missed},
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

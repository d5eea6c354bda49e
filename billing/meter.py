"""The meter: nothing runs unmetered, nothing metered is lost, nothing is counted twice.

Knows admissions, usage events, the journal and the database. Does not know
HTTP, asyncio or workers.

States of a request: `admitted → settled`. One thread, the writer, makes every
change: admissions are group-committed, settled events are posted in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from billing import instants
from billing.db import Database
from billing.instants import Clock, Microseconds
from billing.usage import Admission, UsageEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterLimits:
    """A limit on everything that could grow."""

    waiting_admissions: int = 4096
    pending_events: int = 65_536
    batch_size: int = 512
    lease: timedelta = timedelta(hours=1)
    first_retry: timedelta = timedelta(milliseconds=100)
    last_retry: timedelta = timedelta(seconds=5)
    sweep_interval: timedelta = timedelta(minutes=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterStats:
    """Counters since start, and `pending` and `in_flight` now. For metrics."""

    admitted: int
    refused: int
    settled: int
    posted: int
    duplicates: int
    conflicts: int
    rejected: int
    swept: int
    torn_records: int
    database_failures: int
    journal_failures: int
    pending: int
    in_flight: int

    def as_mapping(self) -> Mapping[str, int]:
        raise NotImplementedError


class Meter:
    """Admits, settles, posts. Thread-safe. `start()` it once, `close()` it once, after all requests."""

    def __init__(
        self,
        db: Database,
        journal_dir: Path,
        *,
        clock: Clock = instants.now,
        limits: MeterLimits | None = None,
    ) -> None:
        raise NotImplementedError

    def start(self) -> None:
        """Takes the journal, queues what it holds, starts the writer, sweeps former processes.

        Raises JournalInUse or JournalCorrupted. Needs a migrated database with prices, but waits for neither.
        """
        raise NotImplementedError

    def close(self, *, timeout_seconds: int = 10) -> None:
        """Posts what is settled, stops the writer, releases the journal. Idempotent.

        What cannot be posted in time stays in the journal, and is posted after the next start.
        """
        raise NotImplementedError

    def admit(self, admission: Admission) -> Future[None]:
        """Done once the request's row is committed. Never blocks.

        The future raises MeterOverloaded, MeterUnavailable or MeterClosed (no work may start: 503),
        UnpricedModel, or DuplicateRequest.
        """
        raise NotImplementedError

    def observe(self, event: UsageEvent) -> None:
        """Keeps the counts known so far as evidence, should this process die. One append."""
        raise NotImplementedError

    def settle(self, event: UsageEvent) -> None:
        """The request has ended. One local append, no database, no waiting: fit for a `finally`.

        Raises MeterClosed alone. A second, different event for a request is an alert (`stats().conflicts`).
        """
        raise NotImplementedError

    def flush(self, *, timeout_seconds: int = 10) -> None:
        """Waits until all that is settled by now is posted. Raises MeterUnavailable."""
        raise NotImplementedError

    def sweep(self, now: Microseconds) -> int:
        """Settles requests that nobody will: those of former processes, and those whose lease ran out.

        Kind aborted, counts from the last evidence, 0 without any. Returns how many.
        """
        raise NotImplementedError

    def stats(self) -> MeterStats:
        raise NotImplementedError

"""The meter: nothing runs unmetered, nothing metered is lost, nothing is counted twice.

Knows admissions, usage events, the journal and the database. Does not know
HTTP, asyncio or workers.

States of a request: `admitted → settled`. Any thread admits, observes and
settles; the writers make every change to the database. On PostgreSQL one of them
admits and another posts and sweeps, so that nobody waits for a posting who need
not; SQLite takes one transaction at a time, so there one writer does both.
Admissions are group-committed: all that wait when their writer comes round share
one transaction. Settled events are posted in order, in batches.

While the database is away, settled events wait in memory and in the journal, and
admissions are refused at once.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from enum import Flag, auto
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from sqlalchemy.exc import StatementError

from billing import budgets, instants, ledger, limits
from billing.backoff import Backoff, nanoseconds
from billing.db import Database
from billing.errors import (
    AmountTooLarge,
    BillingError,
    DatabaseUnavailable,
    InvalidUsage,
    MeterClosed,
    MeterOverloaded,
    MeterRefusal,
    MeterUnavailable,
    UnpricedModel,
)
from billing.ids import ProcessId, RequestId, TenantId, new_id
from billing.instants import Clock, Microseconds
from billing.journal import Journal, Record
from billing.ledger import Grant, Owner, Posting
from billing.prices import RecentBook
from billing.usage import ABANDONED, Admission, Estimate, TokenCounts, UsageEvent, UsageKind

_logger = logging.getLogger(__name__)

_State = Literal["new", "running", "failed", "closing", "closed"]
"""`new → running → closing → closed`. `failed`: a writer died of a fault of its own; see `Meter`."""


class _Duty(Flag):
    """What a writer does."""

    ADMIT = auto()
    POST = auto()
    """Posting, sweeping, and writing what could not be journaled."""


_DUTIES: Final[Mapping[str, Mapping[str, _Duty]]] = {
    "postgresql": {"billing-admitter": _Duty.ADMIT, "billing-poster": _Duty.POST},
    "sqlite": {"billing-writer": _Duty.ADMIT | _Duty.POST},
}
"""The writers of each kind of database."""

_DATABASE_AWAY: Final = "the database is away"
_WRITER_DEAD: Final = "a writer died; a new process must take over"

_NEVER_POSTABLE: Final = (StatementError, UnpricedModel, AmountTooLarge)
"""What is the event's own fault: trying again cannot help."""

SWEEP_TIMEOUT_SECONDS: Final = 60

NOTHING: Final = Estimate()
"""Of whoever does not say what it may use: it is admitted while its budgets are not overrun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterLimits:
    """A limit on everything that could grow.

    `waiting_admissions` wait for their commit. `open_requests` are admitted and
    not yet posted: in flight, or waiting for the database. `lease` is longer than
    any request may last; after it a request is settled as abandoned. Settled events
    wait up to `linger` for others to be posted with, unless they free a reservation: so
    admissions seldom find a posting in their way.
    """

    waiting_admissions: int = 4096
    open_requests: int = 65_536
    batch_size: int = 512
    linger: timedelta = timedelta(milliseconds=100)
    lease: timedelta = timedelta(hours=1)
    first_retry: timedelta = timedelta(milliseconds=100)
    last_retry: timedelta = timedelta(seconds=5)
    sweep_interval: timedelta = timedelta(minutes=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterStats:
    """Counters since start, and what is `in_flight` and `pending` (settled, not yet posted) now. For metrics.

    `conflicts`, `rejected` and `torn_records` call for a person.
    """

    admitted: int
    refused: int
    settled: int
    posted: int
    adjusted: int
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
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """What is settled and not yet posted, and how long the oldest of it has waited, in microseconds."""

    events: int
    oldest_us: int
    journal_bytes: int


_COUNTERS: Final = tuple(
    field.name for field in dataclasses.fields(MeterStats) if field.name not in {"pending", "in_flight"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """An admission before its commit. It is decided when `after` events are done: those leave room for it."""

    admission: Admission
    estimate: Estimate
    outcome: Future[Grant]
    after: int = 0


_Sweep = tuple[Microseconds, Future[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What a writer does in one round."""

    admissions: Sequence[_Waiting] = ()
    events: Sequence[UsageEvent] = ()
    sweeps: Sequence[_Sweep] = ()
    is_journal_due: bool = False

    @property
    def is_empty(self) -> bool:
        return not (self.admissions or self.events or self.sweeps or self.is_journal_due)


class Meter:
    """Admits, settles, posts. Thread-safe. `start()` it once, `close()` it once, after all requests.

    Should a writer die of a fault of its own, nothing is admitted any more, and
    what is settled goes to the journal alone, for the next process to post.
    """

    def __init__(
        self,
        db: Database,
        journal_dir: Path,
        *,
        clock: Clock = instants.now,
        limits: MeterLimits | None = None,
    ) -> None:
        self._db = db
        self._journal_dir = journal_dir
        self._clock = clock
        self._limits = limits or MeterLimits()
        self._book = RecentBook(monotonic_ns=time.monotonic_ns)
        self._database_tries = self._backoff()
        self._journal_tries = self._backoff()
        self._threads = [
            threading.Thread(target=self._run, args=(duty,), name=name, daemon=True)
            for name, duty in _DUTIES[db.engine.dialect.name].items()
        ]
        # Guards everything below. A writer lets go of it before it waits for a disk or a database.
        self._changed = threading.Condition()
        self._num_writers = 0
        self._state: _State = "new"
        self._close_deadline_ns = 0
        self._next_sweep_ns = time.monotonic_ns()
        self._waiting: deque[_Waiting] = deque()
        # Of those in flight, whose admission a transaction is about to decide.
        self._deciding: set[RequestId] = set()
        self._in_flight: set[RequestId] = set()
        # Of those in flight, who has something reserved, and who can use less of it than was thought.
        self._holders: set[RequestId] = set()
        self._narrowed: dict[RequestId, tuple[Admission, Estimate]] = {}
        self._evidence: dict[RequestId, UsageEvent] = {}
        self._pending: deque[UsageEvent] = deque()
        self._pending_ids: set[RequestId] = set()
        self._unjournaled: deque[UsageEvent] = deque()
        self._sweeps: deque[_Sweep] = deque()
        self._num_queued = 0
        self._num_done = 0
        # By tenant: so many must be done before all the room is known that its ended requests leave.
        self._room_goals: dict[TenantId, int] = {}
        # Somebody waits until so many are done.
        self._flush_goal = 0
        self._linger_until_ns = 0
        self._counts: Counter[str] = Counter()

    def start(self) -> None:
        """Takes the journal, queues what it holds, starts the writers, sweeps former processes.

        Raises JournalInUse, JournalCorrupted, or MeterClosed when it was started before. Needs a
        migrated database with prices, but waits for neither.
        """
        if self._state != "new":
            raise MeterClosed(f"the meter is {self._state}")
        self._journal = Journal(self._journal_dir)
        try:
            recovered = self._journal.recover()
        except BillingError:
            self._journal.close()
            raise
        self._owner = Owner(journal_id=self._journal.id, process_id=ProcessId(new_id()))
        if recovered.torn_records:
            _logger.warning("journal: dropped %d torn records of a crash", recovered.torn_records)
        with self._changed:
            self._counts["torn_records"] += recovered.torn_records
            self._evidence.update(recovered.evidence)
            for event in recovered.settled:
                self._enqueue(event)
            self._state = "running"
            self._num_writers = len(self._threads)
        for thread in self._threads:
            thread.start()

    def close(self, *, timeout_seconds: int = 10) -> None:
        """Posts what is settled, stops the writers, releases the journal. Idempotent.

        What cannot be posted in time stays in the journal, and is posted after the next start.
        """
        with self._changed:
            former = self._state
            if former == "running":
                self._state = "closing"
                self._close_deadline_ns = time.monotonic_ns() + nanoseconds(
                    timedelta(seconds=timeout_seconds)
                )
            elif former in {"new", "failed"}:
                self._state = "closed"
            self._changed.notify_all()
        for thread in self._threads:
            if thread.is_alive():
                # Not for ever: a statement of a writer is bounded by the database's own timeouts.
                thread.join()
        if former == "failed":
            self._close_journal()

    def admit(self, admission: Admission, estimate: Estimate = NOTHING) -> Future[Grant]:
        """Done once the request's row is committed, and what it can use is reserved. Never blocks.

        The future tells how the limits stand that the request is under, if any. It raises a
        MeterRefusal (no work may start now: 503), RateLimited, BudgetExceeded, UnpricedModel,
        DuplicateRequest or InvalidUsage. Whoever gives up waiting for it settles the
        request all the same, with no tokens: settling needs no admission.
        """
        outcome: Future[Grant] = Future()
        with self._changed:
            refusal = self._refusal()
            if refusal is None:
                after = self._room_goals.get(admission.tenant_id, 0)
                self._waiting.append(
                    _Waiting(admission=admission, estimate=estimate, outcome=outcome, after=after)
                )
                self._in_flight.add(admission.request_id)
                self._changed.notify_all()
            else:
                self._counts["refused"] += 1
                outcome.set_exception(refusal)
        return outcome

    def narrow(self, admission: Admission, estimate: Estimate) -> None:
        """An open request can use no more than this, as is known now. Never blocks, and costs nothing where
        nothing is reserved.

        What it frees is free before this meter's next admission.
        """
        with self._changed:
            if admission.request_id in self._holders:
                self._narrowed[admission.request_id] = (admission, estimate)

    def observe(self, event: UsageEvent) -> bool:
        """Keeps the counts known so far as evidence, should this process die before `settle`. One append.

        False when they are in memory alone, because the journal cannot be written. Raises MeterClosed alone.
        """
        with self._changed:
            self._require_open()
            self._evidence[event.request_id] = event
            try:
                self._journal.append(Record(purpose="evidence", event=event))
            except OSError:
                self._counts["journal_failures"] += 1
                _logger.exception("journal: evidence for request %s is in memory alone", event.request_id)
                return False
        return True

    def settle(self, event: UsageEvent) -> None:
        """The request has ended. One local append, no database, no waiting: fit for a `finally`.

        Raises MeterClosed alone. A second, different event for a request is an alert (`stats().conflicts`).
        """
        with self._changed:
            self._require_open()
            self._settle(event)

    def flush(self, *, timeout_seconds: int = 10) -> None:
        """Waits until all that is settled by now is posted. Raises MeterUnavailable if that takes longer."""
        with self._changed:
            goal = self._flush_goal = self._num_queued
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._num_done >= goal or self._state in {"failed", "closed"}, timeout=timeout_seconds
            )
            if self._num_done < goal:
                raise MeterUnavailable(f"{goal - self._num_done} events are not posted yet")

    def sweep(self, now: Microseconds) -> int:
        """Settles requests that nobody will: those of former processes, and those whose lease ran out.

        Kind aborted, counts from the last evidence, 0 without any. Returns how many.
        Raises MeterUnavailable when the database is away, MeterClosed. A writer
        does the same by itself at the start and every `sweep_interval`.
        """
        outcome: Future[int] = Future()
        with self._changed:
            if self._state != "running":
                raise self._end()
            self._sweeps.append((now, outcome))
            self._changed.notify_all()
        try:
            return outcome.result(timeout=SWEEP_TIMEOUT_SECONDS)
        except TimeoutError as error:
            raise MeterUnavailable("the sweep takes too long") from error

    def stats(self) -> MeterStats:
        with self._changed:
            return MeterStats(
                **{name: self._counts[name] for name in _COUNTERS},
                pending=len(self._pending),
                in_flight=len(self._in_flight),
            )

    def backlog(self) -> Backlog:
        """For metrics. Looks at the journal's files."""
        with self._changed:
            oldest = self._pending[0].finished_at if self._pending else None
            events, is_open = len(self._pending), self._state != "new"
        return Backlog(
            events=events,
            oldest_us=0 if oldest is None else max(0, self._clock() - oldest),
            journal_bytes=self._journal.num_bytes() if is_open else 0,
        )

    # From here to `_until_next_try`: called with the lock held.

    def _require_open(self) -> None:
        if self._state not in {"running", "failed"}:
            raise MeterClosed(f"the meter is {self._state}")

    def _refusal(self) -> MeterRefusal | None:
        if self._state != "running":
            return self._end()
        if len(self._waiting) >= self._limits.waiting_admissions:
            return MeterOverloaded("too many admissions are waiting")
        if len(self._in_flight) + len(self._pending) >= self._limits.open_requests:
            return MeterOverloaded("too many requests are open")
        if not self._database_tries.is_open:
            return MeterUnavailable(_DATABASE_AWAY)
        if self._unjournaled:
            return MeterUnavailable("the journal cannot be written")
        return None

    def _settle(self, event: UsageEvent) -> None:
        try:
            self._journal.append(Record(purpose="settled", event=event))
        except OSError:
            self._counts["journal_failures"] += 1
            self._unjournaled.append(event)
            _logger.exception("journal: the event of request %s is in memory alone", event.request_id)
        self._counts["settled"] += 1
        self._in_flight.discard(event.request_id)
        self._narrowed.pop(event.request_id, None)
        self._evidence.pop(event.request_id, None)
        self._enqueue(event)
        if event.request_id in self._holders or event.request_id in self._deciding:
            self._holders.discard(event.request_id)
            # Whoever comes from now on is to find the room that it leaves.
            self._flush_goal = self._room_goals[event.admission.tenant_id] = self._num_queued

    def _enqueue(self, event: UsageEvent) -> None:
        if not self._pending:
            self._linger()
        self._pending.append(event)
        self._pending_ids.add(event.request_id)
        self._num_queued += 1
        self._changed.notify_all()

    def _linger(self) -> None:
        self._linger_until_ns = time.monotonic_ns() + nanoseconds(self._limits.linger)

    def _take_work(self, duty: _Duty) -> _Work | None:
        """Waits for something to do; None when it is time to stop."""
        while True:
            if self._state in {"failed", "closed"}:
                return None
            if self._state == "closing" and self._is_drained(duty):
                return None
            work = self._ready_work(duty)
            if not work.is_empty:
                return work
            self._changed.wait(self._until_next_try(duty).total_seconds())

    def _ready_work(self, duty: _Duty) -> _Work:
        is_journal_due = _Duty.POST in duty and bool(self._unjournaled) and self._journal_tries.is_open
        if not self._database_tries.is_open:
            return _Work(is_journal_due=is_journal_due)
        return _Work(
            admissions=self._ready_admissions() if _Duty.ADMIT in duty else (),
            events=self._ready_events() if _Duty.POST in duty else (),
            sweeps=self._ready_sweeps() if _Duty.POST in duty else (),
            is_journal_due=is_journal_due,
        )

    def _ready_admissions(self) -> Sequence[_Waiting]:
        """Those whose room is known, in their order. Of one tenant nobody overtakes."""
        ready: list[_Waiting] = []
        later: list[_Waiting] = []
        while self._waiting and len(ready) < self._limits.batch_size:
            one = self._waiting.popleft()
            (ready if one.after <= self._num_done else later).append(one)
        self._waiting.extendleft(reversed(later))
        self._deciding.update(one.admission.request_id for one in ready)
        return ready

    def _ready_events(self) -> Sequence[UsageEvent]:
        """Of a request whose admission is being decided, nothing is posted until it is."""
        if not self._is_posting_due():
            return ()
        batch = itertools.islice(self._pending, self._limits.batch_size)
        return list(itertools.takewhile(lambda event: event.request_id not in self._deciding, batch))

    def _ready_sweeps(self) -> Sequence[_Sweep]:
        if self._state == "running" and time.monotonic_ns() >= self._next_sweep_ns:
            self._next_sweep_ns = time.monotonic_ns() + nanoseconds(self._limits.sweep_interval)
            self._sweeps.append((self._clock(), Future()))
        sweeps = list(self._sweeps)
        self._sweeps.clear()
        return sweeps

    def _is_posting_due(self) -> bool:
        return (
            len(self._pending) >= self._limits.batch_size
            or self._flush_goal > self._num_done
            or self._state != "running"
            or time.monotonic_ns() >= self._linger_until_ns
        )

    def _is_drained(self, duty: _Duty) -> bool:
        is_late = time.monotonic_ns() >= self._close_deadline_ns
        left: list[object] = [*self._waiting] if _Duty.ADMIT in duty else []
        if _Duty.POST in duty:
            left += [*self._pending, *self._sweeps]
        return is_late or not left

    def _until_next_try(self, duty: _Duty) -> timedelta:
        tries = [self._database_tries.wait] if not self._database_tries.is_open else []
        if self._state == "closing":
            tries.append(_until(self._close_deadline_ns))
        if _Duty.POST in duty:
            if self._unjournaled:
                tries.append(self._journal_tries.wait)
            if (
                self._pending
                and self._database_tries.is_open
                and self._pending[0].request_id not in self._deciding
            ):
                tries.append(_until(self._linger_until_ns))
            return min(tries, default=_until(self._next_sweep_ns))
        return min(tries, default=self._limits.sweep_interval)

    # From here on: called by a writer, without the lock.

    def _run(self, duty: _Duty) -> None:
        work: _Work | None = _Work()
        try:
            while work is not None:
                self._retry_journal(is_due=work.is_journal_due)
                self._admit(work.admissions)
                self._sync_journal(work.events)
                self._post(work.events)
                self._sweep_all(work.sweeps)
                with self._changed:
                    work = self._take_work(duty)
        finally:
            # Also when this thread dies of a fault of its own: nobody waits for it for ever.
            self._stop(duty, work or _Work())

    def _stop(self, duty: _Duty, unfinished: _Work) -> None:
        admissions, sweeps = [*unfinished.admissions], [*unfinished.sweeps]
        with self._changed:
            self._num_writers -= 1
            has_failed = self._state == "running"
            is_last = self._state == "closing" and self._num_writers == 0
            if has_failed or is_last:
                self._state = "failed" if has_failed else "closed"
            if _Duty.ADMIT in duty:
                admissions += self._waiting
                self._waiting.clear()
            if _Duty.POST in duty:
                sweeps += self._sweeps
                self._sweeps.clear()
            self._changed.notify_all()
        for waiting in admissions:
            _fail(waiting.outcome, self._end())
        for _, outcome in sweeps:
            _fail(outcome, self._end())
        if has_failed:
            _logger.critical("meter: %s; settled events wait in the journal", _WRITER_DEAD)
        elif is_last:
            self._close_journal()

    def _end(self) -> MeterRefusal:
        return (
            MeterUnavailable(_WRITER_DEAD) if self._state == "failed" else MeterClosed("the meter was closed")
        )

    def _close_journal(self) -> None:
        try:
            self._journal.close()
        except OSError:
            _logger.exception("journal: the last sync failed")

    def _admit(self, batch: Sequence[_Waiting]) -> None:
        live = [waiting for waiting in batch if waiting.outcome.set_running_or_notify_cancel()]
        self._forget(waiting for waiting in batch if waiting.outcome.cancelled())
        if live:
            self._commit_admissions(live)

    def _commit_admissions(self, live: Sequence[_Waiting]) -> None:
        if not self._database_tries.is_open:
            self._conclude(live, [MeterUnavailable(_DATABASE_AWAY) for _ in live])
            return
        admissions = [(waiting.admission, waiting.estimate) for waiting in live]
        outcomes: Sequence[Grant | BillingError]
        try:
            self._narrow()
            if self._admits_alone(live):
                self._database_answered()
                self._conclude(live, [Grant(standing=None, holds=False)])
                return
            with self._db.write() as connection:
                outcomes = ledger.admit_priced(
                    connection, admissions, book=self._book, owner=self._owner, lease=self._limits.lease
                )
        except StatementError as error:
            if len(live) > 1:  # one of them spoils the batch, so each gets its own transaction
                for waiting in live:
                    self._commit_admissions([waiting])
                return
            outcomes = [InvalidUsage(f"the database refuses the admission: {error.orig}")]
        except DatabaseUnavailable as error:
            self._database_failed(error)
            outcomes = [MeterUnavailable(_DATABASE_AWAY) for _ in live]
        else:
            self._database_answered()
        self._conclude(live, outcomes)

    def _narrow(self) -> None:
        """Should the transaction fail, these stay reserved until they end: too much, but never too little.

        It is one by itself: together with an admission it would lock balances in an order that is not
        everybody's.
        """
        with self._changed:
            narrowed, self._narrowed = self._narrowed, {}
        if narrowed:
            with self._db.write() as connection:
                ledger.narrow_all(connection, narrowed)

    def _admits_alone(self, live: Sequence[_Waiting]) -> bool:
        """Whether it was one request, that nothing limits, and is now admitted. Most are when it is quiet."""
        if len(live) > 1 or self._book.known_price(live[0].admission) is None:
            return False
        return ledger.admission_alone(
            self._db, live[0].admission, owner=self._owner, lease=self._limits.lease
        )

    def _conclude(self, live: Sequence[_Waiting], outcomes: Sequence[Grant | BillingError]) -> None:
        refused = [
            waiting
            for waiting, outcome in zip(live, outcomes, strict=True)
            if isinstance(outcome, BillingError)
        ]
        with self._changed:
            self._deciding.difference_update(waiting.admission.request_id for waiting in live)
            self._counts["refused"] += len(refused)
            self._counts["admitted"] += len(live) - len(refused)
            self._holders.update(
                waiting.admission.request_id
                for waiting, outcome in zip(live, outcomes, strict=True)
                if isinstance(outcome, Grant)
                and outcome.holds
                and waiting.admission.request_id in self._in_flight
            )
            self._changed.notify_all()  # what was settled meanwhile can be posted
        self._forget(refused)
        for waiting, outcome in zip(live, outcomes, strict=True):
            if isinstance(outcome, BillingError):
                waiting.outcome.set_exception(outcome)
            else:
                waiting.outcome.set_result(outcome)

    def _forget(self, refused: Iterable[_Waiting]) -> None:
        ids = [waiting.admission.request_id for waiting in refused]
        with self._changed:
            self._in_flight.difference_update(ids)
            self._deciding.difference_update(ids)
            self._changed.notify_all()

    def _post(self, events: Sequence[UsageEvent]) -> bool:
        """Posts, or rejects, a run of events from the head of the queue. False when the database is away."""
        if not events:
            return True
        if not self._database_tries.is_open:
            return False
        try:
            with self._db.write() as connection:
                posting = ledger.post_all(
                    connection, events, owner=self._owner, lease=self._limits.lease, now=self._clock()
                )
        except _NEVER_POSTABLE as error:
            if len(events) > 1:  # one of them spoils the batch, so each gets its own transaction
                return all(self._post([event]) for event in events)
            self._reject(events[0], error)
            return True
        except DatabaseUnavailable as error:
            self._database_failed(error)
            return False
        self._database_answered()
        self._tell_of(posting)
        self._finish(events)
        return True

    def _tell_of(self, posting: Posting) -> None:
        with self._changed:
            self._counts["posted"] += len(posting.posted)
            self._counts["adjusted"] += len(posting.adjusted)
            self._counts["duplicates"] += len(posting.duplicates)
            self._counts["conflicts"] += len(posting.conflicts)
        for event in posting.conflicts:
            _logger.error(
                "ledger: request %s was posted before with another payload; the first stands. Refused: %s",
                event.request_id,
                msgspec.json.encode(event).decode(),
            )

    def _reject(self, event: UsageEvent, reason: Exception) -> None:
        _logger.critical(
            "ledger: the event of request %s can never be posted (%s): %s",
            event.request_id,
            reason,
            msgspec.json.encode(event).decode(),
        )
        with self._changed:
            self._counts["rejected"] += 1
        try:
            self._journal.reject(event)
        except OSError as error:
            self._journal_failed(error)
        self._finish([event])

    def _finish(self, events: Sequence[UsageEvent]) -> None:
        """These events leave the queue, of which they are the head."""
        ids = [event.request_id for event in events]
        with self._changed:
            for _ in events:
                self._pending.popleft()
            self._linger()
            self._pending_ids.difference_update(ids)
            self._num_done += len(events)
            if not self._pending:
                self._room_goals.clear()
            self._changed.notify_all()
        self._journal.finish(ids)

    def _sweep_all(self, sweeps: Sequence[_Sweep]) -> None:
        for now, outcome in sweeps:
            if not self._database_tries.is_open:
                _fail(outcome, MeterUnavailable(_DATABASE_AWAY))
                continue
            try:
                num_swept = self._sweep(now)
                self._expire(now)
            except DatabaseUnavailable as error:
                self._database_failed(error)
                _fail(outcome, MeterUnavailable(_DATABASE_AWAY))
            else:
                outcome.set_result(num_swept)

    def _sweep(self, now: Microseconds) -> int:
        limit = self._limits.open_requests
        with self._db.read() as connection:
            abandoned = ledger.abandoned_requests(connection, owner=self._owner, now=now, limit=limit)
        num_swept = 0
        with self._changed:
            for admission in abandoned:
                # What was settled since is on its way. Only this thread empties the queue, so none is missed.
                if admission.request_id not in self._pending_ids:
                    self._settle(self._last_evidence(admission))
                    num_swept += 1
            self._counts["swept"] += num_swept
            # Evidence of requests that are over: their rows are settled, or were never committed.
            stale = self._evidence.keys() - self._in_flight if len(abandoned) < limit else set()
            for request_id in stale:
                del self._evidence[request_id]
        self._journal.finish(stale)
        if num_swept:
            _logger.warning("meter: settled %d abandoned requests", num_swept)
        return num_swept

    def _expire(self, now: Microseconds) -> None:
        """Frees what is still held after its lease: of events that can never be posted, for one."""
        with self._db.write() as connection:
            num_expired = budgets.expire(connection, now) + limits.expire(connection, now)
        if num_expired:
            _logger.warning("meter: %d reservations outlived their lease", num_expired)

    def _last_evidence(self, admission: Admission) -> UsageEvent:
        known = self._evidence.get(admission.request_id)
        if known is not None:
            return known.abandoned()
        # Every field follows from the row, so that two sweepers say the same.
        return UsageEvent(
            admission=admission,
            kind=UsageKind.ABORTED,
            counts=TokenCounts(),
            finished_at=admission.admitted_at,
            finish_reason=ABANDONED,
        )

    def _sync_journal(self, events: Sequence[UsageEvent]) -> None:
        if not events:
            return
        try:
            self._journal.sync()
        except OSError as error:
            # The records are written, and the database is about to have the events.
            self._journal_failed(error)

    def _retry_journal(self, *, is_due: bool) -> None:
        """Writes what could not be journaled; a success also shows that the journal works again."""
        with self._changed:
            while is_due and self._unjournaled:
                event = self._unjournaled[0]
                try:
                    self._journal.append(Record(purpose="settled", event=event))
                except OSError as error:
                    self._journal_failed(error)
                    return
                self._unjournaled.popleft()
                self._journal_tries.succeed()
                if event.request_id not in self._pending_ids:
                    self._journal.finish([event.request_id])

    def _journal_failed(self, error: OSError) -> None:
        with self._changed:
            self._counts["journal_failures"] += 1
            self._journal_tries.fail()
        _logger.error("journal: %s", error)

    def _database_failed(self, error: DatabaseUnavailable) -> None:
        _logger.error("database: %s", error)
        with self._changed:
            self._counts["database_failures"] += 1
            self._database_tries.fail()
            waiting = list(self._waiting)
            self._waiting.clear()
        live = [one for one in waiting if one.outcome.set_running_or_notify_cancel()]
        self._forget(one for one in waiting if one.outcome.cancelled())
        self._conclude(live, [MeterUnavailable(_DATABASE_AWAY) for _ in live])

    def _database_answered(self) -> None:
        with self._changed:
            self._database_tries.succeed()

    def _backoff(self) -> Backoff:
        return Backoff(
            first=self._limits.first_retry, last=self._limits.last_retry, monotonic_ns=time.monotonic_ns
        )


def _until(deadline_ns: int) -> timedelta:
    return timedelta(microseconds=max(0, deadline_ns - time.monotonic_ns()) // 1_000 + 1)


def _fail(outcome: Future[Any], error: BillingError) -> None:
    """Unless it is already decided, by an answer or by whoever gave up waiting."""
    if outcome.done() or not (outcome.running() or outcome.set_running_or_notify_cancel()):
        return
    outcome.set_exception(error)

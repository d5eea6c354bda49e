"""kill -9, at each arrow: afterwards every admitted request is settled, exactly once."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import text

from billing import schema
from billing.db import open_database
from billing.usage import TokenCounts, UsageKind
from tests.integration.billing.ledger_checks import check_ledger, count, counts_of, events_by_request, states
from tests.unit.billing.builders import T0, final

PATIENCE_SECONDS = 30
REPOSITORY = Path(__file__).parents[3]


class Victim:
    """A metering process, obeyed line by line until it is killed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def read(self) -> str:
        return self.process.stdout.readline().strip()

    def send(self, verb: str, value: msgspec.Struct | None = None) -> None:
        argument = msgspec.json.encode(value).decode() if value is not None else ""
        self.process.stdin.write(f"{verb} {argument}\n")
        self.process.stdin.flush()

    def obey(self, verb: str, value: msgspec.Struct | None = None) -> None:
        assert self.ask(verb, value) == verb

    def ask(self, verb: str, value: msgspec.Struct | None = None) -> str:
        self.send(verb, value)
        return self.read()

    def kill(self) -> str:
        """Returns what it still said before it died."""
        self.process.kill()
        rest = self.process.stdout.read()
        self.process.wait(PATIENCE_SECONDS)
        return rest


@pytest.fixture
def victim(database_url, db, account, tmp_path) -> Iterator[Victim]:
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.integration.billing.killed_meter",
            database_url,
            str(tmp_path / "journal"),
        ],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        started = Victim(process)
        assert started.read() == "ready"
        yield started
        process.kill()


@pytest.fixture
def recover(db, new_meter) -> Callable[[], None]:
    """Starts the next process of the same journal, and lets it finish what the last one left."""

    def run() -> None:
        meter = new_meter()
        meter.sweep(T0)
        meter.flush(timeout_seconds=PATIENCE_SECONDS)
        assert meter.stats().conflicts == 0
        check_ledger(db)

    return run


@contextmanager
def posting_held_back(url: str) -> Iterator[None]:
    """While it lasts, no event can be written."""
    with open_database(url) as other, other.write() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("LOCK TABLE usage_events IN SHARE ROW EXCLUSIVE MODE"))
        yield


def test_killed_between_settle_and_post_the_event_is_posted_once(database_url, db, account, victim, recover):
    admitted = account.admission()
    victim.obey("admit", admitted)
    event = final(admitted, uncached=11, read=22, output=33)
    with posting_held_back(database_url):
        victim.obey("settle", event)
        victim.kill()
    assert count(db, schema.usage_events) == 0
    recover()
    assert counts_of(events_by_request(db)[admitted.request_id]) == event.counts
    assert states(db) == {admitted.request_id: "settled"}


def test_killed_after_the_post_the_event_is_not_posted_again(db, account, victim, recover):
    admitted = account.admission()
    victim.obey("admit", admitted)
    victim.obey("settle", final(admitted, uncached=1))
    victim.obey("flush")
    before = events_by_request(db)
    victim.kill()
    recover()
    assert events_by_request(db) == before


def test_killed_before_settling_the_request_is_settled_as_aborted_at_no_cost(db, account, victim, recover):
    admitted = account.admission()
    victim.obey("admit", admitted)
    victim.kill()
    recover()
    row = events_by_request(db)[admitted.request_id]
    assert (row.kind, counts_of(row)) == ("aborted", TokenCounts())
    assert states(db) == {admitted.request_id: "settled"}


def test_killed_mid_stream_the_request_is_settled_from_the_last_evidence(db, account, victim, recover):
    admitted = account.admission()
    victim.obey("admit", admitted)
    victim.obey("observe", final(admitted, kind=UsageKind.ABORTED, uncached=100, read=900))
    victim.kill()
    recover()
    row = events_by_request(db)[admitted.request_id]
    assert (row.kind, counts_of(row)) == ("aborted", TokenCounts(uncached=100, read=900))


@pytest.mark.parametrize("num_lines", [1, 60])
def test_killed_under_load_what_was_settled_is_posted_and_the_rest_is_aborted(
    db, account, victim, recover, num_lines
):
    victim.send("rush", account.admission())
    said = [victim.read() for _ in range(num_lines)]
    said += victim.kill().splitlines()
    settled = {line.split()[1] for line in said if line.startswith("settled ")}
    admitted = {line.split()[1] for line in said if line.startswith("admitted ")}
    recover()
    events = {str(request_id): row for request_id, row in events_by_request(db).items()}
    assert settled <= {request_id for request_id, row in events.items() if row.kind == "final"}
    assert admitted <= events.keys()
    assert set(states(db).values()) == {"settled"}
    assert len(events) <= len(admitted) + 1


def test_a_full_disk_refuses_new_work_and_loses_no_event(db, account, victim, recover):
    admitted, late = account.admission(), account.admission()
    victim.obey("admit", admitted)
    victim.obey("fill")
    victim.obey("settle", final(admitted, uncached=4))
    victim.send("admit", late)
    assert victim.read() == "MeterUnavailable"
    victim.obey("free")
    victim.obey("flush")
    assert counts_of(events_by_request(db)[admitted.request_id]) == TokenCounts(uncached=4)
    while victim.ask("admit", late) == "MeterUnavailable":
        pass  # until the journal has what it missed
    victim.kill()
    recover()
    assert states(db) == {admitted.request_id: "settled", late.request_id: "settled"}

"""The commands that read money, on a ledger of two months."""

from __future__ import annotations

import csv
import io
import json
from datetime import UTC, datetime
from decimal import Decimal
from hashlib import sha256

import pyarrow.parquet
import pytest
from sqlalchemy import text
from typer.testing import CliRunner

from billing import instants
from billing.accounts import KeyHasher, create_key, create_tenant
from billing.calendar import UTC_ZONE, month_of
from billing.db import open_database
from billing.errors import InvalidPeriod, PeriodOpen, StatementOutOfOrder, UnknownTenant, UnknownZone
from billing.ids import new_request_id
from billing.meter import Meter
from billing.usage import Admission, TokenCounts, UsageEvent, UsageKind
from gateway.bootstrap import prepare_database
from gateway.cli import app
from gateway.terminal import CommandRefused

EVIL_MODEL = "=HYPERLINK(A1)"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home whose ledger has two tenants: `acme` with usage in August and September 2026, and `idle`."""
    path = tmp_path_factory.mktemp("home")
    url = f"sqlite:///{path / 'headstart.db'}"
    with open_database(url) as database:
        prepare_database(url, database)
        tenant = create_tenant(database, name="acme", now=instants.now())
        create_tenant(database, name="idle", now=instants.now())
        hasher = KeyHasher(bytes(32))
        key, _ = create_key(database, tenant_id=tenant.id, label="ci", hasher=hasher, now=instants.now())
        meter = Meter(database, path / "journal")
        meter.start()
        for month in (8, 9):
            for day in range(1, 11):
                at = instants.from_datetime(datetime(2026, month, day, 23, 30, tzinfo=UTC))
                meter.settle(event(key, at, "small" if day % 2 else EVIL_MODEL, day))
        meter.close()
    return path


def event(key, at, model, day) -> UsageEvent:
    admission = Admission(
        request_id=new_request_id(), tenant_id=key.tenant_id, api_key_id=key.id, model=model, admitted_at=at
    )
    counts = TokenCounts(uncached=1_000 * day, read=9_000 * day, output=100)
    return UsageEvent(admission=admission, kind=UsageKind.FINAL, counts=counts, finished_at=at)


@pytest.fixture
def headstart(home):
    runner = CliRunner(env={"HEADSTART_HOME": str(home), "HEADSTART_DATABASE_URL": ""})

    def run(*arguments: str) -> bytes:
        result = runner.invoke(app, arguments)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result.stdout_bytes

    return run


def shown(output: bytes) -> str:
    return output.decode()


def exported(headstart, *arguments: str) -> list[dict]:
    return list(csv.DictReader(io.StringIO(headstart("export", *arguments).decode(), newline="")))


def test_usage_is_shown_by_what_is_asked_for(headstart):
    period = ("--tenant", "acme", "--since", "2026-08-01", "--until", "2026-09-01")
    by_day = shown(headstart("usage", *period, "--by", "day", "--by", "model"))
    assert by_day.count("2026-08-") == 10
    assert EVIL_MODEL in by_day
    in_india = shown(headstart("usage", *period, "--by", "day", "--zone", "Asia/Kolkata"))
    assert "2026-08-01" not in in_india  # half past eleven at night is the next day there
    by_class = shown(headstart("usage", *period, "--by", "class"))
    assert "495,000" in by_class
    assert "0.00825" in by_class
    assert "0.016275" in shown(headstart("usage", *period))


@pytest.mark.parametrize(
    ("arguments", "refusal", "said"),
    [
        (("--by", "day", "--by", "hour"), CommandRefused, "either"),
        (("--by", "hour"), CommandRefused, "--since"),
        (("--zone", "Mars/Olympus"), UnknownZone, "Mars"),
        (("--since", "2026-09-01", "--until", "2026-08-01"), CommandRefused, "before"),
    ],
)
def test_usage_that_makes_no_sense_is_refused(headstart, arguments, refusal, said):
    with pytest.raises(refusal, match=said):
        headstart("usage", "--tenant", "acme", *arguments)


def test_a_statement_is_printed_in_four_formats(headstart):
    asked = ("statement", "--tenant", "acme", "--period", "2026-08")
    printed = shown(headstart(*asked))
    assert printed.startswith("STATEMENT HS-2026-08-")
    assert "1 August to 31 August 2026, UTC" in printed
    assert "Books agree: events = ledger = roll-ups: 551,000 tokens" in printed
    body = json.loads(headstart(*asked, "--format", "json"))
    canonical = json.dumps(body["document"], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert sha256(canonical.encode()).hexdigest() == body["digest"]
    assert body["digest"] in printed
    assert body["summary"]["amount"] in printed
    page = shown(headstart(*asked, "--format", "html"))
    assert body["digest"] in page
    assert "<script" not in page
    assert "http" not in page
    rows = list(csv.DictReader(io.StringIO(shown(headstart(*asked, "--format", "csv")), newline="")))
    assert rows[-1]["record"] == "total"
    assert rows[-1]["amount"] == body["summary"]["amount"]
    assert {row["model"] for row in rows[:-1]} == {"small", f"'{EVIL_MODEL}"}
    assert shown(headstart(*asked)) == printed


def test_a_preview_is_marked_in_every_format(headstart):
    asked = ("statement", "--tenant", "acme", "--preview")
    assert "PREVIEW: this period is still open" in shown(headstart(*asked))
    assert "PREVIEW: this period is still open" in shown(headstart(*asked, "--format", "html"))
    body = json.loads(headstart(*asked, "--format", "json"))
    assert (body["summary"]["status"], body["digest"]) == ("preview", None)
    assert body["document"]["status"] == "preview"


def test_a_statement_that_cannot_be_is_refused(headstart):
    this_month = month_of(instants.now(), UTC_ZONE)
    for arguments, refusal in (
        (("--tenant", "acme", "--period", this_month), PeriodOpen),
        (("--tenant", "acme", "--period", "2026-02-01"), InvalidPeriod),
        (("--tenant", "nobody"), UnknownTenant),
        ((), CommandRefused),
    ):
        with pytest.raises(refusal):
            headstart("statement", *arguments)
    headstart("statement", "--tenant", "acme", "--period", "2026-08")
    with pytest.raises(StatementOutOfOrder):
        headstart("statement", "--tenant", "acme", "--period", "2026-10")


def test_the_months_of_an_export_are_the_whole(headstart):
    whole = exported(headstart)
    parts = [
        exported(headstart, "--since", "2026-08-01", "--until", "2026-09-01"),
        exported(headstart, "--since", "2026-09-01", "--until", "2026-10-01"),
    ]
    assert [len(part) for part in (whole, *parts)] == [61, 31, 31]
    for rows in (whole, *parts):
        *lines, trailer = rows
        assert trailer["record"] == "total"
        assert int(trailer["row"]) == len(lines)
        assert Decimal(trailer["amount"]) == sum(Decimal(line["amount"]) for line in lines)
    assert sum(Decimal(part[-1]["amount"]) for part in parts) == Decimal(whole[-1]["amount"])
    assert whole[0]["admitted_at"] == "2026-08-01T23:30:00.000000Z"
    assert {line["model"] for line in whole[:-1]} == {"small", f"'{EVIL_MODEL}"}
    assert exported(headstart, "--tenant", "idle")[0]["row"] == "0"


def test_json_lines_and_parquet_say_the_same(headstart, home, tmp_path):
    *lines, trailer = [json.loads(line) for line in headstart("export", "--format", "jsonl").splitlines()]
    headstart("export", "--format", "parquet", "--output", str(tmp_path / "ledger.parquet"))
    table = pyarrow.parquet.read_table(tmp_path / "ledger.parquet")
    assert table.num_rows == trailer["row"] == len(lines)
    assert sum(table.column("amount").to_pylist()) == Decimal(trailer["amount"])
    assert table.column("model").to_pylist() == [line["model"] for line in lines]
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.parquet"]


def test_pages_leave_nothing_out(headstart, monkeypatch):
    whole = exported(headstart)
    monkeypatch.setattr("billing.exports.EVENTS_PER_PAGE", 3)
    assert exported(headstart) == whole


def test_an_export_that_fails_leaves_no_file(headstart, home, tmp_path):
    with pytest.raises(CommandRefused, match="cannot write"):
        headstart("export", "--output", str(tmp_path / "nowhere" / "ledger.csv"))
    with open_database(f"sqlite:///{home / 'headstart.db'}") as database, database.read() as connection:
        assert connection.execute(text("SELECT count(*) FROM ledger_lines")).scalar_one() == 60

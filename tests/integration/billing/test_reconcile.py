"""Books that agree, and each kind of difference planted past the triggers: every one is named."""

import hashlib
import json
import shutil
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import msgspec
import pytest
from sqlalchemy import delete, text, update

from billing import instants, schema
from billing.accounts import set_zone
from billing.book_balances import WorkerCount
from billing.books import Check
from billing.budgets import Period, Scope, set_budget
from billing.credits import BrokenPromise, credit
from billing.db import migrate
from billing.errors import InvalidPeriod, UnknownReconciliation
from billing.ids import ReconciliationId, new_id
from billing.instants import BUCKET_MICROSECONDS
from billing.issuing import issue_statement
from billing.limits import Limits, set_limits
from billing.receipt_keys import SigningKey
from billing.reconcile import MAX_DIFFERENCES, find_run, list_runs, reconcile
from billing.sealer import Sealer
from billing.usage import Estimate, TokenClass, UsageKind
from tests.integration.billing.conftest import autocommitted, new_account, new_postgres_database
from tests.integration.billing.ledger_checks import rows
from tests.unit.billing.builders import T0, final

NOW = instants.from_datetime(datetime(2026, 4, 2, tzinfo=UTC))
EPOCH = "0123456789abcdef"


@pytest.fixture(scope="module")
def postgres_template(postgres):
    url = new_postgres_database(postgres)
    migrate(url)
    return url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request, tmp_path):
    """A migrated database of the test's own, whose CHECKs and triggers it may take away."""
    if request.param == "sqlite":
        path = tmp_path.joinpath("headstart.db")
        shutil.copy(request.getfixturevalue("sqlite_template"), path)
        return f"sqlite:///{path}"
    template = request.getfixturevalue("postgres_template")
    server, template_name = template.rsplit("/", 1)
    name = f"reconcile_{uuid4().hex}"
    with autocommitted(f"{server}/postgres") as connection:
        connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {template_name} STRATEGY file_copy"))
    return f"{server}/{name}"


def books(db, **asked):
    return reconcile(db, clock=lambda: NOW, **asked)


@pytest.fixture
def filled(db, account, new_meter):
    """A month of requests of two tenants, with a budget, a limit, receipts, a credit and a statement."""
    other = new_account(db, "other")
    set_limits(db, Limits(concurrent_requests=9), tenant_id=account.tenant.id, api_key_id=None, now=T0)
    scope = Scope(tenant_id=account.tenant.id)
    for period in Period:
        set_budget(db, scope, period=period, limit_pusd=10**15, now=T0)
    meter = new_meter(lease=timedelta(days=60))
    for number in range(24):
        owner = other if number % 3 == 0 else account
        admitted = owner.admission(admitted_at=T0 + number * BUCKET_MICROSECONDS * 70)
        meter.admit(admitted, Estimate(prompt=300, output=100)).result(10)
        kind = UsageKind.ABORTED if number % 5 == 0 else UsageKind.FINAL
        counts = {"uncached": 10 + number, "read": 20, "write_1h": 32, "output": 30}
        event = final(admitted, kind=kind, **counts)
        meter.settle(msgspec.structs.replace(event, worker="worker-0", worker_epoch=EPOCH))
    meter.close()
    first = next(row for row in rows(db, schema.usage_events) if row.tenant_id == account.tenant.id)
    broken = BrokenPromise(
        request_id=first.request_id,
        promise="block 1",
        token_class=TokenClass.WRITE_1H,
        tokens=16,
        promised_until=first.admitted_at_us + 2_000_000,
        broken_at=first.admitted_at_us + 1_000_000,
    )
    credit(db, broken, now=T0)
    Sealer(db, SigningKey.new(), clock=lambda: T0).seal_some()
    issue_statement(db, tenant_id=account.tenant.id, period="2026-03", now=NOW)
    return account


def plant(db_url: str, statement) -> None:
    """Past triggers, CHECKs and keys, as somebody with a password for the database would."""
    with autocommitted(db_url) as connection:
        if connection.dialect.name == "postgresql":
            checks = text(
                "SELECT conrelid::regclass, conname FROM pg_constraint WHERE contype = 'c' "
                "AND conrelid::regclass::text IN ('ledger_lines', 'statements')"
            )
            for table, check in connection.execute(checks).all():
                connection.execute(text(f"ALTER TABLE {table} DROP CONSTRAINT {check}"))
            connection.execute(text("SET session_replication_role = replica"))
        else:
            connection.execute(text("PRAGMA ignore_check_constraints = ON"))
            names = connection.execute(text("SELECT name FROM sqlite_master WHERE type = 'trigger'"))
            for name in names.scalars().all():
                connection.execute(text(f"DROP TRIGGER {name}"))
        connection.execute(statement)


@pytest.fixture
def plant_in(database_url):
    return lambda statement: plant(database_url, statement)


def worker(**changes):
    counts = {"computed": 0, "cached": 0, "output": 0}
    return WorkerCount(
        **{"worker": "w", "epoch": EPOCH, "is_idle": True, "step_tokens": 0, **counts, **changes}
    )


def billed(db) -> dict:
    """What an honest worker would have counted."""
    events = [row for row in rows(db, schema.usage_events) if row.kind != "credit"]
    return {
        "computed": sum(row.uncached_tokens + row.write_1h_tokens for row in events),
        "cached": sum(row.read_tokens for row in events),
        "output": sum(row.output_tokens for row in events),
    }


def found(run, check):
    assert {one.check for one in run.differences} >= {check}, run.differences
    return [one for one in run.differences if one.check is check]


def a_line(db, account, token_class="output"):
    events = {row.id: row for row in rows(db, schema.usage_events)}
    return next(
        (line, events[line.event_id])
        for line in rows(db, schema.ledger_lines)
        if line.token_class == token_class and events[line.event_id].tenant_id == account.tenant.id
    )


def test_books_that_nobody_touched_agree_in_every_comparison(db, filled):
    run = books(db, count_workers=lambda: [worker(**billed(db))])
    assert run.agrees
    assert run.differences == []
    assert run.not_compared == []
    assert [one.tenant for one in run.tenants] == ["acme", "other"]
    total = run.total
    assert total.agrees
    assert total.ledger_pusd == sum(row.amount_pusd for row in rows(db, schema.ledger_lines)) > 0
    assert total.events_tokens == sum(row.quantity_tokens for row in rows(db, schema.ledger_lines))
    assert run.end == NOW


def test_no_books_agree_too(db, account):
    assert books(db).agrees


def test_a_changed_amount_is_named_by_line_roll_up_receipt_statement_and_budget(db, filled, plant_in):
    line, event = a_line(db, filled)
    plant_in(
        update(schema.ledger_lines)
        .where(schema.ledger_lines.c.id == line.id)
        .values(amount_pusd=line.amount_pusd + 7)
    )
    run = books(db)
    bucket = event.accounted_at_us - event.accounted_at_us % BUCKET_MICROSECONDS
    [priced] = found(run, Check.PRICES_LEDGER)
    assert (priced.pusd, priced.price_version_id, priced.token_class) == (7, line.price_version_id, "output")
    assert (priced.tenant_id, priced.start, priced.end) == (
        filled.tenant.id,
        bucket,
        bucket + BUCKET_MICROSECONDS,
    )
    [rolled] = found(run, Check.LEDGER_ROLLUPS)
    assert (rolled.pusd, rolled.tokens, rolled.start, rolled.token_class) == (-7, 0, bucket, "output")
    [receipt] = found(run, Check.LEDGER_RECEIPTS)
    assert (receipt.pusd, receipt.start) == (-7, bucket)
    [stated] = found(run, Check.LEDGER_STATEMENTS)
    assert (stated.pusd, stated.token_class) == (-7, "output")
    assert not run.total.agrees
    assert run.total.ledger_pusd - run.total.rollup_pusd == 7


def test_a_missing_line_is_rated_again_and_named_with_its_price_version(db, filled, plant_in):
    line, event = a_line(db, filled, "read")
    plant_in(delete(schema.ledger_lines).where(schema.ledger_lines.c.id == line.id))
    [missing] = found(books(db), Check.EVENTS_LEDGER)
    assert missing.subject == f"request {event.request_id}"
    assert (missing.tokens, missing.pusd) == (-line.quantity_tokens, -line.amount_pusd)
    assert (missing.token_class, missing.price_version_id) == ("read", line.price_version_id)


def test_a_doubled_roll_up_is_named_by_its_quarter_of_an_hour(db, filled, plant_in):
    rolled = next(row for row in rows(db, schema.class_rollups) if row.token_class == "input")
    columns = schema.class_rollups.c
    plant_in(
        update(schema.class_rollups)
        .where(
            columns.tenant_id == rolled.tenant_id,
            columns.bucket_start_us == rolled.bucket_start_us,
            columns.token_class == "input",
        )
        .values(quantity_tokens=2 * rolled.quantity_tokens, amount_pusd=2 * rolled.amount_pusd)
    )
    run = books(db)
    [doubled] = found(run, Check.LEDGER_ROLLUPS)
    assert (doubled.tenant_id, doubled.start) == (rolled.tenant_id, rolled.bucket_start_us)
    assert (doubled.tokens, doubled.pusd) == (rolled.quantity_tokens, rolled.amount_pusd)


@pytest.mark.parametrize(
    ("table", "column"),
    [("deployment_class_rollups", "amount_pusd"), ("deployment_request_rollups", "aborted")],
)
def test_a_roll_up_of_all_tenants_that_is_not_the_sum_of_theirs_is_named(db, filled, plant_in, table, column):
    columns = schema.metadata.tables[table].c
    plant_in(update(schema.metadata.tables[table]).values({column: columns[column] + 1}))
    wrong = found(books(db), Check.ROLLUPS_DEPLOYMENT)
    assert len(wrong) == len(rows(db, schema.metadata.tables[table]))
    assert all(f"{column} +1" in one.subject for one in wrong)
    assert books(db, tenant_id=filled.tenant.id).agrees


def test_a_roll_up_that_counts_a_request_too_many_is_named(db, filled, plant_in):
    plant_in(update(schema.request_rollups).values(requests=schema.request_rollups.c.requests + 1))
    run = books(db)
    counted = found(run, Check.EVENTS_ROLLUPS)
    assert len(counted) == 24
    assert all(one.subject.endswith("requests +1") for one in counted)


def test_a_roll_up_of_nothing_at_all_is_named_before_the_first_event(db, filled, plant_in):
    row = dict(rows(db, schema.class_rollups)[0]._mapping) | {"bucket_start_us": T0 - BUCKET_MICROSECONDS}
    plant_in(schema.class_rollups.insert().values(row))
    [early] = found(books(db), Check.LEDGER_ROLLUPS)
    assert early.start == T0 - BUCKET_MICROSECONDS


def test_a_wrong_statement_is_named_though_its_digest_fits(db, filled, plant_in):
    [stated] = rows(db, schema.statements)
    document = json.loads(stated.document)
    line = document["lines"][0]
    line["amount_pusd"] += 10**12
    forged = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    digest = hashlib.sha256(forged.encode()).digest()
    plant_in(update(schema.statements).values(document=forged, digest=digest))
    [wrong] = found(books(db), Check.LEDGER_STATEMENTS)
    assert (wrong.pusd, wrong.tokens, wrong.token_class) == (10**12, 0, line["token_class"])
    assert stated.number in wrong.subject
    plant_in(update(schema.statements).values(document=stated.document + " "))
    assert any("digested" in one.subject for one in found(books(db), Check.LEDGER_STATEMENTS))


def test_a_missing_receipt_is_named_and_so_is_the_gap_that_it_leaves(db, filled, plant_in):
    receipt = next(one for one in rows(db, schema.receipts) if one.tenant_id == filled.tenant.id)
    plant_in(delete(schema.receipts).where(schema.receipts.c.event_id == receipt.event_id))
    missing, gap = found(books(db), Check.LEDGER_RECEIPTS)
    assert "no receipt" in missing.subject
    assert str(receipt.request_id) in missing.subject
    assert missing.tokens < 0
    assert missing.pusd < 0
    assert gap.occurrences == 1


def test_a_receipt_that_was_changed_is_named(db, filled, plant_in):
    receipt = rows(db, schema.receipts)[0]
    forged = receipt.document.replace('"amount_pusd":', '"amount_pusd":1')
    plant_in(
        update(schema.receipts).where(schema.receipts.c.event_id == receipt.event_id).values(document=forged)
    )
    [changed] = found(books(db), Check.LEDGER_RECEIPTS)
    assert "digested" in changed.subject


def test_an_event_that_is_due_a_receipt_lacks_none(db, account, new_meter):
    meter = new_meter()
    meter.settle(final(account.admission(), uncached=1))
    meter.close()
    assert rows(db, schema.receipt_dues)
    assert books(db).agrees


def test_a_settled_request_without_an_event_is_named(db, filled, plant_in):
    event = rows(db, schema.usage_events)[0]
    plant_in(delete(schema.usage_events).where(schema.usage_events.c.id == event.id))
    [lost] = found(books(db), Check.REQUESTS_EVENTS)
    assert str(event.request_id) in lost.subject


def test_a_credit_of_more_than_was_promised_is_named(db, filled, plant_in):
    plant_in(update(schema.broken_promises).values(tokens=15))
    [wrong] = found(books(db), Check.PROMISES_CREDITS)
    assert (wrong.tokens, wrong.token_class) == (1, "write_1h")


def test_a_balance_that_is_not_what_was_spent_is_named(db, filled, plant_in):
    plant_in(update(schema.budget_balances).values(posted_pusd=schema.budget_balances.c.posted_pusd - 5))
    wrong = found(books(db), Check.LEDGER_BUDGETS)
    assert [one.pusd for one in wrong] == [-5] * len(wrong)
    assert len(wrong) >= 2  # the month's and the total


def test_what_is_reserved_for_nobody_is_named(db, filled, plant_in):
    plant_in(update(schema.budget_balances).values(reserved_pusd=3))
    plant_in(update(schema.limits).values(open_requests=2))
    held = found(books(db), Check.HELD_RESERVATIONS)
    assert sorted(one.pusd for one in held)[-1] == 3
    assert any("2 open, 0 held" in one.subject for one in held)


def test_months_that_began_in_another_zone_are_not_compared_with_budgets(db, filled):
    set_zone(db, tenant_id=filled.tenant.id, time_zone="Asia/Kolkata", now=NOW)
    run = books(db)
    assert run.agrees
    assert any("zone was changed" in words for words in run.not_compared)


def test_a_worker_that_counted_more_than_was_billed_is_named(db, filled):
    counted = billed(db)
    run = books(db, count_workers=lambda: [worker(**counted | {"output": counted["output"] + 9})])
    [more] = found(run, Check.EVENTS_WORKERS)
    assert more.tokens == 9
    assert more.subject.endswith(f"{EPOCH}: output")


def test_a_worker_may_have_gone_on_for_a_step_after_each_early_end(db, filled):
    counted = billed(db)
    early = sum(row.kind == "aborted" for row in rows(db, schema.usage_events))
    for beyond, agrees in ((early * 16, True), (early * 16 + 1, False)):
        more = counted | {"computed": counted["computed"] + beyond, "step_tokens": 8}
        assert books(db, count_workers=lambda more=more: [worker(**more)]).agrees is agrees


def test_a_worker_that_counted_less_than_was_billed_is_named_even_while_it_is_busy(db, filled):
    counted = billed(db)
    busy = worker(**counted | {"cached": counted["cached"] - 1, "is_idle": False})
    run = books(db, count_workers=lambda: [busy])
    [less] = found(run, Check.EVENTS_WORKERS)
    assert less.tokens == -1
    assert any("busy" in words for words in run.not_compared)
    more = worker(**counted | {"cached": counted["cached"] + 50, "is_idle": False})
    assert books(db, count_workers=lambda: [more]).agrees


def test_a_worker_that_started_anew_is_compared_from_then_on_and_the_rest_is_said(db, filled):
    run = books(db, count_workers=lambda: [worker(epoch="new")])
    assert run.agrees
    assert any(EPOCH in words and "not to be had" in words for words in run.not_compared)


def test_one_tenant_is_compared_alone(db, filled, plant_in):
    line, _ = a_line(db, filled)
    plant_in(delete(schema.ledger_lines).where(schema.ledger_lines.c.id == line.id))
    other = next(row for row in rows(db, schema.tenants) if row.name == "other")
    assert books(db, tenant_id=other.id).agrees
    run = books(db, tenant_id=filled.tenant.id, count_workers=lambda: [worker()])
    assert not run.agrees
    assert [one.tenant for one in run.tenants] == ["acme"]
    assert any("one was asked for" in words for words in run.not_compared)


def test_a_window_is_of_whole_quarters_and_leaves_out_what_is_beyond(db, filled, plant_in):
    line, event = a_line(db, filled)
    plant_in(delete(schema.ledger_lines).where(schema.ledger_lines.c.id == line.id))
    bucket = event.accounted_at_us - event.accounted_at_us % BUCKET_MICROSECONDS
    inside = books(db, start=bucket, end=bucket + BUCKET_MICROSECONDS)
    assert [one.check for one in inside.differences if one.start == bucket]
    assert books(db, start=bucket + BUCKET_MICROSECONDS, end=bucket + 2 * BUCKET_MICROSECONDS).agrees
    for cuts in ({"start": bucket + 1}, {"end": bucket + 1}, {"start": bucket, "end": 0}):
        with pytest.raises(InvalidPeriod):
            books(db, **cuts)


def test_the_quarter_that_is_open_is_not_compared(db, account, new_meter):
    meter = new_meter()
    meter.settle(final(account.admission(admitted_at=NOW + 1), uncached=1))
    meter.close()
    assert books(db).total.events_tokens == 0


def test_every_run_is_kept_and_found_again(db, filled):
    first, second = books(db), books(db)
    assert [run.id for run in list_runs(db, limit=10)] == [second.id, first.id]
    assert find_run(db, ReconciliationId(first.id)) == first
    with pytest.raises(UnknownReconciliation):
        find_run(db, ReconciliationId(new_id()))


def test_sums_wider_than_64_bits_are_exact(db, filled, plant_in):
    rollups = schema.class_rollups
    plant_in(update(rollups).values(amount_pusd=2**63 - 1))
    run = books(db)
    wide = found(run, Check.LEDGER_ROLLUPS)
    posted = sum(row.amount_pusd for row in rows(db, schema.ledger_lines))
    assert sum(one.pusd for one in wide) == len(rows(db, rollups)) * (2**63 - 1) - posted


def test_a_run_holds_so_many_places_and_counts_the_rest(db, account, plant_in):
    key = {"tenant_id": account.tenant.id, "api_key_id": account.key.id, "model": "m"}
    counts = {"requests": 1, "aborted": 0, "usage_missing": 0, "delivered_tokens": 0}
    many = [
        key | counts | {"bucket_start_us": T0 + number * BUCKET_MICROSECONDS}
        for number in range(MAX_DIFFERENCES + 5)
    ]
    plant_in(schema.request_rollups.insert().values(many))
    run = books(db, tenant_id=account.tenant.id)
    assert len(run.differences) == MAX_DIFFERENCES
    assert run.num_differences == MAX_DIFFERENCES + 5

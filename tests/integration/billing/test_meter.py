"""Admit, settle, post, sweep: exactly once, on both databases."""

import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from sqlalchemy import select, text

from billing import schema
from billing.budgets import Period, Scope, set_budget
from billing.errors import (
    DuplicateRequest,
    InvalidUsage,
    JournalCorrupted,
    JournalInUse,
    MeterClosed,
    MeterOverloaded,
    MeterUnavailable,
    UnpricedModel,
)
from billing.ids import new_id
from billing.journal import decode_segment
from billing.meter import Meter
from billing.price_sheet import parse_price_sheet
from billing.prices import publish
from billing.usage import Estimate, TokenCounts, UsageKind
from tests.integration.billing.ledger_checks import (
    check_ledger,
    count,
    counts_of,
    events_by_request,
    rows,
    states,
)
from tests.unit.billing.builders import T0, admission, final

PATIENCE_SECONDS = 30


def admit(meter, *admissions):
    for outcome in [meter.admit(one) for one in admissions]:
        outcome.result(PATIENCE_SECONDS)


def test_a_request_is_admitted_then_settled_with_one_event_and_a_line_per_class(db, account, new_meter):
    meter = new_meter()
    admitted = account.admission()
    admit(meter, admitted)
    assert states(db) == {admitted.request_id: "admitted"}
    event = final(admitted, uncached=3, read=5, write_auto=1, output=7)
    meter.settle(event)
    meter.flush()
    assert states(db) == {admitted.request_id: "settled"}
    row = events_by_request(db)[admitted.request_id]
    assert (row.kind, row.finish_reason, row.delivered_tokens, row.first_token_ns) == (
        "final",
        "stop",
        7,
        12_345_678,
    )
    assert counts_of(row) == event.counts
    assert count(db, schema.ledger_lines) == 4
    check_ledger(db)
    stats = meter.stats()
    assert (stats.admitted, stats.settled, stats.posted, stats.pending, stats.in_flight) == (1, 1, 1, 0, 0)


def test_many_requests_at_once_are_each_metered_once(db, account, new_meter):
    meter = new_meter()
    admissions = [account.admission() for _ in range(400)]

    def run(admitted):
        meter.admit(admitted).result(PATIENCE_SECONDS)
        meter.settle(final(admitted, uncached=1, output=2))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(run, admissions))
    meter.flush(timeout_seconds=PATIENCE_SECONDS)
    assert events_by_request(db).keys() == {one.request_id for one in admissions}
    assert set(states(db).values()) == {"settled"}
    check_ledger(db)


def test_requests_without_upstream_ids_are_as_many_rows_as_requests(db, account, new_meter):
    meter = new_meter()
    for _ in range(20):
        meter.settle(final(account.admission(), uncached=1))
    meter.flush()
    assert count(db, schema.usage_events) == 20


def test_a_hang_up_after_26_tokens_is_one_row(db, account, new_meter):
    meter = new_meter()
    admitted = account.admission()
    admit(meter, admitted)
    meter.settle(final(admitted, kind=UsageKind.ABORTED, uncached=18, output=26))
    meter.flush()
    (row,) = rows(db, schema.usage_events)
    assert (row.kind, row.uncached_tokens, row.output_tokens) == ("aborted", 18, 26)


def test_usage_of_nothing_costs_nothing_and_is_a_row(db, account, new_meter):
    meter = new_meter()
    meter.settle(final(account.admission(), kind=UsageKind.ABORTED))
    meter.flush()
    assert count(db, schema.usage_events) == 1
    assert count(db, schema.ledger_lines) == 0


def test_settling_twice_posts_once(db, account, new_meter):
    meter = new_meter()
    event = final(account.admission(), uncached=3)
    meter.settle(event)
    meter.settle(event)
    meter.flush()
    meter.settle(event)
    meter.flush()
    assert count(db, schema.usage_events) == 1
    assert (meter.stats().posted, meter.stats().duplicates, meter.stats().conflicts) == (1, 2, 0)


def test_another_payload_under_the_same_id_is_an_alert_and_the_first_stands(db, account, new_meter, caplog):
    meter = new_meter()
    admitted = account.admission()
    meter.settle(final(admitted, uncached=3))
    meter.flush()
    meter.settle(final(admitted, uncached=4))
    meter.flush()
    (row,) = rows(db, schema.usage_events)
    assert row.uncached_tokens == 3
    assert (meter.stats().conflicts, meter.stats().duplicates) == (1, 0)
    assert [
        str(admitted.request_id) in record.message for record in caplog.records if record.levelname == "ERROR"
    ] == [True]
    check_ledger(db)


def test_the_price_is_the_one_in_force_at_admission_not_at_the_end(db, account, new_meter):
    meter = new_meter()
    admitted = account.admission(admitted_at=T0 + 9)
    admit(meter, admitted)
    dearer = parse_price_sheet(
        "book: dearer\ncurrency: USD\ncache_basis_points: {read: 1000, write_auto: 10000, write_5m: 12500,"
        " write_1h: 20000}\nmodels:\n  test-model: {input: 6000000, output: 30000000}"
    )
    publish(db, dearer, clock=lambda: T0 + 10)
    meter.settle(final(admitted, uncached=1))  # ends a second later
    meter.settle(final(account.admission(admitted_at=T0 + 10), uncached=1))
    meter.flush()
    assert sorted(line.unit_pusd for line in rows(db, schema.ledger_lines)) == [3_000_000, 6_000_000]
    check_ledger(db)


def test_an_unpriced_model_is_refused_and_spoils_nobody_elses_admission(db, account, new_meter):
    meter = new_meter()
    outcomes = [
        meter.admit(account.admission(model=model)) for model in ("test-model", "unpriced", "test-model")
    ]
    assert [type(outcome.exception(PATIENCE_SECONDS)) for outcome in outcomes] == [
        type(None),
        UnpricedModel,
        type(None),
    ]
    assert len(states(db)) == 2
    assert meter.stats().in_flight == 2


def test_a_request_is_admitted_once(db, account, new_meter):
    meter = new_meter()
    admitted = account.admission()
    outcomes = [meter.admit(admitted) for _ in range(3)]
    failures = [outcome.exception(PATIENCE_SECONDS) for outcome in outcomes]
    assert failures[0] is None
    assert [type(failure) for failure in failures[1:]] == [DuplicateRequest] * 2


def test_an_admission_for_a_tenant_that_is_not_there_spoils_nobody_elses(db, account, new_meter):
    meter = new_meter()
    outcomes = [meter.admit(one) for one in (account.admission(), admission(), account.admission())]
    assert isinstance(outcomes[1].exception(PATIENCE_SECONDS), InvalidUsage)
    assert outcomes[0].exception(PATIENCE_SECONDS) is None
    assert outcomes[2].exception(PATIENCE_SECONDS) is None
    assert len(states(db)) == 2


def test_an_event_that_can_never_be_posted_is_kept_aside_and_the_rest_go_on(
    db, account, new_meter, tmp_path, caplog
):
    meter = new_meter()
    stranger = final(admission(), uncached=1)
    unpriced = final(account.admission(model="unpriced"), uncached=1)
    good = [final(account.admission(), uncached=1) for _ in range(3)]
    for event in (good[0], stranger, good[1], unpriced, good[2]):
        meter.settle(event)
    meter.flush()
    assert events_by_request(db).keys() == {event.request_id for event in good}
    assert meter.stats().rejected == 2
    kept, _ = decode_segment(tmp_path.joinpath("journal", "rejected.log").read_bytes(), name="rejected")
    assert [record.event for record in kept] == [stranger, unpriced]
    assert sum(record.levelname == "CRITICAL" for record in caplog.records) == 2
    check_ledger(db)


def test_an_admission_given_up_before_its_commit_is_not_admitted(db, account, new_meter):
    meter = new_meter(start=False)
    assert isinstance(meter.admit(account.admission()).exception(0), MeterClosed)
    meter = new_meter()
    with db.write():  # on SQLite this holds the writer back; either way the outcome is one of the two
        given_up = meter.admit(account.admission())
        was_cancelled = given_up.cancel()
    meter.sweep(T0)
    assert (count(db, schema.requests) == 0) or not was_cancelled
    assert meter.stats().in_flight == len(states(db))


def test_settling_needs_no_admission(db, account, new_meter):
    meter = new_meter()
    event = final(account.admission(), kind=UsageKind.ABORTED)
    meter.settle(event)
    meter.flush()
    assert states(db) == {event.request_id: "settled"}


def test_too_many_open_requests_are_refused_until_some_are_posted(db, account, new_meter):
    meter = new_meter(open_requests=3)
    admissions = [account.admission() for _ in range(3)]
    admit(meter, *admissions)
    assert isinstance(meter.admit(account.admission()).exception(PATIENCE_SECONDS), MeterOverloaded)
    meter.settle(final(admissions[0]))
    meter.flush()
    admit(meter, account.admission())
    assert meter.stats().refused == 1


def test_a_closed_meter_refuses(account, new_meter):
    meter = new_meter()
    meter.close()
    meter.close()
    assert isinstance(meter.admit(account.admission()).exception(0), MeterClosed)
    for call in (
        lambda: meter.settle(final(account.admission())),
        lambda: meter.observe(final(account.admission())),
        lambda: meter.sweep(T0),
    ):
        with pytest.raises(MeterClosed):
            call()


def test_closing_posts_what_is_settled_and_leaves_an_empty_journal(db, account, new_meter, tmp_path):
    meter = new_meter()
    for _ in range(50):
        meter.settle(final(account.admission(), uncached=1))
    meter.close()
    assert count(db, schema.usage_events) == 50
    assert list(tmp_path.joinpath("journal").glob("0*.log")) == []


def test_a_journal_has_one_meter(new_meter):
    new_meter()
    with pytest.raises(JournalInUse):
        new_meter(start=False).start()


def test_a_damaged_journal_is_refused_and_let_go(db, account, new_meter, tmp_path, outage):
    meter = new_meter()
    with outage():
        fail_once(meter, account)
        for _ in range(3):
            meter.settle(final(account.admission(), uncached=1))
        meter.close(timeout_seconds=0)
    (segment,) = tmp_path.joinpath("journal").glob("0*.log")
    whole = segment.read_bytes()
    segment.write_bytes(whole[:60] + b"X" + whole[61:])
    for _ in range(2):
        with pytest.raises(JournalCorrupted):
            new_meter(start=False).start()
    segment.write_bytes(whole)
    new_meter().flush()
    assert count(db, schema.usage_events) == 3


def fail_once(meter, account):
    """During an outage: one admission learns of it, and so does the meter."""
    assert isinstance(meter.admit(account.admission()).exception(PATIENCE_SECONDS), MeterUnavailable)


def test_a_failing_database_loses_nothing_and_refuses_new_work(db, account, new_meter, outage):
    meter = new_meter(first_retry=timedelta(milliseconds=20), last_retry=timedelta(milliseconds=50))
    admissions = [account.admission() for _ in range(5)]
    admit(meter, *admissions)
    with outage():
        fail_once(meter, account)
        for admitted in admissions:
            meter.settle(final(admitted, uncached=1, output=1))
        assert meter.stats().pending == 5
        assert isinstance(meter.admit(account.admission()).exception(PATIENCE_SECONDS), MeterUnavailable)
        with pytest.raises(MeterUnavailable):
            meter.flush(timeout_seconds=0)
        assert meter.stats().database_failures > 0
    meter.flush(timeout_seconds=PATIENCE_SECONDS)
    assert events_by_request(db).keys() == {one.request_id for one in admissions}
    admit(meter, account.admission())
    check_ledger(db)


def test_what_a_failing_database_did_not_take_is_posted_by_the_next_process(db, account, new_meter, outage):
    meter = new_meter()
    admitted = account.admission()
    admit(meter, admitted)
    with outage():
        fail_once(meter, account)
        meter.settle(final(admitted, uncached=9))
        meter.close(timeout_seconds=0)
    assert count(db, schema.usage_events) == 0
    new_meter().flush(timeout_seconds=PATIENCE_SECONDS)
    assert events_by_request(db)[admitted.request_id].uncached_tokens == 9
    assert states(db)[admitted.request_id] == "settled"
    check_ledger(db)


def test_replaying_a_journal_that_was_posted_changes_nothing(db, account, new_meter, tmp_path, outage):
    meter = new_meter()
    with outage():
        fail_once(meter, account)
        for index in range(10):
            meter.settle(final(account.admission(), uncached=index))
        meter.close(timeout_seconds=0)
    shutil.copytree(tmp_path.joinpath("journal"), tmp_path.joinpath("copy"))
    meter = new_meter()
    meter.flush(timeout_seconds=PATIENCE_SECONDS)
    meter.close()
    before = [rows(db, table) for table in (schema.usage_events, schema.ledger_lines)]
    meter = new_meter(journal="copy")
    meter.flush(timeout_seconds=PATIENCE_SECONDS)
    assert (meter.stats().duplicates, meter.stats().posted, meter.stats().conflicts) == (10, 0, 0)
    assert [rows(db, table) for table in (schema.usage_events, schema.ledger_lines)] == before


def test_a_torn_tail_loses_the_torn_record_alone_and_the_sweep_settles_its_request(
    db, account, new_meter, tmp_path, outage
):
    meter = new_meter()
    admissions = [account.admission() for _ in range(3)]
    admit(meter, *admissions)
    with outage():
        fail_once(meter, account)
        for admitted in admissions:
            meter.settle(final(admitted, uncached=5))
        meter.close(timeout_seconds=0)
    (segment,) = tmp_path.joinpath("journal").glob("0*.log")
    os.truncate(segment, segment.stat().st_size - 1)
    meter = new_meter()
    meter.sweep(T0)
    meter.flush(timeout_seconds=PATIENCE_SECONDS)
    assert meter.stats().torn_records == 1
    events = events_by_request(db)
    assert [events[one.request_id].uncached_tokens for one in admissions] == [5, 5, 0]
    assert [events[one.request_id].kind for one in admissions] == ["final", "final", "aborted"]
    check_ledger(db)


def test_a_request_whose_lease_ran_out_is_swept_and_a_living_one_is_not(db, account, new_meter):
    meter = new_meter(lease=timedelta(seconds=1))
    forgotten, living = account.admission(), account.admission(admitted_at=T0 + 1)
    admit(meter, forgotten, living)
    assert meter.sweep(T0 + 999_999) == 0
    assert meter.sweep(T0 + 1_000_000) == 1
    meter.flush()
    assert states(db) == {forgotten.request_id: "settled", living.request_id: "admitted"}
    (row,) = rows(db, schema.usage_events)
    assert (row.kind, row.finish_reason, counts_of(row)) == ("aborted", "abandoned", TokenCounts())
    assert meter.sweep(T0 + 1_000_000) == 0


def test_a_sweep_bills_the_last_evidence(db, account, new_meter):
    meter = new_meter(lease=timedelta(seconds=1))
    admitted = account.admission()
    admit(meter, admitted)
    meter.observe(final(admitted, kind=UsageKind.ABORTED, uncached=100, read=50))
    meter.observe(final(admitted, kind=UsageKind.ABORTED, uncached=100, read=50, output=8))
    assert meter.sweep(T0 + 1_000_000) == 1
    meter.flush()
    assert counts_of(events_by_request(db)[admitted.request_id]) == TokenCounts(
        uncached=100, read=50, output=8
    )
    check_ledger(db)


def test_a_settled_request_is_never_swept(db, account, new_meter, outage):
    meter = new_meter(lease=timedelta(seconds=1))
    admitted = account.admission()
    admit(meter, admitted)
    with db.write():  # holds the posting back on SQLite; on PostgreSQL it may win the race, which is as good
        meter.settle(final(admitted, uncached=1))
    meter.sweep(T0 + 10**9)
    meter.flush()
    assert events_by_request(db)[admitted.request_id].kind == "final"
    assert meter.stats().conflicts == 0


def test_a_sweep_while_the_database_is_away_is_refused(account, new_meter, outage):
    meter = new_meter()
    with outage():
        fail_once(meter, account)
        with pytest.raises(MeterUnavailable):
            meter.sweep(T0)


def test_the_requests_of_another_living_process_are_left_alone(db, account, new_meter):
    mine, theirs = new_meter(), new_meter(journal="other")
    admitted = account.admission()
    admit(theirs, admitted)
    assert mine.sweep(T0) == 0
    assert states(db) == {admitted.request_id: "admitted"}


def test_new_ids_are_made_for_events_so_that_no_client_can_choose_one(db, account, new_meter):
    meter = new_meter()
    chosen = new_id()
    meter.settle(final(account.admission(request_id=chosen)))
    meter.flush()
    (row,) = rows(db, schema.usage_events)
    assert row.request_id == chosen
    assert row.id not in {chosen, admission().request_id}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_writer_that_dies_of_its_own_fault_keeps_nobody_waiting_and_loses_no_event(
    db, account, tmp_path, new_meter
):
    def broken_clock():
        raise RuntimeError("a fault of our own")

    meter = Meter(db, tmp_path.joinpath("journal"), clock=broken_clock)
    meter.start()
    event = final(account.admission(), uncached=6)
    meter.settle(event)
    with pytest.raises(MeterUnavailable):
        meter.flush(timeout_seconds=PATIENCE_SECONDS)
    assert isinstance(meter.admit(account.admission()).exception(PATIENCE_SECONDS), MeterUnavailable)
    with pytest.raises(MeterUnavailable):
        meter.sweep(T0)
    late = final(account.admission(), uncached=7)
    meter.settle(late)
    meter.close()
    with pytest.raises(MeterClosed):
        meter.settle(late)
    new_meter().flush(timeout_seconds=PATIENCE_SECONDS)
    assert events_by_request(db).keys() == {event.request_id, late.request_id}


def test_a_meter_is_started_once(new_meter):
    meter = new_meter()
    with pytest.raises(MeterClosed):
        meter.start()


POSTGRESQL_ALONE = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
"""SQLite takes one transaction at a time."""


@POSTGRESQL_ALONE
def test_no_admission_waits_for_events_that_are_being_posted(db, account, new_meter):
    meter = new_meter()
    with db.write() as connection:
        # As one who closes the tenant's period: postings wait for it, admissions need not.
        connection.execute(
            select(schema.tenants)
            .where(schema.tenants.c.id == account.tenant.id)
            .with_for_update(key_share=True)
        )
        ended = account.admission()
        meter.settle(final(ended, uncached=1))
        wait_for_a_lock(db)
        admitted = account.admission()
        admit(meter, admitted)
        assert states(db) == {admitted.request_id: "admitted"}
        assert meter.stats().pending == 1
    meter.flush()
    assert events_by_request(db).keys() == {ended.request_id}


@POSTGRESQL_ALONE
def test_what_ends_while_its_admission_is_decided_is_posted_after_it_and_leaves_nothing_reserved(
    db, account, new_meter
):
    meter = new_meter()
    set_budget(db, Scope(tenant_id=account.tenant.id), period=Period.TOTAL, limit_pusd=10**12, now=T0)
    estimate = Estimate(prompt=10, read=0, output=10)
    first = account.admission()
    meter.admit(first, estimate).result(PATIENCE_SECONDS)
    given_up = account.admission()
    with db.write() as connection:
        connection.execute(select(schema.budget_balances).with_for_update())
        outcome = meter.admit(given_up, estimate)
        wait_for_a_lock(db)
        meter.settle(final(given_up, uncached=3, output=1))
        time.sleep(0.5)  # in which a poster that did not wait would take the locks that the admission needs
    assert outcome.result(PATIENCE_SECONDS).holds
    meter.settle(final(first, uncached=3, output=1))
    meter.flush()
    assert {row.state for row in rows(db, schema.reservations)} == {"settled"}
    (balance,) = rows(db, schema.budget_balances)
    assert (balance.reserved_pusd, balance.posted_pusd) == (0, 2 * (3 * 3_000_000 + 15_000_000))
    assert meter.stats().database_failures == 0
    check_ledger(db)


def wait_for_a_lock(db):
    """Until some transaction waits for another."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        with db.read() as connection:
            if connection.execute(text("SELECT count(*) FROM pg_locks WHERE NOT granted")).scalar_one():
                return
        time.sleep(0.01)
    pytest.fail("nobody waits for a lock")


def test_all_writers_end_with_the_meter(db, account, new_meter):
    before = writers()
    meter = new_meter()
    assert writers() > before
    admit(meter, account.admission())
    meter.close()
    assert writers() == before


def writers():
    return {thread for thread in threading.enumerate() if thread.name.startswith("billing-")}


@POSTGRESQL_ALONE
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_one_writer_dies_the_other_ends_too(db, account, tmp_path):
    clock = iter([T0])  # for the sweep at the start; the next who asks is the poster
    meter = Meter(db, tmp_path.joinpath("journal"), clock=lambda: next(clock))
    before = writers()
    meter.start()
    admitted = account.admission()
    admit(meter, admitted)
    meter.settle(final(admitted, uncached=6))
    with pytest.raises(MeterUnavailable):
        meter.flush(timeout_seconds=PATIENCE_SECONDS)
    assert isinstance(meter.admit(account.admission()).exception(PATIENCE_SECONDS), MeterUnavailable)
    meter.close()
    assert writers() == before

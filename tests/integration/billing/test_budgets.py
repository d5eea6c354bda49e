"""Budgets: reserved before, settled after, never overrun, on both databases."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy import text, update
from sqlalchemy.exc import IntegrityError

from billing import budgets, instants, schema
from billing.accounts import KeyHasher, create_key
from billing.budgets import Period, Scope, list_budgets, remove_budget, set_budget
from billing.errors import BudgetBelowPosted, BudgetExceeded, InvalidBudget, UnknownBudget
from billing.ids import ApiKeyId, BudgetId, new_id
from billing.meter import Meter
from billing.money import MAX_STORED
from billing.prices import price_in_force
from billing.usage import Estimate, UsageKind
from tests.integration.billing.conftest import new_account
from tests.integration.billing.ledger_checks import check_ledger, count, rows
from tests.unit.billing.builders import MODEL, T0, final

PATIENCE_SECONDS = 60
ESTIMATE = Estimate(prompt=100, read=40, output=10)
NUM_ROUNDS = 100
NUM_ASKING = 64
NUM_FITTING = 33


def worst_case(db, estimate=ESTIMATE) -> int:
    return budgets.worst_case_pusd(price_in_force(db, model=MODEL, at=T0), estimate)


def scope(account, **narrower) -> Scope:
    return Scope(tenant_id=account.tenant.id, **narrower)


def balance(db, account, now=T0):
    (one,) = list_budgets(db, tenant_id=account.tenant.id, now=now)
    return one.limit_pusd, one.posted_pusd, one.reserved_pusd


def outcome_of(meter, admission, estimate=ESTIMATE):
    """ "granted" or "refused"; whatever else is raised fails the test."""
    try:
        meter.admit(admission, estimate).result(PATIENCE_SECONDS)
    except BudgetExceeded:
        return "refused"
    return "granted"


def check_budgets(db):
    """reserved is the sum of what is held, posted that of the ledger, and reservations never overran."""
    held = {}
    for row in rows(db, schema.reservations):
        assert (row.state == "held") == (row.ended_at_us is None)
        if row.state == "held":
            held[row.balance_id] = held.get(row.balance_id, 0) + row.amount_pusd
    spent = sum(line.amount_pusd for line in rows(db, schema.ledger_lines))
    for row in rows(db, schema.budget_balances):
        assert row.reserved_pusd == held.get(row.id, 0)
        assert row.posted_pusd == spent
        assert row.posted_pusd + row.reserved_pusd <= row.limit_pusd


def test_the_worst_case_is_known_reads_and_the_dearest_input_and_all_output(db, account):
    # 40 read at 0.3, 60 written for an hour at 6, 10 output at 15 dollars per million
    assert worst_case(db) == 40 * 300_000 + 60 * 6_000_000 + 10 * 15_000_000


def test_a_budget_grants_exactly_what_fits_every_time(db, account, new_meter, tmp_path):
    """64 at once against 33, from two processes' worth of meters, a hundred times."""
    price = worst_case(db)
    first, second = new_meter(journal="first"), new_meter(journal="second")
    with ThreadPoolExecutor(NUM_ASKING) as pool:
        for number in range(NUM_ROUNDS):
            asking = new_account(db, f"tenant {number}")
            fitting = NUM_FITTING * price + price - 1
            set_budget(db, scope(asking), period=Period.MONTH, limit_pusd=fitting, now=T0)
            meters = [first, second if number % 2 else first] * (NUM_ASKING // 2)
            together = threading.Barrier(NUM_ASKING)

            def ask(meter, asking=asking, together=together):
                admission = asking.admission()
                together.wait(PATIENCE_SECONDS)
                return outcome_of(meter, admission)

            outcomes = list(pool.map(ask, meters))
            assert outcomes.count("granted") == NUM_FITTING
            assert balance(db, asking) == (fitting, 0, NUM_FITTING * price)


def test_five_at_the_limit_at_once_never_pass_it(db, account, new_meter):
    meter = new_meter()
    price = worst_case(db)
    set_budget(db, scope(account), period=Period.TOTAL, limit_pusd=price, now=T0)
    with ThreadPoolExecutor(5) as pool:
        outcomes = list(pool.map(lambda _: outcome_of(meter, account.admission()), range(5)))
    assert sorted(outcomes) == ["granted", "refused", "refused", "refused", "refused"]
    check_budgets(db)


def test_in_one_batch_the_first_are_granted(db, account, new_meter):
    meter = new_meter(start=False)
    set_budget(db, scope(account), period=Period.TOTAL, limit_pusd=3 * worst_case(db), now=T0)
    meter.start()
    admissions = [account.admission() for _ in range(8)]
    outcomes = [meter.admit(one, ESTIMATE) for one in admissions]
    refused = [outcome.exception(PATIENCE_SECONDS) is not None for outcome in outcomes]
    meter.close()
    assert refused == [False] * 3 + [True] * 5


def test_settling_posts_what_was_used_and_frees_the_rest(db, account, new_meter):
    meter = new_meter()
    price = worst_case(db)
    set_budget(db, scope(account), period=Period.MONTH, limit_pusd=2 * price, now=T0)
    admitted = account.admission()
    assert outcome_of(meter, admitted) == "granted"
    assert balance(db, account) == (2 * price, 0, price)
    meter.settle(final(admitted, uncached=60, read=40, output=2))
    meter.flush()
    used = 60 * 3_000_000 + 40 * 300_000 + 2 * 15_000_000
    assert balance(db, account) == (2 * price, used, 0)
    assert [row.state for row in rows(db, schema.reservations)] == ["settled"]
    check_budgets(db)


def test_a_request_that_used_nothing_releases_its_reservation(db, account, new_meter):
    meter = new_meter()
    set_budget(db, scope(account), period=Period.MONTH, limit_pusd=worst_case(db), now=T0)
    for _ in range(3):
        admitted = account.admission()
        assert outcome_of(meter, admitted) == "granted"
        assert outcome_of(meter, account.admission()) == "refused"
        meter.settle(final(admitted, kind=UsageKind.ABORTED))
        meter.flush()
    assert {row.state for row in rows(db, schema.reservations)} == {"released"}
    check_budgets(db)


def test_who_comes_after_a_settlement_finds_the_room_that_it_leaves(db, account, new_meter):
    """However often: nobody waits for the settled event to be posted, but for its own admission."""
    meter = new_meter()
    set_budget(db, scope(account), period=Period.MONTH, limit_pusd=worst_case(db), now=T0)
    for _ in range(20):
        admitted = account.admission()
        assert outcome_of(meter, admitted) == "granted"
        meter.settle(final(admitted, kind=UsageKind.ABORTED))
    meter.flush()
    check_budgets(db)


def test_a_refused_request_leaves_no_row(db, account, new_meter):
    meter = new_meter()
    set_budget(db, scope(account), period=Period.MONTH, limit_pusd=0, now=T0)
    assert outcome_of(meter, account.admission()) == "refused"
    assert count(db, schema.requests) == 0
    assert (meter.stats().refused, meter.stats().in_flight) == (1, 0)


def test_another_tenant_is_not_bound(db, account, new_meter):
    meter = new_meter()
    other = new_account(db, "other")
    set_budget(db, scope(account), period=Period.MONTH, limit_pusd=0, now=T0)
    assert outcome_of(meter, account.admission()) == "refused"
    assert outcome_of(meter, other.admission()) == "granted"


def test_every_budget_over_a_request_must_have_room_or_none_is_touched(db, account, new_meter):
    meter = new_meter()
    price = worst_case(db)
    set_budget(db, scope(account), period=Period.MONTH, limit_pusd=10 * price, now=T0)
    of_key = scope(account, api_key_id=account.key.id)
    set_budget(db, of_key, period=Period.TOTAL, limit_pusd=price, now=T0)
    assert outcome_of(meter, account.admission()) == "granted"
    assert outcome_of(meter, account.admission()) == "refused"
    reserved = [one.reserved_pusd for one in list_budgets(db, tenant_id=account.tenant.id, now=T0)]
    assert reserved == [price, price]
    second, _ = create_key(
        db, tenant_id=account.tenant.id, label="second", hasher=KeyHasher(bytes(32)), now=T0
    )
    assert outcome_of(meter, replace(account, key=second).admission()) == "granted"


def test_a_month_begins_anew_in_the_tenants_zone(db, account, new_meter):
    meter = new_meter()
    with db.write() as connection:
        connection.execute(update(schema.tenants).values(time_zone="Asia/Kathmandu"))
    end_of_march = instants.later(T0, timedelta(days=31, hours=-5, minutes=-45))
    price = worst_case(db)
    set_budget(db, scope(account), period=Period.MONTH, limit_pusd=price, now=T0)
    assert outcome_of(meter, account.admission(admitted_at=end_of_march - 1)) == "granted"
    assert outcome_of(meter, account.admission(admitted_at=end_of_march - 1)) == "refused"
    assert outcome_of(meter, account.admission(admitted_at=end_of_march)) == "granted"
    assert outcome_of(meter, account.admission(admitted_at=end_of_march)) == "refused"


def test_what_was_posted_before_counts_against_a_new_budget(db, account, new_meter):
    meter = new_meter()
    meter.settle(final(account.admission(), uncached=10))
    meter.flush()
    with pytest.raises(BudgetBelowPosted, match=r"0\.00003 dollars are spent already"):
        set_budget(db, scope(account), period=Period.MONTH, limit_pusd=29_999_999, now=T0)
    assert count(db, schema.budgets) == 0
    made = set_budget(db, scope(account), period=Period.MONTH, limit_pusd=30_000_000, now=T0)
    assert (made.posted_pusd, made.reserved_pusd) == (30_000_000, 0)
    with pytest.raises(BudgetBelowPosted):
        set_budget(db, scope(account), period=Period.MONTH, limit_pusd=29_999_999, now=T0)
    assert outcome_of(meter, account.admission()) == "refused"
    check_budgets(db)


def test_what_is_in_flight_when_a_budget_is_made_is_counted_when_it_is_posted(db, account, new_meter):
    meter = new_meter()
    admitted = account.admission()
    assert outcome_of(meter, admitted) == "granted"
    set_budget(db, scope(account), period=Period.MONTH, limit_pusd=10**12, now=T0)
    meter.settle(final(admitted, uncached=7))
    meter.flush()
    assert balance(db, account) == (10**12, 21_000_000, 0)


def test_a_raised_limit_grants_more_and_a_removed_budget_limits_nothing(db, account, new_meter):
    meter = new_meter()
    price = worst_case(db)
    made = set_budget(db, scope(account), period=Period.MONTH, limit_pusd=price, now=T0)
    admitted = account.admission()
    assert outcome_of(meter, admitted) == "granted"
    raised = set_budget(db, scope(account), period=Period.MONTH, limit_pusd=2 * price, now=T0)
    assert (raised.id, raised.limit_pusd, raised.reserved_pusd) == (made.id, 2 * price, price)
    assert outcome_of(meter, account.admission()) == "granted"
    assert outcome_of(meter, account.admission()) == "refused"
    remove_budget(db, made.id, now=T0)
    assert outcome_of(meter, account.admission()) == "granted"
    meter.settle(final(admitted, uncached=1))
    meter.flush()
    (kept,) = rows(db, schema.budget_balances)
    assert kept.reserved_pusd == price  # of the other; the first was settled although its budget is gone
    with pytest.raises(UnknownBudget):
        remove_budget(db, made.id, now=T0)


def test_a_former_process_loses_its_reservations_once(db, account, new_meter, tmp_path):
    price = worst_case(db)
    set_budget(db, scope(account), period=Period.MONTH, limit_pusd=3 * price, now=T0)
    crashed = new_meter(journal="crashed")
    first, second = account.admission(), account.admission()
    for admitted in (first, second):
        assert outcome_of(crashed, admitted) == "granted"
    crashed.observe(final(first, kind=UsageKind.ABORTED, uncached=5))
    crashed.close(timeout_seconds=0)
    took_over = Meter(db, tmp_path.joinpath("crashed"), clock=lambda: T0)
    took_over.start()
    took_over.sweep(T0)
    took_over.sweep(T0)
    took_over.flush()
    took_over.close()
    assert balance(db, account) == (3 * price, 15_000_000, 0)
    assert sorted(row.state for row in rows(db, schema.reservations)) == ["released", "settled"]
    check_budgets(db)
    check_ledger(db)


def test_a_lease_that_ran_out_frees_its_reservation_and_a_late_event_still_counts(db, account, new_meter):
    price = worst_case(db)
    set_budget(db, scope(account), period=Period.MONTH, limit_pusd=price, now=T0)
    meter = new_meter(lease=timedelta(hours=1))
    admitted = account.admission()
    assert outcome_of(meter, admitted) == "granted"
    with db.write() as connection:
        assert budgets.expire(connection, instants.later(T0, timedelta(minutes=59))) == 0
    with db.write() as connection:
        assert budgets.expire(connection, instants.later(T0, timedelta(hours=1))) == 1
    assert balance(db, account) == (price, 0, 0)
    meter.settle(final(admitted, uncached=1))
    meter.flush()
    assert balance(db, account) == (price, 3_000_000, 0)
    assert [row.state for row in rows(db, schema.reservations)] == ["expired"]


def test_the_same_request_told_twice_reserves_once(db, account, new_meter):
    meter = new_meter()
    price = worst_case(db)
    set_budget(db, scope(account), period=Period.MONTH, limit_pusd=10 * price, now=T0)
    admitted = account.admission()
    outcomes = [meter.admit(admitted, ESTIMATE) for _ in range(3)]
    assert [one.exception(PATIENCE_SECONDS) is None for one in outcomes] == [True, False, False]
    assert balance(db, account) == (10 * price, 0, price)


@pytest.mark.parametrize("limit", [-1, MAX_STORED + 1])
def test_a_limit_that_cannot_be_is_refused(db, account, limit):
    with pytest.raises(InvalidBudget):
        set_budget(db, scope(account), period=Period.MONTH, limit_pusd=limit, now=T0)


def test_a_budget_is_for_ones_own_key_or_project(db, account):
    foreign = new_account(db, "other")
    for narrower in (
        {"api_key_id": foreign.key.id},
        {"project_id": new_id()},
        {"api_key_id": ApiKeyId(account.key.id), "project_id": new_id()},
    ):
        with pytest.raises(InvalidBudget):
            set_budget(db, scope(account, **narrower), period=Period.MONTH, limit_pusd=1, now=T0)
    with pytest.raises(UnknownBudget):
        remove_budget(db, BudgetId(new_id()), now=T0)


def test_the_database_itself_refuses_a_reservation_past_the_limit(db, account):
    set_budget(db, scope(account), period=Period.MONTH, limit_pusd=10, now=T0)
    change = "UPDATE budget_balances SET posted_pusd = {}, reserved_pusd = {}"
    with db.write() as connection:
        connection.execute(text(change.format(4, 6)))
    with pytest.raises(IntegrityError), db.write() as connection:
        connection.execute(text(change.format(4, 7)))
    with pytest.raises(IntegrityError), db.write() as connection:
        connection.execute(text(change.format(4, -1)))
    with db.write() as connection:  # what was really used is posted all the same
        connection.execute(text(change.format(20, 6)))

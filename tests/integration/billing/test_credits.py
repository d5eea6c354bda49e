"""A broken promise to keep cached tokens is credited by itself, once, and never beyond what was paid."""

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import delete, update
from sqlalchemy.exc import IntegrityError

from billing import schema
from billing.budgets import Period, Scope, list_budgets, set_budget
from billing.calendar import month, zone_named
from billing.credits import BrokenPromise, Granted, credit, num_credits
from billing.db import open_database
from billing.errors import InvalidPromise, UnknownRequest
from billing.ids import new_request_id
from billing.issuing import issue_statement, preview_statement
from billing.price_sheet import parse_price_sheet
from billing.prices import publish, set_discount
from billing.receipt_chain import receipts_of
from billing.receipt_keys import SigningKey
from billing.sealer import Sealer
from billing.statements import LineKind
from tests.integration.billing.ledger_checks import check_ledger, count, rows
from tests.unit.billing.builders import MODEL, T0, final

SECOND = 1_000_000
PREMIUM_5M = 750_000
PREMIUM_1H = 3_000_000
DEARER = parse_price_sheet(
    f"""
    book: dearer
    currency: USD
    cache_basis_points: {{read: 1000, write_auto: 10000, write_5m: 12500, write_1h: 20000}}
    models:
      {MODEL}: {{input: 9000000, output: 15000000}}
    """
)


@pytest.fixture
def write(account, new_meter):
    """Posts a request that wrote tokens by TTL; returns its admission."""
    meter = new_meter()

    def post(**counts):
        admitted = account.admission()
        meter.admit(admitted).result(10)
        meter.settle(
            final(admitted, **(counts or {"uncached": 10, "write_5m": 100, "write_1h": 40, "output": 5}))
        )
        meter.flush()
        return admitted

    return post


def broken(admitted, **changes) -> BrokenPromise:
    said = {
        "request_id": admitted.request_id,
        "promise": "b1",
        "token_class": "write_5m",
        "tokens": 16,
        "promised_until": T0 + 300 * SECOND,
        "broken_at": T0 + 60 * SECOND,
    }
    return msgspec.convert(said | changes, BrokenPromise)


def test_broken_tokens_are_rated_again_as_plain_input(db, write):
    granted = credit(db, broken(write()), now=T0 + 61 * SECOND)
    assert granted == Granted(credit_id=granted.credit_id, amount_pusd=-16 * PREMIUM_5M, is_new=True)
    [event] = [row for row in rows(db, schema.usage_events) if row.kind == "credit"]
    assert event.id == granted.credit_id
    assert (event.write_5m_tokens, event.uncached_tokens, event.output_tokens) == (-16, 16, 0)
    assert (event.finished_at_us, event.posted_at_us) == (T0 + 60 * SECOND, T0 + 61 * SECOND)
    original = next(row for row in rows(db, schema.usage_events) if row.kind == "final")
    assert event.original_id == original.id
    check_ledger(db)


def test_an_hours_write_gives_back_an_hours_premium(db, write):
    assert credit(db, broken(write(), token_class="write_1h"), now=T0).amount_pusd == -16 * PREMIUM_1H


def test_a_report_is_credited_once_however_often_it_comes(db, write):
    report = broken(write())
    first, again = credit(db, report, now=T0), credit(db, report, now=T0 + 1)
    assert again == dataclasses.replace(first, is_new=False)
    with db.read() as connection:
        assert num_credits(connection) == 1
    assert count(db, schema.broken_promises) == 1


def test_the_same_promise_in_other_words_is_refused(db, write):
    admitted = write()
    credit(db, broken(admitted), now=T0)
    with pytest.raises(InvalidPromise, match="other words"):
        credit(db, broken(admitted, tokens=17), now=T0)


def test_reports_at_once_are_credited_once_and_never_beyond_what_was_written(db, database_url, write):
    admitted = write()
    # Ten of 16 tokens each, every one twice: 100 were written.
    reports = 2 * [broken(admitted, promise=f"b{number}") for number in range(10)]

    def report(one):
        with open_database(database_url) as mine:
            try:
                return credit(mine, one, now=T0).is_new
            except InvalidPromise:
                return None

    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(report, reports))
    assert outcomes.count(True) == 6
    assert sum(row.tokens for row in rows(db, schema.broken_promises)) == 96
    check_ledger(db)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["write_5m", "write_1h"]), st.integers(1, 60)),
        max_size=8,
    )
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_reported_no_more_is_given_back_than_was_paid_for_the_promise(db, write, reports):
    admitted = write()
    given_back = 0
    for name, token_class, tokens in reports:
        try:
            granted = credit(
                db, broken(admitted, promise=f"b{name}", token_class=token_class, tokens=tokens), now=T0
            )
        except InvalidPromise:
            continue
        given_back -= granted.amount_pusd if granted.is_new else 0
    assert 0 <= given_back <= 100 * PREMIUM_5M + 40 * PREMIUM_1H
    of_request = [row for row in rows(db, schema.usage_events) if row.request_id == admitted.request_id]
    assert sum(row.write_5m_tokens for row in of_request) >= 0
    assert sum(row.write_1h_tokens for row in of_request) >= 0
    assert sum(row.uncached_tokens + row.write_5m_tokens + row.write_1h_tokens for row in of_request) == 150


def test_a_credit_is_at_the_prices_and_discount_of_the_request(db, account, write):
    set_discount(db, tenant_id=account.tenant.id, basis_points=1_000, clock=lambda: T0 - 1)
    admitted = write()
    publish(db, DEARER, clock=lambda: T0 + SECOND)
    set_discount(db, tenant_id=account.tenant.id, basis_points=5_000, clock=lambda: T0 + SECOND)
    assert credit(db, broken(admitted), now=T0 + 61 * SECOND).amount_pusd == -16 * PREMIUM_5M * 9 // 10
    check_ledger_of_tenant(db)


def check_ledger_of_tenant(db):
    versions = {row.id: row for row in rows(db, schema.price_versions)}
    for line in rows(db, schema.ledger_lines):
        assert versions[line.price_version_id].unit_pusd == line.list_unit_pusd
        assert line.discount_basis_points == 1_000


def test_a_credit_after_the_statement_goes_to_the_next_period(db, account, write):
    admitted = write()
    march = month("2026-03", zone_named("UTC"))
    issued = issue_statement(db, tenant_id=account.tenant.id, period="2026-03", now=march.end)
    credit(db, broken(admitted), now=march.end + SECOND)
    [event] = [row for row in rows(db, schema.usage_events) if row.kind == "credit"]
    assert event.accounted_at_us == march.end
    april = preview_statement(db, tenant_id=account.tenant.id, period="2026-04", now=march.end + SECOND)
    assert {line.for_period for line in april.of_kind(LineKind.CREDIT)} == {"2026-03"}
    assert april.amount_of_kind(LineKind.CREDIT) == april.amount_pusd == -16 * PREMIUM_5M
    again = issue_statement(db, tenant_id=account.tenant.id, period="2026-03", now=march.end + SECOND)
    assert again.digest == issued.digest


def test_a_credit_within_the_period_is_a_line_of_its_own(db, account, write):
    credit(db, broken(write()), now=T0)
    march = preview_statement(db, tenant_id=account.tenant.id, period="2026-03", now=T0 + SECOND)
    assert march.amount_of_kind(LineKind.CREDIT) == -16 * PREMIUM_5M
    assert march.reconciliation.agrees


def test_a_credit_leaves_room_in_a_budget(db, account, write):
    set_budget(db, Scope(tenant_id=account.tenant.id), period=Period.TOTAL, limit_pusd=10**12, now=T0)
    admitted = write()
    [before] = list_budgets(db, tenant_id=account.tenant.id, now=T0)
    credit(db, broken(admitted), now=T0)
    [after] = list_budgets(db, tenant_id=account.tenant.id, now=T0)
    assert after.left_pusd - before.left_pusd == 16 * PREMIUM_5M
    assert after.reserved_pusd == before.reserved_pusd == 0


def test_a_credit_has_a_receipt_that_points_at_the_original(db, write):
    admitted = write()
    credit(db, broken(admitted), now=T0)
    Sealer(db, SigningKey.new(), clock=lambda: T0).seal_some()
    original, credited = map(json.loads, receipts_of(db, admitted.request_id))
    assert (credited["kind"], credited["original_id"]) == ("credit", original["event_id"])
    assert credited["amount"] == "-0.000012"
    assert credited["tokens"]["write_5m"] == -16


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token_class": "write_auto"}, "token_class"),
        ({"token_class": "read"}, "token_class"),
        ({"tokens": 0}, "tokens"),
        ({"tokens": -1}, "tokens"),
        ({"tokens": 101}, "tokens"),
        ({"promise": ""}, "promise"),
        ({"promise": "a\nb"}, "promise"),
        ({"promise": "x" * 129}, "promise"),
        ({"broken_at": T0 + 300 * SECOND}, "broken_at"),
        ({"broken_at": T0 - 1}, "broken_at"),
        ({"broken_at": -1}, "broken_at"),
        ({"promised_until": 2**63}, "broken_at"),
    ],
)
def test_a_promise_that_cannot_have_been_broken_is_refused(db, write, changes, reason):
    admitted = write()
    before = count(db, schema.usage_events)
    with pytest.raises(InvalidPromise, match=f"^{reason}:"):
        credit(db, broken(admitted, **changes), now=T0)
    assert count(db, schema.usage_events) == before


def test_a_request_that_has_not_ended_has_broken_no_promise(db, account, new_meter):
    admitted = account.admission()
    meter = new_meter()
    meter.admit(admitted).result(10)
    for report in (broken(admitted), broken(admitted, request_id=new_request_id())):
        with pytest.raises(UnknownRequest):
            credit(db, report, now=T0)


def test_what_was_credited_for_is_never_changed_or_deleted(db, write):
    credit(db, broken(write()), now=T0)
    before = rows(db, schema.broken_promises)
    table = schema.broken_promises
    for change in (update(table).values(tokens=1), delete(table)):
        with pytest.raises(IntegrityError, match="append-only"), db.write() as connection:
            connection.execute(change)
    assert rows(db, table) == before

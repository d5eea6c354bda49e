"""What comes after a request was ended for good, or after its period was closed."""

from datetime import timedelta

import pytest
from sqlalchemy import select

from billing import schema
from billing.calendar import month, zone_named
from billing.issuing import issue_statement
from billing.usage import TokenClass, UsageKind
from tests.integration.billing.ledger_checks import check_ledger, check_rollups, count, rows
from tests.unit.billing.builders import T0, final

LEASE = timedelta(seconds=1)
AFTER_LEASE = T0 + 1_000_000


@pytest.fixture
def swept(account, new_meter):
    """A meter, and a request whose lease ran out with some tokens in evidence."""
    meter = new_meter(lease=LEASE)
    admitted = account.admission()
    meter.admit(admitted).result(10)
    meter.observe(final(admitted, kind=UsageKind.ABORTED, uncached=100, read=50, output=8))
    assert meter.sweep(AFTER_LEASE) == 1
    meter.flush()
    return meter, admitted


def billed(db) -> dict[str, int]:
    """Tokens of each class over all lines, corrections included."""
    lines = schema.ledger_lines.c
    totals: dict[str, int] = {}
    with db.read() as connection:
        for row in connection.execute(select(lines.token_class, lines.quantity_tokens)):
            totals[row.token_class] = totals.get(row.token_class, 0) + row.quantity_tokens
    return totals


def test_a_late_end_is_an_adjustment_that_points_at_what_the_sweep_billed(db, swept):
    meter, admitted = swept
    meter.settle(final(admitted, uncached=100, read=50, output=20))
    meter.flush()
    original, adjustment = sorted(rows(db, schema.usage_events), key=lambda row: row.original_id is not None)
    assert (adjustment.kind, adjustment.original_id) == ("adjustment", original.id)
    assert (adjustment.uncached_tokens, adjustment.read_tokens, adjustment.output_tokens) == (0, 0, 12)
    assert billed(db) == {"input": 100, "read": 50, "output": 20}
    assert (meter.stats().adjusted, meter.stats().conflicts) == (1, 0)
    check_ledger(db)


def test_a_late_end_that_used_less_gives_back_what_was_billed_too_much(db, swept):
    meter, admitted = swept
    meter.settle(final(admitted, uncached=20, read=50))
    meter.flush()
    assert billed(db) == {"input": 20, "read": 50, "output": 0}
    negative = [row for row in rows(db, schema.ledger_lines) if row.quantity_tokens < 0]
    assert {row.token_class for row in negative} == {TokenClass.INPUT, TokenClass.OUTPUT}
    check_ledger(db)


def test_a_late_end_corrects_once_however_often_it_is_told(db, swept):
    meter, admitted = swept
    late = final(admitted, uncached=100, read=50, output=20)
    for _ in range(3):
        meter.settle(late)
    meter.flush()
    meter.settle(late)
    meter.flush()
    assert count(db, schema.usage_events) == 2
    assert (meter.stats().adjusted, meter.stats().duplicates) == (1, 3)
    check_ledger(db)


def test_the_end_that_a_request_itself_told_is_never_corrected(db, account, new_meter):
    meter = new_meter()
    admitted = account.admission()
    meter.admit(admitted).result(10)
    meter.settle(final(admitted, uncached=1))
    meter.flush()
    meter.settle(final(admitted, uncached=2))
    meter.flush()
    assert billed(db) == {"input": 1}
    assert (meter.stats().adjusted, meter.stats().conflicts) == (0, 1)
    check_ledger(db)


def test_what_comes_after_a_statement_is_accounted_to_the_next_period(db, account, new_meter):
    meter = new_meter()
    march = month("2026-03", zone_named("UTC"))
    meter.settle(final(account.admission(admitted_at=march.start + 1), uncached=1))
    meter.flush()
    issue_statement(db, tenant_id=account.tenant.id, period="2026-03", now=march.end + 1)
    late = account.admission(admitted_at=march.end - 1)
    meter.settle(final(late, uncached=7))
    meter.flush()
    (row,) = [row for row in rows(db, schema.usage_events) if row.request_id == late.request_id]
    assert (row.admitted_at_us, row.accounted_at_us) == (march.end - 1, march.end)
    check_rollups(db)

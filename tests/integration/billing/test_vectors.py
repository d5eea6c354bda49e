"""Faults that other systems' users reported, one by one: what went wrong there is right here."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import insert
from sqlalchemy.exc import IntegrityError

from billing import instants, rollups, schema
from billing.budgets import Period, Scope, set_budget, worst_case_pusd
from billing.calendar import days
from billing.errors import BudgetExceeded, InvalidUsage
from billing.ids import PriceVersionId, new_id, new_request_id
from billing.money import format_dollars
from billing.prices import price_in_force
from billing.rating import LedgerLine
from billing.reports import usage_report
from billing.usage import Estimate, TokenClass, TokenCounts, UsageEvent, UsageKind
from gateway.edge.reported_usage import AnthropicUsage, openai_usage
from gateway.relay import ProtocolBroken, Tally
from model_worker.protocol import Started, TierTokens, Token
from tests.integration.billing.ledger_checks import check_ledger, count, counts_of, rows
from tests.unit.billing.builders import MODEL, T0, final

YEAR = timedelta(days=365)


@pytest.fixture
def bill(db, account, new_meter):
    """Settles one request with these counts; returns its row and what it costs in picodollars."""
    meter = new_meter()

    def settle(counts: TokenCounts, *, kind: UsageKind = UsageKind.FINAL):
        admitted = account.admission()
        meter.admit(admitted).result(10)
        meter.settle(UsageEvent(admission=admitted, kind=kind, counts=counts, finished_at=T0 + 1))
        meter.flush()
        check_ledger(db)
        (row,) = [row for row in rows(db, schema.usage_events) if row.request_id == admitted.request_id]
        lines = [line for line in rows(db, schema.ledger_lines) if line.event_id == row.id]
        return row, sum(line.amount_pusd for line in lines)

    return settle


def reported(db, account):
    """The tenant's totals, as a report adds them up."""
    return usage_report(db, tenant_id=account.tenant.id, start=T0, end=instants.later(T0, YEAR)).totals


# ---- amounts


def test_a_read_is_billed_at_the_price_of_reads_alone(bill):
    _, amount = bill(TokenCounts(uncached=100, read=10_000))
    assert format_dollars(amount) == "0.0033"


def test_a_write_is_not_also_billed_as_input(bill):
    _, amount = bill(TokenCounts(uncached=3, write_5m=12_304, output=550))
    assert amount == 54_399_000_000


def test_writes_for_an_hour_have_their_own_price(bill):
    _, amount = bill(TokenCounts(uncached=10, write_5m=4_000, write_1h=6_000))
    assert format_dollars(amount) == "0.05103"


def test_an_amount_is_never_negative_however_much_is_read(bill):
    row, amount = bill(TokenCounts(uncached=1, write_5m=225, read=965_602, output=82))
    assert amount == 3_000_000 + 225 * 3_750_000 + 965_602 * 300_000 + 82 * 15_000_000
    assert row.uncached_tokens == 1


# ---- what others report


@pytest.mark.parametrize(("prompt", "cached", "uncached"), [(262_960, 257_955, 5_005), (17_111, 17_102, 9)])
def test_an_inclusive_prompt_is_taken_apart_and_cached_tokens_are_billed_once(bill, prompt, cached, uncached):
    usage = {"prompt_tokens": prompt, "prompt_tokens_details": {"cached_tokens": cached}}
    row, amount = bill(openai_usage(usage | {"completion_tokens": 0}).counts)
    assert (row.uncached_tokens, row.read_tokens) == (uncached, cached)
    assert amount == uncached * 3_000_000 + cached * 300_000


def test_counts_that_a_delta_repeats_are_counted_once(bill):
    usage = AnthropicUsage()
    usage.take({"input_tokens": 9, "cache_read_input_tokens": 5, "cache_creation_input_tokens": 2})
    usage.take({"cache_read_input_tokens": 5, "cache_creation_input_tokens": 2, "output_tokens": 7})
    row, _ = bill(usage.counts)
    assert usage.counts.prompt == 16
    assert (row.uncached_tokens, row.read_tokens, row.write_5m_tokens) == (9, 5, 2)


def test_counts_that_only_the_delta_carries_are_counted(bill):
    usage = AnthropicUsage()
    usage.take({})
    usage.take({"input_tokens": 4_522, "cache_creation_input_tokens": 4_511, "output_tokens": 5})
    row, _ = bill(usage.counts)
    assert row.uncached_tokens + row.write_5m_tokens + row.output_tokens == 9_038


def test_counts_that_only_the_start_carries_are_kept(bill):
    usage = AnthropicUsage()
    usage.take({"input_tokens": 50, "cache_read_input_tokens": 2_400, "cache_creation_input_tokens": 120})
    usage.take({"output_tokens": 11, "input_tokens": None})
    row, _ = bill(usage.counts)
    assert (usage.counts.prompt, row.read_tokens, row.output_tokens) == (2_570, 2_400, 11)


def test_more_cached_than_prompt_is_cut_at_the_source_with_an_alert_and_refused_by_the_database(db, bill):
    told = openai_usage({"prompt_tokens": 126, "prompt_tokens_details": {"cached_tokens": 128}})
    assert told.is_contradictory
    row, amount = bill(told.counts)
    assert (row.uncached_tokens, row.read_tokens, amount) == (0, 126, 126 * 300_000)
    with pytest.raises(InvalidUsage):
        TokenCounts(uncached=126 - 128, read=128)
    wrong = row._asdict() | {"id": new_id(), "request_id": new_request_id(), "uncached_tokens": -2}
    with pytest.raises(IntegrityError, match="non_negative"), db.write() as connection:
        connection.execute(insert(schema.usage_events).values(wrong))


# ---- what happens while a request runs


def test_cached_counts_are_frozen_when_a_preempted_request_resumes(bill):
    tally = Tally(prompt_tokens=10_000, clock=lambda: 0)
    tally.add(Started(cached=TierTokens(device=768), uncached=9_232))
    tally.add(Token(token_ids=[1], text="a"))
    with pytest.raises(ProtocolBroken):
        tally.add(Started(cached=TierTokens(device=8_448), uncached=1_552))
    counts = tally.counts
    row, _ = bill(TokenCounts(uncached=counts.uncached, read=counts.read, output=counts.output))
    assert (row.read_tokens, row.uncached_tokens) == (768, 9_232)


def test_a_reported_usage_of_nothing_is_nothing_also_after_a_hang_up(db, bill):
    told = openai_usage({"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0})
    row, amount = bill(told.counts, kind=UsageKind.ABORTED)
    assert (amount, counts_of(row), row.usage_state) == (0, TokenCounts(), "reported")
    assert count(db, schema.ledger_lines) == 0


def test_a_hang_up_in_the_middle_leaves_one_row_with_what_was_made(db, bill):
    row, amount = bill(TokenCounts(uncached=18, output=26), kind=UsageKind.ABORTED)
    assert count(db, schema.usage_events) == 1
    assert (row.uncached_tokens, row.output_tokens) == (18, 26)
    assert format_dollars(amount) == "0.000444"


def test_requests_are_told_apart_by_ids_of_ours_whatever_an_upstream_calls_them(db, bill):
    for _ in (None, "", "chatcmpl-1", "chatcmpl-1"):
        bill(TokenCounts(uncached=1))
    assert count(db, schema.usage_events) == 4


def test_a_million_small_amounts_add_up_exactly(db, account, bill):
    bill(TokenCounts(uncached=1))  # a key with a price, and a row to add to
    line = LedgerLine(
        token_class=TokenClass.INPUT,
        quantity=1,
        list_unit_pusd=2_100_000,
        list_unit_without_cache_pusd=2_100_000,
        discount_basis_points=0,
        price_version_id=PriceVersionId(new_id()),
    )
    admission = account.admission(admitted_at=T0)
    one = rollups.PostedEvent(
        admission=admission,
        accounted_at=T0,
        requests=1,
        aborted=0,
        usage_missing=0,
        delivered=0,
        lines=[line],
    )
    before = reported(db, account).amount_pusd
    for _ in range(100):
        with db.write() as connection:
            rollups.add(connection, [one] * 10_000)
    assert format_dollars(reported(db, account).amount_pusd - before) == "2.10"


def test_a_day_in_india_holds_its_own_quarter_hours_and_no_neighbours(db, account, new_meter):
    meter, india = new_meter(), ZoneInfo("Asia/Kolkata")
    start = datetime(2026, 3, 2, tzinfo=UTC)
    for quarter in range(4 * 72):
        at = instants.from_datetime(start + timedelta(minutes=15 * quarter + 7))
        meter.settle(final(account.admission(admitted_at=at), uncached=quarter + 1))
    meter.flush()
    begin, end = (instants.from_datetime(start + timedelta(days=day)) for day in (0, 3))
    whole = usage_report(db, tenant_id=account.tenant.id, start=begin, end=end)
    by_day = usage_report(db, tenant_id=account.tenant.id, start=begin, end=end, cutter=days, zone=india)
    expected: dict[str, int] = {}
    for quarter in range(4 * 72):
        day = (start + timedelta(minutes=15 * quarter + 7)).astimezone(india).date().isoformat()
        expected[day] = expected.get(day, 0) + quarter + 1
    assert {one.span.label: one.totals.uncached_tokens for one in by_day.spans} == expected
    assert sum(one.totals.amount_pusd for one in by_day.spans) == whole.totals.amount_pusd


# ---- money that is claimed and paid


def test_five_at_once_at_the_limit_never_pass_it(db, account, new_meter):
    estimate = Estimate(prompt=100, output=10)
    worst = worst_case_pusd(price_in_force(db, model=MODEL, at=T0), estimate)
    scope = Scope(tenant_id=account.tenant.id)
    set_budget(db, scope, period=Period.TOTAL, limit_pusd=worst, now=T0)
    meter = new_meter()

    def is_granted(_: int) -> bool:
        try:
            meter.admit(account.admission(), estimate).result(30)
        except BudgetExceeded:
            return False
        return True

    with ThreadPoolExecutor(5) as pool:
        assert sorted(pool.map(is_granted, range(5))) == [False] * 4 + [True]


def test_a_write_that_fails_and_is_tried_again_is_metered_once(db, account, new_meter, outage):
    meter = new_meter()
    admitted = account.admission()
    meter.admit(admitted).result(10)
    event = final(admitted, uncached=5)
    with outage():
        meter.settle(event)  # the id is claimed, the write fails
        meter.settle(event)  # and the client tries again
    meter.flush(timeout_seconds=30)
    assert count(db, schema.usage_events) == 1
    assert (meter.stats().posted, meter.stats().duplicates) == (1, 1)
    check_ledger(db)

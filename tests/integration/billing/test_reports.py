import random
from fractions import Fraction

import pytest

from billing.calendar import hours
from billing.errors import InvalidPeriod
from billing.instants import BUCKET_MICROSECONDS
from billing.meter import Meter
from billing.money import format_dollars
from billing.price_sheet import parse_price_sheet
from billing.prices import price_in_force, publish
from billing.rating import rate
from billing.reports import usage_report
from billing.totals import ClassTotals, UsageTotals
from billing.usage import MAX_TOKENS, TokenClass, UsageKind
from tests.integration.billing.conftest import new_account
from tests.integration.billing.ledger_checks import check_ledger, check_rollups
from tests.unit.billing.builders import T0, final

DAY = 24 * 4 * BUCKET_MICROSECONDS


def settle_all(meter: Meter, events) -> None:
    for event in events:
        meter.settle(event)
    meter.flush()


def report(db, account, start=T0, end=T0 + DAY, **cut):
    return usage_report(db, tenant_id=account.tenant.id, start=start, end=end, **cut)


def at_price(quantity: int, unit_pusd: int, *, without_cache: int) -> ClassTotals:
    return ClassTotals(
        quantity=quantity,
        list_amount_pusd=quantity * unit_pusd,
        amount_pusd=quantity * unit_pusd,
        amount_without_cache_pusd=quantity * without_cache,
    )


def test_a_report_says_what_was_used_paid_and_saved(db, account, new_meter):
    first, second = account.admission(), account.admission(admitted_at=T0 + 1)
    settle_all(
        new_meter(),
        [final(first, uncached=1_000, output=10), final(second, uncached=30, read=970, output=10)],
    )
    totals = report(db, account).totals
    assert totals == UsageTotals(
        requests=2,
        by_class={
            TokenClass.INPUT: at_price(1_030, 3_000_000, without_cache=3_000_000),
            TokenClass.READ: at_price(970, 300_000, without_cache=3_000_000),
            TokenClass.OUTPUT: at_price(20, 15_000_000, without_cache=15_000_000),
        },
    )
    assert (totals.uncached_tokens, totals.read_tokens, totals.output_tokens) == (1_030, 970, 20)
    assert totals.amount_pusd == 1_030 * 3_000_000 + 970 * 300_000 + 20 * 15_000_000
    assert totals.amount_without_cache_pusd == 2_000 * 3_000_000 + 20 * 15_000_000
    assert totals.saved_pusd == 970 * 2_700_000
    assert totals.hit_share == Fraction(970, 2_000)
    assert totals.hit_basis_points == 4_850
    assert format_dollars(totals.saved_pusd) == "0.002619"


def test_written_tokens_are_in_the_prompt_and_their_premium_is_a_negative_saving(db, account, new_meter):
    settle_all(new_meter(), [final(account.admission(), uncached=10, write_5m=4_000, write_1h=6_000)])
    totals = report(db, account).totals
    assert totals.written_tokens == 10_000
    assert totals.prompt_tokens == 10_010
    assert format_dollars(totals.amount_pusd) == "0.05103"
    assert totals.saved_pusd == -(4_000 * 750_000 + 6_000 * 3_000_000)


def test_a_tenant_sees_its_own_requests_alone(db, account, new_meter):
    other = new_account(db, "other")
    settle_all(new_meter(), [final(account.admission(), uncached=5), final(other.admission(), uncached=7)])
    assert report(db, account).totals.uncached_tokens == 5
    assert report(db, other).totals.uncached_tokens == 7


def test_an_empty_period_is_all_zeros(db, account):
    empty = report(db, account)
    assert empty.totals == UsageTotals()
    assert empty.spans == []
    assert empty.totals.hit_share == 0


def test_a_period_that_ends_before_it_starts_is_refused(db, account):
    with pytest.raises(InvalidPeriod, match="before it starts"):
        report(db, account, start=T0, end=T0 - 1)


def test_a_request_belongs_to_the_instant_of_its_admission(db, account, new_meter):
    late = account.admission(admitted_at=T0 + BUCKET_MICROSECONDS - 1)
    settle_all(new_meter(), [final(late, uncached=5)])  # ends in the next bucket
    assert [used.span.start for used in report(db, account, cutter=hours).spans] == [T0]
    assert report(db, account, end=late.admitted_at).totals.requests == 0
    assert report(db, account, end=late.admitted_at + 1).totals.requests == 1


def test_an_aborted_request_without_tokens_is_a_row_that_costs_nothing(db, account, new_meter):
    settle_all(new_meter(), [final(account.admission(), kind=UsageKind.ABORTED)])
    assert report(db, account).totals == UsageTotals(requests=1)


def test_random_requests_add_up_however_the_period_is_cut(db, account, new_meter):
    rng = random.Random(7)
    events = [
        final(
            account.admission(admitted_at=T0 + rng.randrange(DAY)),
            uncached=rng.randrange(10**6),
            read=rng.randrange(10**6),
            write_auto=rng.randrange(10),
            write_5m=rng.randrange(10),
            write_1h=rng.randrange(10),
            output=rng.randrange(10**5),
        )
        for _ in range(300)
    ]
    settle_all(new_meter(), events)
    check_ledger(db)
    price = price_in_force(db, model=events[0].admission.model, at=T0)
    whole = report(db, account)
    assert whole.totals.requests == 300
    assert whole.totals.amount_pusd == sum(
        line.amount_pusd for event in events for line in rate(event.counts, price)
    )
    by_hour = report(db, account, cutter=hours)
    assert sum((hour.totals for hour in by_hour.spans), UsageTotals()) == by_hour.totals == whole.totals
    for _ in range(10):
        cut = T0 + rng.randrange(DAY)
        assert report(db, account, end=cut).totals + report(db, account, start=cut).totals == whole.totals


def test_sums_beyond_64_bits_are_exact(db, account, new_meter):
    dear = parse_price_sheet(
        "book: dear\ncurrency: USD\nmodels:\n  dear: {input: 9000000, output: 9000000, read: 9000000,"
        " write_auto: 9000000, write_5m: 9000000, write_1h: 9000000}"
    )
    publish(db, dear, clock=lambda: T0)
    # One a quarter of an hour: 64 bits are enough for a line and for a roll-up.
    instants = [T0 + number * BUCKET_MICROSECONDS for number in range(3)]
    events = [
        final(account.admission(model="dear", admitted_at=at), uncached=MAX_TOKENS, output=MAX_TOKENS)
        for at in instants
    ]
    settle_all(new_meter(), events)
    totals = report(db, account).totals
    assert totals.amount_pusd == 6 * 9_000_000 * MAX_TOKENS > 2**63
    assert totals.amount_without_cache_pusd == totals.amount_pusd


def test_what_a_roll_up_cannot_hold_is_rejected_whole_and_kept_aside(db, account, new_meter):
    dear = "book: dear\ncurrency: USD\nmodels:\n  dear: {input: 9000000, output: 9000000, read: 9000000,"
    dear += " write_auto: 9000000, write_5m: 9000000, write_1h: 9000000}"
    publish(db, parse_price_sheet(dear), clock=lambda: T0)
    meter = new_meter()
    settle_all(meter, [final(account.admission(model="dear"), uncached=MAX_TOKENS) for _ in range(2)])
    assert (meter.stats().posted, meter.stats().rejected) == (1, 1)
    check_rollups(db)


def test_a_read_without_the_cache_costs_the_input_price_in_force_for_its_event(db, account, new_meter):
    doubled = parse_price_sheet(
        "book: doubled\ncurrency: USD\ncache_basis_points: {read: 1000, write_auto: 10000, write_5m: 12500,"
        " write_1h: 20000}\nmodels:\n  test-model: {input: 6000000, output: 15000000}"
    )
    publish(db, doubled, clock=lambda: T0, effective_from=T0 + 10)
    before, after = account.admission(admitted_at=T0 + 9), account.admission(admitted_at=T0 + 10)
    settle_all(new_meter(), [final(before, read=1_000), final(after, read=1_000)])
    totals = report(db, account).totals
    assert totals.amount_pusd == 1_000 * 300_000 + 1_000 * 600_000
    assert totals.amount_without_cache_pusd == 1_000 * 3_000_000 + 1_000 * 6_000_000

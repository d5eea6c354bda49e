"""However a period is cut, and in whatever zone it is looked at, its parts add up to the whole."""

from __future__ import annotations

import random
from collections import defaultdict
from datetime import UTC, datetime
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from billing.calendar import Span, days, hours, minutes, uncut, zone_named
from billing.instants import BUCKET_MICROSECONDS, Microseconds, from_datetime, to_datetime
from billing.price_sheet import parse_price_sheet
from billing.prices import publish
from billing.reports import Dimension, Selection, grouped_usage, usage_report
from billing.totals import UsageTotals
from tests.integration.billing.conftest import new_account
from tests.unit.billing.builders import T0, final

ZONES = (
    "UTC",
    "Asia/Kolkata",
    "Asia/Kathmandu",
    "Pacific/Chatham",
    "Europe/Berlin",
    "America/New_York",
    "Australia/Lord_Howe",
    "Africa/Cairo",
)
# In them clocks change: in Berlin on 29 March and 25 October, in Chatham on 5 April and 27 September.
SEASONS = (
    (datetime(2026, 3, 7, tzinfo=UTC), datetime(2026, 4, 26, tzinfo=UTC)),
    (datetime(2026, 9, 25, tzinfo=UTC), datetime(2026, 11, 3, tzinfo=UTC)),
)
START, END = from_datetime(SEASONS[0][0]), from_datetime(SEASONS[-1][1])

MODELS = ("test-model", "other-model")
OTHER_BOOK = parse_price_sheet(
    """
    book: other
    currency: USD
    cache_basis_points: {read: 1000, write_auto: 10000, write_5m: 12500, write_1h: 20000}
    models:
      other-model: {input: 70000, output: 90000}
    """
)

instants = st.one_of(
    st.integers(START, END),
    st.integers(START // BUCKET_MICROSECONDS, END // BUCKET_MICROSECONDS).map(BUCKET_MICROSECONDS.__mul__),
).map(Microseconds)


def random_instant(rng: random.Random) -> Microseconds:
    start, end = (from_datetime(moment) for moment in rng.choice(SEASONS))
    instant = rng.randrange(start, end)
    if rng.random() < 0.3:  # on an edge, or one microsecond beside it
        instant += -instant % BUCKET_MICROSECONDS + rng.choice((-1, 0, 1))
    return Microseconds(instant)


@pytest.fixture
def busy(db, account, new_meter):
    """Two tenants' requests over two changes of clocks. Returns the first one's events."""
    publish(db, OTHER_BOOK, clock=lambda: T0)
    rng = random.Random(5)
    neighbour = new_account(db, "neighbour")
    meter = new_meter(batch_size=200)
    events = []
    for number in range(500):
        whose = neighbour if number % 5 == 0 else account
        admitted = whose.admission(admitted_at=random_instant(rng), model=rng.choice(MODELS))
        counts = {"uncached": rng.randrange(1, 9_000), "read": rng.randrange(9), "output": 2}
        event = final(admitted, **counts)
        meter.settle(event)
        if whose is account:
            events.append(event)
    meter.flush()
    return events


def by_group(groups) -> dict:
    totals: dict = defaultdict(UsageTotals)
    for one in groups:
        totals[one.group] += one.totals
    return dict(totals)


def together(*parts: dict) -> dict:
    totals: dict = defaultdict(UsageTotals)
    for part in parts:
        for group, used in part.items():
            totals[group] += used
    return dict(totals)


def test_a_period_is_the_sum_of_its_parts(db, account, busy):
    selection = Selection(tenant_ids=[account.tenant.id])

    def usage(start, end, cutter=uncut, zone="UTC"):
        spans = cutter(start, end, zone_named(zone))
        return by_group(grouped_usage(db, selection, spans, by=(Dimension.MODEL, Dimension.API_KEY)))

    @settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.lists(instants, min_size=3, max_size=5).map(sorted), st.sampled_from(ZONES))
    @example([START, from_datetime(datetime(2026, 3, 28, 18, 30, tzinfo=UTC)), END], "Asia/Kolkata")
    def parts_add_up(cuts, zone):
        whole = usage(cuts[0], cuts[-1])
        assert together(*(usage(start, end) for start, end in pairwise(cuts))) == whole
        assert usage(cuts[0], cuts[-1], days, zone) == whole
        assert together(*(usage(start, end, days, zone) for start, end in pairwise(cuts))) == whole

    parts_add_up()
    assert sum(usage(START, END).values(), UsageTotals()).requests == len(busy)


def test_a_day_view_counts_each_request_on_the_day_that_its_zone_had(db, account, busy):
    for name in ZONES:
        expected: dict = defaultdict(int)
        for event in busy:
            local = to_datetime(event.admission.admitted_at).astimezone(zone_named(name))
            expected[local.date().isoformat()] += event.counts.uncached
        report = usage_report(
            db, tenant_id=account.tenant.id, start=START, end=END, cutter=days, zone=zone_named(name)
        )
        assert {used.span.label: used.totals.uncached_tokens for used in report.spans} == expected


def test_hours_and_minutes_add_up_to_their_day(db, account, busy):
    for name, label in (
        ("Asia/Kolkata", "2026-10-25"),
        ("Pacific/Chatham", "2026-04-05"),
        ("Europe/Berlin", "2026-10-25"),
    ):
        day = next(span for span in days(START, END, zone_named(name)) if span.label == label)
        period = {"tenant_id": account.tenant.id, "start": day.start, "end": day.end}
        whole = usage_report(db, **period)
        assert whole.totals.requests > 0
        for cutter in (hours, minutes):
            cut = usage_report(db, **period, cutter=cutter, zone=zone_named(name))
            assert cut.totals == whole.totals
            for used in cut.spans:
                inside = [event for event in busy if used.span.holds(event.admission.admitted_at)]
                assert used.totals.requests == len(inside)


def test_neighbouring_hours_of_india_are_not_counted_twice(db, account, new_meter):
    """$8.78 for $0.99: the first and last half hours of a day are in one hour of UTC with a neighbour's."""
    midnight = from_datetime(datetime(2026, 11, 2, 18, 30, tzinfo=UTC))
    meter = new_meter()
    for minutes_after, tokens in (
        (-20, 1_000_000),
        (10, 330_000),
        (24 * 60 - 5, 0),
        (24 * 60 + 5, 1_596_667),
    ):
        instant = Microseconds(midnight + minutes_after * 60_000_000)
        meter.settle(final(account.admission(admitted_at=instant), uncached=tokens))
    meter.flush()
    report = usage_report(
        db,
        tenant_id=account.tenant.id,
        start=Microseconds(midnight - 86_400_000_000),
        end=Microseconds(midnight + 2 * 86_400_000_000),
        cutter=days,
        zone=zone_named("Asia/Kolkata"),
    )
    amounts = {used.span.label: used.totals.amount_pusd for used in report.spans}
    assert amounts["2026-11-03"] == 990_000_000_000
    assert sum(amounts.values()) == report.totals.amount_pusd == 8_780_001_000_000


def test_everybody_as_one_is_everybody_added_up(db, busy):
    for name in ZONES:
        spans = days(Microseconds(START + 7), END, zone_named(name))
        for by in ((), (Dimension.MODEL,)):
            apart: dict = defaultdict(UsageTotals)
            for one in grouped_usage(db, Selection(), spans, by=(Dimension.TENANT, *by)):
                apart[one.span, one.group.model] += one.totals
            as_one = grouped_usage(db, Selection(), spans, by=by)
            assert {(one.span, one.group.model): one.totals for one in as_one} == apart


def test_a_selection_is_met_by_what_it_names_alone(db, account, busy):
    whole = [Span(label="", start=START, end=END)]
    everybody = grouped_usage(db, Selection(), whole, by=(Dimension.TENANT,))
    assert {one.group.tenant_id for one in everybody} > {account.tenant.id}
    [own] = [one for one in everybody if one.group.tenant_id == account.tenant.id]
    assert own.totals.requests == len(busy)
    [chosen] = grouped_usage(db, Selection(api_key_ids=[account.key.id], models=["other-model"]), whole)
    assert chosen.totals.requests == sum(event.admission.model == "other-model" for event in busy) > 0
    assert grouped_usage(db, Selection(models=[]), whole) == []
    assert grouped_usage(db, Selection(project_ids=[account.tenant.id]), whole) == []

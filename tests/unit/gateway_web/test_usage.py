"""A day as rows and hours, and the figure made of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import plotly.graph_objects
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from billing import instants
from billing.ids import TenantId, new_id
from billing.reports import Group, GroupUsage
from billing.totals import ClassTotals, UsageTotals
from billing.usage import TokenClass
from gateway.web.figures import day_figure
from gateway.web.usage import Day, day_of, hours_of, rows_of

NOW = instants.from_datetime(datetime(2026, 3, 12, 15, 40, 12, tzinfo=UTC))
UTC_ZONE = ZoneInfo("UTC")
counts = st.integers(0, 10**15)


class_totals = st.builds(
    ClassTotals,
    quantity=counts,
    list_amount_pusd=counts,
    amount_pusd=counts,
    amount_without_cache_pusd=counts,
)
totals = st.builds(
    UsageTotals,
    requests=st.integers(1, 10**6),
    by_class=st.dictionaries(st.sampled_from(TokenClass), class_totals),
)


@st.composite
def used_days(draw: st.DrawFn) -> Day:
    """Any day, also an empty one, in some zone."""
    zone = ZoneInfo(draw(st.sampled_from(["UTC", "Asia/Kolkata", "America/Los_Angeles", "Asia/Kathmandu"])))
    return day_with(draw(st.dictionaries(st.integers(0, 23), totals, max_size=6)), zone)


def day_with(used: Mapping[int, UsageTotals], zone: ZoneInfo = UTC_ZONE) -> Day:
    """By the place of the hour in the day."""
    spans = hours_of(NOW, zone)
    return day_of(
        NOW,
        zone,
        [GroupUsage(span=spans[place], group=Group(), totals=found) for place, found in used.items()],
    )


def any_day(test: Callable[[Day], None]) -> Callable[[], None]:
    """Without a deadline: how long a test takes on a busy machine is no claim."""
    return settings(deadline=None)(given(used_days())(test))


@pytest.mark.parametrize(
    ("zone", "moment", "first", "num_hours"),
    [
        ("UTC", "2026-03-12T15:40", "2026-03-12T00:00+00:00", 24),
        ("Asia/Kolkata", "2026-03-12T20:00", "2026-03-12T18:30+00:00", 24),
        ("America/Los_Angeles", "2026-03-08T20:00", "2026-03-08T08:00+00:00", 23),
        ("America/Los_Angeles", "2026-11-01T20:00", "2026-11-01T07:00+00:00", 25),
    ],
)
def test_a_day_is_one_of_its_zone(zone: str, moment: str, first: str, num_hours: int) -> None:
    now = instants.from_datetime(datetime.fromisoformat(moment).replace(tzinfo=UTC))
    day = day_of(now, ZoneInfo(zone), [])
    assert instants.to_datetime(day.hours[0].span.start) == datetime.fromisoformat(first)
    assert len(day.hours) == num_hours
    assert day.hours[0].begins == "00:00"
    assert [len(trace["x"]) for trace in day_figure(day)["data"]] == [num_hours] * 3


def test_usage_of_several_tenants_in_an_hour_is_added_up() -> None:
    [span, *_] = hours_of(NOW, UTC_ZONE)
    both = [
        GroupUsage(span=span, group=Group(tenant_id=TenantId(new_id())), totals=UsageTotals(requests=number))
        for number in (2, 3)
    ]
    assert day_of(NOW, UTC_ZONE, both).totals.requests == 5


@any_day
def test_hours_add_up_to_the_day(day: Day) -> None:
    assert sum((hour.totals for hour in day.used_hours), start=UsageTotals()) == day.totals
    starts = [hour.span.start for hour in day.hours]
    assert starts == sorted(set(starts))
    assert all(before.span.end == after.span.start for before, after in pairwise(day.hours))


@any_day
def test_rows_show_the_days_own_numbers(day: Day) -> None:
    rows = {row.key: row for row in rows_of(day.totals)}
    for key in ("requests", "uncached_tokens", "read_tokens", "written_tokens", "output_tokens"):
        assert int(rows[key].value) == int(rows[key].shown.replace(",", "")) == getattr(day.totals, key)
    assert (rows["amount"].unit, rows["saved"].unit, rows["hit_share"].unit) == ("USD", "USD", "%")


def test_written_input_can_cost_more_than_it_saved() -> None:
    written = ClassTotals(quantity=1, amount_pusd=125 * 10**9, amount_without_cache_pusd=100 * 10**9)
    found = UsageTotals(requests=1, by_class={TokenClass.WRITE_5M: written})
    saved = next(row for row in rows_of(found) if row.key == "saved")
    assert (saved.value, saved.shown) == ("-0.025", "−0.025")


@any_day
def test_the_figure_is_one_that_plotly_accepts_and_adds_up(day: Day) -> None:
    figure = day_figure(day)
    assert json.loads(json.dumps(figure, allow_nan=False)) == figure
    accepted = plotly.graph_objects.Figure(in_one_colour(figure))
    cached, uncached, share = accepted.data
    assert sum(cached.y) == day.totals.read_tokens
    assert sum(uncached.y) == day.totals.uncached_tokens + day.totals.written_tokens
    assert len(share.y) == len(cached.y) == len(uncached.y) == 24
    assert all(percent is None or 0 <= percent <= 100 for percent in share.y)


def in_one_colour(value: Any) -> Any:
    """The figure as the browser has it: custom properties replaced."""
    if isinstance(value, dict):
        return {key: in_one_colour(item) for key, item in value.items()}
    if isinstance(value, list):
        return [in_one_colour(item) for item in value]
    return "#123456" if isinstance(value, str) and value.startswith("var(--") else value


def test_an_hour_without_input_has_no_share() -> None:
    input_tokens = {
        TokenClass.INPUT: ClassTotals(quantity=25),
        TokenClass.READ_DISK: ClassTotals(quantity=75),
    }
    used = {0: UsageTotals(requests=1), 1: UsageTotals(requests=1, by_class=input_tokens)}
    share = day_figure(day_with(used))["data"][2]
    assert share["y"][:3] == [None, 75.0, None]
    assert (share["customdata"][1], share["x"][1]) == ("01:00–02:00", 1.5)


def test_an_hour_is_named_as_its_zone_names_it() -> None:
    figure = day_figure(day_with({}, ZoneInfo("Asia/Kathmandu")))
    assert figure["data"][0]["customdata"][0] == "00:00–01:00"
    assert figure["layout"]["xaxis"]["ticktext"] == ["00:00", "06:00", "12:00", "18:00"]

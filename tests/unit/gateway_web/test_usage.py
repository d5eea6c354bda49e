"""A report as rows and hours, and the figure made of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import plotly.graph_objects
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from billing import instants
from billing.calendar import Span
from billing.ids import TenantId, new_id
from billing.instants import Microseconds
from billing.reports import Group, GroupUsage, UsageReport
from billing.totals import ClassTotals, UsageTotals
from billing.usage import TokenClass
from gateway.web.figures import day_figure
from gateway.web.usage import HOUR_MICROSECONDS, day_of, hours_of, rows_of

DAY_START, DAY_END = day_of(instants.from_datetime(datetime(2026, 3, 12, 15, 40, 12, tzinfo=UTC)))
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
def reports(draw: st.DrawFn) -> UsageReport:
    """Any day, also an empty one."""
    used = draw(st.dictionaries(st.integers(0, 23), totals, max_size=6))
    return report_of({hour: used[hour] for hour in sorted(used)})


def report_of(hours: dict[int, UsageTotals]) -> UsageReport:
    return UsageReport(
        tenant_id=TenantId(new_id()),
        start=DAY_START,
        end=DAY_END,
        currency="USD",
        totals=sum(hours.values(), start=UsageTotals()),
        spans=[GroupUsage(span=hour_span(hour), group=Group(), totals=used) for hour, used in hours.items()],
    )


def hour_span(hour: int) -> Span:
    start = DAY_START + hour * HOUR_MICROSECONDS
    return Span(label="", start=Microseconds(start), end=Microseconds(start + HOUR_MICROSECONDS))


def any_report(test: Callable[[UsageReport], None]) -> Callable[[], None]:
    """Without a deadline: how long a test takes on a busy machine is no claim."""
    return settings(deadline=None)(given(reports())(test))


def test_a_day_is_a_utc_day_and_ends_where_the_next_begins() -> None:
    assert instants.to_datetime(DAY_START) == datetime(2026, 3, 12, tzinfo=UTC)
    assert instants.to_datetime(DAY_END) == datetime(2026, 3, 13, tzinfo=UTC)
    assert day_of(DAY_START) == day_of(Microseconds(DAY_END - 1)) == (DAY_START, DAY_END)
    assert day_of(DAY_END)[0] == DAY_END


@any_report
def test_hours_add_up_to_the_report(report: UsageReport) -> None:
    hours = hours_of(report)
    assert sum((hour.totals for hour in hours), start=UsageTotals()) == report.totals
    starts = [hour.start for hour in hours]
    assert starts == sorted(set(starts))
    assert all(start % HOUR_MICROSECONDS == 0 for start in starts)


@any_report
def test_rows_show_the_reports_own_numbers(report: UsageReport) -> None:
    rows = {row.key: row for row in rows_of(report)}
    totals = report.totals
    for key in ("requests", "uncached_tokens", "read_tokens", "written_tokens", "output_tokens"):
        assert int(rows[key].value) == int(rows[key].shown.replace(",", "")) == getattr(totals, key)
    assert (rows["amount"].unit, rows["saved"].unit, rows["hit_share"].unit) == ("USD", "USD", "%")


def test_written_input_can_cost_more_than_it_saved() -> None:
    written = ClassTotals(quantity=1, amount_pusd=125 * 10**9, amount_without_cache_pusd=100 * 10**9)
    totals = UsageTotals(requests=1, by_class={TokenClass.WRITE_5M: written})
    saved = next(row for row in rows_of(report_of({0: totals})) if row.key == "saved")
    assert (saved.value, saved.shown) == ("-0.025", "−0.025")


@any_report
def test_the_figure_is_one_that_plotly_accepts_and_adds_up(report: UsageReport) -> None:
    figure = day_figure(hours_of(report), start=report.start, end=report.end)
    assert json.loads(json.dumps(figure, allow_nan=False)) == figure
    accepted = plotly.graph_objects.Figure(in_one_colour(figure))
    cached, uncached, share = accepted.data
    assert sum(cached.y) == report.totals.read_tokens
    assert sum(uncached.y) == report.totals.uncached_tokens + report.totals.written_tokens
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
    figure = day_figure(hours_of(report_of(used)), start=DAY_START, end=DAY_END)
    share = figure["data"][2]
    assert share["y"][:3] == [None, 75.0, None]
    assert share["customdata"][1] == "01:00–02:00"
    assert share["x"][1] == "2026-03-12T01:30:00"


@pytest.mark.parametrize("num_hours", [23, 24, 25])
def test_a_figure_has_as_many_hours_as_its_period(num_hours: int) -> None:
    end = instants.later(DAY_START, timedelta(hours=num_hours))
    figure = day_figure([], start=DAY_START, end=end)
    assert [len(trace["x"]) for trace in figure["data"]] == [num_hours] * 3

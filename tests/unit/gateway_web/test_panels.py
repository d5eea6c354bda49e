"""How numbers are written down: exact for machines, aligned for people."""

from __future__ import annotations

from zoneinfo import ZoneInfo

import pytest

from billing import calendar
from billing.calendar import UTC_ZONE, Span
from billing.instants import Microseconds
from gateway.web.charts import MAX_TICKS, Series, shares, stacked_bars
from gateway.web.panels import (
    Table,
    button,
    columns,
    count,
    duration,
    link,
    milliseconds,
    moment,
    money,
    percent,
    size,
    text,
)
from gateway.web.spending import forecast_pusd


def test_money_is_exact_and_its_points_stand_below_each_other() -> None:
    table = Table(
        caption="",
        columns=columns("Name", "Amount"),
        rows=[(text("a"), money(150_000_000_000)), (text("b"), money(-1))],
        total=(text("Total"), money(149_999_999_999)),
    )
    shown = [row[1].shown for row in table.shown_rows]
    assert shown == ["0.150000000000", "−0.000000000001", "0.149999999999"]
    assert [row[1].value for row in table.shown_rows] == ["0.15", "-0.000000000001", "0.149999999999"]
    assert table.units == ["", "USD"]


def test_a_table_without_rows_has_its_headings() -> None:
    table = Table(caption="", columns=columns("Name", "Amount"), rows=[])
    assert (table.shown_rows, table.units) == ([], ["", ""])


@pytest.mark.parametrize(
    ("cell", "shown", "value"),
    [
        (count(1_234_567), "1,234,567", "1234567"),
        (count(-5), "−5", "-5"),
        (percent(2, 3), "66.66 %", "66.66"),
        (percent(0, 7), "0.00 %", "0.00"),
        (percent(1, 0), "—", ""),
        (milliseconds(123_456, 1), "123.4 ms", "123.4"),
        (milliseconds(10, 0), "—", ""),
        (duration(0.0005), "0.5 ms", "0.001"),
        (duration(90.0), "1.5 min", "90.000"),
        (duration(3 * 86_400.0), "3 d", "259200.000"),
        (size(1_023), "1,023 B", "1023"),
        (size(3 * 2**20), "3.0 MiB", "3145728"),
    ],
)
def test_a_figure_has_a_text_for_people_and_a_value_for_machines(cell, shown, value) -> None:
    assert f"{cell.shown} {cell.unit}".strip() == shown
    assert cell.value == value


def test_an_instant_is_written_in_the_zone_and_stays_exact() -> None:
    cell = moment(Microseconds(1_773_330_012_000_001), ZoneInfo("Asia/Kolkata"))
    assert cell.shown == "2026-03-12 21:10:12"
    assert cell.value == "2026-03-12T21:10:12.000001+05:30"


def test_a_link_keeps_what_is_carried_and_drops_what_is_empty() -> None:
    assert link("/x", {"tenant": "a b"}, after=None, by="c&d") == "/x?tenant=a+b&by=c%26d"
    assert link("/x", {"after": "old"}, after="new") == "/x?after=new"
    assert link("/x", {}) == "/x"


def test_a_button_says_which_row_it_is_for() -> None:
    made = button("Revoke", "/there", names="ci")
    assert made.button is not None
    assert (made.button.label, made.button.names, made.button.asks) == ("Revoke", "ci", "")


def test_a_chart_has_every_label_and_few_ticks() -> None:
    labels = [f"{hour:02d}:00" for hour in range(25)]
    figure = stacked_bars(labels, [Series(name="Read", colour="cached", values=[1] * 25)], unit="tokens")
    axis = figure["layout"]["xaxis"]
    assert len(axis["tickvals"]) <= MAX_TICKS
    assert axis["ticktext"] == [labels[place] for place in axis["tickvals"]]
    assert figure["data"][0]["customdata"] == labels
    assert figure["data"][0]["marker"]["color"] == "var(--cached)"


def test_a_share_is_a_gap_where_there_is_none_and_its_scale_is_the_whole() -> None:
    figure = shares(["a", "b"], [Series(name="Hits", colour="cached", values=[None, 50.0])])
    assert figure["data"][0]["y"] == [None, 50.0]
    assert figure["data"][0]["connectgaps"] is False
    assert figure["layout"]["yaxis"]["range"] == [0, 100]


def test_a_forecast_carries_the_pace_on_and_a_closed_month_is_what_it_was() -> None:
    span: Span = calendar.month("2026-03", UTC_ZONE)
    a_third = Microseconds(span.start + (span.end - span.start) // 3)
    assert forecast_pusd(10**9, span, a_third) == 3 * 10**9
    assert forecast_pusd(10**9, span, span.end) == 10**9
    assert forecast_pusd(10**9, span, Microseconds(span.end + 1)) == 10**9
    assert forecast_pusd(0, span, span.start) == 0

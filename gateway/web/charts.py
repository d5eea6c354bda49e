"""Series as Plotly figures: bars that stack, and lines, over spans of time or kinds of things.

Knows Plotly's figure schema. Does not know colours: a string `var(--name)` is the style sheet's custom
property of that name. Does not import Plotly, whose script is all that is needed here.

The horizontal axis counts places, and the labels are ours: Plotly knows no zones, and two hours of a
day can have the same name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

Figure = dict[str, Any]
HEIGHT: Final = 300
MAX_TICKS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """`colour` is a custom property of the style sheet. None is a gap."""

    name: str
    colour: str
    values: Sequence[float | int | None]


def stacked_bars(labels: Sequence[str], series: Sequence[Series], *, unit: str) -> Figure:
    return {
        "data": [
            _common(one, labels, unit, ":,")
            | {"type": "bar", "marker": {"color": f"var(--{one.colour})", "line": {"width": 0}}}
            for one in series
        ],
        "layout": _layout(labels) | {"barmode": "stack", "bargap": 0.18},
    }


def grouped_bars(labels: Sequence[str], series: Sequence[Series], *, unit: str) -> Figure:
    figure = stacked_bars(labels, series, unit=unit)
    figure["layout"]["barmode"] = "group"
    return figure


def lines(labels: Sequence[str], series: Sequence[Series], *, unit: str) -> Figure:
    return {
        "data": [
            _common(one, labels, unit, "")
            | {
                "type": "scatter",
                "mode": "lines+markers",
                "connectgaps": False,
                "cliponaxis": False,
                "line": {"color": f"var(--{one.colour})", "width": 2},
                "marker": {"color": f"var(--{one.colour})", "size": 6},
            }
            for one in series
        ],
        "layout": _layout(labels),
    }


def shares(labels: Sequence[str], series: Sequence[Series]) -> Figure:
    """Percentages: the scale is always from nothing to all."""
    figure = lines(labels, series, unit="%")
    figure["layout"]["yaxis"] |= {
        "range": [0, 100],
        "tickvals": [0, 25, 50, 75, 100],
        "ticksuffix": " %",
        "tickformat": "d",
    }
    return figure


def _common(one: Series, labels: Sequence[str], unit: str, number: str) -> Figure:
    return {
        "name": one.name,
        "x": list(range(len(labels))),
        "y": list(one.values),
        "customdata": list(labels),
        "hovertemplate": f"%{{customdata}}  {one.name.lower()} <b>%{{y{number}}}</b> {unit}<extra></extra>",
    }


def _ticks(labels: Sequence[str]) -> Sequence[int]:
    step = -(-len(labels) // MAX_TICKS) or 1
    return range(0, len(labels), step)


def _layout(labels: Sequence[str]) -> Figure:
    axis = {
        "fixedrange": True,
        "gridcolor": "var(--grid)",
        "linecolor": "var(--grid)",
        "zeroline": False,
        "automargin": True,
    }
    ticks = list(_ticks(labels))
    return {
        "height": HEIGHT,
        "margin": {"l": 8, "r": 16, "t": 12, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": "var(--text)"},
        "showlegend": True,
        "legend": {
            "orientation": "h",
            "x": 0,
            "y": -0.2,
            "yanchor": "top",
            "traceorder": "normal",
            "itemclick": False,
            "itemdoubleclick": False,
        },
        "hovermode": "closest",
        "hoverlabel": {"bgcolor": "var(--surface)", "bordercolor": "var(--grid)", "align": "left"},
        "dragmode": False,
        "xaxis": {
            **axis,
            "showgrid": False,
            "range": [-0.6, len(labels) - 0.4],
            "tickvals": ticks,
            "ticktext": [labels[place] for place in ticks],
            "tickangle": 0,
        },
        "yaxis": {**axis, "rangemode": "tozero", "tickformat": "~s", "nticks": 5},
    }

"""Hours of usage as a Plotly figure: the JSON that `Plotly.newPlot` takes.

Knows Plotly's figure schema. Does not know colours: a string `var(--name)` is
the style sheet's custom property of that name, which the page's script looks up, so that one figure
serves light and dark. Does not import Plotly, whose script is all that is needed here.

Two panels share the time axis, rather than one with two scales: hit share
above, and below it the input tokens that the share is of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from billing import instants
from billing.instants import Microseconds
from gateway.web.usage import HOUR, Hour

Figure = dict[str, Any]
"""`data` and `layout`, made of what JSON can say."""

_HOUR_MILLISECONDS: Final = 3_600_000
_BAR_SHARE_PERCENT: Final = 82
_BAR_MILLISECONDS: Final = _HOUR_MILLISECONDS * _BAR_SHARE_PERCENT // 100
_HALF_HOUR: Final = HOUR / 2


def day_figure(hours: Sequence[Hour], *, start: Microseconds, end: Microseconds) -> Figure:
    """Input tokens and hit share of each hour of `[start, end)`; hours without requests stay empty."""
    middles = [_moment(hour.start, plus_half=True) for hour in hours]
    labels = [hour.label for hour in hours]
    return {
        "data": [
            _bars("Cached", "cached", middles, labels, [hour.totals.read_tokens for hour in hours]),
            _bars("Uncached", "uncached", middles, labels, [hour.computed_tokens for hour in hours]),
            _share_line(middles, labels, hours),
        ],
        "layout": _layout(_moment(start), _moment(end)),
    }


def _share_percent(hour: Hour) -> float | None:
    """None where there was no input, so that no share is drawn."""
    return hour.totals.hit_basis_points / 100 if hour.totals.prompt_tokens else None


def _moment(instant: Microseconds, *, plus_half: bool = False) -> str:
    """Plotly draws a date without a zone as it stands: UTC here."""
    moment = instants.to_datetime(instant) + (_HALF_HOUR if plus_half else HOUR * 0)
    return moment.strftime("%Y-%m-%dT%H:%M:%S")


def _bars(
    name: str, colour: str, middles: Sequence[str], labels: Sequence[str], tokens: Sequence[int]
) -> Figure:
    return {
        "type": "bar",
        "name": name,
        "x": list(middles),
        "y": list(tokens),
        "customdata": list(labels),
        "width": _BAR_MILLISECONDS,
        "marker": {"color": f"var(--{colour})", "line": {"width": 0}},
        "hovertemplate": f"%{{customdata}}  {name.lower()} <b>%{{y:,}}</b> tokens<extra></extra>",
    }


def _share_line(middles: Sequence[str], labels: Sequence[str], hours: Sequence[Hour]) -> Figure:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "Hit share",
        "x": list(middles),
        "y": [_share_percent(hour) for hour in hours],
        "yaxis": "y2",
        "customdata": list(labels),
        "connectgaps": True,
        "line": {"color": "var(--share)", "width": 2},
        "marker": {"color": "var(--share)", "size": 7},
        "hovertemplate": "%{customdata}  hit share <b>%{y:.2f} %</b><extra></extra>",
        "cliponaxis": False,
    }


def _layout(start: str, end: str) -> Figure:
    axis = {
        "fixedrange": True,
        "gridcolor": "var(--grid)",
        "linecolor": "var(--grid)",
        "zeroline": False,
        "automargin": True,
    }
    title = {"font": {"size": 12, "color": "var(--muted)"}, "standoff": 10}
    return {
        "barmode": "stack",
        "height": 400,
        "margin": {"l": 8, "r": 16, "t": 8, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": "var(--text)"},
        "showlegend": True,
        "legend": {"orientation": "h", "x": 0, "y": 1.06, "yanchor": "bottom", "traceorder": "normal"},
        "hovermode": "closest",
        "hoverlabel": {"bgcolor": "var(--surface)", "bordercolor": "var(--grid)", "align": "left"},
        "dragmode": False,
        "xaxis": axis | {
            "type": "date",
            "range": [start, end],
            "tickformat": "%H:%M",
            "anchor": "y",
            "showgrid": False,
            "nticks": 8,
        },
        "yaxis": axis | {
            "domain": [0, 0.60],
            "rangemode": "tozero",
            "tickformat": "~s",
            "nticks": 5,
            "title": title | {"text": "input tokens"},
        },
        "yaxis2": axis | {
            "domain": [0.72, 1],
            "range": [0, 100],
            "tickvals": [0, 50, 100],
            "ticksuffix": " %",
            "title": title | {"text": "hit share"},
        },
    }  # fmt: skip

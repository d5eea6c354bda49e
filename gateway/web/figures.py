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

from gateway.web.usage import Day, Hour

Figure = dict[str, Any]
"""`data` and `layout`, made of what JSON can say."""

_BAR_WIDTH: Final = 0.82
"""Of an hour."""
_TICK_HOURS: Final = 6
# The panels' edges, as parts of the height.
_TOKENS_TOP: Final = 0.58
_SHARE_BOTTOM: Final = 0.73


def day_figure(day: Day) -> Figure:
    """Input tokens and hit share of each hour of the day."""
    hours = day.hours
    return {
        "data": [
            _bars("Cached", "cached", hours, [hour.totals.read_tokens for hour in hours]),
            _bars("Uncached", "uncached", hours, [hour.computed_tokens for hour in hours]),
            _share_line(hours),
        ],
        "layout": _layout(hours),
    }


def _along_time(hours: Sequence[Hour]) -> Figure:
    """Each hour at its middle, counted from the day's start, and its name for whoever points at it.

    Not at its time on the wall, which some hours have in common when clocks go back.
    """
    return {
        "x": [place + 0.5 for place in range(len(hours))],
        "customdata": [hour.label for hour in hours],
    }


def _bars(name: str, colour: str, hours: Sequence[Hour], tokens: Sequence[int]) -> Figure:
    return _along_time(hours) | {
        "type": "bar",
        "name": name,
        "y": list(tokens),
        "width": _BAR_WIDTH,
        "marker": {"color": f"var(--{colour})", "line": {"width": 0}},
        "hovertemplate": f"%{{customdata}}  {name.lower()} <b>%{{y:,}}</b> tokens<extra></extra>",
    }


def _share_line(hours: Sequence[Hour]) -> Figure:
    """Broken where an hour had no input, and so no share."""
    shares = [hour.totals.hit_basis_points / 100 if hour.totals.prompt_tokens else None for hour in hours]
    return _along_time(hours) | {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "Hit share",
        "y": shares,
        "yaxis": "y2",
        "connectgaps": False,
        "line": {"color": "var(--share)", "width": 2},
        "marker": {"color": "var(--share)", "size": 7},
        "hovertemplate": "%{customdata}  hit share <b>%{y:.2f} %</b><extra></extra>",
        "cliponaxis": False,
        "showlegend": False,
    }


def _panel_title(text: str, top: float) -> Figure:
    """Above the panel that ends at `top`, flush left."""
    return {
        "text": text,
        "xref": "paper",
        "yref": "paper",
        "x": 0,
        "y": top,
        "xanchor": "left",
        "yanchor": "bottom",
        "yshift": 6,
        "showarrow": False,
        "font": {"color": "var(--muted)"},
    }


def _layout(hours: Sequence[Hour]) -> Figure:
    ticks = list(range(0, len(hours), _TICK_HOURS))
    axis = {
        "fixedrange": True,
        "gridcolor": "var(--grid)",
        "linecolor": "var(--grid)",
        "zeroline": False,
        "automargin": True,
    }
    return {
        "barmode": "stack",
        "height": 460,
        "margin": {"l": 8, "r": 16, "t": 32, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": "var(--text)"},
        "showlegend": True,
        "legend": {
            "orientation": "h",
            "x": 0,
            "y": -0.12,
            "yanchor": "top",
            "traceorder": "normal",
            "itemclick": False,
            "itemdoubleclick": False,
        },
        "annotations": [_panel_title("Hit share", 1), _panel_title("Input tokens", _TOKENS_TOP)],
        "hovermode": "closest",
        "hoverlabel": {"bgcolor": "var(--surface)", "bordercolor": "var(--grid)", "align": "left"},
        "dragmode": False,
        "xaxis": axis | {
            "range": [0, len(hours)],
            "tickvals": ticks,
            "ticktext": [hours[place].begins for place in ticks],
            "anchor": "y",
            "showgrid": False,
        },
        "yaxis": axis | {
            "domain": [0, _TOKENS_TOP],
            "rangemode": "tozero",
            "tickformat": "~s",
            "nticks": 5,
        },
        "yaxis2": axis | {
            "domain": [_SHARE_BOTTOM, 1],
            "range": [0, 100],
            "tickvals": [0, 50, 100],
            "ticktext": ["0 %", "50 %", "100 %"],
        },
    }  # fmt: skip

"""The cache page: how much was reused, why not more, and what it is worth.

Knows which panels there are and what each is made of. Does not know SQL or HTML. What is over time
comes from roll-ups; what a worker holds now, from the worker.

A later part adds a panel by a function that returns one, and a line in `panels_of`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from billing.cache_outcomes import Facet, Outcome, OutcomeGroup, OutcomeTotals, outcomes
from billing.calendar import Span
from billing.reports import Selection, grouped_usage
from billing.totals import READS, WRITES, UsageTotals
from billing.usage import TokenClass
from gateway.roster import Roster
from gateway.secrets import DeploymentSecret
from gateway.statements import CLASS_LABELS
from gateway.web.cache_live import live_panels
from gateway.web.charts import Series, shares, stacked_bars
from gateway.web.filters import PERIOD, Period, common_choices, described, period_of
from gateway.web.live import LiveCache, ScopeNames, live_caches
from gateway.web.panels import (
    Cell,
    Panel,
    Table,
    Tile,
    code,
    columns,
    count,
    duration,
    milliseconds,
    money,
    nothing,
    percent,
    text,
)
from gateway.web.visits import Visit, Visits

CACHE: Final = "/dashboard/cache"
NO_REQUESTS: Final = "No requests in this period."
_FACETS: Final = (Facet.OUTCOME, Facet.MISS_REASON, Facet.WORKER)
_COLOURS: Final = {
    TokenClass.INPUT: "uncached",
    TokenClass.READ: "cached",
    TokenClass.READ_HOST: "share",
    TokenClass.READ_DISK: "other",
    TokenClass.READ_REMOTE: "accent",
    TokenClass.WRITE_AUTO: "write",
    TokenClass.WRITE_5M: "write-soft",
    TokenClass.WRITE_1H: "error",
}
REASONS: Final[Mapping[str, str]] = {
    "": "All that could be read was read",
    "below_minimum": "The prompt is shorter than what is kept",
    "no_shared_prefix": "Nothing cached begins like it",
    "diverged": "It parts from what is cached",
    "not_yet_written": "Another request was writing it",
    "expired": "Its promised time was over",
    "evicted": "It had to make room",
    "routed_elsewhere": "Another worker had it",
    "scope_changed": "Another tenant or salt had it",
    "model_changed": "Another model had it",
    "tools_changed": "The tools differ",
    "template_changed": "The template differs",
    "breakpoint_dropped": "More breakpoints than are kept",
    "unsupported_layers": "The model keeps more than keys and values",
    "bypass": "The request asked for no cache",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFigures:
    """All that the page shows: tokens and money by span, requests by span, outcome, reason and worker."""

    period: Period
    usage: Mapping[Span, UsageTotals]
    requests: Sequence[OutcomeGroup]

    @property
    def totals(self) -> UsageTotals:
        return sum(self.usage.values(), UsageTotals())

    def outcome(self, outcome: Outcome | None = None) -> OutcomeTotals:
        groups = (one for one in self.requests if outcome is None or one.values[0] == outcome)
        return sum((one.totals for one in groups), OutcomeTotals())

    def by(self, place: int) -> Mapping[str, OutcomeTotals]:
        """By one of the facets, in the order of most requests."""
        found: dict[str, OutcomeTotals] = {}
        for one in self.requests:
            found[one.values[place]] = found.get(one.values[place], OutcomeTotals()) + one.totals
        return dict(sorted(found.items(), key=lambda item: item[1].requests, reverse=True))

    def hits(self, worker: str) -> int:
        return sum(
            one.totals.requests
            for one in self.requests
            if one.values[0] == Outcome.HIT and one.values[2] == worker
        )

    @property
    def saved_us(self) -> int | None:
        """Microseconds that the tokens read would have taken, at the pace of requests that read none.

        An estimate: waiting for a turn is in the pace. None where no such request came to a token.
        """
        miss = self.outcome(Outcome.MISS)
        if not miss.first_token_us or not miss.computed_tokens:
            return None
        return self.outcome().read_tokens * miss.first_token_us // miss.computed_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePage:
    visits: Visits
    roster: Roster
    secret: DeploymentSecret

    def routes(self) -> Sequence[BaseRoute]:
        return (Route(CACHE, self.visits.page(self.show, known=(PERIOD,)), methods=["GET"]),)

    async def show(self, visit: Visit) -> Response:
        period = period_of(visit, default="day")
        is_behind = not await self.visits.catch_up()
        # Three sources that do not wait for each other.
        live, usage, requests = await asyncio.gather(
            live_caches(self.roster),
            self.visits.run(lambda: self._usage(visit, period)),
            self.visits.run(lambda: self._requests(visit, period)),
        )
        figures = CacheFigures(period=period, usage=usage, requests=requests)
        names = ScopeNames(self.secret, visit.tenants)
        return await self.visits.render(
            "page.html",
            visit,
            active="cache",
            title="Cache",
            subtitle=described(visit, period),
            action=CACHE,
            choices=common_choices(visit, period),
            is_behind=is_behind,
            tiles=tiles_of(figures),
            panels=panels_of(figures, live, names, visit),
            has_chart=True,
        )

    def _usage(self, visit: Visit, period: Period) -> Mapping[Span, UsageTotals]:
        used = grouped_usage(self.visits.database, Selection(tenant_ids=visit.tenant_ids), period.spans)
        return {one.span: one.totals for one in used}

    def _requests(self, visit: Visit, period: Period) -> Sequence[OutcomeGroup]:
        return outcomes(self.visits.database, period.spans, tenant_ids=visit.tenant_ids, by=_FACETS)


def tiles_of(figures: CacheFigures) -> Sequence[Tile]:
    totals, saved_us = figures.totals, figures.saved_us
    hits, every = figures.outcome(Outcome.HIT), figures.outcome()
    return (
        Tile(
            key="hit_tokens",
            label="Hit share by tokens",
            hint="input tokens read, of all input tokens",
            cell=percent(totals.read_tokens, totals.prompt_tokens),
        ),
        Tile(
            key="hit_requests",
            label="Hit share by requests",
            hint="requests that read anything, of all requests",
            cell=percent(hits.requests, every.requests),
        ),
        Tile(
            key="tokens_saved",
            label="Tokens not computed",
            hint="read from the cache instead",
            cell=count(totals.read_tokens),
        ),
        Tile(
            key="money_saved",
            label="Saved",
            hint="reads at their discount, less premiums on writes",
            cell=money(totals.saved_pusd),
        ),
        Tile(
            key="time_saved",
            label="Time saved, estimated",
            hint="at the pace of requests that read nothing",
            cell=nothing() if saved_us is None else duration(saved_us / 1e6),
        ),
    )


def panels_of(
    figures: CacheFigures, live: Sequence[LiveCache], names: ScopeNames, visit: Visit
) -> Sequence[Panel]:
    """Every panel, in order."""
    return (
        hit_share_panel(figures),
        composition_panel(figures),
        reasons_panel(figures),
        first_token_panel(figures),
        workers_panel(figures),
        *live_panels(live, names, visit),
    )


def hit_share_panel(figures: CacheFigures) -> Panel:
    period = figures.period
    rows, by_tokens, by_requests = [], [], []
    for span in period.spans:
        used = figures.usage.get(span, UsageTotals())
        groups = [one for one in figures.requests if one.span == span]
        requests = sum(one.totals.requests for one in groups)
        hits = sum(one.totals.requests for one in groups if one.values[0] == Outcome.HIT)
        by_tokens.append(_share(used.read_tokens, used.prompt_tokens))
        by_requests.append(_share(hits, requests))
        if requests or used.prompt_tokens:
            rows.append(
                (
                    text(period.short(span), value=span.label),
                    count(requests),
                    count(hits),
                    percent(hits, requests),
                    count(used.prompt_tokens),
                    count(used.read_tokens),
                    percent(used.read_tokens, used.prompt_tokens),
                )
            )
    if not rows:
        return Panel(key="hit-share", title="Hit share", empty=NO_REQUESTS, is_wide=True)
    labels = [period.short(span) for span in period.spans]
    return Panel(
        key="hit-share",
        title="Hit share",
        hint="Weighted by tokens it says what was saved; weighted by requests, how often anything was.",
        is_wide=True,
        figure=shares(
            labels,
            (
                Series(name="By tokens", colour="cached", values=by_tokens),
                Series(name="By requests", colour="share", values=by_requests),
            ),
        ),
        says="Chart of the hit share over time, by tokens and by requests.",
        table=Table(
            caption=f"Hit share by {'day' if period.is_by_day else 'hour'}, {period.zone.key}",
            columns=columns(
                "Time", "Requests", "Hits", "Share of requests", "Input tokens", "Read", "Share of tokens"
            ),
            rows=rows,
        ),
    )


def composition_panel(figures: CacheFigures) -> Panel:
    period, totals = figures.period, figures.totals
    if not totals.prompt_tokens:
        return Panel(key="composition", title="What input was made of", empty=NO_REQUESTS, is_wide=True)
    shown = [
        one
        for one in (TokenClass.INPUT, *READS, *WRITES)
        if totals.tokens(one) or one in {TokenClass.INPUT, TokenClass.READ}
    ]
    used = [figures.usage.get(span, UsageTotals()) for span in period.spans]
    labels = [period.short(span) for span in period.spans]
    series = [
        Series(name=_class_label(one), colour=_COLOURS[one], values=[each.tokens(one) for each in used])
        for one in shown
    ]
    rows = [
        (
            text(period.short(span), value=span.label),
            *(count(each.tokens(one)) for one in shown),
            count(each.prompt_tokens),
        )
        for span, each in zip(period.spans, used, strict=True)
        if each.prompt_tokens
    ]
    return Panel(
        key="composition",
        title="What input was made of",
        hint="Every input token is in one class: computed, read from a tier, or kept for a time.",
        is_wide=True,
        figure=stacked_bars(labels, series, unit="tokens"),
        says="Chart of input tokens over time by class.",
        table=Table(
            caption=f"Input tokens by class, {period.zone.key}",
            columns=columns("Time", *(_class_label(one) for one in shown), "Input"),
            rows=rows,
            total=(
                text("Total"),
                *(count(totals.tokens(one)) for one in shown),
                count(totals.prompt_tokens),
            ),
        ),
    )


def reasons_panel(figures: CacheFigures) -> Panel:
    every = figures.outcome()
    rows = [
        (
            code(reason) if reason else text("none", value=""),
            text(REASONS.get(reason, "")),
            count(totals.requests),
            percent(totals.requests, every.requests),
            count(totals.computed_tokens),
        )
        for reason, totals in figures.by(1).items()
    ]
    if not rows:
        return Panel(key="reasons", title="Why not more was read", empty=NO_REQUESTS)
    return Panel(
        key="reasons",
        title="Why not more was read",
        is_wide=True,
        hint="The reason names the first token of a prompt that was not found.",
        table=Table(
            caption="Requests by reason",
            columns=columns("Reason", "Meaning", "Requests", "Share", "Tokens computed", num_texts=2),
            rows=rows,
            total=(
                text("Total"),
                text(""),
                count(every.requests),
                percent(every.requests, every.requests),
                count(every.computed_tokens),
            ),
        ),
    )


def first_token_panel(figures: CacheFigures) -> Panel:
    if not figures.outcome().first_tokens:
        return Panel(
            key="first-token", title="Time to the first token", empty="No request came to a token yet."
        )
    return Panel(
        key="first-token",
        title="Time to the first token",
        hint="From admission, waiting for a turn included; per 1,000 tokens, as prompts differ in length.",
        table=Table(
            caption="Means by outcome",
            columns=columns("Outcome", "Requests", "Mean", "Input tokens each", "Mean per 1,000 tokens"),
            rows=[
                _first_token_row("Hit", figures.outcome(Outcome.HIT)),
                _first_token_row("Miss", figures.outcome(Outcome.MISS)),
            ],
        ),
    )


def _first_token_row(label: str, totals: OutcomeTotals) -> Sequence[Cell]:
    each = totals.prompt_tokens // totals.requests if totals.requests else 0
    return (
        text(label),
        count(totals.first_tokens),
        milliseconds(totals.first_token_us, totals.first_tokens),
        count(each),
        milliseconds(totals.first_token_us * 1_000, totals.first_tokens * each),
    )


def workers_panel(figures: CacheFigures) -> Panel:
    rows = [
        (
            text(worker or "not stated", value=worker),
            count(totals.requests),
            percent(figures.hits(worker), totals.requests),
            count(totals.prompt_tokens),
            count(totals.read_tokens),
            percent(totals.read_tokens, totals.prompt_tokens),
        )
        for worker, totals in figures.by(2).items()
    ]
    if not rows:
        return Panel(key="workers", title="By worker", empty=NO_REQUESTS)
    return Panel(
        key="workers",
        title="By worker",
        table=Table(
            caption="Requests by the worker that served them",
            columns=columns(
                "Worker", "Requests", "Share of requests", "Input tokens", "Read", "Share of tokens"
            ),
            rows=rows,
        ),
    )


def _class_label(token_class: TokenClass) -> str:
    return "Computed" if token_class is TokenClass.INPUT else CLASS_LABELS[token_class]


def _share(part: int, whole: int) -> float | None:
    """Percent, for drawing; None is a gap."""
    return part * 10_000 // whole / 100 if whole else None

"""The usage page: what a period used, at list price, as paid, and saved, by whatever it can be told apart.

Knows which tables there are, and how a month so far is carried on to its end. Does not know SQL or
HTML: each amount is billing's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar
from uuid import UUID

from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from billing.budgets import Budget, list_budgets
from billing.budgets import Period as BudgetPeriod
from billing.calendar import Span, month, month_of, uncut, zone_named
from billing.ids import ApiKeyId, ProjectId
from billing.instants import Microseconds
from billing.names import TenantNames, names_of
from billing.reports import CURRENCY, Dimension, Group, GroupUsage, Selection, usage_within
from billing.totals import ClassTotals, UsageTotals
from billing.usage import TokenClass
from gateway.statements import CLASS_LABELS
from gateway.tables import Kind, Layout, csv_lines, json_lines
from gateway.tables import Row as TableRow
from gateway.web.charts import Series, stacked_bars
from gateway.web.filters import PERIOD, Period, common_choices, described, period_of
from gateway.web.panels import (
    Cell,
    Choice,
    Panel,
    Table,
    Tile,
    columns,
    count,
    link,
    money,
    nothing,
    percent,
    text,
)
from gateway.web.visits import Visit, Visits

T = TypeVar("T")

USAGE: Final = "/dashboard/usage"
FILE: Final = "/dashboard/usage/file"
STATEMENTS: Final = "/dashboard/statements"
PROJECT: Final = "project"
API_KEY: Final = "api_key"
MODEL: Final = "model"
MAX_LINES: Final = 200
NO_USAGE: Final = "Nothing was used in this period."
NO_PROJECT: Final = "no project"
_FILTERS: Final = (PERIOD, PROJECT, API_KEY, MODEL)
_DOLLARS: Final = 10**12

FILE_LAYOUT: Final = Layout(
    columns={
        "by": Kind.TEXT,
        "id": Kind.TEXT,
        "name": Kind.TEXT,
        "requests": Kind.INTEGER,
        "input_tokens": Kind.INTEGER,
        "cached_tokens": Kind.INTEGER,
        "output_tokens": Kind.INTEGER,
        "list_amount": Kind.MONEY,
        "discount": Kind.MONEY,
        "amount": Kind.MONEY,
        "amount_without_cache": Kind.MONEY,
        "saved": Kind.MONEY,
        "currency": Kind.TEXT,
    },
    summed="amount",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What a table has a row for: an id where there is one, a name, and the totals."""

    id: str
    name: str
    totals: UsageTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """All that the page shows. `names` are of the one tenant, or None where it is about all of them."""

    period: Period
    by_span: Mapping[Span, UsageTotals]
    groups: Sequence[GroupUsage]
    tenants: Mapping[UUID, str]
    names: TenantNames | None
    budgets: Sequence[Budget]
    month: Span
    month_usage: Sequence[GroupUsage]
    now: Microseconds

    @property
    def totals(self) -> UsageTotals:
        return sum(self.by_span.values(), UsageTotals())

    def tables(self) -> Mapping[str, tuple[str, Sequence[Line]]]:
        """The title and the lines of each, by the name that a file of it has."""
        by_time = [
            Line(id=span.label, name=self.period.short(span), totals=totals)
            for span, totals in self.by_span.items()
        ]
        if self.names is None:
            apart = {"tenant": ("By tenant", self._lines(lambda group: group.tenant_id, self._tenant))}
        else:
            apart = {
                "project": ("By project", self._lines(lambda group: group.project_id, self._project)),
                "api_key": ("By key", self._lines(lambda group: group.api_key_id, self._api_key)),
            }
        return {
            "time": ("Over time", by_time),
            **apart,
            "model": ("By model", self._lines(lambda group: group.model, str)),
        }

    def _lines(
        self, of: Callable[[Group], UUID | str | None], named: Callable[[UUID | str | None], str]
    ) -> Sequence[Line]:
        """The most expensive first."""
        found: dict[UUID | str | None, UsageTotals] = {}
        for one in self.groups:
            found[of(one.group)] = found.get(of(one.group), UsageTotals()) + one.totals
        ordered = sorted(found.items(), key=lambda item: item[1].amount_pusd, reverse=True)
        return [
            Line(id="" if key is None else str(key), name=named(key), totals=totals)
            for key, totals in ordered
        ]

    def _tenant(self, key: UUID | str | None) -> str:
        assert isinstance(key, UUID), "grouped by tenant"
        return self.tenants.get(key, str(key))

    def _project(self, key: UUID | str | None) -> str:
        assert self.names is not None, "one tenant's"
        return NO_PROJECT if key is None else self.names.projects[ProjectId(UUID(str(key)))]

    def _api_key(self, key: UUID | str | None) -> str:
        assert self.names is not None, "one tenant's"
        return self.names.api_keys[ApiKeyId(UUID(str(key)))]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpendingPage:
    visits: Visits

    def routes(self) -> Sequence[BaseRoute]:
        page = self.visits.page
        return (
            Route(USAGE, page(self.show, known=_FILTERS), methods=["GET"]),
            Route(FILE, page(self.send_file, known=(*_FILTERS, "by", "format")), methods=["GET"]),
        )

    async def show(self, visit: Visit) -> Response:
        spending, is_behind = await self._read(visit)
        return await self.visits.render(
            "page.html",
            visit,
            active="usage",
            title="Usage",
            subtitle=described(visit, spending.period),
            action=USAGE,
            choices=choices_of(visit, spending),
            is_behind=is_behind,
            tiles=tiles_of(spending),
            panels=panels_of(spending, visit),
            has_chart=True,
        )

    async def send_file(self, visit: Visit) -> Response:
        spending, _ = await self._read(visit)
        tables = spending.tables()
        by = visit.query.choice("by", {name: name for name in tables}, default="time")
        form = visit.query.choice("format", {"csv": "csv", "jsonl": "jsonl"}, default="csv")
        rows = [_file_row(by, line) for line in tables[by][1]]
        encode = csv_lines if form == "csv" else json_lines
        name = f"headstart-usage-{spending.period.name}-by-{by}.{form}"
        return Response(
            b"".join(encode(rows, FILE_LAYOUT)),
            media_type="text/csv" if form == "csv" else "application/x-ndjson",
            headers={"content-disposition": f'attachment; filename="{name}"', "cache-control": "no-store"},
        )

    async def _read(self, visit: Visit) -> tuple[Spending, bool]:
        period = period_of(visit, default=month_of(visit.now, visit.zone))
        selection = _selection(visit)
        is_behind = not await self.visits.catch_up()
        return await self.visits.run(lambda: self._spending(visit, period, selection)), is_behind

    def _spending(self, visit: Visit, period: Period, selection: Selection) -> Spending:
        tenant = visit.tenant
        by = [Dimension.TENANT] if tenant is None else [Dimension.PROJECT, Dimension.API_KEY]
        with self.visits.database.read() as connection:
            names = None if tenant is None else names_of(connection, tenant.id)
            by_span = usage_within(connection, selection, period.spans)
            groups = usage_within(connection, selection, period.whole, by=[*by, Dimension.MODEL])
            zone = visit.zone if names is None else zone_named(names.time_zone)
            this_month = month(month_of(visit.now, zone), zone)
            month_usage = usage_within(
                connection,
                Selection(tenant_ids=visit.tenant_ids),
                uncut(this_month.start, this_month.end, zone),
            )
        budgets = (
            [] if tenant is None else list_budgets(self.visits.database, tenant_id=tenant.id, now=visit.now)
        )
        return Spending(
            period=period,
            by_span={one.span: one.totals for one in by_span},
            groups=groups,
            tenants={one.id: one.name for one in visit.tenants},
            names=names,
            budgets=budgets,
            month=this_month,
            month_usage=month_usage,
            now=visit.now,
        )


def choices_of(visit: Visit, spending: Spending) -> Sequence[Choice]:
    asked = {name: visit.query.one(name) or "" for name in (PROJECT, API_KEY, MODEL)}
    own: list[Choice] = []
    if spending.names is not None:
        projects = [(str(key), name) for key, name in spending.names.projects.items()]
        keys = [(str(key), name) for key, name in spending.names.api_keys.items()]
        own += [
            Choice(name=PROJECT, label="Project", value=asked[PROJECT], options=[("", "All"), *projects]),
            Choice(name=API_KEY, label="Key", value=asked[API_KEY], options=[("", "All"), *keys]),
        ]
    own.append(Choice(name=MODEL, label="Model", value=asked[MODEL]))
    return (*common_choices(visit, spending.period), *own)


def tiles_of(spending: Spending) -> Sequence[Tile]:
    totals = spending.totals
    return (
        Tile(key="amount", label="Amount", hint="what is paid", cell=money(totals.amount_pusd)),
        Tile(
            key="list", label="At list price", hint="before the discount", cell=money(totals.list_amount_pusd)
        ),
        Tile(
            key="saved",
            label="Saved by the cache",
            hint="reads at their discount, less premiums on writes",
            cell=money(totals.saved_pusd),
        ),
        Tile(key="requests", label="Requests", hint="admitted", cell=count(totals.requests)),
    )


def panels_of(spending: Spending, visit: Visit) -> Sequence[Panel]:
    tables = dict(spending.tables())
    title, lines = tables.pop("time")
    return (
        time_panel(title, lines, spending, visit),
        month_panel(spending),
        class_panel(spending),
        *(table_panel(by, title, lines, spending, visit) for by, (title, lines) in tables.items()),
    )


def time_panel(title: str, lines: Sequence[Line], spending: Spending, visit: Visit) -> Panel:
    panel = table_panel("time", title, lines, spending, visit)
    if not lines:
        return panel
    period = spending.period
    used = [spending.by_span.get(span, UsageTotals()) for span in period.spans]
    paid = [one.amount_pusd / _DOLLARS for one in used]
    saved = [max(one.saved_pusd, 0) / _DOLLARS for one in used]
    figure = stacked_bars(
        [period.short(span) for span in period.spans],
        (
            Series(name="Paid", colour="uncached", values=paid),
            Series(name="Saved", colour="cached", values=saved),
        ),
        unit=CURRENCY,
    )
    figure["layout"]["yaxis"]["tickformat"] = "~g"
    return Panel(
        key=panel.key,
        title=title,
        hint="Both together are what the same tokens would have cost without a cache.",
        figure=figure,
        says="Chart of what was paid and what was saved over time.",
        table=panel.table,
        links=panel.links,
        is_wide=True,
    )


def month_panel(spending: Spending) -> Panel:
    """The month so far against its budgets, and carried on at the same pace."""
    so_far = sum((one.totals for one in spending.month_usage), UsageTotals()).amount_pusd
    rows = [
        (
            text("All usage"),
            money(so_far),
            nothing(),
            nothing(),
            nothing(),
            money(forecast_pusd(so_far, spending.month, spending.now)),
            nothing(),
        ),
        *(_budget_row(budget, spending) for budget in spending.budgets),
    ]
    return Panel(
        key="budgets",
        title=f"{spending.month.label} so far",
        hint="The forecast carries the month on at its pace so far. "
        + ("" if spending.budgets else "No budget limits it."),
        is_wide=True,
        table=Table(
            caption="Month to date, against budgets",
            columns=columns("Budget", "Posted", "Reserved", "Limit", "Used", "Forecast", "Of the limit"),
            rows=rows,
        ),
    )


def forecast_pusd(so_far_pusd: int, span: Span, now: Microseconds) -> int:
    """Rounded down. Before anything of the span has passed, what is there."""
    elapsed = min(now, span.end) - span.start
    return so_far_pusd * (span.end - span.start) // elapsed if elapsed > 0 else so_far_pusd


def _budget_row(budget: Budget, spending: Spending) -> Sequence[Cell]:
    is_monthly = budget.period is BudgetPeriod.MONTH
    forecast = forecast_pusd(budget.posted_pusd, spending.month, spending.now)
    return (
        text(f"{_scope_name(budget, spending)}, {'a month' if is_monthly else 'in all'}"),
        money(budget.posted_pusd),
        money(budget.reserved_pusd),
        money(budget.limit_pusd),
        percent(budget.posted_pusd + budget.reserved_pusd, budget.limit_pusd),
        money(forecast) if is_monthly else nothing(),
        percent(forecast, budget.limit_pusd) if is_monthly else nothing(),
    )


def _scope_name(budget: Budget, spending: Spending) -> str:
    assert spending.names is not None, "only one tenant's budgets are shown"
    scope = budget.scope
    if scope.api_key_id is not None:
        return f"Key {spending.names.api_keys[scope.api_key_id]}"
    if scope.project_id is not None:
        return f"Project {spending.names.projects[scope.project_id]}"
    return "Whole tenant"


def class_panel(spending: Spending) -> Panel:
    totals = spending.totals
    rows = [
        (text(CLASS_LABELS[one], value=one.value), *_class_cells(totals.by_class[one]))
        for one in TokenClass
        if one in totals.by_class
    ]
    if not rows:
        return Panel(key="by-class", title="By class of token", empty=NO_USAGE, is_wide=True)
    return Panel(
        key="by-class",
        title="By class of token",
        is_wide=True,
        table=Table(
            caption="Tokens and money by class; token-hours for pins",
            columns=columns("Class", "Quantity", "List", "Discount", "Amount", "Without cache", "Saved"),
            rows=rows,
            total=(
                text("Total"),
                text(""),
                money(totals.list_amount_pusd),
                money(totals.list_amount_pusd - totals.amount_pusd),
                money(totals.amount_pusd),
                money(totals.amount_without_cache_pusd),
                money(totals.saved_pusd),
            ),
        ),
    )


def _class_cells(totals: ClassTotals) -> Sequence[Cell]:
    return (
        count(totals.quantity),
        money(totals.list_amount_pusd),
        money(totals.discount_pusd),
        money(totals.amount_pusd),
        money(totals.amount_without_cache_pusd),
        money(totals.saved_pusd),
    )


def table_panel(by: str, title: str, lines: Sequence[Line], spending: Spending, visit: Visit) -> Panel:
    key = f"by-{by.replace('_', '-')}"
    if not lines:
        return Panel(key=key, title=title, empty=NO_USAGE, is_wide=True)
    return Panel(
        key=key,
        title=title,
        is_wide=True,
        table=Table(
            caption=f"{title}, {spending.period.zone.key}",
            columns=columns(
                title.removeprefix("By ").capitalize(),
                "Requests",
                "Input",
                "Cached",
                "Hit share",
                "Output",
                "List",
                "Discount",
                "Amount",
                "Saved",
            ),
            rows=[_cells(text(line.name, value=line.id), line.totals) for line in shown_lines(lines)],
            total=_cells(text("Total"), sum((line.totals for line in lines), UsageTotals())),
        ),
        links=_file_links(by, spending, visit),
    )


def shown_lines(lines: Sequence[Line]) -> Sequence[Line]:
    """At most `MAX_LINES`; what is left out is one more, so that all of them add up. A file has each."""
    if len(lines) <= MAX_LINES:
        return lines
    rest = sum((line.totals for line in lines[MAX_LINES:]), UsageTotals())
    others = Line(id="other", name=f"{len(lines) - MAX_LINES:,} others", totals=rest)
    return [*lines[:MAX_LINES], others]


def _file_links(by: str, spending: Spending, visit: Visit) -> Sequence[tuple[str, str]]:
    asked = dict(visit.request.query_params) | {PERIOD: spending.period.name, "by": by}
    files = [(label, link(FILE, asked, format=form)) for label, form in (("CSV", "csv"), ("JSONL", "jsonl"))]
    if spending.names is None:
        return files
    tenant = str(visit.tenant.id) if visit.is_admin and visit.tenant is not None else None
    statement = f"{STATEMENTS}/{spending.month.label}"
    return [*files, ("Print this month's statement", link(statement, {}, preview="true", tenant=tenant))]


def _cells(heading: Cell, totals: UsageTotals) -> Sequence[Cell]:
    return (
        heading,
        count(totals.requests),
        count(totals.prompt_tokens),
        count(totals.read_tokens),
        percent(totals.read_tokens, totals.prompt_tokens),
        count(totals.output_tokens),
        money(totals.list_amount_pusd),
        money(totals.list_amount_pusd - totals.amount_pusd),
        money(totals.amount_pusd),
        money(totals.saved_pusd),
    )


def _file_row(by: str, line: Line) -> TableRow:
    totals = line.totals
    return (
        by,
        line.id,
        line.name,
        totals.requests,
        totals.prompt_tokens,
        totals.read_tokens,
        totals.output_tokens,
        totals.list_amount_pusd,
        totals.list_amount_pusd - totals.amount_pusd,
        totals.amount_pusd,
        totals.amount_without_cache_pusd,
        totals.saved_pusd,
        CURRENCY,
    )


def _selection(visit: Visit) -> Selection:
    """Empty fields of the form are no conditions."""
    models = [model for model in visit.query.many(MODEL) if model]
    return Selection(
        tenant_ids=visit.tenant_ids,
        project_ids=_ids(visit, PROJECT, ProjectId),
        api_key_ids=_ids(visit, API_KEY, ApiKeyId),
        models=models or None,
    )


def _ids(visit: Visit, name: str, make: Callable[[UUID], T]) -> Sequence[T] | None:
    return visit.query.ids(name, make) if visit.query.one(name) else None

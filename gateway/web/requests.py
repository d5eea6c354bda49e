"""Requests one by one: a list, and all that is known of one.

Knows filters and what a request is made of. Does not know SQL, HTML or prompts: nobody here has any text
of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from billing.errors import UnknownRequest
from billing.ids import ApiKeyId, ProjectId, RequestId, TenantId
from billing.instants import Microseconds
from billing.names import names_of
from billing.reports import Selection
from billing.request_log import (
    Place,
    RequestFilter,
    RequestRecord,
    RequestRow,
    find_request,
    list_requests,
)
from billing.totals import WRITES
from billing.usage import TokenClass
from gateway.edge.errors import InvalidRequest, NotFound
from gateway.statements import CLASS_LABELS
from gateway.web.cache import REASONS
from gateway.web.filters import PERIOD, Period, common_choices, described, period_of
from gateway.web.panels import (
    Cell,
    Choice,
    Panel,
    Table,
    code,
    columns,
    count,
    link,
    milliseconds,
    moment,
    money,
    nothing,
    percent,
    text,
)
from gateway.web.receipts import IssuedReceipt, ReceiptDesk, receipt_file, receipts_panel
from gateway.web.visits import Visit, Visits

REQUESTS: Final = "/dashboard/requests"
ROWS_PER_PAGE: Final = 50
KINDS: Final = ("final", "aborted", "adjustment", "credit")
OUTCOMES: Final[Mapping[str, bool | None]] = {"": None, "hit": True, "miss": False}
_ONE: Final = REQUESTS + "/{request_id}"
_FILTERS: Final = (PERIOD, "project", "api_key", "model", "kind", "outcome", "reason", "after")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPages:
    visits: Visits
    desk: ReceiptDesk

    def routes(self) -> Sequence[BaseRoute]:
        page = self.visits.page
        return (
            Route(REQUESTS, page(self.show_list, known=_FILTERS), methods=["GET"]),
            Route(_ONE, page(self.show_one), methods=["GET"]),
            Route(_ONE + "/receipts/{number}", page(self.send_receipt), methods=["GET"]),
        )

    async def show_list(self, visit: Visit) -> Response:
        period = period_of(visit, default="today")
        wanted, after = _filter(visit, period), _after(visit)
        is_behind = not await self.visits.catch_up()
        rows, following = await self.visits.run(
            lambda: list_requests(self.visits.database, wanted, after=after, limit=ROWS_PER_PAGE)
        )
        names = await self.visits.run(lambda: self._names(visit))
        return await self.visits.render(
            "page.html",
            visit,
            active="requests",
            title="Requests",
            subtitle=described(visit, period),
            action=REQUESTS,
            choices=_choices(visit, period, names),
            is_behind=is_behind,
            tiles=(),
            panels=(list_panel(rows, following, visit, names),),
            has_chart=False,
        )

    async def show_one(self, visit: Visit) -> Response:
        request_id = _request_id(visit.request.path_params["request_id"])
        await self.visits.catch_up()
        record, issued = await self.visits.run(lambda: self._find(visit, request_id))
        names = await self.visits.run(lambda: self._names_of_one(record.events[0]))
        return await self.visits.render(
            "request.html",
            visit,
            active="requests",
            title="Request",
            request_id=str(request_id),
            back=link(REQUESTS, visit.carried),
            split=split_of(record),
            panels=(
                cost_panel(record),
                facts_panel(record, names, visit),
                receipts_panel(
                    issued,
                    f"{REQUESTS}/{request_id}/receipts",
                    visit.carried,
                    num_due=len(record.events) - len(issued),
                ),
                *history_panels(record, visit),
            ),
            has_chart=False,
        )

    async def send_receipt(self, visit: Visit) -> Response:
        request_id = _request_id(visit.request.path_params["request_id"])
        await self.visits.catch_up()
        _, issued = await self.visits.run(lambda: self._find(visit, request_id))
        return receipt_file(issued, visit.request.path_params["number"])

    def _find(self, visit: Visit, request_id: RequestId) -> tuple[RequestRecord, Sequence[IssuedReceipt]]:
        """Blocks. Raises `NotFound`, also for what is another tenant's."""
        try:
            record = find_request(self.visits.database, request_id, tenant_ids=visit.tenant_ids)
        except UnknownRequest as error:
            raise NotFound("There is no such request.") from error
        issued = self.desk.issued(
            request_id, tenant_id=record.events[0].tenant_id, num_events=len(record.events)
        )
        return record, issued

    def _names(self, visit: Visit) -> Names:
        tenants = {one.id: one.name for one in visit.tenants}
        if visit.tenant is None:
            return Names(tenants=tenants, projects={}, api_keys={})
        return self._named(visit.tenant.id, tenants)

    def _names_of_one(self, row: RequestRow) -> Names:
        return self._named(row.tenant_id, {})

    def _named(self, tenant_id: TenantId, tenants: Mapping[TenantId, str]) -> Names:
        with self.visits.database.read() as connection:
            own = names_of(connection, tenant_id)
        return Names(tenants={**tenants, tenant_id: own.tenant}, projects=own.projects, api_keys=own.api_keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What people call the ids of a page."""

    tenants: Mapping[TenantId, str]
    projects: Mapping[ProjectId, str]
    api_keys: Mapping[ApiKeyId, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some of a prompt's tokens. `start` and `width` are hundredths of a percent of the bar."""

    kind: str
    label: str
    tokens: int
    start: int
    width: int


def list_panel(rows: Sequence[RequestRow], following: Place | None, visit: Visit, names: Names) -> Panel:
    if not rows:
        return Panel(key="list", title="Newest first", empty="No request fits these filters.", is_wide=True)
    heading = ("Admitted", "Tenant") if visit.tenant is None else ("Admitted", "Key")
    links = []
    if following is not None:
        asked = dict(visit.request.query_params)
        links.append(("Older requests", link(REQUESTS, asked, after=_cursor(following))))
    if visit.query.one("after"):
        links.append(
            ("Back to the newest", link(REQUESTS, {**dict(visit.request.query_params), "after": ""}))
        )
    return Panel(
        key="list",
        title="Newest first",
        is_wide=True,
        table=Table(
            caption=f"Requests, times in {visit.zone.key}",
            columns=columns(
                *heading,
                "Model",
                "Kind",
                "Reason",
                "Input",
                "Read",
                "Share",
                "Output",
                "First token",
                "Amount",
                "Saved",
                num_texts=5,
            ),
            rows=[_row(row, visit, names) for row in rows],
        ),
        links=links,
    )


def split_of(record: RequestRecord) -> Sequence[Part]:
    """The prompt as it was met: read first, then what had to be computed."""
    row = record.events[0]
    parts = (
        ("read", "Read from the cache", row.read_tokens),
        ("uncached", "Computed", row.tokens[TokenClass.INPUT]),
        ("write", "Computed and kept", sum(row.tokens[one] for one in WRITES)),
    )
    split: list[Part] = []
    start = 0
    for kind, label, tokens in parts:
        width = tokens * 10_000 // (row.prompt_tokens or 1)
        if tokens:
            split.append(Part(kind=kind, label=label, tokens=tokens, start=start, width=width))
        start += width
    return split


def facts_panel(record: RequestRecord, names: Names, visit: Visit) -> Panel:
    row = record.events[0]
    project = "—" if row.project_id is None else names.projects.get(row.project_id, str(row.project_id))
    facts: Sequence[tuple[str, Cell]] = (
        ("Tenant", text(names.tenants[row.tenant_id])),
        ("Project", text(project)),
        ("Key", text(names.api_keys[row.api_key_id])),
        ("Model", text(row.model)),
        ("Worker", text(row.worker) if row.worker else nothing()),
        ("Kind", text(row.kind)),
        ("Finish reason", text(row.finish_reason) if row.finish_reason else nothing()),
        ("Admitted", moment(row.admitted_at, visit.zone)),
        ("Finished", moment(row.finished_at, visit.zone)),
        ("Time to the first token", _first_token(row)),
        ("Input tokens", count(row.prompt_tokens)),
        ("Read from the cache", count(row.read_tokens)),
        ("Output tokens", count(row.tokens[TokenClass.OUTPUT])),
        ("Why not more was read", code(row.miss_reason) if row.miss_reason else nothing()),
        ("First token not read", _first_not_read(row)),
    )
    return Panel(
        key="facts",
        title="What it was",
        is_wide=True,
        hint=REASONS.get(row.miss_reason or "", ""),
        table=Table(
            caption=f"Times in {visit.zone.key}",
            columns=columns("Fact", "Value", num_texts=2),
            rows=[(text(label), cell) for label, cell in facts],
        ),
    )


def cost_panel(record: RequestRecord) -> Panel:
    lines = record.lines
    if not lines:
        return Panel(key="cost", title="What it costs", empty="Nothing was used, so it costs nothing.")
    return Panel(
        key="cost",
        title="What it costs",
        is_wide=True,
        hint="Without a cache, every input token would have been computed at the input price.",
        table=Table(
            caption="Ledger lines; a unit is what a million tokens cost",
            columns=columns("Class", "Quantity", "List unit", "Unit", "Amount", "Without cache", "Saved"),
            rows=[
                (
                    text(CLASS_LABELS[line.token_class], value=line.token_class.value),
                    count(line.quantity),
                    money(line.list_unit_pusd * 1_000_000),
                    money(line.unit_pusd * 1_000_000),
                    money(line.amount_pusd),
                    money(line.amount_without_cache_pusd),
                    money(line.amount_without_cache_pusd - line.amount_pusd),
                )
                for line in lines
            ],
            total=(
                text("Total"),
                text(""),
                text(""),
                text(""),
                money(sum(line.amount_pusd for line in lines)),
                money(sum(line.amount_without_cache_pusd for line in lines)),
                money(sum(line.amount_without_cache_pusd - line.amount_pusd for line in lines)),
            ),
        ),
    )


def history_panels(record: RequestRecord, visit: Visit) -> Sequence[Panel]:
    """Attempts and corrections, where there are any."""
    panels = []
    if record.attempts:
        panels.append(
            Panel(
                key="attempts",
                title="Attempts",
                table=Table(
                    caption="Only the one that was answered is billed",
                    columns=columns("Attempt", "Worker", "Outcome", "Began", "Ended", num_texts=5),
                    rows=[
                        (
                            text(str(one.number)),
                            text(one.worker or "—"),
                            text(one.outcome),
                            moment(one.started_at, visit.zone),
                            moment(one.ended_at, visit.zone),
                        )
                        for one in record.attempts
                    ],
                ),
            )
        )
    if len(record.events) > 1:
        panels.append(
            Panel(
                key="corrections",
                title="Corrections",
                table=Table(
                    caption="New rows beside the first, which stands",
                    columns=columns("Accounted to", "Kind", "Input", "Read", "Output", "Amount", num_texts=2),
                    rows=[
                        (
                            moment(one.place.accounted_at, visit.zone),
                            text(one.kind),
                            count(one.prompt_tokens),
                            count(one.read_tokens),
                            count(one.tokens[TokenClass.OUTPUT]),
                            money(one.amount_pusd),
                        )
                        for one in record.events[1:]
                    ],
                ),
            )
        )
    return panels


def _row(row: RequestRow, visit: Visit, names: Names) -> Sequence[Cell]:
    whose = (
        text(names.tenants.get(row.tenant_id, str(row.tenant_id)))
        if visit.tenant is None
        else text(names.api_keys.get(row.api_key_id, str(row.api_key_id)))
    )
    admitted = moment(row.admitted_at, visit.zone)
    return (
        Cell(
            shown=admitted.shown,
            value=str(row.request_id),
            href=link(f"{REQUESTS}/{row.request_id}", visit.carried),
        ),
        whose,
        text(row.model),
        text(row.kind),
        code(row.miss_reason) if row.miss_reason else nothing(),
        count(row.prompt_tokens),
        count(row.read_tokens),
        percent(row.read_tokens, row.prompt_tokens),
        count(row.tokens[TokenClass.OUTPUT]),
        _first_token(row),
        money(row.amount_pusd),
        money(row.amount_without_cache_pusd - row.amount_pusd),
    )


def _first_token(row: RequestRow) -> Cell:
    return nothing() if row.first_token_ns is None else milliseconds(row.first_token_ns // 1_000, 1)


def _first_not_read(row: RequestRow) -> Cell:
    """Its place in the prompt; none where all but the last were read, which is always computed."""
    return count(row.read_tokens) if row.miss_reason else nothing()


def _choices(visit: Visit, period: Period, names: Names) -> Sequence[Choice]:
    asked = {name: visit.query.one(name) or "" for name in _FILTERS}
    own: list[Choice] = []
    if visit.tenant is not None:
        for name, label, known in (
            ("project", "Project", names.projects),
            ("api_key", "Key", names.api_keys),
        ):
            options = [("", "All"), *((str(key), shown) for key, shown in known.items())]
            own.append(Choice(name=name, label=label, value=asked[name], options=options))
    return (
        *common_choices(visit, period),
        *own,
        Choice(name="model", label="Model", value=asked["model"]),
        Choice(
            name="outcome",
            label="Cache",
            value=asked["outcome"],
            options=[("", "All"), ("hit", "Hit"), ("miss", "Miss")],
        ),
        Choice(
            name="kind",
            label="Kind",
            value=asked["kind"],
            options=[("", "All"), *((kind, kind) for kind in KINDS)],
        ),
        Choice(
            name="reason",
            label="Reason",
            value=asked["reason"],
            options=[("", "All"), *((reason, reason) for reason in REASONS if reason)],
        ),
    )


def _filter(visit: Visit, period: Period) -> RequestFilter:
    """Empty fields of the form are no conditions."""
    query = visit.query
    return RequestFilter(
        selection=Selection(
            tenant_ids=visit.tenant_ids,
            project_ids=query.ids("project", ProjectId) if query.one("project") else None,
            api_key_ids=query.ids("api_key", ApiKeyId) if query.one("api_key") else None,
            models=_asked(visit, "model"),
        ),
        start=period.start,
        end=period.end,
        kinds=_asked(visit, "kind"),
        is_hit=query.choice("outcome", OUTCOMES, default=""),
        miss_reasons=_asked(visit, "reason"),
    )


def _asked(visit: Visit, name: str) -> Sequence[str] | None:
    return [value for value in visit.query.many(name) if value] or None


def _cursor(place: Place) -> str:
    return f"{place.accounted_at}-{place.event_id.hex}"


def _after(visit: Visit) -> Place | None:
    cursor = visit.query.one("after")
    if not cursor:
        return None
    instant, _, event_id = cursor.partition("-")
    try:
        return Place(Microseconds(int(instant)), UUID(event_id))
    except ValueError as error:
        raise InvalidRequest("'after' is no place that a page of ours named.", param="after") from error


def _request_id(written: str) -> RequestId:
    try:
        return RequestId(UUID(written))
    except ValueError as error:
        raise NotFound("There is no such request.") from error

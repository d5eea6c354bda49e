"""Tenants, and of each its keys and budgets: made, revoked, set and removed by an admin.

Knows forms and what billing can be asked to do. Does not know SQL or HTML. A new key's text is in the
answer to the form that made it, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, TypeVar
from uuid import UUID

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from billing import instants
from billing.accounts import ApiKey, Role, Tenant, create_key, create_tenant, list_keys, revoke_key
from billing.budgets import Budget, Period, Scope, list_budgets, remove_budget, set_budget
from billing.calendar import UTC_ZONE, month, month_of, uncut
from billing.db import Database
from billing.errors import BillingError, DatabaseUnavailable
from billing.ids import ApiKeyId, BudgetId, ProjectId, TenantId
from billing.instants import Microseconds
from billing.money import parse_dollars
from billing.names import TenantNames, names_of
from billing.reports import Dimension, Selection, grouped_usage
from billing.totals import UsageTotals
from gateway.edge.errors import InvalidRequest, NotFound
from gateway.web import pages
from gateway.web.panels import (
    Cell,
    Choice,
    Field,
    Form,
    Panel,
    Table,
    button,
    code,
    columns,
    count,
    link,
    moment,
    money,
    nothing,
    percent,
    text,
)
from gateway.web.visits import Visit, Visits, refused

TENANTS: Final = "/dashboard/tenants"
NAME: Final = "name"
MAX_ROWS: Final = 200
NEVER: Final = "never"
MAX_DAYS: Final = 3_650
_PAGES_OF_A_TENANT: Final = {
    "Cache": "/dashboard/cache",
    "Usage": "/dashboard/usage",
    "Requests": "/dashboard/requests",
    "Statements": "/dashboard/statements",
}
_ONE: Final = TENANTS + "/{tenant_id}"

T = TypeVar("T")
log = structlog.get_logger("gateway.web")


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantPages:
    visits: Visits

    def routes(self) -> Sequence[BaseRoute]:
        reads = {TENANTS: (self.show_list, (NAME,)), _ONE: (self.show_one, ())}
        changes = {
            TENANTS: self.create,
            _ONE + "/keys": self.create_key,
            _ONE + "/keys/{key_id}/revoke": self.revoke_key,
            _ONE + "/budgets": self.set_budget,
            _ONE + "/budgets/{budget_id}/remove": self.remove_budget,
        }
        return (
            *(
                Route(path, self.visits.page(show, known=known, role=Role.ADMIN), methods=["GET"])
                for path, (show, known) in reads.items()
            ),
            *(
                Route(path, self.visits.form(act, role=Role.ADMIN), methods=["POST"])
                for path, act in changes.items()
            ),
        )

    async def show_list(self, visit: Visit) -> Response:
        rows = await self.visits.run(lambda: self._list(visit))
        return await self.visits.render(
            "page.html",
            visit,
            active="tenants",
            title="Tenants",
            subtitle=f"{len(visit.tenants):,} in all · month in UTC",
            action=TENANTS,
            choices=(Choice(name=NAME, label="Name contains", value=visit.query.one(NAME) or ""),),
            panels=(list_panel(rows, visit), new_tenant_panel()),
            has_chart=False,
        )

    async def create(self, visit: Visit) -> Response:
        name = visit.form.get("name", "").strip()
        tenant = await self._change(lambda: create_tenant(self._database, name=name, now=visit.now))
        log.info("dashboard_tenant_created", tenant_id=str(tenant.id), by=str(visit.principal.api_key_id))
        return pages.go_to(f"{TENANTS}/{tenant.id}")

    async def show_one(self, visit: Visit) -> Response:
        return await self._show(visit, _tenant_of(visit))

    async def create_key(self, visit: Visit) -> Response:
        tenant = _tenant_of(visit)
        label, role = visit.form.get("label", "").strip(), _role(visit.form.get("role", ""))
        expires_at = _expiry(visit.form.get("days", "").strip(), visit.now)
        key, secret = await self._change(
            lambda: create_key(
                self._database,
                tenant_id=tenant.id,
                label=label,
                hasher=self.visits.hasher,
                now=visit.now,
                role=role,
                expires_at=expires_at,
            )
        )
        log.info("dashboard_key_created", api_key_id=str(key.id), by=str(visit.principal.api_key_id))
        return await self._show(visit, tenant, secret=secret, secret_note=f"{key.label}, for {tenant.name}.")

    async def revoke_key(self, visit: Visit) -> Response:
        tenant = _tenant_of(visit)
        key_id = ApiKeyId(_id(visit.request, "key_id"))
        keys = await self.visits.run(lambda: list_keys(self._database, tenant_id=tenant.id))
        if key_id not in {key.id for key in keys}:
            raise NotFound("The tenant has no such key.")
        await self._change(lambda: revoke_key(self._database, key_id=key_id, now=visit.now))
        log.info("dashboard_key_revoked", api_key_id=str(key_id), by=str(visit.principal.api_key_id))
        return pages.go_to(f"{TENANTS}/{tenant.id}")

    async def set_budget(self, visit: Visit) -> Response:
        tenant = _tenant_of(visit)
        scope = _scope(tenant, visit.form.get("scope", ""))
        period = _period(visit.form.get("period", ""))
        limit = visit.form.get("limit", "").strip()
        await self._change(
            lambda: set_budget(
                self._database, scope, period=period, limit_pusd=parse_dollars(limit), now=visit.now
            )
        )
        return pages.go_to(f"{TENANTS}/{tenant.id}")

    async def remove_budget(self, visit: Visit) -> Response:
        tenant = _tenant_of(visit)
        budget_id = BudgetId(_id(visit.request, "budget_id"))
        budgets = await self.visits.run(
            lambda: list_budgets(self._database, tenant_id=tenant.id, now=visit.now)
        )
        if budget_id not in {budget.id for budget in budgets}:
            raise NotFound("The tenant has no such budget.")
        await self._change(lambda: remove_budget(self._database, budget_id, now=visit.now))
        return pages.go_to(f"{TENANTS}/{tenant.id}")

    @property
    def _database(self) -> Database:
        return self.visits.database

    async def _change(self, work: Callable[[], T]) -> T:
        """Raises `InvalidRequest` with billing's words where it says no."""
        try:
            return await self.visits.run(work)
        except DatabaseUnavailable:
            raise
        except BillingError as error:
            raise refused(error) from error

    async def _show(
        self, visit: Visit, tenant: Tenant, *, secret: str | None = None, secret_note: str = ""
    ) -> Response:
        def read() -> tuple[TenantNames, Sequence[ApiKey], Sequence[Budget]]:
            with self._database.read() as connection:
                names = names_of(connection, tenant.id)
            keys = list_keys(self._database, tenant_id=tenant.id)
            return names, keys, list_budgets(self._database, tenant_id=tenant.id, now=visit.now)

        names, keys, budgets = await self.visits.run(read)
        return await self.visits.render(
            "page.html",
            visit,
            active="tenants",
            title=tenant.name,
            subtitle=f"{tenant.id} · time zone {names.time_zone} · times in {visit.zone.key}",
            panels=(
                keys_panel(tenant, keys, visit),
                budgets_panel(tenant, budgets, names),
                new_key_panel(tenant),
                new_budget_panel(tenant, names, keys, visit.now),
            ),
            has_chart=False,
            secret=secret,
            secret_note=secret_note,
        )

    def _list(self, visit: Visit) -> Sequence[TenantRow]:
        asked = (visit.query.one(NAME) or "").casefold()
        listed = [one for one in visit.tenants if asked in one.name.casefold()][:MAX_ROWS]
        this_month = month(month_of(visit.now, UTC_ZONE), UTC_ZONE)
        used = grouped_usage(
            self._database,
            Selection(tenant_ids=[one.id for one in listed]),
            uncut(this_month.start, this_month.end, UTC_ZONE),
            by=[Dimension.TENANT],
        )
        totals = {one.group.tenant_id: one.totals for one in used}
        return [TenantRow(tenant=one, totals=totals.get(one.id, UsageTotals())) for one in listed]


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRow:
    """A tenant and its month so far."""

    tenant: Tenant
    totals: UsageTotals


def list_panel(rows: Sequence[TenantRow], visit: Visit) -> Panel:
    return Panel(
        key="tenants",
        title="By name",
        hint=f"The first {MAX_ROWS} whose name fits." if len(rows) == MAX_ROWS else "",
        is_wide=True,
        table=Table(
            caption="With the month so far",
            columns=columns(
                "Name", "Created", "Requests", "Input", "Hit share", "Amount", "Saved", num_texts=2
            ),
            rows=[
                (
                    text(row.tenant.name, value=str(row.tenant.id), href=f"{TENANTS}/{row.tenant.id}"),
                    moment(row.tenant.created_at, visit.zone),
                    count(row.totals.requests),
                    count(row.totals.prompt_tokens),
                    percent(row.totals.read_tokens, row.totals.prompt_tokens),
                    money(row.totals.amount_pusd),
                    money(row.totals.saved_pusd),
                )
                for row in rows
            ],
        )
        if rows
        else None,
        empty="No tenant has such a name.",
    )


def new_tenant_panel() -> Panel:
    return Panel(
        key="new-tenant",
        title="New tenant",
        form=Form(
            key="create-tenant",
            action=TENANTS,
            button="Create tenant",
            fields=(Field(name="name", label="Name", is_required=True),),
        ),
    )


def keys_panel(tenant: Tenant, keys: Sequence[ApiKey], visit: Visit) -> Panel:
    return Panel(
        key="keys",
        title="Keys",
        hint="A key works at every gateway until it is revoked or expires; then it stops within a second.",
        is_wide=True,
        table=Table(
            caption=f"Oldest first, times in {visit.zone.key}",
            columns=columns("Label", "Key", "Role", "State", "Created", "Expires", "Change", num_texts=7),
            rows=[_key_row(tenant, key, visit) for key in keys],
        )
        if keys
        else None,
        empty="No key yet.",
        links=[(label, link(path, {}, tenant=str(tenant.id))) for label, path in _PAGES_OF_A_TENANT.items()],
    )


def _key_row(tenant: Tenant, key: ApiKey, visit: Visit) -> Sequence[Cell]:
    state = _state(key, visit.now)
    return (
        text(key.label, value=str(key.id)),
        code(f"{key.prefix}…", value=key.prefix),
        text(key.role.value),
        text(state),
        moment(key.created_at, visit.zone),
        text(NEVER) if key.expires_at is None else moment(key.expires_at, visit.zone),
        button(
            "Revoke",
            f"{TENANTS}/{tenant.id}/keys/{key.id}/revoke",
            names=f"{key.label} ({key.prefix}…)",
            asks="Its requests will be refused, for good.",
        )
        if state == "works"
        else nothing(),
    )


def _state(key: ApiKey, now: Microseconds) -> str:
    if key.revoked_at is not None:
        return "revoked"
    return "expired" if key.expires_at is not None and key.expires_at <= now else "works"


def new_key_panel(tenant: Tenant) -> Panel:
    return Panel(
        key="new-key",
        title="New key",
        form=Form(
            key="create-key",
            action=f"{TENANTS}/{tenant.id}/keys",
            button="Create key",
            fields=(
                Field(name="label", label="Label", is_required=True),
                Field(
                    name="role",
                    label="Role",
                    value=Role.TENANT.value,
                    options=[
                        (Role.TENANT.value, "Tenant: its own"),
                        (Role.ADMIN.value, "Admin: everybody's"),
                    ],
                ),
                Field(name="days", label="Expires after days", hint="Empty: never."),
            ),
        ),
    )


def budgets_panel(tenant: Tenant, budgets: Sequence[Budget], names: TenantNames) -> Panel:
    rows = [
        (
            text(_scope_name(budget.scope, names), value=str(budget.id)),
            text("a month" if budget.period is Period.MONTH else "in all", value=budget.period.value),
            money(budget.limit_pusd),
            money(budget.posted_pusd),
            money(budget.reserved_pusd),
            percent(budget.posted_pusd + budget.reserved_pusd, budget.limit_pusd),
            button(
                "Remove",
                f"{TENANTS}/{tenant.id}/budgets/{budget.id}/remove",
                names=f"the budget of {_scope_name(budget.scope, names)}",
                asks="It will limit nothing any more.",
            ),
        )
        for budget in budgets
    ]
    return Panel(
        key="budgets",
        title="Budgets",
        hint=f"Months are those of {names.time_zone}. A request that could go past one is refused.",
        is_wide=True,
        table=Table(
            caption="In the period that is now",
            columns=[
                *columns("Of", "For", "Limit", "Posted", "Reserved", "Used", num_texts=2),
                *columns("Change"),
            ],
            rows=rows,
        )
        if rows
        else None,
        empty="No budget limits this tenant.",
    )


def new_budget_panel(tenant: Tenant, names: TenantNames, keys: Sequence[ApiKey], now: Microseconds) -> Panel:
    live = [key for key in keys if _state(key, now) == "works"]
    return Panel(
        key="new-budget",
        title="Set a budget",
        form=Form(
            key="set-budget",
            action=f"{TENANTS}/{tenant.id}/budgets",
            button="Set budget",
            fields=(
                Field(
                    name="scope",
                    label="Of",
                    options=[
                        ("", "Whole tenant"),
                        *((f"project:{key}", f"Project {name}") for key, name in names.projects.items()),
                        *((f"key:{key.id}", f"Key {names.api_keys[key.id]}") for key in live),
                    ],
                ),
                Field(
                    name="period",
                    label="For",
                    value=Period.MONTH.value,
                    options=[(Period.MONTH.value, "Each month"), (Period.TOTAL.value, "All time")],
                ),
                Field(name="limit", label="Limit in USD", hint="Exact, as 250.00", is_required=True),
            ),
        ),
    )


def _scope_name(scope: Scope, names: TenantNames) -> str:
    if scope.api_key_id is not None:
        return f"key {names.api_keys[scope.api_key_id]}"
    if scope.project_id is not None:
        return f"project {names.projects[scope.project_id]}"
    return "whole tenant"


def _tenant_of(visit: Visit) -> Tenant:
    wanted = _id(visit.request, "tenant_id")
    found = next((one for one in visit.tenants if one.id == wanted), None)
    if found is None:
        raise NotFound("There is no such tenant.")
    return found


def _id(request: Request, name: str) -> UUID:
    try:
        return UUID(request.path_params[name])
    except ValueError as error:
        raise NotFound("There is nothing at this address.") from error


def _role(written: str) -> Role:
    try:
        return Role(written)
    except ValueError as error:
        raise InvalidRequest("A key's role is tenant or admin.", param="role") from error


def _period(written: str) -> Period:
    try:
        return Period(written)
    except ValueError as error:
        raise InvalidRequest("A budget is for a month or in all.", param="period") from error


def _expiry(days: str, now: Microseconds) -> Microseconds | None:
    if not days:
        return None
    if not (days.isascii() and days.isdigit() and 0 < int(days[:5]) <= MAX_DAYS):
        raise InvalidRequest(f"A key lives for 1 to {MAX_DAYS} days.", param="days")
    return instants.later(now, timedelta(days=int(days)))


def _scope(tenant: Tenant, written: str) -> Scope:
    kind, _, identity = written.partition(":")
    tenant_id = TenantId(tenant.id)
    try:
        if kind == "project":
            return Scope(tenant_id=tenant_id, project_id=ProjectId(UUID(identity)))
        if kind == "key":
            return Scope(tenant_id=tenant_id, api_key_id=ApiKeyId(UUID(identity)))
    except ValueError as error:
        raise InvalidRequest("There is no such project or key.", param="scope") from error
    return Scope(tenant_id=tenant_id)

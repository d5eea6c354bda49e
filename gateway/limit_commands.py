"""The commands that say what a tenant may spend and do: budgets and limits.

Knows arguments and how a result is shown. Does not know how anything is reserved.
"""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

import typer

from billing import instants
from billing.accounts import find_tenant
from billing.budgets import Budget, Period, Scope, list_budgets, remove_budget, set_budget
from billing.ids import ApiKeyId, BudgetId, ProjectId
from billing.limits import ALL_BASIS_POINTS, Limits, limits_of, set_limits
from billing.money import format_basis_points, format_dollars, parse_dollars
from billing.names import TenantNames, names_of
from gateway.terminal import TenantOption, open_current_database, print_table

WHOLE_TENANT = "all keys"

budgets = typer.Typer(no_args_is_help=True, help="What tenants, projects and keys may spend.")
limits = typer.Typer(no_args_is_help=True, help="How much tenants and keys may ask for at a time.")

KeyOption = Annotated[UUID | None, typer.Option(help="A key's id, as keys list shows it.")]
RateOption = Annotated[int | None, typer.Option(min=1, help="Left out: no limit.")]


@budgets.command("set")
def budgets_set(
    tenant: TenantOption,
    limit: Annotated[str, typer.Option(help="Dollars, as 25 or 0.50.")],
    period: Annotated[
        Period, typer.Option(help="Each month of the tenant's zone, or for ever.")
    ] = Period.MONTH,
    project: Annotated[UUID | None, typer.Option(help="A project's id.")] = None,
    key: KeyOption = None,
) -> None:
    """Make a budget, or change its limit from now on."""
    with open_current_database() as database:
        scope = Scope(
            tenant_id=find_tenant(database, name=tenant).id,
            project_id=None if project is None else ProjectId(project),
            api_key_id=None if key is None else ApiKeyId(key),
        )
        made = set_budget(database, scope, period=period, limit_pusd=parse_dollars(limit), now=instants.now())
    typer.echo(made.id)


@budgets.command("list")
def budgets_list(tenant: TenantOption) -> None:
    """Show a tenant's budgets, and what stands against them in the period that is now."""
    with open_current_database() as database:
        tenant_id = find_tenant(database, name=tenant).id
        found = list_budgets(database, tenant_id=tenant_id, now=instants.now())
        with database.read() as connection:
            names = names_of(connection, tenant_id)
    header = ("id", "for", "period", "limit", "spent", "reserved", "left")
    print_table(header, [_budget_row(one, names) for one in found])


@budgets.command("remove")
def budgets_remove(budget_id: UUID) -> None:
    """Let a budget limit nothing any more. BUDGET_ID is what `budgets list` shows."""
    with open_current_database() as database:
        remove_budget(database, BudgetId(budget_id), now=instants.now())
    typer.echo("removed")


@limits.command("set")
def limits_set(
    tenant: TenantOption,
    key: KeyOption = None,
    requests_per_minute: RateOption = None,
    tokens_per_minute: RateOption = None,
    concurrent_requests: RateOption = None,
    cached_weight: Annotated[
        int, typer.Option(help="Of a cached token, in basis points; 0: it does not count.")
    ] = ALL_BASIS_POINTS,
) -> None:
    """Set all limits of a tenant, or of one key, which is then bound by those alone."""
    chosen = Limits(
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        concurrent_requests=concurrent_requests,
        cached_weight_basis_points=cached_weight,
    )
    with open_current_database() as database:
        set_limits(
            database,
            chosen,
            tenant_id=find_tenant(database, name=tenant).id,
            api_key_id=None if key is None else ApiKeyId(key),
            now=instants.now(),
        )
    typer.echo("set")


@limits.command("show")
def limits_show(tenant: TenantOption) -> None:
    """Show a tenant's limits, and those of its keys that have their own."""
    with open_current_database() as database:
        tenant_id = find_tenant(database, name=tenant).id
        found = limits_of(database, tenant_id=tenant_id)
        with database.read() as connection:
            names = names_of(connection, tenant_id)
    header = ("for", "requests/min", "tokens/min", "concurrent", "weight of cached")
    rows = [
        (
            WHOLE_TENANT if key is None else names.api_keys[key],
            _or_none(one.requests_per_minute),
            _or_none(one.tokens_per_minute),
            _or_none(one.concurrent_requests),
            f"{format_basis_points(one.cached_weight_basis_points)} %",
        )
        for key, one in found.items()
    ]
    print_table(header, rows)


def _budget_row(budget: Budget, names: TenantNames) -> tuple[str, ...]:
    amounts = (budget.limit_pusd, budget.posted_pusd, budget.reserved_pusd, budget.left_pusd)
    return (
        str(budget.id),
        _owner(budget.scope, names),
        budget.period.value,
        *(format_dollars(amount) for amount in amounts),
    )


def _owner(scope: Scope, names: TenantNames) -> str:
    if scope.api_key_id is not None:
        return names.api_keys[scope.api_key_id]
    return WHOLE_TENANT if scope.project_id is None else names.projects[scope.project_id]


def _or_none(limit: int | None) -> str:
    return "none" if limit is None else str(limit)

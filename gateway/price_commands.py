"""The commands about prices: what is in force, what a new book changes, what it would have cost.

Knows arguments and how a result is shown. Does not know the rules of a book.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import typer

from billing import instants
from billing.accounts import find_tenant
from billing.db import Database
from billing.ids import TenantId
from billing.instants import Microseconds
from billing.money import format_basis_points, format_dollars
from billing.price_sheet import ANY_MODEL, PriceSheet, load_price_sheet
from billing.prices import PriceVersion, price_history, publish, set_discount
from billing.usage import TokenClass
from billing.what_if import Rerated, what_if
from gateway.terminal import TenantOption, open_current_database, print_table, shown

DATE_FORMATS: Final = ["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"]
EVERY_OTHER: Final = "* (every other)"

prices = typer.Typer(no_args_is_help=True, help="What tokens cost, from when on.")

BookArgument = Annotated[Path, typer.Argument(help="A price book in YAML.")]
SinceOption = Annotated[
    datetime | None, typer.Option("--effective-from", formats=DATE_FORMATS, help="UTC; left out: at once.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One unit of a book beside the one in force; None where there was none."""

    model: str
    token_class: TokenClass
    before_pusd: int | None
    after_pusd: int


@prices.command("show")
def prices_show(
    at: Annotated[datetime | None, typer.Option(formats=DATE_FORMATS, help="UTC; left out: now.")] = None,
    tenant: Annotated[str | None, typer.Option(help="A tenant's own prices instead of the list.")] = None,
) -> None:
    """Show the units in force, in dollars for a million tokens."""
    instant = _instant(at) or instants.now()
    with open_current_database() as database:
        versions = _in_force(database, _tenant_id(database, tenant), instant)
    rows = [
        (_model(one.model), one.token_class.value, _per_million(one.unit_pusd), shown(one.effective_from))
        for one in versions
    ]
    print_table(("model", "class", "USD for a million", "since (UTC)"), rows)


@prices.command("load")
def prices_load(book: BookArgument, effective_from: SinceOption = None) -> None:
    """Check a book and publish what it changes, for everybody or for the tenant that it names."""
    sheet = load_price_sheet(book)
    with open_current_database() as database:
        added = publish(database, sheet, clock=instants.now, effective_from=_instant(effective_from))
    typer.echo(f"{added} prices of {sheet.name} are published")


@prices.command("diff")
def prices_diff(book: BookArgument) -> None:
    """Check a book and show what it would change now, line by line. Publishes nothing."""
    sheet = load_price_sheet(book)
    with open_current_database() as database:
        changes = _changes(database, sheet)
    rows = [
        (
            _model(one.model),
            one.token_class.value,
            "none" if one.before_pusd is None else _per_million(one.before_pusd),
            _per_million(one.after_pusd),
        )
        for one in changes
    ]
    print_table(("model", "class", "in force", "in the book"), rows)


@prices.command("what-if")
def prices_what_if(
    book: BookArgument,
    start: Annotated[datetime, typer.Option(formats=DATE_FORMATS, help="UTC.")],
    end: Annotated[datetime | None, typer.Option(formats=DATE_FORMATS, help="UTC; left out: now.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: exact, in picodollars.")] = False,
) -> None:
    """Show what a past window would have cost under a book, exactly. Publishes nothing."""
    sheet = load_price_sheet(book)
    with open_current_database() as database:
        until = _instant(end) or instants.now()
        rerated = what_if(database, sheet, start=_required(start), end=until)
    if as_json:
        typer.echo(json.dumps({"book": sheet.name, "lines": [_fields(one) for one in rerated]}, indent=1))
        return
    print_table(
        ("tenant", "model", "class", "quantity", "was (USD)", "would be (USD)", "difference"),
        [*map(_cells, rerated), _total(rerated)],
    )


def discount(
    tenant: TenantOption,
    basis_points: Annotated[int, typer.Option(help="1250 is 12.5 %, 0 is none.")],
    effective_from: SinceOption = None,
) -> None:
    """Give a tenant a discount on every unit from an instant on."""
    with open_current_database() as database:
        since = set_discount(
            database,
            tenant_id=find_tenant(database, name=tenant).id,
            basis_points=basis_points,
            clock=instants.now,
            effective_from=_instant(effective_from),
        )
    typer.echo(f"{tenant}: {format_basis_points(basis_points)} % from {shown(since)} UTC on")


def _instant(given: datetime | None) -> Microseconds | None:
    return None if given is None else _required(given)


def _required(given: datetime) -> Microseconds:
    return instants.from_datetime(given.replace(tzinfo=UTC))


def _tenant_id(database: Database, name: str | None) -> TenantId | None:
    return None if name is None else find_tenant(database, name=name).id


def _in_force(database: Database, tenant_id: TenantId | None, at: Microseconds) -> list[PriceVersion]:
    latest = {
        (one.model, one.token_class): one
        for one in price_history(database, tenant_id=tenant_id)
        if one.effective_from <= at
    }
    order = list(TokenClass)
    return sorted(latest.values(), key=lambda one: (one.model, order.index(one.token_class)))


def _changes(database: Database, sheet: PriceSheet) -> list[Change]:
    tenant_id = _tenant_id(database, sheet.tenant)
    now = {
        (one.model, one.token_class): one.unit_pusd for one in _in_force(database, tenant_id, instants.now())
    }
    return [
        Change(
            model=model, token_class=token_class, before_pusd=now.get((model, token_class)), after_pusd=unit
        )
        for model, units in sorted(sheet.units.items())
        for token_class, unit in units.items()
        if now.get((model, token_class)) != unit
    ]


def _model(name: str) -> str:
    return EVERY_OTHER if name == ANY_MODEL else name


def _per_million(unit_pusd: int) -> str:
    """Picodollars a token are micro-dollars a million tokens."""
    return format_dollars(unit_pusd * 1_000_000)


def _total(rerated: Sequence[Rerated]) -> tuple[str, ...]:
    before, after = (sum(getattr(one, name) for one in rerated) for name in ("before_pusd", "after_pusd"))
    return ("all", "", "", "", format_dollars(before), format_dollars(after), format_dollars(after - before))


def _cells(one: Rerated) -> tuple[str, ...]:
    return (
        one.tenant,
        one.model,
        one.token_class.value,
        f"{one.quantity:,}",
        format_dollars(one.before_pusd),
        format_dollars(one.after_pusd),
        format_dollars(one.difference_pusd),
    )


def _fields(one: Rerated) -> dict[str, object]:
    return {
        "tenant": one.tenant,
        "model": one.model,
        "token_class": one.token_class.value,
        "quantity": one.quantity,
        "before_pusd": one.before_pusd,
        "after_pusd": one.after_pusd,
        "difference_pusd": one.difference_pusd,
    }

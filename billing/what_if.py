"""What a past window would have cost under another book, exactly.

Knows ledger lines and checked books. Changes nothing.

A line is quantity times unit, so lines of one class with one discount are re-rated by the sum of
their quantities. Corrections are lines too. What the book does not name keeps its amount; a
book for everybody leaves alone what a tenant pays by prices of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, Select, select

from billing import schema
from billing.db import Database
from billing.ids import TenantId
from billing.instants import Microseconds
from billing.price_sheet import ANY_MODEL, PriceSheet
from billing.prices import TIERS, discounted, require_tenant
from billing.reports import require_forwards
from billing.sums import exact_sum, exact_sums
from billing.usage import TokenClass

_events: Final = schema.usage_events.c
_lines: Final = schema.ledger_lines.c
_versions: Final = schema.price_versions.c


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerated:
    """One tenant, model and class: tokens, and picodollars as they were and as they would have been."""

    tenant: str
    model: str
    token_class: TokenClass
    quantity: int
    before_pusd: int
    after_pusd: int

    @property
    def difference_pusd(self) -> int:
        return self.after_pusd - self.before_pusd


def what_if(db: Database, sheet: PriceSheet, *, start: Microseconds, end: Microseconds) -> Sequence[Rerated]:
    """Everything accounted to `[start, end)`, re-rated. Raises InvalidPeriod or UnknownTenant."""
    require_forwards(start, end)
    apart = {
        "tenant_id": _events.tenant_id,
        "tenant": schema.tenants.c.name,
        "model": _events.model,
        "token_class": _lines.token_class,
        "discount": _lines.discount_basis_points,
        "owner": _versions.tenant_id,
    }
    rows = (
        schema.ledger_lines.join(schema.usage_events, _events.id == _lines.event_id)
        .join(schema.tenants, schema.tenants.c.id == _events.tenant_id)
        .join(schema.price_versions, _versions.id == _lines.price_version_id)
    )

    def build(sums: Sequence[ColumnElement[Any]]) -> Select[Any]:
        chosen = select(*(column.label(name) for name, column in apart.items()), *sums).select_from(rows)
        within = _events.accounted_at_us.between(start, end - 1)
        return chosen.where(within).group_by(*apart.values())

    sums = {"quantity": _lines.quantity_tokens, "before": _lines.amount_pusd}
    with db.read() as connection:
        only = None if sheet.tenant is None else require_tenant(connection, sheet.tenant)
        found: dict[tuple[str, str, TokenClass], Rerated] = {}
        for row in exact_sums(connection, sums, build):
            one = _rerated(row, sheet, only, exact_sum(row, "quantity"), exact_sum(row, "before"))
            key = (one.tenant, one.model, one.token_class)
            found[key] = _joined(found[key], one) if key in found else one
    return [found[key] for key in sorted(found)]


def _rerated(row: Any, sheet: PriceSheet, only: TenantId | None, quantity: int, before: int) -> Rerated:
    token_class = TokenClass(row["token_class"])
    unit = _unit(sheet, row["model"], token_class)
    is_concerned = row["owner"] is None if only is None else row["tenant_id"] == only
    after = before
    if is_concerned and unit is not None:
        after = quantity * discounted(unit, row["discount"])
    return Rerated(
        tenant=row["tenant"],
        model=row["model"],
        token_class=token_class,
        quantity=quantity,
        before_pusd=before,
        after_pusd=after,
    )


def _unit(sheet: PriceSheet, model: str, token_class: TokenClass) -> int | None:
    units = sheet.units.get(model) or sheet.units.get(ANY_MODEL) or {}
    unit = units.get(token_class)
    return units.get(TokenClass.READ) if unit is None and token_class in TIERS else unit


def _joined(one: Rerated, other: Rerated) -> Rerated:
    return Rerated(
        tenant=one.tenant,
        model=one.model,
        token_class=one.token_class,
        quantity=one.quantity + other.quantity,
        before_pusd=one.before_pusd + other.before_pusd,
        after_pusd=one.after_pusd + other.after_pusd,
    )

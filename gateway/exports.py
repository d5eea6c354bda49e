"""Which columns an export has.

Knows names, order and kinds: they are promises to whoever reads the files. Does not know
formats or tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from billing.exports import LedgerRow
from billing.reports import CURRENCY
from gateway.tables import Cell, Kind, Layout

LEDGER: Final = Layout(
    columns={
        "tenant_id": Kind.TEXT,
        "tenant": Kind.TEXT,
        "event_id": Kind.TEXT,
        "request_id": Kind.TEXT,
        "kind": Kind.TEXT,
        "admitted_at": Kind.INSTANT,
        "accounted_at": Kind.INSTANT,
        "project_id": Kind.TEXT,
        "project": Kind.TEXT,
        "api_key_id": Kind.TEXT,
        "api_key": Kind.TEXT,
        "model": Kind.TEXT,
        "token_class": Kind.TEXT,
        "quantity": Kind.INTEGER,
        "list_unit_pusd": Kind.INTEGER,
        "discount_basis_points": Kind.INTEGER,
        "unit_pusd": Kind.INTEGER,
        "amount": Kind.MONEY,
        "amount_without_cache": Kind.MONEY,
        "currency": Kind.TEXT,
        "price_version_id": Kind.TEXT,
    },
    summed="amount",
)


def ledger_cells(rows: Iterable[LedgerRow]) -> Iterator[tuple[Cell, ...]]:
    """Each row's cells, in the order of `LEDGER`."""
    for row in rows:
        yield (
            str(row.tenant_id),
            row.tenant,
            str(row.event_id),
            str(row.request_id),
            row.kind,
            row.admitted_at,
            row.accounted_at,
            None if row.project_id is None else str(row.project_id),
            row.project,
            str(row.api_key_id),
            row.api_key,
            row.model,
            row.token_class,
            row.quantity,
            row.list_unit_pusd,
            row.discount_basis_points,
            row.unit_pusd,
            row.amount_pusd,
            row.amount_without_cache_pusd,
            CURRENCY,
            str(row.price_version_id),
        )

"""Which periods are closed, and for how long they stay open.

Knows the end of each tenant's last statement. Does not know what a statement says.

A period is closed by its statement. What is accounted to a closed period would be on no
statement, so a late event is accounted to the next open one: to the instant at which the
last closed one ended.
"""

from __future__ import annotations

from collections.abc import Collection
from uuid import UUID

from sqlalchemy import Connection, func, select

from billing import schema
from billing.instants import Microseconds


def hold_periods(connection: Connection, tenant_ids: Collection[UUID]) -> dict[UUID, Microseconds]:
    """The end of each tenant's last closed period. None of them closes until this transaction ends.

    A statement is issued under the tenant's row lock; many posters hold it together.
    """
    tenants, statements = schema.tenants.c, schema.statements.c
    held = select(tenants.id).where(tenants.id.in_(tenant_ids)).order_by(tenants.id)
    # SQLite has one writer anyway, and no such clause.
    connection.execute(held.with_for_update(read=True))
    closed = (
        select(statements.tenant_id, func.max(statements.end_us))
        .where(statements.tenant_id.in_(tenant_ids))
        .group_by(statements.tenant_id)
    )
    return {tenant_id: Microseconds(end) for tenant_id, end in connection.execute(closed)}

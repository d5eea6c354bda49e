"""What people call a tenant's ids, and where its clocks are.

Knows names as they are now: labels and projects may have been renamed since. Does not know usage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, select

from billing import schema
from billing.errors import UnknownTenant
from billing.ids import ApiKeyId, ProjectId, TenantId


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantNames:
    """`api_keys` are labels with the part of the key that may be shown: a label can have had several keys."""

    tenant: str
    time_zone: str
    projects: Mapping[ProjectId, str]
    api_keys: Mapping[ApiKeyId, str]


def names_of(connection: Connection, tenant_id: TenantId) -> TenantNames:
    """Raises UnknownTenant."""
    tenants, projects, keys = schema.tenants.c, schema.projects.c, schema.api_keys.c
    tenant = connection.execute(
        select(tenants.name, tenants.time_zone).where(tenants.id == tenant_id)
    ).one_or_none()
    if tenant is None:
        raise UnknownTenant(f"no tenant has the id {tenant_id}")
    named = connection.execute(select(projects.id, projects.name).where(projects.tenant_id == tenant_id))
    labelled = connection.execute(select(keys.id, keys.label, keys.prefix).where(keys.tenant_id == tenant_id))
    return TenantNames(
        tenant=tenant.name,
        time_zone=tenant.time_zone,
        projects={ProjectId(row.id): row.name for row in named},
        api_keys={ApiKeyId(row.id): f"{row.label} ({row.prefix}…)" for row in labelled},
    )

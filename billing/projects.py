"""Projects: what a tenant's keys, and so its usage and budgets, can be told apart by.

Knows names and their tenants. Does not know usage. A key belongs to one project of its
tenant, or to none, for as long as it lives. States: `open → archived`; an archived
project keeps its keys and its history, and gets no new key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update
from sqlalchemy.exc import IntegrityError

from billing import schema
from billing.accounts import require_name
from billing.db import Database
from billing.errors import NameTaken, UnknownProject, UnknownTenant
from billing.ids import ProjectId, TenantId, new_id
from billing.instants import Microseconds

_projects = schema.projects.c


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    id: ProjectId
    tenant_id: TenantId
    name: str
    created_at: Microseconds
    archived_at: Microseconds | None


def create_project(db: Database, *, tenant_id: TenantId, name: str, now: Microseconds) -> Project:
    """Raises InvalidName, NameTaken (also by an archived one) or UnknownTenant."""
    require_name("a project's name", name)
    project = Project(
        id=ProjectId(new_id()), tenant_id=tenant_id, name=name, created_at=now, archived_at=None
    )
    try:
        with db.write() as connection:
            tenant = select(schema.tenants.c.id).where(schema.tenants.c.id == tenant_id)
            if connection.execute(tenant).one_or_none() is None:
                raise UnknownTenant(f"no tenant has the id {tenant_id}")
            connection.execute(
                insert(schema.projects).values(
                    id=project.id, tenant_id=tenant_id, name=name, created_at_us=now, archived_at_us=None
                )
            )
    except IntegrityError as error:
        raise NameTaken(f"the tenant has a project named {name!r}") from error
    return project


def find_project(db: Database, *, tenant_id: TenantId, name: str) -> Project:
    """Raises UnknownProject."""
    with db.read() as connection:
        return _named(connection, tenant_id, name)


def list_projects(db: Database, *, tenant_id: TenantId) -> Sequence[Project]:
    """By name, archived ones included."""
    chosen = select(schema.projects).where(_projects.tenant_id == tenant_id).order_by(_projects.name)
    with db.read() as connection:
        return [_project(row) for row in connection.execute(chosen)]


def archive_project(db: Database, *, tenant_id: TenantId, name: str, now: Microseconds) -> None:
    """Idempotent: the first time stands. Raises UnknownProject."""
    with db.write() as connection:
        project = _named(connection, tenant_id, name)
        open_one = update(schema.projects).where(
            _projects.id == project.id, _projects.archived_at_us.is_(None)
        )
        connection.execute(open_one.values(archived_at_us=now))


def _named(connection: Connection, tenant_id: TenantId, name: str) -> Project:
    chosen = select(schema.projects).where(_projects.tenant_id == tenant_id, _projects.name == name)
    row = connection.execute(chosen).one_or_none()
    if row is None:
        raise UnknownProject(f"the tenant has no project named {name!r}")
    return _project(row)


def _project(row: Row[Any]) -> Project:
    return Project(
        id=ProjectId(row.id),
        tenant_id=TenantId(row.tenant_id),
        name=row.name,
        created_at=row.created_at_us,
        archived_at=row.archived_at_us,
    )

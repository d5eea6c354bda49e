"""Tenants and API keys.

Knows names, roles, and keyed digests of keys. Does not know HTTP, and never
stores a key: only its digest and the part that may be shown.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final, NewType

from sqlalchemy import Connection, Row, insert, select, update
from sqlalchemy.exc import IntegrityError

from billing import instants, schema
from billing.calendar import zone_named
from billing.db import Database
from billing.errors import InvalidName, MalformedKey, NameTaken, UnknownKey, UnknownProject, UnknownTenant
from billing.ids import ApiKeyId, ProjectId, TenantId, new_id
from billing.instants import Microseconds

MAX_NAME_CHARACTERS: Final = 128
MIN_SECRET_BYTES: Final = 32

_ALPHABET: Final = string.ascii_letters + string.digits
_SHOWN_CHARACTERS: Final = 8
_PREFIX_CHARACTERS: Final = len("hs-") + _SHOWN_CHARACTERS
# 43 of 62 characters carry 256 bits.
_SECRET_CHARACTERS: Final = 43
_KEY_FORM: Final = re.compile(f"hs-[A-Za-z0-9]{{{_SHOWN_CHARACTERS}}}-[A-Za-z0-9]{{{_SECRET_CHARACTERS}}}")
# Separates this use of the deployment secret from every other.
_KEY_DOMAIN: Final = b"headstart api key\0"

KeyDigest = NewType("KeyDigest", bytes)
"""HMAC-SHA256 of a key under the deployment secret: what is at rest, and what caches are keyed by."""


class Role(StrEnum):
    """What a key may ask for: its tenant's own business, or everybody's."""

    TENANT = "tenant"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    id: TenantId
    name: str
    created_at: Microseconds
    time_zone: str = "UTC"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key without its secret. `prefix` (`hs-` and eight characters) is all of it that can be shown.

    `replaced_by` is the key that took its label when it was rotated: it lives on until it expires.
    """

    id: ApiKeyId
    tenant_id: TenantId
    label: str
    prefix: str
    role: Role
    created_at: Microseconds
    expires_at: Microseconds | None
    revoked_at: Microseconds | None
    project_id: ProjectId | None = None
    replaced_by: ApiKeyId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Who is asking, as proved by a key."""

    tenant_id: TenantId
    tenant_name: str
    api_key_id: ApiKeyId
    role: Role
    expires_at: Microseconds | None
    project_id: ProjectId | None = None


class KeyHasher:
    """Digests keys under the deployment secret (at least 32 bytes)."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < MIN_SECRET_BYTES:
            raise ValueError(f"a deployment secret has at least {MIN_SECRET_BYTES} bytes")
        self._secret = bytes(secret)

    def __repr__(self) -> str:
        return "KeyHasher(<secret>)"

    def digest(self, presented: str) -> KeyDigest:
        """Raises MalformedKey when the text (any text, also hostile) has not the form of a key."""
        if not _KEY_FORM.fullmatch(presented):
            raise MalformedKey("an API key looks like hs-XXXXXXXX-…")
        return KeyDigest(hmac.digest(self._secret, _KEY_DOMAIN + presented.encode("ascii"), hashlib.sha256))


def create_tenant(db: Database, *, name: str, now: Microseconds) -> Tenant:
    """Raises InvalidName or NameTaken."""
    require_name("a tenant's name", name)
    tenant = Tenant(id=TenantId(new_id()), name=name, created_at=now)
    try:
        with db.write() as connection:
            connection.execute(
                insert(schema.tenants).values(
                    id=tenant.id, name=name, time_zone="UTC", currency="USD", created_at_us=now
                )
            )
    except IntegrityError as error:
        raise NameTaken(f"there is a tenant named {name!r}") from error
    return tenant


def set_zone(db: Database, *, tenant_id: TenantId, time_zone: str, now: Microseconds) -> None:
    """Where the tenant's days and months begin from now on. Raises UnknownZone or UnknownTenant.

    Statements that were issued keep theirs.
    """
    zone_named(time_zone)
    tenants = schema.tenants
    with db.write() as connection:
        since = {"time_zone": time_zone, "zone_since_us": now}
        changed = update(tenants).where(tenants.c.id == tenant_id).values(since)
        if connection.execute(changed).rowcount == 0:
            raise UnknownTenant(f"no tenant has the id {tenant_id}")


def find_tenant(db: Database, *, name: str) -> Tenant:
    """Raises UnknownTenant."""
    with db.read() as connection:
        row = connection.execute(select(schema.tenants).where(schema.tenants.c.name == name)).one_or_none()
    if row is None:
        raise UnknownTenant(f"no tenant is named {name!r}")
    return _tenant(row)


def list_tenants(db: Database) -> Sequence[Tenant]:
    """By name."""
    with db.read() as connection:
        rows = connection.execute(select(schema.tenants).order_by(schema.tenants.c.name)).all()
    return [_tenant(row) for row in rows]


def create_key(
    db: Database,
    *,
    tenant_id: TenantId,
    label: str,
    hasher: KeyHasher,
    now: Microseconds,
    role: Role = Role.TENANT,
    expires_at: Microseconds | None = None,
    project_id: ProjectId | None = None,
    text: str | None = None,
) -> tuple[ApiKey, str]:
    """A new key, and its full text, which exists nowhere else and is shown once; or one whose text
    was made elsewhere by `generate_key`.

    Raises InvalidName, NameTaken (a live key of the tenant has the label, or any key ever had the text),
    MalformedKey, UnknownTenant or UnknownProject (also of an archived one).
    """
    require_name("a key's label", label)
    prefix, full = generate_key() if text is None else (text[:_PREFIX_CHARACTERS], text)
    key = ApiKey(
        id=ApiKeyId(new_id()),
        tenant_id=tenant_id,
        label=label,
        prefix=prefix,
        role=role,
        created_at=now,
        expires_at=expires_at,
        revoked_at=None,
        project_id=project_id,
    )
    try:
        with db.write() as connection:
            if project_id is not None:
                _require_open_project(connection, tenant_id, project_id)
            tenant = select(schema.tenants.c.id).where(schema.tenants.c.id == tenant_id)
            if connection.execute(tenant).one_or_none() is None:
                raise UnknownTenant(f"no tenant has the id {tenant_id}")
            connection.execute(insert(schema.api_keys).values(_key_values(key, hasher.digest(full))))
    except IntegrityError as error:
        raise NameTaken(f"the tenant has a live key labelled {label!r}") from error
    return key, full


def rotate_key(
    db: Database, *, key_id: ApiKeyId, hasher: KeyHasher, now: Microseconds, grace: timedelta
) -> tuple[ApiKey, str]:
    """A successor with the key's label, role, project and expiry, and its full text. The old one works until
    `now + grace`, or until it expires anyway.

    Raises UnknownKey when there is no such key, or it is revoked, expired or was replaced before.
    """
    keys = schema.api_keys
    prefix, full = generate_key()
    with db.write() as connection:
        row = connection.execute(select(keys).where(keys.c.id == key_id).with_for_update()).one_or_none()
        if row is None or row.revoked_at_us is not None or row.replaced_by is not None:
            raise UnknownKey(f"no live key has the id {key_id}")
        old = _api_key(row)
        if old.expires_at is not None and old.expires_at <= now:
            raise UnknownKey(f"the key {key_id} has expired")
        until = instants.later(now, grace)
        new = replace(old, id=ApiKeyId(new_id()), prefix=prefix, created_at=now)
        ends = until if old.expires_at is None else min(until, old.expires_at)
        # Under a label that nobody has, until the old key has left it.
        digest = hasher.digest(full)
        connection.execute(insert(keys).values(_key_values(replace(new, label=str(new.id)), digest)))
        connection.execute(
            update(keys).where(keys.c.id == key_id).values(replaced_by=new.id, expires_at_us=ends)
        )
        connection.execute(update(keys).where(keys.c.id == new.id).values(label=old.label))
    return new, full


def list_keys(db: Database, *, tenant_id: TenantId) -> Sequence[ApiKey]:
    """Oldest first, revoked ones included."""
    keys = schema.api_keys
    chosen = select(keys).where(keys.c.tenant_id == tenant_id).order_by(keys.c.created_at_us, keys.c.id)
    with db.read() as connection:
        rows = connection.execute(chosen).all()
    return [_api_key(row) for row in rows]


def revoke_key(db: Database, *, key_id: ApiKeyId, now: Microseconds) -> None:
    """Idempotent: the first revocation stands. Raises UnknownKey."""
    keys = schema.api_keys
    with db.write() as connection:
        live = update(keys).where(keys.c.id == key_id, keys.c.revoked_at_us.is_(None))
        if connection.execute(live.values(revoked_at_us=now)).rowcount == 1:
            return
        if connection.execute(select(keys.c.id).where(keys.c.id == key_id)).one_or_none() is None:
            raise UnknownKey(f"no key has the id {key_id}")


def authenticate(db: Database, digest: KeyDigest, *, now: Microseconds) -> Principal | None:
    """None when no key has the digest, or when it is revoked or expired at `now`."""
    keys, tenants = schema.api_keys, schema.tenants
    chosen = (
        select(
            keys.c.id, keys.c.tenant_id, keys.c.project_id, tenants.c.name, keys.c.role, keys.c.expires_at_us
        )
        .join(tenants, tenants.c.id == keys.c.tenant_id)
        .where(keys.c.digest == digest, keys.c.revoked_at_us.is_(None))
        .where(keys.c.expires_at_us.is_(None) | (keys.c.expires_at_us > now))
    )
    with db.read() as connection:
        row = connection.execute(chosen).one_or_none()
    if row is None:
        return None
    return Principal(
        tenant_id=TenantId(row.tenant_id),
        tenant_name=row.name,
        api_key_id=ApiKeyId(row.id),
        role=Role(row.role),
        expires_at=row.expires_at_us,
        project_id=row.project_id,
    )


def generate_key() -> tuple[str, str]:
    """The part that may be shown, and the full key."""
    prefix = "hs-" + _random_text(_SHOWN_CHARACTERS)
    return prefix, f"{prefix}-{_random_text(_SECRET_CHARACTERS)}"


def _random_text(num_characters: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(num_characters))


def require_name(what: str, name: str) -> None:
    """Printable refuses control characters and lone surrogates, which neither database would take."""
    if not (0 < len(name) <= MAX_NAME_CHARACTERS and name.isprintable() and name == name.strip()):
        raise InvalidName(
            f"{what} has 1 to {MAX_NAME_CHARACTERS} printable characters, with no space at either end"
        )


def _require_open_project(connection: Connection, tenant_id: TenantId, project_id: ProjectId) -> None:
    projects = schema.projects.c
    chosen = select(projects.id).where(
        projects.id == project_id, projects.tenant_id == tenant_id, projects.archived_at_us.is_(None)
    )
    if connection.execute(chosen).one_or_none() is None:
        raise UnknownProject(f"the tenant has no open project with the id {project_id}")


def _tenant(row: Row[Any]) -> Tenant:
    return Tenant(id=TenantId(row.id), name=row.name, created_at=row.created_at_us, time_zone=row.time_zone)


def _api_key(row: Row[Any]) -> ApiKey:
    return ApiKey(
        id=ApiKeyId(row.id),
        tenant_id=TenantId(row.tenant_id),
        label=row.label,
        prefix=row.prefix,
        role=Role(row.role),
        created_at=row.created_at_us,
        expires_at=row.expires_at_us,
        revoked_at=row.revoked_at_us,
        project_id=row.project_id,
        replaced_by=row.replaced_by,
    )


def _key_values(key: ApiKey, digest: KeyDigest) -> dict[str, object]:
    return {
        "id": key.id,
        "tenant_id": key.tenant_id,
        "project_id": key.project_id,
        "label": key.label,
        "prefix": key.prefix,
        "digest": digest,
        "role": key.role.value,
        "created_at_us": key.created_at,
        "expires_at_us": key.expires_at,
        "revoked_at_us": key.revoked_at,
        "replaced_by": key.replaced_by,
    }

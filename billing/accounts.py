"""Tenants and API keys.

Knows names, roles, and keyed digests of keys. Does not know HTTP, and never
stores a key: only its digest and the part that may be shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from billing.db import Database
from billing.ids import ApiKeyId, TenantId
from billing.instants import Microseconds

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key without its secret. `prefix` (`hs-` and eight characters) is all of it that can be shown."""

    id: ApiKeyId
    tenant_id: TenantId
    label: str
    prefix: str
    role: Role
    created_at: Microseconds
    expires_at: Microseconds | None
    revoked_at: Microseconds | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Who is asking, as proved by a key."""

    tenant_id: TenantId
    tenant_name: str
    api_key_id: ApiKeyId
    role: Role
    expires_at: Microseconds | None


class KeyHasher:
    """Digests keys under the deployment secret (at least 32 bytes)."""

    def __init__(self, secret: bytes) -> None:
        raise NotImplementedError

    def digest(self, presented: str) -> KeyDigest:
        """Raises MalformedKey when the text (any text, also hostile) has not the form of a key."""
        raise NotImplementedError


def create_tenant(db: Database, *, name: str, now: Microseconds) -> Tenant:
    """Raises InvalidName or NameTaken."""
    raise NotImplementedError


def find_tenant(db: Database, *, name: str) -> Tenant:
    """Raises UnknownTenant."""
    raise NotImplementedError


def list_tenants(db: Database) -> Sequence[Tenant]:
    """By name."""
    raise NotImplementedError


def create_key(
    db: Database,
    *,
    tenant_id: TenantId,
    label: str,
    hasher: KeyHasher,
    now: Microseconds,
    role: Role = Role.TENANT,
    expires_at: Microseconds | None = None,
) -> tuple[ApiKey, str]:
    """A new key, and its full text, which exists nowhere else and is shown once.

    Raises InvalidName, NameTaken (a live key of the tenant has the label) or UnknownTenant.
    """
    raise NotImplementedError


def list_keys(db: Database, *, tenant_id: TenantId) -> Sequence[ApiKey]:
    """Oldest first, revoked ones included."""
    raise NotImplementedError


def revoke_key(db: Database, *, key_id: ApiKeyId, now: Microseconds) -> None:
    """Idempotent: the first revocation stands. Raises UnknownKey."""
    raise NotImplementedError


def authenticate(db: Database, digest: KeyDigest, *, now: Microseconds) -> Principal | None:
    """None when no key has the digest, or when it is revoked or expired."""
    raise NotImplementedError

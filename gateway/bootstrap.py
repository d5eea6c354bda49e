"""The first start: a home, a schema, prices, a tenant and a key, so that a fresh machine can be used at once.

Knows billing's calls and the file that keeps the first key. Does not know
HTTP or workers.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from billing import instants
from billing.accounts import (
    KeyHasher,
    Role,
    Tenant,
    authenticate,
    create_key,
    create_tenant,
    list_keys,
    list_tenants,
    revoke_key,
)
from billing.db import Database, migrate
from billing.errors import MalformedKey, NameTaken
from billing.price_sheet import default_price_sheet
from billing.prices import ensure_published
from gateway.secrets import SecretUnusable, create_private_file, read_password

FIRST_TENANT: Final = "default"
FIRST_LABEL: Final = "first"
ADMIN_TENANT: Final = "operators"
ADMIN_LABEL: Final = "admin-key-file"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstKey:
    """A key that works. `is_new` says that it was made just now."""

    text: str
    is_new: bool


class HomeUnusable(Exception):
    """The home directory cannot be made or written to. The message says why and what to do."""


def make_home(path: Path) -> None:
    """Makes the home directory, for this user alone, if there is none. Raises `HomeUnusable`."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Tried rather than asked: a read-only file system grants permissions that it does not honour.
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise HomeUnusable(
            f"cannot write to the home directory {path}: {error.strerror}; set HEADSTART_HOME to another"
        ) from error


def prepare_database(url: str, database: Database) -> None:
    """Brings the schema to this code's version, and publishes the default prices where there are none."""
    migrate(url)
    ensure_published(database, default_price_sheet(), clock=instants.now)


def ensure_first_key(database: Database, hasher: KeyHasher, path: Path) -> FirstKey | None:
    """The key kept in `path`, if it still works; a new one for a database in which nobody has any.

    None when others made the keys: then they know them, and we cannot.
    """
    kept = _kept_key(database, hasher, path)
    if kept is not None:
        return FirstKey(text=kept, is_new=False)
    tenant = _first_tenant(database)
    if tenant is None:
        return None
    _, text = create_key(database, tenant_id=tenant.id, label=FIRST_LABEL, hasher=hasher, now=instants.now())
    path.unlink(missing_ok=True)
    create_private_file(path, lambda: text + "\n")
    return FirstKey(text=text, is_new=True)


def ensure_admin_key(database: Database, hasher: KeyHasher, path: Path) -> None:
    """The key in the file is an admin's, of a tenant that is there for it, and the file's former key is none
    any more.

    Raises `SecretUnusable` when there is none in the file, or one that was revoked or is a tenant's.
    """
    text = read_password(path).strip()
    try:
        known = authenticate(database, hasher.digest(text), now=instants.now())
    except MalformedKey as error:
        raise SecretUnusable(f"{path}: {error}") from error
    if known is not None and known.role is Role.ADMIN:
        return
    now = instants.now()
    names = {tenant.name: tenant for tenant in list_tenants(database)}
    owner = names.get(ADMIN_TENANT) or create_tenant(database, name=ADMIN_TENANT, now=now)
    for former in list_keys(database, tenant_id=owner.id):
        if former.label == ADMIN_LABEL and former.revoked_at is None:
            revoke_key(database, key_id=former.id, now=now)
    try:
        create_key(
            database,
            tenant_id=owner.id,
            label=ADMIN_LABEL,
            hasher=hasher,
            now=now,
            role=Role.ADMIN,
            text=text,
        )
    except NameTaken as error:
        raise SecretUnusable(
            f"{path} holds a key that was revoked, or is a tenant's: make another"
        ) from error


def _kept_key(database: Database, hasher: KeyHasher, path: Path) -> str | None:
    try:
        text = path.read_text("ascii").strip()
        principal = authenticate(database, hasher.digest(text), now=instants.now())
    except (FileNotFoundError, UnicodeDecodeError, MalformedKey):
        return None
    return text if principal is not None else None


def _first_tenant(database: Database) -> Tenant | None:
    """The default tenant, made now if there is none, as long as nobody has a key yet."""
    tenants = list_tenants(database)
    if not tenants:
        return create_tenant(database, name=FIRST_TENANT, now=instants.now())
    only = tenants[0]
    is_untouched = (
        len(tenants) == 1 and only.name == FIRST_TENANT and not list_keys(database, tenant_id=only.id)
    )
    return only if is_untouched else None

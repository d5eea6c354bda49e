"""The deployment secret, and every key that is derived from it.

Knows where the secret lives (environment, a file, or `secrets.json` in the
home directory, generated at first start), how purposes are separated, and that
passwords come in files of their own. Does
not know tenants or HTTP. Losing the secret loses every API key and every
cached block's name; leaking it lets its holder forge scopes.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path

from billing.db import with_password
from gateway.settings import Settings

MIN_SECRET_BYTES = 32
SECRETS_FILE_NAME = "secrets.json"
_OTHERS_MASK = 0o077


class SecretUnusable(Exception):
    """The configured secret is missing, too short, damaged or readable by others. The message says which."""


class DeploymentSecret:
    """Derives one subkey per purpose (HMAC-SHA256 as in RFC 2104), so that no output of one purpose
    is valid in another.
    """

    __slots__ = ("_material",)

    def __init__(self, material: bytes) -> None:
        if len(material) < MIN_SECRET_BYTES:
            raise SecretUnusable(f"the deployment secret needs at least {MIN_SECRET_BYTES} bytes")
        self._material = material

    def __repr__(self) -> str:
        return "DeploymentSecret(…)"

    def subkey(self, purpose: str) -> bytes:
        """32 bytes for one purpose; knowing them tells nothing about another purpose's."""
        return hmac.digest(self._material, b"headstart/" + purpose.encode(), hashlib.sha256)

    def block_seed(self) -> str:
        """The 64-bit seed of block names, in hexadecimal, for the worker's `HEADSTART_BLOCK_SEED`."""
        return self.subkey("block-seed")[:8].hex()


def load_secret(settings: Settings) -> DeploymentSecret:
    """From `HEADSTART_SECRET`, else `HEADSTART_SECRET_FILE`, else `secrets.json` (made now if absent).

    Raises `SecretUnusable`.
    """
    if settings.secret is not None:
        return DeploymentSecret(settings.secret.get_secret_value().encode())
    if settings.secret_file is not None:
        return DeploymentSecret(read_secret_file(settings.secret_file).strip())
    path = settings.home / SECRETS_FILE_NAME
    if not path.exists():
        create_private_file(path, _new_secrets_document)
    return _load_document(path)


def ledger_url(settings: Settings) -> str:
    """The ledger's URL, with the password from `HEADSTART_DATABASE_PASSWORD_FILE` if that is set.

    Raises `SecretUnusable`, or billing's `UnsupportedDatabase`.
    """
    if settings.database_password_file is None:
        return settings.database
    return with_password(settings.database, read_password(settings.database_password_file))


def read_password(path: Path) -> str:
    """A file's text without the line break that an editor ends it with. Raises `SecretUnusable`."""
    try:
        password = read_secret_file(path).decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise SecretUnusable(f"{path} is not UTF-8 text") from error
    if not password:
        raise SecretUnusable(f"{path} is empty")
    return password


def create_private_file(path: Path, content: Callable[[], str]) -> bool:
    """Creates `path` with mode 0600, whole or not at all. False when it was already there (it is left
    as it is).

    The content is written beside the target and linked into place: a crash leaves no half-written secret, and
    of two processes that start together one wins and the other reads the winner's file.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content())
            file.flush()
            os.fsync(file.fileno())
        os.link(name, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(name)
    _sync_directory(path.parent)
    return True


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _new_secrets_document() -> str:
    return json.dumps({"version": 1, "deployment_secret": secrets.token_hex(32)}) + "\n"


def read_secret_file(path: Path) -> bytes:
    """Raises `SecretUnusable`."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise SecretUnusable(f"cannot read {path}: {error.strerror}") from error


def require_private(path: Path) -> None:
    """Raises `SecretUnusable` when others can read the file."""
    if path.stat().st_mode & _OTHERS_MASK:
        raise SecretUnusable(f"{path} can be read by others: run chmod 600 {path}")


def _load_document(path: Path) -> DeploymentSecret:
    require_private(path)
    try:
        document = json.loads(read_secret_file(path))
        return DeploymentSecret(document["deployment_secret"].encode())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SecretUnusable(f"{path} is damaged: restore it from a backup") from error

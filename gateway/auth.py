"""Who is asking: a Bearer key becomes a `Principal`, and a principal a scope.

Knows header syntax, the deployment's subkeys and a short memory of past
answers, so that a revoked key stops working within a second. Does not know
how keys are stored.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

from billing.accounts import KeyDigest, KeyHasher, Principal
from billing.errors import DatabaseUnavailable, MalformedKey
from billing.ids import TenantId
from gateway.edge.errors import ServiceUnavailable, Unauthenticated
from gateway.secrets import DeploymentSecret
from model_worker.protocol import Scope

MAX_REMEMBERED_KEYS = 10_000
KEY_PURPOSE = "api-key"
SCOPE_PURPOSE = "scope"

LookUp = Callable[[KeyDigest], Principal | None]
"""Asks the database, blocking. Runs on an executor thread."""


def key_hasher(secret: DeploymentSecret) -> KeyHasher:
    return KeyHasher(secret.subkey(KEY_PURPOSE))


def scope_of(secret: DeploymentSecret, tenant_id: TenantId, *, salt: bytes = b"") -> Scope:
    """The isolation boundary of a tenant's cached blocks: HMAC-SHA256 over length-prefixed fields.

    The only place where a scope is made. The tenant comes from the authenticated key, never from a
    body; a salt can only narrow, because the tenant is always part of it.
    """
    message = b"".join(len(field).to_bytes(8, "big") + field for field in (tenant_id.bytes, salt))
    return Scope(hmac.digest(secret.subkey(SCOPE_PURPOSE), message, hashlib.sha256).hex())


def client_key(headers: Mapping[str, str]) -> str:
    """The key in `Authorization: Bearer`, or in `x-api-key` where that header is missing. Raises
    `Unauthenticated`.
    """
    key = headers.get("x-api-key", "").strip()
    if key and "authorization" not in headers:
        return key
    return bearer_key(headers.get("authorization"))


def bearer_key(authorization: str | None) -> str:
    """The key in an `Authorization` header (RFC 6750). Raises `Unauthenticated`."""
    if authorization is None:
        raise _refusal("You didn't provide an API key: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'.")
    scheme, _, key = authorization.partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key:
        raise _refusal("The Authorization header must be 'Bearer KEY'.")
    return key


@dataclass(frozen=True, slots=True)
class _Remembered:
    principal: Principal | None
    until: float


class Authenticator:
    """Remembers each answer, good or bad, for at most `remember_seconds`. Concurrent askers share one
    look-up.

    Belongs to one event loop.
    """

    def __init__(
        self,
        look_up: LookUp,
        hasher: KeyHasher,
        executor: Executor,
        *,
        remember_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._look_up = look_up
        self._hasher = hasher
        self._executor = executor
        self._remember_seconds = remember_seconds
        self._clock = clock
        self._remembered: OrderedDict[KeyDigest, _Remembered] = OrderedDict()
        self._asking: dict[KeyDigest, asyncio.Future[Principal | None]] = {}

    async def authenticate(self, key: str) -> Principal:
        """Raises `Unauthenticated` for a key that is malformed, unknown, expired or revoked, and
        `ServiceUnavailable` when the keys cannot be read.
        """
        try:
            digest = self._hasher.digest(key)
        except MalformedKey:
            raise _refusal("Incorrect API key provided.") from None
        remembered = self._remembered.get(digest)
        if remembered is not None and self._clock() < remembered.until:
            principal = remembered.principal
        else:
            principal = await self._ask(digest)
        if principal is None:
            raise _refusal("Incorrect API key provided.")
        return principal

    async def _ask(self, digest: KeyDigest) -> Principal | None:
        asking = self._asking.get(digest)
        if asking is None:
            asked_at = self._clock()
            asking = asyncio.get_running_loop().run_in_executor(self._executor, self._look_up, digest)
            self._asking[digest] = asking
            asking.add_done_callback(lambda done: self._answered(digest, asked_at, done))
        # Shielded: one asker that hangs up must not take the answer from the others.
        try:
            return await asyncio.shield(asking)
        except DatabaseUnavailable as error:
            raise ServiceUnavailable("Keys cannot be checked at the moment.") from error

    def _answered(self, digest: KeyDigest, asked_at: float, done: asyncio.Future[Principal | None]) -> None:
        del self._asking[digest]
        if done.cancelled() or done.exception() is not None:
            return
        # Counted from the question, not the answer: the row may have changed right after it was read.
        self._remembered[digest] = _Remembered(done.result(), asked_at + self._remember_seconds)
        self._remembered.move_to_end(digest)
        while len(self._remembered) > MAX_REMEMBERED_KEYS:
            self._remembered.popitem(last=False)


def _refusal(message: str) -> Unauthenticated:
    return Unauthenticated(message, param="authorization", headers={"www-authenticate": "Bearer"})

"""Who is signed in to the dashboard, and until when.

Knows opaque tokens, digests of keys and lifetimes. Does not know cookies, pages or how a
key is checked: whoever finds a session asks again whether its key still works.

States of a session: `open → ended`. It ends when it is closed, when nobody used
it for `IDLE_LIFETIME`, or `LIFETIME` after it was opened, whichever comes first. They
are rows of the database, so that any gateway knows them and each of them can be ended; what
the browser holds is in no row.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, NewType

from billing import instants
from billing.accounts import KeyDigest
from billing.db import Database
from billing.errors import DatabaseUnavailable
from billing.instants import Clock, Microseconds
from billing.sign_ins import (
    SignIn,
    TokenDigest,
    find_sign_in,
    forget_sign_in,
    mark_used,
    record_sign_in,
)

SessionToken = NewType("SessionToken", str)
"""256 random bits that only the browser holds: the row has their SHA-256."""

LIFETIME: Final = timedelta(hours=12)
IDLE_LIFETIME: Final = timedelta(hours=1)
USE_IS_WRITTEN_EVERY: Final = timedelta(minutes=1)
"""Looking at a page is no reason to write, unless the row would soon be wrong by more than this."""

_TOKEN_BYTES: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """An open session. `form_token` proves that a form was served in it."""

    key_digest: KeyDigest
    form_token: str


class SessionStore:
    """Every method blocks, and raises `DatabaseUnavailable`."""

    def __init__(self, database: Database, form_key: bytes, clock: Clock) -> None:
        self._database = database
        self._form_key = form_key
        self._clock = clock

    def open(self, key_digest: KeyDigest) -> SessionToken:
        now = self._clock()
        token = SessionToken(secrets.token_urlsafe(_TOKEN_BYTES))
        record_sign_in(
            self._database,
            SignIn(token_digest=_digest(token), key_digest=key_digest, opened_at=now, last_used_at=now),
            opened_after=instants.later(now, -LIFETIME),
            used_after=instants.later(now, -IDLE_LIFETIME),
        )
        return token

    def use(self, token: SessionToken) -> Session | None:
        """The open session of a token, kept from going idle; None for any other text."""
        found = find_sign_in(self._database, _digest(token)) if token else None
        if found is None:
            return None
        now = self._clock()
        if _is_over(found, now):
            forget_sign_in(self._database, found.token_digest)
            return None
        if now >= instants.later(found.last_used_at, USE_IS_WRITTEN_EVERY):
            # A page that only reads is shown also while nothing can be written.
            with suppress(DatabaseUnavailable):
                mark_used(self._database, found.token_digest, now=now)
        return Session(key_digest=found.key_digest, form_token=self._form_token(token))

    def close(self, token: SessionToken) -> None:
        """Idempotent."""
        if token:
            forget_sign_in(self._database, _digest(token))

    def _form_token(self, token: SessionToken) -> str:
        """HMAC-SHA256: whoever sees it in a page learns nothing of the token."""
        return hmac.digest(self._form_key, b"session\0" + _bytes(token), hashlib.sha256).hex()


def _is_over(sign_in: SignIn, now: Microseconds) -> bool:
    return now >= min(
        instants.later(sign_in.opened_at, LIFETIME), instants.later(sign_in.last_used_at, IDLE_LIFETIME)
    )


def _digest(token: SessionToken) -> TokenDigest:
    """Finding by digest takes no longer for a nearly right token, and leaks none from the database."""
    return TokenDigest(hashlib.sha256(_bytes(token)).digest())


def _bytes(token: SessionToken) -> bytes:
    return token.encode("utf-8", "surrogatepass")

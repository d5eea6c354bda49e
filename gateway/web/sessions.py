"""Who is signed in to the dashboard, and until when.

Knows opaque tokens and digests of keys. Does not know cookies, pages or how a
key is checked: whoever finds a session asks again whether its key still works.

States of a session: `open → ended`. It ends when it is closed, when nobody used
it for `IDLE_LIFETIME`, or `LIFETIME` after it was opened, whichever comes first. All of
them live in this process's memory and end with it.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, NewType

from billing import instants
from billing.accounts import KeyDigest
from billing.instants import Clock, Microseconds

SessionToken = NewType("SessionToken", str)
"""256 random bits that only the browser holds: here is their SHA-256."""

LIFETIME: Final = timedelta(hours=12)
IDLE_LIFETIME: Final = timedelta(hours=1)
MAX_SESSIONS: Final = 10_000
_TOKEN_BYTES: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """An open session. `form_token` proves that a form was served in it."""

    key_digest: KeyDigest
    form_token: str
    opened_at: Microseconds
    last_used_at: Microseconds


class SessionStore:
    """Belongs to one event loop. Of too many sessions the one unused for longest ends."""

    def __init__(self, clock: Clock, *, max_sessions: int = MAX_SESSIONS) -> None:
        self._clock = clock
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()  # the least recently used first

    def open(self, key_digest: KeyDigest) -> SessionToken:
        now = self._clock()
        token = SessionToken(secrets.token_urlsafe(_TOKEN_BYTES))
        self._put(
            _name(token),
            Session(
                key_digest=key_digest,
                form_token=secrets.token_urlsafe(_TOKEN_BYTES),
                opened_at=now,
                last_used_at=now,
            ),
        )
        while len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)
        return token

    def use(self, token: SessionToken) -> Session | None:
        """The open session of a token, kept from going idle; None for any other text."""
        name = _name(token)
        session = self._sessions.get(name)
        if session is None:
            return None
        now = self._clock()
        if now >= min(
            instants.later(session.opened_at, LIFETIME), instants.later(session.last_used_at, IDLE_LIFETIME)
        ):
            del self._sessions[name]
            return None
        used = Session(
            key_digest=session.key_digest,
            form_token=session.form_token,
            opened_at=session.opened_at,
            last_used_at=now,
        )
        self._put(name, used)
        return used

    def close(self, token: SessionToken) -> None:
        """Idempotent."""
        self._sessions.pop(_name(token), None)

    def _put(self, name: bytes, session: Session) -> None:
        self._sessions[name] = session
        self._sessions.move_to_end(name)


def _name(token: SessionToken) -> bytes:
    """Finding by digest takes no longer for a nearly right token, and leaks none from memory."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()

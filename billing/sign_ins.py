"""Who is signed in to the dashboard: one row for each open session, which every gateway sees.

Knows digests and instants. Does not know keys, tokens, cookies or lifetimes: whoever finds a row decides
whether its time is over, and asks anew whether its key still works.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NewType

from sqlalchemy import delete, insert, or_, select, update

from billing import schema
from billing.accounts import KeyDigest
from billing.db import Database
from billing.instants import Microseconds

TokenDigest = NewType("TokenDigest", bytes)
"""SHA-256 of the token that only the browser holds."""

MAX_SESSIONS_OF_A_KEY: Final = 100

_sessions: Final = schema.dashboard_sessions.c


@dataclass(frozen=True, slots=True, kw_only=True)
class SignIn:
    token_digest: TokenDigest
    key_digest: KeyDigest
    opened_at: Microseconds
    last_used_at: Microseconds


def record_sign_in(
    db: Database, sign_in: SignIn, *, opened_after: Microseconds, used_after: Microseconds
) -> None:
    """Adds a session, and forgets those that were opened or used no later than the instants given.

    Of too many of one key the ones unused for longest go.
    """
    with db.write() as connection:
        over = or_(_sessions.opened_at_us <= opened_after, _sessions.last_used_at_us <= used_after)
        connection.execute(delete(schema.dashboard_sessions).where(over))
        surplus = (
            select(_sessions.token_digest)
            .where(_sessions.key_digest == sign_in.key_digest)
            .order_by(_sessions.last_used_at_us.desc(), _sessions.token_digest)
            .offset(MAX_SESSIONS_OF_A_KEY - 1)
        )
        too_many = list(connection.execute(surplus).scalars())
        connection.execute(delete(schema.dashboard_sessions).where(_sessions.token_digest.in_(too_many)))
        connection.execute(
            insert(schema.dashboard_sessions).values(
                token_digest=sign_in.token_digest,
                key_digest=sign_in.key_digest,
                opened_at_us=sign_in.opened_at,
                last_used_at_us=sign_in.last_used_at,
            )
        )


def find_sign_in(db: Database, token_digest: TokenDigest) -> SignIn | None:
    chosen = select(schema.dashboard_sessions).where(_sessions.token_digest == token_digest)
    with db.read() as connection:
        row = connection.execute(chosen).one_or_none()
    if row is None:
        return None
    return SignIn(
        token_digest=TokenDigest(row.token_digest),
        key_digest=KeyDigest(row.key_digest),
        opened_at=row.opened_at_us,
        last_used_at=row.last_used_at_us,
    )


def mark_used(db: Database, token_digest: TokenDigest, *, now: Microseconds) -> None:
    used = update(schema.dashboard_sessions).where(_sessions.token_digest == token_digest)
    with db.write() as connection:
        connection.execute(used.values(last_used_at_us=now))


def forget_sign_in(db: Database, token_digest: TokenDigest) -> None:
    """Idempotent."""
    with db.write() as connection:
        connection.execute(delete(schema.dashboard_sessions).where(_sessions.token_digest == token_digest))

"""Who is signed in, and until when."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from billing.accounts import KeyDigest
from billing.db import Database, migrate, open_database
from gateway.web.sessions import IDLE_LIFETIME, LIFETIME, SessionStore, SessionToken
from tests.browser.site import MovableClock

DIGEST = KeyDigest(b"d" * 32)
INSTANT = timedelta(microseconds=1)
FORM_KEY = b"f" * 32


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock()


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    url = f"sqlite:///{tmp_path / 'sessions.db'}"
    migrate(url)
    with open_database(url) as database:
        yield database


@pytest.fixture
def store(database: Database, clock: MovableClock) -> SessionStore:
    return SessionStore(database, FORM_KEY, clock)


def test_a_session_is_found_by_its_token_and_by_no_other_text(store: SessionStore) -> None:
    token = store.open(DIGEST)
    session = store.use(token)
    assert session is not None
    assert session.key_digest == DIGEST
    for other in ("", token[:-1], token + "a", token.swapcase(), "\udc80"):
        assert store.use(SessionToken(other)) is None


def test_tokens_are_long_and_never_the_same(store: SessionStore) -> None:
    tokens = {store.open(DIGEST) for _ in range(100)}
    assert len(tokens) == 100
    assert min(map(len, tokens)) >= 43  # 256 bits in base64


def test_the_database_holds_no_token(store: SessionStore, tmp_path: Path) -> None:
    token = store.open(DIGEST)
    files = b"".join(file.read_bytes() for file in tmp_path.glob("sessions.db*"))
    assert DIGEST in files, "the row is there"
    assert token.encode() not in files


def test_another_gateway_knows_the_session_and_its_form_and_can_end_it(
    store: SessionStore, database: Database, clock: MovableClock
) -> None:
    another = SessionStore(database, FORM_KEY, clock)
    token = store.open(DIGEST)
    assert another.use(token) == store.use(token) is not None
    another.close(token)
    assert store.use(token) is None


def test_form_tokens_are_the_sessions_own_and_need_the_deployments_key(
    store: SessionStore, database: Database, clock: MovableClock
) -> None:
    first, second = (store.use(store.open(DIGEST)) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.form_token != second.form_token
    token = store.open(DIGEST)
    mine, forged = store.use(token), SessionStore(database, b"g" * 32, clock).use(token)
    assert mine is not None
    assert forged is not None
    assert mine.form_token != forged.form_token


def test_an_idle_session_ends_at_the_instant(store: SessionStore, clock: MovableClock) -> None:
    token = store.open(DIGEST)
    clock.forward(IDLE_LIFETIME - INSTANT)
    assert store.use(token) is not None
    clock.forward(IDLE_LIFETIME - INSTANT)
    assert store.use(token) is not None, "use keeps it from going idle"
    clock.forward(IDLE_LIFETIME)
    assert store.use(token) is None
    clock.forward(-IDLE_LIFETIME)
    assert store.use(token) is None, "an ended session stays so"


def test_a_session_in_use_ends_after_its_lifetime(store: SessionStore, clock: MovableClock) -> None:
    token = store.open(DIGEST)
    for _ in range(int(LIFETIME / IDLE_LIFETIME) * 2 - 1):
        clock.forward(IDLE_LIFETIME / 2)
        assert store.use(token) is not None
    clock.forward(IDLE_LIFETIME / 2)
    assert store.use(token) is None


def test_a_closed_session_is_gone_and_closing_is_idempotent(store: SessionStore) -> None:
    token, other = store.open(DIGEST), store.open(DIGEST)
    store.close(token)
    store.close(token)
    assert store.use(token) is None
    assert store.use(other) is not None

"""Who is signed in, and until when."""

from __future__ import annotations

from datetime import timedelta

import pytest

from billing.accounts import KeyDigest
from gateway.web.sessions import IDLE_LIFETIME, LIFETIME, SessionStore, SessionToken
from tests.browser.site import MovableClock

DIGEST = KeyDigest(b"d" * 32)
INSTANT = timedelta(microseconds=1)


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock()


@pytest.fixture
def store(clock: MovableClock) -> SessionStore:
    return SessionStore(clock, max_sessions=3)


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


def test_a_store_holds_no_token(store: SessionStore) -> None:
    token = store.open(DIGEST)
    assert token not in repr(vars(store))


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


def test_of_too_many_sessions_the_one_unused_for_longest_ends(store: SessionStore) -> None:
    first, second, third = (store.open(DIGEST) for _ in range(3))
    assert store.use(first) is not None
    fourth = store.open(DIGEST)
    assert store.use(second) is None
    assert all(store.use(token) is not None for token in (first, third, fourth))

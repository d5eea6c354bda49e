"""Sessions that every gateway sees."""

from billing.accounts import KeyDigest
from billing.instants import Microseconds
from billing.sign_ins import (
    MAX_SESSIONS_OF_A_KEY,
    SignIn,
    TokenDigest,
    find_sign_in,
    forget_sign_in,
    mark_used,
    record_sign_in,
)
from tests.unit.billing.builders import T0

KEY = KeyDigest(b"k" * 32)


def sign_in(number: int, *, at: int = T0, key: KeyDigest = KEY) -> SignIn:
    return SignIn(
        token_digest=TokenDigest(number.to_bytes(32, "big")),
        key_digest=key,
        opened_at=Microseconds(at),
        last_used_at=Microseconds(at),
    )


def record(db, one: SignIn, *, opened_after: int = 0, used_after: int = 0) -> None:
    record_sign_in(db, one, opened_after=Microseconds(opened_after), used_after=Microseconds(used_after))


def test_what_one_gateway_recorded_another_finds(db):
    first, second = sign_in(1), sign_in(2)
    record(db, first)
    record(db, second)
    assert find_sign_in(db, first.token_digest) == first
    assert find_sign_in(db, TokenDigest(bytes(32))) is None
    forget_sign_in(db, first.token_digest)
    forget_sign_in(db, first.token_digest)
    assert find_sign_in(db, first.token_digest) is None
    assert find_sign_in(db, second.token_digest) == second


def test_use_is_remembered(db):
    record(db, sign_in(1))
    mark_used(db, sign_in(1).token_digest, now=Microseconds(T0 + 7))
    found = find_sign_in(db, sign_in(1).token_digest)
    assert found is not None
    assert (found.opened_at, found.last_used_at) == (T0, T0 + 7)


def test_those_whose_time_is_over_are_forgotten_when_somebody_signs_in(db):
    for number in range(3):
        record(db, sign_in(number, at=T0 + number))
    mark_used(db, sign_in(0).token_digest, now=Microseconds(T0 + 10))
    record(db, sign_in(9, at=T0 + 20), opened_after=T0, used_after=T0 + 1)
    left = [number for number in (0, 1, 2, 9) if find_sign_in(db, sign_in(number).token_digest)]
    assert left == [2, 9]


def test_a_key_has_a_bounded_number_of_sessions_and_others_keep_theirs(db):
    others = sign_in(10_000, key=KeyDigest(b"o" * 32))
    record(db, others)
    for number in range(MAX_SESSIONS_OF_A_KEY + 2):
        record(db, sign_in(number, at=T0 + number))
    assert find_sign_in(db, sign_in(1).token_digest) is None
    assert find_sign_in(db, sign_in(2).token_digest) is not None
    assert find_sign_in(db, others.token_digest) == others

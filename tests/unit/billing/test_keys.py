import re

import pytest

from billing.accounts import KeyHasher, generate_key
from billing.errors import MalformedKey

SECRET = bytes(range(32))


def test_a_key_has_its_published_form():
    prefix, key = generate_key()
    assert re.fullmatch(r"hs-[A-Za-z0-9]{8}-[A-Za-z0-9]{43}", key)
    assert key.startswith(prefix + "-")
    assert len(prefix) == 11


def test_keys_are_never_the_same():
    assert len({generate_key()[1] for _ in range(1000)}) == 1000


def test_a_digest_depends_on_the_key_and_on_the_deployment():
    _, key = generate_key()
    _, other = generate_key()
    assert KeyHasher(SECRET).digest(key) == KeyHasher(SECRET).digest(key)
    assert KeyHasher(SECRET).digest(key) != KeyHasher(SECRET).digest(other)
    assert KeyHasher(SECRET).digest(key) != KeyHasher(SECRET[::-1]).digest(key)
    assert len(KeyHasher(SECRET).digest(key)) == 32


@pytest.mark.parametrize(
    "presented",
    ["", "hs-", "hs-abcdefgh-short", "sk-" + "a" * 52, "\ud800" * 55, "hs-abcdefgh-" + "é" * 43, "x" * 10**6],
)
def test_text_that_is_no_key_is_refused_before_any_hashing(presented):
    with pytest.raises(MalformedKey) as refusal:
        KeyHasher(SECRET).digest(presented)
    assert len(presented) < 4 or presented not in str(refusal.value)


def test_a_trailing_newline_is_not_part_of_a_key():
    with pytest.raises(MalformedKey):
        KeyHasher(SECRET).digest(generate_key()[1] + "\n")


def test_a_short_secret_is_refused_and_a_secret_is_never_shown():
    with pytest.raises(ValueError, match="32 bytes"):
        KeyHasher(b"short")
    assert SECRET.hex() not in repr(KeyHasher(SECRET))

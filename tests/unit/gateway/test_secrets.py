"""The deployment secret: where it comes from, and that its purposes are separate."""

import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import make_url

from billing.errors import UnsupportedDatabase
from gateway.secrets import DeploymentSecret, SecretUnusable, create_private_file, ledger_url, load_secret
from gateway.settings import Settings

TEXT = "0123456789abcdef0123456789abcdef"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_first_start_makes_a_secret_that_later_starts_read(tmp_path):
    settings = Settings(home=tmp_path / "home")
    first = load_secret(settings)
    assert load_secret(settings).subkey("x") == first.subkey("x")
    path = tmp_path / "home" / "secrets.json"
    assert mode(path) == 0o600
    assert mode(path.parent) == 0o700
    assert [entry.name for entry in path.parent.iterdir()] == ["secrets.json"], "no temporary file is left"


def test_two_homes_have_two_secrets(tmp_path):
    one, other = (load_secret(Settings(home=tmp_path / name)) for name in ("a", "b"))
    assert one.subkey("x") != other.subkey("x")


def test_processes_that_start_together_agree(tmp_path):
    settings = Settings(home=tmp_path)
    with ThreadPoolExecutor(8) as threads:
        subkeys = set(threads.map(lambda _: load_secret(settings).subkey("x"), range(16)))
    assert len(subkeys) == 1


def test_the_environment_wins_over_a_file_and_a_file_over_the_home(tmp_path):
    file = tmp_path / "secret"
    file.write_text(TEXT + "\n")
    home = Settings(home=tmp_path)
    from_file = load_secret(Settings(home=tmp_path, secret_file=file))
    assert from_file.subkey("x") == DeploymentSecret(TEXT.encode()).subkey("x")
    from_environment = load_secret(Settings(home=tmp_path, secret_file=file, secret="e" * 32))
    assert from_environment.subkey("x") == DeploymentSecret(b"e" * 32).subkey("x")
    assert not (tmp_path / "secrets.json").exists()
    assert load_secret(home).subkey("x") != from_file.subkey("x")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"deployment_secret": 7}', '{"deployment_secret": "short"}']
)
def test_a_damaged_file_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "secrets.json"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(SecretUnusable):
        load_secret(Settings(home=tmp_path))
    assert path.read_text() == content


def test_a_file_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "secrets.json"
    path.write_text(json.dumps({"deployment_secret": TEXT}))
    path.chmod(0o644)
    with pytest.raises(SecretUnusable, match="chmod 600"):
        load_secret(Settings(home=tmp_path))


def test_a_missing_secret_file_is_refused(tmp_path):
    with pytest.raises(SecretUnusable, match="nowhere"):
        load_secret(Settings(home=tmp_path, secret_file=tmp_path / "nowhere"))


def test_a_short_secret_is_refused():
    with pytest.raises(SecretUnusable):
        DeploymentSecret(b"x" * 31)


def test_purposes_and_secrets_give_unrelated_subkeys():
    one, other = DeploymentSecret(b"a" * 32), DeploymentSecret(b"b" * 32)
    subkeys = {
        secret.subkey(purpose) for secret in (one, other) for purpose in ("scope", "api-key", "block-seed")
    }
    assert len(subkeys) == 6


def test_a_secret_does_not_show_itself():
    assert TEXT not in repr(DeploymentSecret(TEXT.encode()))


def test_the_block_seed_has_64_bits():
    assert len(bytes.fromhex(DeploymentSecret(TEXT.encode()).block_seed())) == 8


def test_a_private_file_is_never_overwritten(tmp_path):
    path = tmp_path / "deep" / "file"
    assert create_private_file(path, lambda: "first")
    assert not create_private_file(path, lambda: "second")
    assert path.read_text() == "first"


@pytest.mark.parametrize("password", ["plain", "p@ss:/w?rd#%20 &", " spaces ", "ünïcode"])
def test_a_password_in_a_file_may_have_any_character(tmp_path, password):
    path = tmp_path / "password"
    path.write_text(password + "\n")
    settings = Settings(
        home=tmp_path, database_url="postgresql://headstart@db/books", database_password_file=path
    )
    assert make_url(ledger_url(settings)).password == password
    assert make_url(ledger_url(settings)).database == "books"


def test_without_a_password_file_the_url_is_what_was_set(tmp_path):
    assert (
        ledger_url(Settings(home=tmp_path, database_url="postgresql://a:b@db/c")) == "postgresql://a:b@db/c"
    )


@pytest.mark.parametrize(
    ("content", "words"), [(None, "cannot read"), (b"\n", "is empty"), (b"\xff\xfe", "not UTF-8")]
)
def test_an_unusable_password_file_is_named(tmp_path, content, words):
    path = tmp_path / "password"
    if content is not None:
        path.write_bytes(content)
    settings = Settings(home=tmp_path, database_url="postgresql://db/x", database_password_file=path)
    with pytest.raises(SecretUnusable, match=words) as caught:
        ledger_url(settings)
    assert str(path) in str(caught.value)


def test_a_file_of_sqlite_takes_no_password(tmp_path):
    (tmp_path / "password").write_text("x")
    with pytest.raises(UnsupportedDatabase, match="only PostgreSQL"):
        ledger_url(Settings(home=tmp_path, database_password_file=tmp_path / "password"))


def test_a_failed_write_leaves_nothing(tmp_path):
    def fail() -> str:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        create_private_file(tmp_path / "file", fail)
    assert list(tmp_path.iterdir()) == []

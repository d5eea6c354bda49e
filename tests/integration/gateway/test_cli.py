"""The operator's commands, in one process, on SQLite."""

import re
from uuid import uuid4

import pytest
from typer.testing import CliRunner

from billing.accounts import generate_key
from billing.errors import BillingError
from gateway.bootstrap import HomeUnusable
from gateway.cli import CommandRefused, app
from gateway.secrets import SecretUnusable


@pytest.fixture
def headstart(tmp_path):
    """Runs a command in a home of its own and returns what it printed; raises what it refuses with."""
    runner = CliRunner(env={"HEADSTART_HOME": str(tmp_path / "home"), "HEADSTART_DATABASE_URL": ""})

    def run(*arguments: str) -> str:
        result = runner.invoke(app, arguments)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result.stdout

    return run


@pytest.fixture
def migrated(headstart):
    headstart("migrate")
    return headstart


def test_a_command_before_the_first_migration_says_what_to_do(headstart):
    with pytest.raises(CommandRefused, match="headstart migrate"):
        headstart("tenants", "list")


def test_migrating_twice_is_migrating_once(headstart, tmp_path):
    headstart("migrate")
    assert "The schema is current." in headstart("migrate")
    assert "A first key was made" in headstart("migrate", "--first-key")
    assert "still valid" in headstart("migrate", "--first-key")
    assert (tmp_path / "home" / "first-key").stat().st_mode & 0o777 == 0o600


def test_a_lost_first_key_is_not_replaced(headstart, tmp_path):
    headstart("migrate", "--first-key")
    (tmp_path / "home" / "first-key").unlink()
    assert "Keys exist" in headstart("migrate", "--first-key")


@pytest.fixture
def admin_key_file(tmp_path, monkeypatch):
    path = tmp_path / "admin-key"
    path.write_text(generate_key()[1] + "\n")
    monkeypatch.setenv("HEADSTART_ADMIN_KEY_FILE", str(path))
    return path


def live_admin_prefixes(headstart) -> list[str]:
    listed = headstart("keys", "list", "--tenant", "operators")
    return [
        line.split("│")[3].strip()
        for line in listed.splitlines()
        if "│ admin" in line and "20" in line and not line.split("│")[6].strip()
    ]


def test_an_admins_key_that_is_given_in_a_file_is_taken_once(headstart, admin_key_file):
    """And the first tenant gets its first key all the same."""
    assert "A first key was made" in headstart("migrate", "--first-key")
    assert "still valid" in headstart("migrate", "--first-key")
    assert live_admin_prefixes(headstart) == [admin_key_file.read_text()[:11]]


def test_another_key_in_the_file_takes_the_former_ones_place(headstart, admin_key_file):
    headstart("migrate")
    former = admin_key_file.read_text()
    admin_key_file.write_text(generate_key()[1])
    headstart("migrate")
    assert live_admin_prefixes(headstart) == [admin_key_file.read_text()[:11]]
    admin_key_file.write_text(former)
    with pytest.raises(SecretUnusable, match="was revoked"):
        headstart("migrate")


def test_a_tenants_key_does_not_become_an_admins(migrated, admin_key_file):
    migrated("tenants", "create", "acme")
    admin_key_file.write_text(migrated("keys", "create", "--tenant", "acme", "--label", "ci"))
    with pytest.raises(SecretUnusable, match="is a tenant's"):
        migrated("migrate")


@pytest.mark.parametrize("text", ["", "hs-short", "sk-" + "a" * 52])
def test_a_file_without_a_key_is_refused(headstart, admin_key_file, text):
    admin_key_file.write_text(text)
    with pytest.raises(SecretUnusable, match="admin-key"):
        headstart("migrate")


@pytest.mark.parametrize("arguments", [("migrate",), ("gateway", "--port", "0", "--worker-url", "http://x")])
def test_a_home_that_cannot_be_written_to_is_told_by_name(headstart, tmp_path, arguments):
    (tmp_path / "home").write_text("a file is in the way")
    with pytest.raises(HomeUnusable, match="HEADSTART_HOME"):
        headstart(*arguments)


def test_tenants_and_keys_come_and_go(migrated):
    assert migrated("tenants", "create", "acme").startswith("acme ")
    assert "acme" in migrated("tenants", "list")
    key = migrated("keys", "create", "--tenant", "acme", "--label", "ci").strip()
    assert re.fullmatch(r"hs-\w{8}-\w+", key)
    listed = migrated("keys", "list", "--tenant", "acme")
    assert "ci" in listed
    assert key[:11] in listed
    assert key not in listed
    (key_id,) = re.findall(r"[0-9a-f-]{36}", listed)
    assert migrated("keys", "revoke", key_id) == "revoked\n"
    assert len(re.findall(r"\d{4}-\d\d-\d\d", migrated("keys", "list", "--tenant", "acme"))) == 2


def test_the_usage_of_a_tenant_without_any_is_zero(migrated):
    migrated("tenants", "create", "acme")
    report = migrated("usage", "--tenant", "acme", "--since", "2026-01-01", "--until", "2026-01-02")
    for name in ("requests", "uncached tokens", "cached tokens", "output tokens"):
        assert re.search(rf"{name}\s+│\s+0 ", report)
    assert re.search(r"hit share\s+│\s+0\.00 %", report)
    assert re.search(r"saved\s+│\s+0\.00 USD", report)


@pytest.mark.parametrize(
    "arguments",
    [
        ("tenants", "create", " padded "),
        ("keys", "create", "--tenant", "nobody", "--label", "x"),
        ("keys", "list", "--tenant", "nobody"),
        ("keys", "revoke", str(uuid4())),
        ("usage", "--tenant", "nobody"),
    ],
)
def test_what_cannot_be_done_is_refused(migrated, arguments):
    with pytest.raises(BillingError):
        migrated(*arguments)


def test_a_period_that_runs_backwards_is_refused(migrated):
    migrated("tenants", "create", "acme")
    with pytest.raises(CommandRefused, match="before"):
        migrated("usage", "--tenant", "acme", "--since", "2026-01-02", "--until", "2026-01-01")


def test_a_gateway_without_a_worker_is_refused(migrated):
    with pytest.raises(CommandRefused, match="HEADSTART_WORKER_URL"):
        migrated("gateway")


def test_a_gateway_does_not_start_on_an_old_schema(headstart):
    with pytest.raises(CommandRefused, match="headstart migrate"):
        headstart("gateway", "--worker-url", "http://127.0.0.1:9", "--port", "0")

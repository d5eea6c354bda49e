"""What the environment can set, and what it cannot."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from gateway.settings import Settings


def test_the_defaults_need_no_service(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    settings = Settings()
    assert settings.home == tmp_path / ".headstart"
    assert settings.database == f"sqlite:///{tmp_path}/.headstart/headstart.db"
    assert settings.host == "127.0.0.1"
    assert settings.port == 8080


def test_the_environment_is_read(monkeypatch):
    monkeypatch.setenv("HEADSTART_HOME", "/srv/headstart")
    monkeypatch.setenv("HEADSTART_PORT", "9000")
    monkeypatch.setenv("HEADSTART_DATABASE_URL", "postgresql+psycopg://db/x")
    monkeypatch.setenv("HEADSTART_WORKER_URL", "http://worker:9/")
    monkeypatch.setenv("HEADSTART_SECRET", "s" * 32)
    settings = Settings()
    assert settings.journal_directory == Path("/srv/headstart/journal")
    assert settings.port == 9000
    assert settings.database == "postgresql+psycopg://db/x"
    assert settings.worker_url == "http://worker:9"
    assert "sss" not in repr(settings)


def test_an_empty_variable_is_an_unset_one(monkeypatch):
    for name in ("DATABASE_URL", "MODEL", "WORKER_URL", "SECRET", "SECRET_FILE"):
        monkeypatch.setenv(f"HEADSTART_{name}", "")
    settings = Settings()
    assert settings.model is None
    assert settings.worker_url is None
    assert settings.secret is None
    assert settings.secret_file is None
    assert settings.database_url is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "70000"),
        ("PORT", "http"),
        ("WORKER_URL", "worker:9"),
        ("KEY_CACHE_SECONDS", "2"),
        ("CONNECT_TIMEOUT_SECONDS", "0"),
        ("MAX_BODY_BYTES", "1"),
        ("LOG_LEVEL", "loud"),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_name(monkeypatch, name, value):
    monkeypatch.setenv(f"HEADSTART_{name}", value)
    with pytest.raises(ValidationError) as caught:
        Settings()
    assert caught.value.errors()[0]["loc"] == (name.lower(),)

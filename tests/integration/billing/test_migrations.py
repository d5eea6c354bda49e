import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic import command
from alembic.config import main as alembic_command
from sqlalchemy import inspect, text

from billing.db import alembic_config, migrate, open_database, schema_is_current
from billing.errors import DatabaseUnavailable, SchemaUnknown, UnsupportedDatabase

REPOSITORY = Path(__file__).parents[3]


def run(db, action, *arguments):
    config = alembic_config()
    with db.write() as connection:
        config.attributes["connection"] = connection
        action(config, *arguments)


def table_names(db):
    with db.read() as connection:
        return set(inspect(connection).get_table_names())


def test_up_down_up_and_the_schema_is_the_declared_one(empty_database_url):
    with open_database(empty_database_url) as db:
        assert not schema_is_current(db)
        run(db, command.upgrade, "head")
        run(db, command.check)
        assert schema_is_current(db)
        run(db, command.downgrade, "base")
        assert table_names(db) == {"alembic_version"}
        assert not schema_is_current(db)
        run(db, command.upgrade, "head")
        run(db, command.check)
        assert schema_is_current(db)


def test_migrating_twice_is_migrating_once(empty_database_url):
    migrate(empty_database_url)
    migrate(empty_database_url)
    with open_database(empty_database_url) as db:
        assert schema_is_current(db)


def test_several_processes_may_migrate_at_once(empty_database_url):
    with ThreadPoolExecutor(2) as pool:
        command_line = [
            sys.executable,
            "-c",
            "import sys; from billing.db import migrate; migrate(sys.argv[1])",
        ]
        runs = [
            pool.submit(subprocess.run, [*command_line, empty_database_url], check=True, timeout=120)
            for _ in range(2)
        ]
    assert [one.result().returncode for one in runs] == [0, 0]
    with open_database(empty_database_url) as db:
        assert schema_is_current(db)


def test_a_database_of_newer_code_is_refused_and_left_alone(database_url):
    with open_database(database_url) as db:
        with db.write() as connection:
            connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
        with pytest.raises(SchemaUnknown, match="9999"):
            migrate(database_url)
        assert not schema_is_current(db)
        assert "usage_events" in table_names(db)


def test_the_alembic_command_of_a_checkout_runs_the_same_versions(empty_database_url, monkeypatch):
    monkeypatch.setenv("HEADSTART_DATABASE_URL", empty_database_url)
    with open_database(empty_database_url) as db:
        for arguments, is_current in (
            (["upgrade", "head"], True),
            (["check"], True),
            (["downgrade", "base"], False),
        ):
            alembic_command(["--config", str(REPOSITORY / "alembic.ini"), *arguments])
            assert schema_is_current(db) is is_current


def test_the_alembic_command_without_a_database_says_what_to_set(monkeypatch):
    monkeypatch.delenv("HEADSTART_DATABASE_URL", raising=False)
    with pytest.raises(SystemExit, match="HEADSTART_DATABASE_URL"):
        alembic_command(["--config", str(REPOSITORY / "alembic.ini"), "upgrade", "head"])


@pytest.mark.parametrize(
    "url",
    [
        "",
        "nonsense",
        "mysql://h/d",
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite:///file:x?mode=memory&uri=true",
    ],
)
def test_a_database_that_cannot_keep_money_is_refused(url):
    with pytest.raises(UnsupportedDatabase):
        open_database(url)


@pytest.mark.parametrize(
    "url", ["postgresql://user:secret@127.0.0.1:1/none", "sqlite:////nonexistent/folder/headstart.db"]
)
def test_a_database_that_is_away_is_named_so_without_its_password(url):
    with open_database(url) as db:
        assert not db.is_reachable()
        with pytest.raises(DatabaseUnavailable) as refusal, db.read():
            pass
        assert "secret" not in str(refusal.value)


def test_both_databases_answer(db):
    assert db.is_reachable()

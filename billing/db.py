"""The database: engines, transactions, migration.

Knows SQLite and PostgreSQL and how each is made safe for money. Does not know
what the tables mean.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from typing import Any

import psycopg
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, Engine, Executable, Row, create_engine, event, make_url, select, text
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import (
    ArgumentError,
    DataError,
    DBAPIError,
    DisconnectionError,
    IntegrityError,
    OperationalError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.pool import ConnectionPoolEntry, PoolProxiedConnection

from billing.errors import DatabaseUnavailable, SchemaUnknown, UnsupportedDatabase

BUSY_TIMEOUT_MS = 5_000
STATEMENT_TIMEOUT_MS = 15_000
CONNECT_TIMEOUT_SECONDS = 5

FRESH_NS = 1_000_000_000
"""A connection that was used so lately is taken for alive."""

_MIGRATION_LOCK = 0x4EAD57A7
"""Any constant: the advisory lock that lets one process migrate at a time."""

_SQLITE_SETTINGS = (
    f"busy_timeout = {BUSY_TIMEOUT_MS}",
    "journal_mode = WAL",
    "synchronous = FULL",  # a commit that was acknowledged survives a power cut
    "foreign_keys = ON",
    "recursive_triggers = ON",  # or else INSERT OR REPLACE deletes rows past the triggers that forbid it
)

_POSTGRES_DRIVERS = {"postgres", "postgresql", "postgresql+psycopg"}
_SQLITE_DRIVERS = {"sqlite", "sqlite+pysqlite"}


class Database:
    """One engine and its two kinds of transaction. Thread-safe. Close it when done."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        if engine.dialect.name == "sqlite":
            self._reader: Engine = engine
            self._writer: Engine = engine.execution_options(begin_immediate=True)
            self._alone = self._writer
        else:
            self._reader = engine.execution_options(
                isolation_level="REPEATABLE READ", postgresql_readonly=True
            )
            self._writer = engine
            self._alone = engine.execution_options(isolation_level="AUTOCOMMIT")

    def close(self) -> None:
        """Closes every pooled connection."""
        self.engine.dispose()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """One consistent snapshot. Changes made in it are refused or rolled back.

        Raises DatabaseUnavailable when the database fails to answer; see `write`.
        """
        with _failures_named(), self._reader.connect() as connection, connection.begin() as transaction:
            yield connection
            transaction.rollback()

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """One transaction: commits at the end of the block, rolls back when it raises.

        Raises DatabaseUnavailable when the database fails to answer. What it answers to a
        statement that breaks a rule (IntegrityError, DataError) passes through.
        """
        with _failures_named(), self._writer.begin() as connection:
            yield connection

    def write_alone(self, statement: Executable, row: Mapping[str, object]) -> Sequence[Row[Any]]:
        """One statement that is a transaction by itself: one way to PostgreSQL and back. Returns its rows.

        Raises like `write`.
        """
        with _failures_named(), self._alone.begin() as connection:
            return connection.execute(statement, row).all()

    def is_reachable(self) -> bool:
        """Whether the database answers now (for readiness)."""
        try:
            with self.read() as connection:
                connection.execute(select(1))
        except DatabaseUnavailable:
            return False
        return True

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _failures_named() -> Iterator[None]:
    try:
        yield
    except (IntegrityError, DataError):
        raise
    except (DBAPIError, PoolTimeoutError) as error:
        # The driver's words alone: SQLAlchemy's would quote the statement and its values.
        cause = error.orig if isinstance(error, DBAPIError) else error
        raise DatabaseUnavailable(f"the database fails: {cause}") from error


def open_database(url: str) -> Database:
    """`sqlite:///path/file.db` or `postgresql://…` (also `postgresql+psycopg://…`). Connects lazily.

    Raises UnsupportedDatabase for any other URL, and for SQLite in memory.
    """
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise UnsupportedDatabase("the database URL cannot be read") from error
    if parsed.drivername in _SQLITE_DRIVERS:
        return Database(_sqlite_engine(parsed))
    if parsed.drivername in _POSTGRES_DRIVERS:
        return Database(_postgres_engine(parsed.set(drivername="postgresql+psycopg")))
    raise UnsupportedDatabase(f"{parsed.drivername}: neither SQLite nor PostgreSQL")


def with_password(url: str, password: str) -> str:
    """The URL of a server with the password in it, which may have any character.

    Raises UnsupportedDatabase when the URL cannot be read, or is a file's.
    """
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise UnsupportedDatabase("the database URL cannot be read") from error
    if parsed.drivername not in _POSTGRES_DRIVERS:
        raise UnsupportedDatabase(f"{parsed.drivername}: only PostgreSQL takes a password")
    return parsed.set(password=password).render_as_string(hide_password=False)


def migrate(url: str) -> None:
    """Brings the schema to this code's version. Safe to run by several processes at once.

    Raises SchemaUnknown when newer code migrated the database.
    """
    config = alembic_config()
    with open_database(url) as database, database.write() as connection:
        _wait_for_other_migrations(connection)
        known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
        unknown = set(_applied(connection)) - known
        if unknown:
            raise SchemaUnknown(
                f"the database is at version {', '.join(sorted(unknown))}: newer than this code"
            )
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def schema_is_current(db: Database) -> bool:
    """Whether the schema is exactly the one of this code."""
    heads = set(ScriptDirectory.from_config(alembic_config()).get_heads())
    with db.read() as connection:
        return set(_applied(connection)) == heads


def alembic_config() -> Config:
    """Points Alembic at the packaged versions. Give it a connection in `attributes["connection"]`."""
    config = Config()
    config.set_main_option("script_location", str(resources.files("migrations")).replace("%", "%%"))
    return config


def _applied(connection: Connection) -> tuple[str, ...]:
    return MigrationContext.configure(connection).get_current_heads()


def _wait_for_other_migrations(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        # A migration may outlast any request's patience, and so may waiting for one.
        connection.execute(text("SET LOCAL statement_timeout = 0"))
        connection.execute(text("SET LOCAL lock_timeout = 0"))
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
    # SQLite: BEGIN IMMEDIATE already holds the only write lock.


def _sqlite_engine(url: URL) -> Engine:
    if url.database in {None, "", ":memory:"} or "mode=memory" in str(url):
        raise UnsupportedDatabase("SQLite in memory forgets its ledger; name a file")
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_MS // 1000})
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(dbapi_connection: DBAPIConnection, _record: object) -> None:
    # Without this the driver begins transactions by its own rules, and DDL escapes them.
    dbapi_connection.isolation_level = None
    cursor = dbapi_connection.cursor()
    try:
        for setting in _SQLITE_SETTINGS:
            cursor.execute(f"PRAGMA {setting}")
    except sqlite3.Error as error:
        # Raised in this place, the driver's own error would not be recognised as the database's.
        raise OperationalError("PRAGMA", None, error) from error
    finally:
        cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    # A writer takes its lock at the start, where waiting works; upgrading a read lock may fail at once.
    immediate = connection.get_execution_options().get("begin_immediate", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


def _postgres_engine(url: URL) -> Engine:
    defaults: dict[str, Any] = {
        "application_name": "headstart-billing",
        "connect_timeout": CONNECT_TIMEOUT_SECONDS,
        "tcp_user_timeout": STATEMENT_TIMEOUT_MS,
        "options": f"-c statement_timeout={STATEMENT_TIMEOUT_MS} -c lock_timeout={STATEMENT_TIMEOUT_MS}",
    }
    # What the operator's URL says goes first.
    connect_args = {name: value for name, value in defaults.items() if name not in url.query}
    engine = create_engine(url, connect_args=connect_args, pool_timeout=CONNECT_TIMEOUT_SECONDS)
    event.listen(engine, "checkin", _note_use)
    event.listen(engine, "checkout", _ping_unless_fresh)
    return engine


def _note_use(_connection: DBAPIConnection | None, record: ConnectionPoolEntry) -> None:
    record.info["used_ns"] = time.monotonic_ns()


def _ping_unless_fresh(
    connection: DBAPIConnection, record: ConnectionPoolEntry, _proxy: PoolProxiedConnection
) -> None:
    """SQLAlchemy's own `pool_pre_ping` asks each time, which is a fifth of a short transaction."""
    used_ns = record.info.get("used_ns")
    if used_ns is None or time.monotonic_ns() - used_ns < FRESH_NS:
        return
    try:
        connection.cursor().execute("SELECT 1")
        connection.rollback()
    except psycopg.OperationalError as error:
        raise DisconnectionError from error  # the pool opens another

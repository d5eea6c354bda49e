"""The database: engines, transactions, migration.

Knows SQLite and PostgreSQL and how each is made safe for money. Does not know
what the tables mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Engine


class Database:
    """One engine and its two kinds of transaction. Thread-safe. Close it when done."""

    engine: Engine

    def close(self) -> None:
        """Closes every pooled connection."""
        raise NotImplementedError

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """One consistent snapshot. Changes made in it are rolled back."""
        raise NotImplementedError

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """One transaction: commits at the end of the block, rolls back when it raises."""
        raise NotImplementedError

    def is_reachable(self) -> bool:
        """Whether the database answers now (for readiness)."""
        raise NotImplementedError

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_database(url: str) -> Database:
    """`sqlite:///path/file.db` or `postgresql://…` (also `postgresql+psycopg://…`). Connects lazily.

    Raises UnsupportedDatabase for any other URL, and for SQLite in memory.
    """
    raise NotImplementedError


def migrate(url: str) -> None:
    """Brings the schema to this code's version. Safe to run by several processes at once.

    Raises SchemaUnknown when newer code migrated the database.
    """
    raise NotImplementedError


def schema_is_current(db: Database) -> bool:
    """Whether the schema is exactly the one of this code."""
    raise NotImplementedError

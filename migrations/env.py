"""Runs the versions on one connection, in one transaction.

`billing.db.migrate` passes its connection in `config.attributes["connection"]`.
Without one (the `alembic` command), `HEADSTART_DATABASE_URL` names the database.
"""

from __future__ import annotations

import os

from alembic import context
from sqlalchemy import Connection

from billing.db import open_database
from billing.schema import metadata


def run_on(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=metadata,
        # SQLite changes columns by copying the table.
        render_as_batch=connection.dialect.name == "sqlite",
        # Both databases undo DDL, so a version is applied whole or not at all.
        transactional_ddl=True,
        compare_type=True,
        compare_server_default=True,
    )
    with context.begin_transaction():
        context.run_migrations()


def run_from_environment() -> None:
    url = os.environ.get("HEADSTART_DATABASE_URL")
    if not url:
        raise SystemExit("set HEADSTART_DATABASE_URL, for instance sqlite:///headstart.db")
    with open_database(url) as database, database.write() as connection:
        run_on(connection)


if context.is_offline_mode():
    raise SystemExit("these versions look at the database they run on; offline SQL is not offered")

given: Connection | None = context.config.attributes.get("connection")
if given is None:
    run_from_environment()
else:
    run_on(given)

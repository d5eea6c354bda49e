"""What commands share: settings, an open database, refusals, tables.

Knows the terminal. Does not know any command.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from billing import instants
from billing.db import Database, open_database, schema_is_current
from billing.instants import Microseconds
from gateway.secrets import ledger_url
from gateway.settings import Settings

PIPE_WIDTH: Final = 240

TenantOption = Annotated[str, typer.Option("--tenant", help="A tenant's name.")]


class CommandRefused(Exception):
    """The command cannot do what was asked. The message says why and what to do."""


def settings_from(**given: object) -> Settings:
    """From the environment, with what was given on the command line before it."""
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return Settings(**chosen)


def settings_fault(error: ValidationError) -> str:
    faults = (f"HEADSTART_{str(fault['loc'][0]).upper()}: {fault['msg']}" for fault in error.errors())
    return "; ".join(faults)


@contextmanager
def open_current_database() -> Iterator[Database]:
    with open_database(ledger_url(settings_from())) as database:
        require_current(database)
        yield database


def require_current(database: Database) -> None:
    if not database.is_reachable():
        raise CommandRefused("the database cannot be reached; a new one is made by headstart migrate")
    if not schema_is_current(database):
        raise CommandRefused("the database is not at this version's schema: run headstart migrate")


def print_table(header: tuple[str, ...], rows: list[Any], *, right_aligned: bool = False) -> None:
    table = Table(header_style="bold")
    for index, name in enumerate(header):
        table.add_column(name, justify="right" if right_aligned and index else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    # A pipe has no width; nothing is folded for a program that reads it.
    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(table)


def shown(instant: Microseconds) -> str:
    return instants.to_datetime(instant).strftime("%Y-%m-%d %H:%M:%S")

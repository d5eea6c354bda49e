"""Small pieces of SQL that the two databases want in different forms.

Knows dialects. Does not know tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final

import msgspec
import psycopg
from sqlalchemy import (
    ARRAY,
    ColumnElement,
    Connection,
    LargeBinary,
    Table,
    TextClause,
    any_,
    insert,
    literal,
    text,
)
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import DBAPIError

_JSON: Final = msgspec.json.Encoder()


def among(connection: Connection, column: ColumnElement[Any], values: Iterable[Any]) -> ColumnElement[bool]:
    """`column IN (values)`. On PostgreSQL one parameter: the driver reads a statement of hundreds slowly."""
    if connection.dialect.name == "postgresql":
        return column == any_(literal(list(values), ARRAY(column.type)))
    return column.in_(list(values))


def insert_many(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows that all have the same columns and meet nothing that is there. On PostgreSQL by COPY.

    Raises as an INSERT does.
    """
    if not rows:
        return
    if connection.dialect.name != "postgresql":
        connection.execute(insert(table), rows)
        return
    columns = list(rows[0])
    statement = f"COPY {table.name} ({', '.join(columns)}) FROM STDIN"
    driver = connection.connection.driver_connection
    assert driver is not None, "the transaction has begun"
    try:
        with driver.cursor() as cursor, cursor.copy(statement) as copy:
            for row in rows:
                copy.write_row(tuple(row.values()))
    except psycopg.Error as error:
        raise DBAPIError.instance(
            statement, None, error, psycopg.Error, dialect=connection.dialect
        ) from error


def insert_new(
    connection: Connection,
    table: Table,
    rows: Sequence[Mapping[str, Any]],
    *,
    key: Sequence[str] = ("id",),
    where: str | None = None,
) -> set[Any]:
    """Writes the rows that meet no other with their key; returns the ids of those written.

    The key is that of a unique index, which holds for rows that meet `where`. All rows have the same columns.
    On PostgreSQL they travel as one JSON text: a statement with a parameter for each value
    takes the driver longer to read than the database to run.
    """
    if not rows:
        return set()
    if connection.dialect.name == "postgresql":
        columns = tuple(rows[0])
        statement = _insert_new_from_json(table, columns, tuple(key), where)
        return set(connection.execute(statement, {"rows": _json_rows(table, rows)}).scalars())
    keeping = sqlite.insert(table).on_conflict_do_nothing(
        index_elements=key, index_where=None if where is None else text(where)
    )
    return set(connection.execute(keeping.returning(table.c.id), rows).scalars())


@cache
def _insert_new_from_json(
    table: Table, columns: Sequence[str], key: Sequence[str], where: str | None
) -> TextClause:
    names = ", ".join(columns)
    condition = "" if where is None else f" WHERE {where}"
    return text(
        f"INSERT INTO {table.name} ({names})"  # noqa: S608  # names of our own schema, no value
        f" SELECT {names} FROM json_populate_recordset(CAST(NULL AS {table.name}), CAST(:rows AS json))"
        f" ON CONFLICT ({', '.join(key)}){condition} DO NOTHING RETURNING id"
    )


def _json_rows(table: Table, rows: Sequence[Mapping[str, Any]]) -> str:
    binary = [name for name in rows[0] if isinstance(table.c[name].type, LargeBinary)]
    if binary:
        rows = [{**row, **{name: rf"\x{row[name].hex()}" for name in binary}} for row in rows]
    return _JSON.encode(rows).decode()


def place_text(column: str, starts: Sequence[int], first: int = 0) -> str:
    """SQL for a value's place among ascending starts: as many questions as in a binary search."""
    if len(starts) == 1:
        return str(first)
    middle = len(starts) // 2
    before = place_text(column, starts[:middle], first)
    after = place_text(column, starts[middle:], first + middle)
    return f"CASE WHEN {column} < {int(starts[middle])} THEN {before} ELSE {after} END"

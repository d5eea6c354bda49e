"""Small pieces of SQL that the two databases want in different forms.

Knows dialects. Does not know tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import psycopg
from sqlalchemy import ARRAY, ColumnElement, Connection, Table, any_, insert, literal
from sqlalchemy.exc import DBAPIError


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


def place_text(column: str, starts: Sequence[int], first: int = 0) -> str:
    """SQL for a value's place among ascending starts: as many questions as in a binary search."""
    if len(starts) == 1:
        return str(first)
    middle = len(starts) // 2
    before = place_text(column, starts[:middle], first)
    after = place_text(column, starts[middle:], first + middle)
    return f"CASE WHEN {column} < {int(starts[middle])} THEN {before} ELSE {after} END"

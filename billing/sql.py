"""Small pieces of SQL that the two databases want in different forms.

Knows dialects. Does not know tables.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import ARRAY, ColumnElement, Connection, any_, literal


def among(connection: Connection, column: ColumnElement[Any], values: Iterable[Any]) -> ColumnElement[bool]:
    """`column IN (values)`. On PostgreSQL one parameter: the driver reads a statement of hundreds slowly."""
    if connection.dialect.name == "postgresql":
        return column == any_(literal(list(values), ARRAY(column.type)))
    return column.in_(list(values))

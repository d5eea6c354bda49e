"""Exact sums in SQL, also where a sum is wider than 64 bits.

Knows how each database adds up. Does not know what is added.

PostgreSQL widens a sum by itself. SQLite's SUM raises when it passes 64 bits, which few
sums do: then both halves of every value are summed, and put together again here. Neither
half's sum can pass 64 bits, below two milliard rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import BigInteger, ColumnElement, Connection, RowMapping, Select, cast, func, literal_column
from sqlalchemy.exc import OperationalError

ONE: Final = cast(literal_column("1"), BigInteger())
"""For counting rows."""

_HALF_BITS: Final = 32
_HALF_MASK: Final = 2**_HALF_BITS - 1
_OVERFLOW: Final = "integer overflow"

Build = Callable[[Sequence[ColumnElement[Any]]], Select[Any]]
"""A query for these columns, among others."""


def exact_sums(
    connection: Connection, columns: Mapping[str, ColumnElement[int]], build: Build
) -> Sequence[RowMapping]:
    """The rows of a query for sums; `exact_sum` reads each one from a row."""
    whole = [func.sum(column).label(name) for name, column in columns.items()]
    try:
        return connection.execute(build(whole)).mappings().all()
    except OperationalError as error:
        if _OVERFLOW not in str(error.orig):
            raise
    return connection.execute(build(_halves(columns))).mappings().all()


def exact_sum(row: RowMapping, name: str) -> int:
    """Zero, where no row was summed."""
    if name in row:
        return int(row[name] or 0)
    return (int(row[f"{name}_high"] or 0) << _HALF_BITS) + int(row[f"{name}_low"] or 0)


def _halves(columns: Mapping[str, ColumnElement[int]]) -> list[ColumnElement[Any]]:
    return [
        func.sum(half).label(f"{name}_{part}")
        for name, column in columns.items()
        for part, half in (
            ("high", column.bitwise_rshift(_HALF_BITS)),
            ("low", column.bitwise_and(_HALF_MASK)),
        )
    ]

"""Exact sums in SQL, also where a sum is wider than 64 bits.

Knows how each database adds up. Does not know what is added.

PostgreSQL widens a sum by itself. SQLite's SUM raises when it passes 64 bits, so both
halves of every value are summed, and put together again here: neither half's sum can
pass 64 bits, below two milliard rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sqlalchemy import BigInteger, ColumnElement, RowMapping, cast, func, literal_column

ONE: Final = cast(literal_column("1"), BigInteger())
"""For counting rows."""

_HALF_BITS: Final = 32
_HALF_MASK: Final = 2**_HALF_BITS - 1


def exact_sums(columns: Mapping[str, ColumnElement[int]]) -> list[ColumnElement[int]]:
    """What to select; `exact_sum` reads each one from the row."""
    return [
        half.label(f"{name}_{part}")
        for name, column in columns.items()
        for part, half in (("high", func.sum(_high(column))), ("low", func.sum(_low(column))))
    ]


def exact_sum(row: RowMapping, name: str) -> int:
    """Zero, where no row was summed."""
    return (int(row[f"{name}_high"] or 0) << _HALF_BITS) + int(row[f"{name}_low"] or 0)


# Literals, because PostgreSQL shifts by a 32-bit integer and a parameter would be a 64-bit one.
def _high(column: ColumnElement[int]) -> ColumnElement[int]:
    return column.bitwise_rshift(literal_column(str(_HALF_BITS)))


def _low(column: ColumnElement[int]) -> ColumnElement[int]:
    return column.bitwise_and(literal_column(str(_HALF_MASK)))

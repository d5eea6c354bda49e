"""Rows as CSV, JSONL or Parquet, written as they come, with a trailer that proves that all came.

Knows the formats, and which cells a spreadsheet would run. Does not know what rows mean
or where they come from. However many rows there are, only one page is in memory.

Money is exact in every format: decimal strings in text, decimals in Parquet. Instants are UTC.
The last record of a text file is its trailer: the number of rows and the exact sum of the
money. A Parquet file has them in its metadata.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import BinaryIO, Final

from billing import instants
from billing.instants import Microseconds
from billing.money import format_dollars

PARQUET_MISSING: Final = "Parquet needs pyarrow, which is not installed: pip install 'headstart[export]'"
_RECORD: Final = "record"
_ROW: Final = "row"
# What a spreadsheet takes for the beginning of a formula, and what it would skip to find one.
_RUNNABLE: Final = ("=", "+", "-", "@", "\t", "\r", "\n")

Cell = str | int | None
Row = Sequence[Cell]


class Kind(StrEnum):
    """What a column holds: text, an integer, picodollars, or microseconds since 1970."""

    TEXT = "text"
    INTEGER = "integer"
    MONEY = "money"
    INSTANT = "instant"


class Format(StrEnum):
    CSV = "csv"
    JSONL = "jsonl"
    PARQUET = "parquet"


class FormatMissing(Exception):
    """The format needs a package that is not installed. The message says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A table's columns in order. Their names and order are promises. `summed` is one of money."""

    columns: Mapping[str, Kind]
    summed: str


@dataclass(slots=True)
class Trailer:
    """How many rows passed through `counted`, and their exact sum."""

    rows: int = 0
    sum_pusd: int = 0

    def counted(self, rows: Iterable[Row], layout: Layout) -> Iterator[Row]:
        summed_at = list(layout.columns).index(layout.summed)
        for row in rows:
            self.rows += 1
            amount = row[summed_at]
            assert isinstance(amount, int), "a layout sums a column of money"
            self.sum_pusd += amount
            yield row


def write_table(output: BinaryIO, rows: Iterable[Row], layout: Layout, *, into: Format) -> None:
    """Raises FormatMissing before anything is written."""
    if into is Format.PARQUET:
        _write_parquet(output, rows, layout)
        return
    encode = csv_lines if into is Format.CSV else json_lines
    output.writelines(encode(rows, layout))


def csv_lines(rows: Iterable[Row], layout: Layout) -> Iterator[bytes]:
    """RFC 4180, UTF-8. The trailer's `record` is `total` and its `row` the number of rows."""
    trailer = Trailer()
    yield _csv_line([_RECORD, _ROW, *layout.columns])
    for row in trailer.counted(rows, layout):
        cells = [_csv_cell(cell, kind) for cell, kind in zip(row, layout.columns.values(), strict=True)]
        yield _csv_line(["line", str(trailer.rows), *cells])
    totals = [format_dollars(trailer.sum_pusd) if name == layout.summed else "" for name in layout.columns]
    yield _csv_line(["total", str(trailer.rows), *totals])


def json_lines(rows: Iterable[Row], layout: Layout) -> Iterator[bytes]:
    """One object a line. The last one's `record` is `total`."""
    trailer = Trailer()
    for row in trailer.counted(rows, layout):
        cells = {
            name: _json_cell(cell, kind)
            for (name, kind), cell in zip(layout.columns.items(), row, strict=True)
        }
        yield _json_line({_RECORD: "line", _ROW: trailer.rows, **cells})
    yield _json_line({_RECORD: "total", _ROW: trailer.rows, layout.summed: format_dollars(trailer.sum_pusd)})


def neutralised(text: str) -> str:
    """The same text, which no spreadsheet takes for a formula: an apostrophe goes before one."""
    return f"'{text}" if text.startswith(_RUNNABLE) else text


def shown_instant(instant: int) -> str:
    """ISO 8601 in UTC, always with microseconds: as text it sorts like time."""
    return instants.to_datetime(Microseconds(instant)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _csv_cell(cell: Cell, kind: Kind) -> str:
    # Only text can be somebody else's. A number of ours keeps its sign.
    shown = _json_cell(cell, kind)
    return neutralised(shown) if isinstance(shown, str) and kind is Kind.TEXT else _blank(shown)


def _blank(cell: Cell) -> str:
    return "" if cell is None else str(cell)


def _json_cell(cell: Cell, kind: Kind) -> Cell:
    if kind is Kind.MONEY and isinstance(cell, int):
        return format_dollars(cell)
    if kind is Kind.INSTANT and isinstance(cell, int):
        return shown_instant(cell)
    return cell


def _csv_line(cells: Sequence[str]) -> bytes:
    line = io.StringIO()
    csv.writer(line).writerow(cells)
    return line.getvalue().encode()


def _json_line(record: Mapping[str, object]) -> bytes:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _write_parquet(output: BinaryIO, rows: Iterable[Row], layout: Layout) -> None:
    try:
        from gateway import parquet  # noqa: PLC0415 — an extra, and slow to load
    except ImportError as error:
        raise FormatMissing(PARQUET_MISSING) from error
    parquet.write(output, rows, layout)

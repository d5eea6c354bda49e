"""Tables as Parquet files. Needs pyarrow, which is an extra: only `gateway.tables` imports this, when asked.

Knows Arrow's types. Does not know what rows mean.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any, BinaryIO, Final

import pyarrow
import pyarrow.parquet

from billing.money import format_dollars
from gateway.tables import Cell, Kind, Layout, Row, Trailer

ROWS_PER_GROUP: Final = 10_000
"""A row group is what is in memory at a time."""
ROWS_KEY: Final = "rows"
_PICODOLLAR_DIGITS: Final = 12
_TYPES: Final = {
    Kind.TEXT: pyarrow.string(),
    Kind.INTEGER: pyarrow.int64(),
    Kind.MONEY: pyarrow.decimal128(38, _PICODOLLAR_DIGITS),
    Kind.INSTANT: pyarrow.timestamp("us", tz="UTC"),
}


def write(output: BinaryIO, rows: Iterable[Row], layout: Layout) -> None:
    """The number of rows and the sum of their money go into the file's metadata."""
    trailer = Trailer()
    schema = pyarrow.schema([(name, _TYPES[kind]) for name, kind in layout.columns.items()])
    counted = trailer.counted(rows, layout)
    with pyarrow.parquet.ParquetWriter(output, schema) as writer:
        for group in iter(lambda: list(itertools.islice(counted, ROWS_PER_GROUP)), []):
            writer.write_table(_arrow_table(group, layout, schema))
        writer.add_key_value_metadata(
            {ROWS_KEY: str(trailer.rows), layout.summed: format_dollars(trailer.sum_pusd)}
        )


def _arrow_table(rows: Sequence[Row], layout: Layout, schema: Any) -> Any:
    arrays = [
        pyarrow.array([_arrow_cell(cell, kind) for cell in column], _TYPES[kind])
        for kind, column in zip(layout.columns.values(), zip(*rows, strict=True), strict=True)
    ]
    return pyarrow.Table.from_arrays(arrays, schema=schema)


def _arrow_cell(cell: Cell, kind: Kind) -> object:
    return Decimal(cell).scaleb(-_PICODOLLAR_DIGITS) if kind is Kind.MONEY and cell is not None else cell

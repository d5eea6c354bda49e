"""Tables in three formats: exact, whole, and nothing in them that a spreadsheet would run."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
import tracemalloc
from datetime import UTC, datetime
from decimal import Decimal

import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tables import Format, Kind, Layout, csv_lines, json_lines, neutralised, write_table

LAYOUT = Layout(
    columns={"name": Kind.TEXT, "at": Kind.INSTANT, "quantity": Kind.INTEGER, "amount": Kind.MONEY},
    summed="amount",
)
ROWS = [
    ("plain", 1_772_323_200_000_001, 3, 54_399_000_000),
    ("=cmd|' /C calc'!A0", 0, -7, -1),
    (None, 1_772_323_200_000_000, None, 2**63 - 1),
]
TOTAL = "9223372.091253775806"

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
amounts = st.integers(-(2**63), 2**63 - 1)


def as_csv(rows) -> list[list[str]]:
    return list(csv.reader(io.StringIO(b"".join(csv_lines(rows, LAYOUT)).decode(), newline="")))


def as_json(rows) -> list[dict]:
    return [json.loads(line) for line in json_lines(rows, LAYOUT)]


def test_csv_has_a_header_the_rows_and_a_trailer():
    assert as_csv(ROWS) == [
        ["record", "row", "name", "at", "quantity", "amount"],
        ["line", "1", "plain", "2026-03-01T00:00:00.000001Z", "3", "0.054399"],
        ["line", "2", "'=cmd|' /C calc'!A0", "1970-01-01T00:00:00.000000Z", "-7", "-0.000000000001"],
        ["line", "3", "", "2026-03-01T00:00:00.000000Z", "", "9223372.036854775807"],
        ["total", "3", "", "", "", TOTAL],
    ]


def test_json_lines_end_with_a_trailer():
    *lines, trailer = as_json(ROWS)
    assert lines[1] == {
        "record": "line",
        "row": 2,
        "name": "=cmd|' /C calc'!A0",  # JSON is read by programs: what was written is what is read
        "at": "1970-01-01T00:00:00.000000Z",
        "quantity": -7,
        "amount": "-0.000000000001",
    }
    assert lines[2]["name"] is None
    assert trailer == {"record": "total", "row": 3, "amount": TOTAL}


def test_parquet_keeps_types_and_its_metadata_has_the_trailer():
    output = io.BytesIO()
    write_table(output, ROWS, LAYOUT, into=Format.PARQUET)
    table = pyarrow.parquet.read_table(output)
    assert table.column("amount").to_pylist() == [
        Decimal("0.054399"),
        Decimal("-0.000000000001"),
        Decimal("9223372.036854775807"),
    ]
    assert table.column("at").to_pylist()[0] == datetime(2026, 3, 1, 0, 0, 0, 1, tzinfo=UTC)
    assert table.column("name").to_pylist() == [row[0] for row in ROWS]
    metadata = pyarrow.parquet.read_metadata(output).metadata
    assert (metadata[b"rows"], metadata[b"amount"]) == (b"3", TOTAL.encode())


@pytest.mark.parametrize("form", list(Format))
def test_a_table_without_rows_is_whole_too(form):
    output = io.BytesIO()
    write_table(output, [], LAYOUT, into=form)
    if form is Format.PARQUET:
        assert pyarrow.parquet.read_table(output).num_rows == 0
    else:
        assert b"0.00" in output.getvalue().splitlines()[-1]


@given(st.lists(st.tuples(texts, st.just(0), st.just(0), amounts)))
def test_no_text_of_a_csv_can_be_run_and_none_is_lost(rows):
    _, *lines, trailer = as_csv(rows)
    assert trailer[1] == str(len(rows))
    assert Decimal(trailer[-1]) == sum(Decimal(row[3]).scaleb(-12) for row in rows)
    for line, row in zip(lines, rows, strict=True):
        shown = line[2]
        assert not shown.startswith(("=", "+", "-", "@", "\t", "\r", "\n"))
        assert shown in {row[0], "'" + row[0]}
        assert Decimal(line[-1]).scaleb(12) == row[3]


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1"])
def test_a_cell_that_begins_like_a_formula_is_neutralised(text):
    assert neutralised(text) == f"'{text}"


@pytest.mark.parametrize("text", ["", "a=1", "1-1", "'=1", "gpt@home"])
def test_other_cells_stay_as_they_are(text):
    assert neutralised(text) == text


@pytest.mark.parametrize("form", [Format.CSV, Format.JSONL])
def test_rows_are_written_as_they_come(form, tmp_path):
    tracemalloc.start()
    with (tmp_path / "table").open("wb") as output:
        write_table(output, (("x" * 1_000, 0, 1, 1) for _ in range(20_000)), LAYOUT, into=form)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (tmp_path / "table").stat().st_size > 20_000_000
    assert peak_bytes < 1_000_000


def test_without_pyarrow_a_parquet_file_is_refused_by_name_of_what_to_install():
    program = (
        "import sys, io; sys.modules['pyarrow'] = None\n"
        "from gateway.tables import *\n"
        "layout = Layout(columns={'amount': Kind.MONEY}, summed='amount')\n"
        "try: write_table(io.BytesIO(), [], layout, into=Format.PARQUET)\n"
        "except FormatMissing as refusal: print(refusal)"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install 'headstart[export]'" in told.stdout

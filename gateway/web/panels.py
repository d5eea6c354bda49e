"""What a page is made of: tiles, panels, tables, cells and filters, as values.

Knows how numbers, money, instants and durations are written down. Does not know HTML, nor where a
number comes from. A cell has an exact value for machines and a text for people. A panel shows a figure,
a table or both; one that has neither says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import urlencode
from zoneinfo import ZoneInfo

from billing import instants
from billing.instants import Microseconds
from billing.money import format_basis_points, format_dollars
from billing.reports import CURRENCY

Figure = dict[str, Any]
"""`data` and `layout` as Plotly takes them."""

UNKNOWN: Final = "—"
_SECONDS: Final = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"), (1.0, "s"))
_BYTES: Final = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """`value` is exact; `shown`, with its `unit`, is what people read. `href` makes it a link."""

    shown: str
    value: str
    unit: str = ""
    href: str = ""
    is_code: bool = False
    is_money: bool = False
    button: Button | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Button:
    """What changes something for one row. `asks` is said before it is done, where it cannot be undone."""

    label: str
    action: str
    names: str
    asks: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One of a form. It is a list where it has options, and a text of several lines where it has `rows`."""

    name: str
    label: str
    value: str = ""
    hint: str = ""
    options: Sequence[tuple[str, str]] = ()
    rows: int = 0
    is_required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    key: str
    action: str
    button: str
    fields: Sequence[Field]
    hidden: Sequence[tuple[str, str]] = ()
    takes_file: str = ""
    """The field that the content of a chosen file is put into."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    label: str
    is_number: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The first cell of a row is its heading. `total` is one more row, set apart."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    total: Sequence[Cell] = ()

    @property
    def units(self) -> Sequence[str]:
        """Of each column of money its currency, which is said once, in the heading."""
        every = [*self.rows, self.total] if self.total else list(self.rows)
        columns_of_cells = zip(*every, strict=True)
        return [next((cell.unit for cell in column if cell.is_money), "") for column in columns_of_cells] or [
            ""
        ] * len(self.columns)

    @property
    def shown_rows(self) -> Sequence[Sequence[Cell]]:
        """The rows, then the total, with the points of each column's money below each other."""
        every = [*self.rows, self.total] if self.total else list(self.rows)
        digits = [max(map(_digits, column)) for column in zip(*every, strict=True)]
        return [[_padded(cell, wanted) for cell, wanted in zip(row, digits, strict=True)] for row in every]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """`key` names it in the page. `says` is what a figure shows, for who cannot see it."""

    key: str
    title: str
    hint: str = ""
    figure: Figure | None = None
    says: str = ""
    table: Table | None = None
    empty: str = ""
    links: Sequence[tuple[str, str]] = ()
    form: Form | None = None
    is_wide: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    key: str
    label: str
    hint: str
    cell: Cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A filter: a list to choose from, or where it has no options, a field to fill in."""

    name: str
    label: str
    value: str
    options: Sequence[tuple[str, str]] = ()
    suggestions: Sequence[str] = ()


def columns(*labels: str, num_texts: int = 1) -> Sequence[Column]:
    """The first ones are text, the others are numbers."""
    return [Column(label=label, is_number=place >= num_texts) for place, label in enumerate(labels)]


def text(shown: str, *, value: str | None = None, href: str = "") -> Cell:
    return Cell(shown=shown, value=shown if value is None else value, href=href)


def button(label: str, action: str, *, names: str, asks: str = "") -> Cell:
    """`names` says which row it is for, to who cannot see the row."""
    return Cell(shown="", value="", button=Button(label=label, action=action, names=names, asks=asks))


def code(shown: str, *, value: str | None = None, href: str = "") -> Cell:
    """Names that are compared letter by letter."""
    return Cell(shown=shown, value=shown if value is None else value, href=href, is_code=True)


def nothing() -> Cell:
    return Cell(shown=UNKNOWN, value="")


def count(number: int) -> Cell:
    return Cell(shown=_signed(f"{number:,}"), value=str(number))


def money(amount_pusd: int) -> Cell:
    exact = format_dollars(amount_pusd)
    return Cell(shown=_signed(exact), value=exact, unit=CURRENCY, is_money=True)


def percent(part: int, whole: int) -> Cell:
    """Hundredths of a percent, rounded down; of nothing there is no share."""
    if not whole:
        return nothing()
    exact = format_basis_points(part * 10_000 // whole)
    return Cell(shown=_signed(exact), value=exact, unit="%")


def milliseconds(total_us: int, requests: int) -> Cell:
    """A mean of microseconds, in milliseconds with one digit."""
    if not requests:
        return nothing()
    tenths = total_us // requests // 100
    return Cell(shown=f"{tenths // 10:,}.{tenths % 10}", value=f"{tenths // 10}.{tenths % 10}", unit="ms")


def duration(seconds: float) -> Cell:
    """In its largest unit, with two or three digits."""
    for size, unit in _SECONDS:
        if seconds >= size:
            return Cell(shown=f"{seconds / size:.3g}", value=f"{seconds:.3f}", unit=unit)
    return Cell(shown=f"{seconds * 1_000:.3g}", value=f"{seconds:.3f}", unit="ms")


def size(num_bytes: int) -> Cell:
    for unit_bytes, unit in _BYTES:
        if num_bytes >= unit_bytes:
            return Cell(shown=f"{num_bytes / unit_bytes:,.1f}", value=str(num_bytes), unit=unit)
    return Cell(shown=f"{num_bytes:,}", value=str(num_bytes), unit="B")


def moment(instant: Microseconds, zone: ZoneInfo) -> Cell:
    """In the zone, to the second; the page names the zone."""
    local = instants.to_datetime(instant).astimezone(zone)
    return Cell(shown=local.strftime("%Y-%m-%d %H:%M:%S"), value=local.isoformat(timespec="microseconds"))


def link(path: str, carried: Mapping[str, str], **more: str | None) -> str:
    """An address that keeps what is carried from page to page."""
    query = {**carried, **{name: value for name, value in more.items() if value}}
    return f"{path}?{urlencode(query)}" if query else path


def _digits(cell: Cell) -> int:
    return len(cell.shown.partition(".")[2]) if cell.is_money else 0


def _padded(cell: Cell, digits: int) -> Cell:
    """Zeros up to so many digits; the exact value stays as short as it is."""
    return replace(cell, shown=cell.shown + "0" * (digits - _digits(cell))) if cell.is_money else cell


def _signed(shown: str) -> str:
    return shown.replace("-", "−")

"""A statement in words, for people and for programs: text, CSV and JSON; `web.statements` has the page.

Knows labels and columns. Does not know how a statement came to be. Exact amounts stand beside rounded
ones, and nothing is added up here that billing did not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import msgspec

from billing import instants
from billing.calendar import zone_named
from billing.instants import Microseconds
from billing.money import PICODOLLARS_PER_CENT, format_basis_points, format_cents, format_dollars
from billing.statements import LineKind, Statement, StatementLine, Status
from billing.usage import TokenClass
from gateway.tables import Cell, Kind, Layout, csv_lines, shown_instant

PREVIEW_NOTE: Final = "PREVIEW: this period is still open, and its figures may change. This is no statement."

CLASS_LABELS: Final = {
    TokenClass.INPUT: "Input",
    TokenClass.READ: "Cached",
    TokenClass.READ_HOST: "Cached, host memory",
    TokenClass.READ_DISK: "Cached, disk",
    TokenClass.READ_REMOTE: "Cached, remote",
    TokenClass.WRITE_AUTO: "Written, automatic",
    TokenClass.WRITE_5M: "Written, 5 minutes",
    TokenClass.WRITE_1H: "Written, 1 hour",
    TokenClass.OUTPUT: "Output",
    TokenClass.PIN: "Pinned, token-hours",
}
_SECTIONS: Final = {
    LineKind.USAGE: "Usage",
    LineKind.ADJUSTMENT: "Adjustments from earlier periods",
    LineKind.CREDIT: "Credits",
}
LINES: Final = Layout(
    columns={
        "statement": Kind.TEXT,
        "status": Kind.TEXT,
        "kind": Kind.TEXT,
        "for_period": Kind.TEXT,
        "project_id": Kind.TEXT,
        "project": Kind.TEXT,
        "api_key_id": Kind.TEXT,
        "api_key": Kind.TEXT,
        "model": Kind.TEXT,
        "token_class": Kind.TEXT,
        "quantity": Kind.INTEGER,
        "list_amount": Kind.MONEY,
        "discount": Kind.MONEY,
        "amount": Kind.MONEY,
        "amount_without_cache": Kind.MONEY,
        "currency": Kind.TEXT,
    },
    summed="amount",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LineView:
    """A line as it is printed: names for what has none, and every figure as text."""

    period: str
    project: str
    api_key: str
    model: str
    token_class: str
    quantity: str
    list_amount: str
    discount: str
    amount: str
    rounded: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    title: str
    lines: Sequence[LineView]
    amount: str
    """The exact sum of its lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    label: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StatementView:
    """Everything that a printed statement says, in the order in which it is said."""

    title: str
    note: str | None
    tenant: str
    number: str
    period: str
    issued: str
    currency: str
    sections: Sequence[Section]
    totals: Sequence[Figure]
    due: str
    savings: Sequence[Figure]
    books_agree: bool
    books: str
    digest: str | None


def view_of(statement: Statement, digest: bytes | None) -> StatementView:
    """`digest` is None for a preview, which has none."""
    is_preview = statement.status is Status.PREVIEW
    return StatementView(
        title="Preview" if is_preview else "Statement",
        note=PREVIEW_NOTE if is_preview else None,
        tenant=statement.tenant,
        number=statement.number,
        period=_period(statement),
        issued=_moment(statement.issued_at, statement.time_zone),
        currency=statement.currency,
        sections=list(_sections(statement)),
        totals=_totals(statement),
        due=format_cents(statement.due_cents),
        savings=_savings(statement),
        books_agree=statement.reconciliation.agrees,
        books=_books(statement),
        digest=None if digest is None else digest.hex(),
    )


def as_json(statement: Statement, digest: bytes | None) -> bytes:
    """The document as billing keeps it, with its digest, and a summary in decimal strings.

    The SHA-256 of `document`, written with sorted names, without spaces and in UTF-8, is `digest`.
    """
    body: dict[str, Any] = {
        "object": "statement",
        "digest": None if digest is None else digest.hex(),
        "summary": {
            "number": statement.number,
            "status": statement.status.value,
            "period": statement.period,
            "start": shown_instant(statement.start),
            "end": shown_instant(statement.end),
            "currency": statement.currency,
            "list_amount": format_dollars(statement.list_amount_pusd),
            "discount": format_dollars(statement.discount_pusd),
            "amount": format_dollars(statement.amount_pusd),
            "amount_pusd": statement.amount_pusd,
            "residual_brought": format_dollars(statement.residual_brought_pusd),
            "residual_kept": format_dollars(statement.residual_kept_pusd),
            "due": format_cents(statement.due_cents),
            "saved": format_dollars(statement.savings.net_pusd),
            "cached_percent": format_basis_points(statement.savings.cached_basis_points),
            "books_agree": statement.reconciliation.agrees,
        },
        "document": msgspec.to_builtins(statement),
    }
    return json.dumps(body, ensure_ascii=False).encode() + b"\n"


def as_csv(statement: Statement) -> bytes:
    """The lines, exact, with a trailer."""
    return b"".join(csv_lines(_cells(statement), LINES))


def as_text(statement: Statement, digest: bytes | None) -> str:
    """For a terminal or a mail, with columns of equal width."""
    view = view_of(statement, digest)
    head = [
        f"{view.title.upper()} {view.number}",
        *([view.note] if view.note else []),
        "",
        f"For      {view.tenant}",
        f"Period   {view.period}",
        f"Issued   {view.issued}",
    ]
    books = "agree" if view.books_agree else "DISAGREE"
    foot = [
        *_figures([*view.totals, Figure(label=f"Due, {view.currency}", value=view.due)]),
        "",
        *_figures(view.savings),
        "",
        f"Books {books}: {view.books}",
        *([f"SHA-256 {view.digest}"] if view.digest else []),
    ]
    body = [line for section in view.sections for line in ("", *_section_text(section, view.currency))]
    return "\n".join([*head, *body, "", *foot, ""])


def _sections(statement: Statement) -> Iterator[Section]:
    """Usage always, the others where there are any."""
    for kind, title in _SECTIONS.items():
        lines = statement.of_kind(kind)
        if lines or kind is LineKind.USAGE:
            digits = _digits(amount for line in lines for amount in _amounts(line))
            yield Section(
                title=title,
                lines=[_line(line, digits) for line in lines],
                amount=_padded(statement.amount_of_kind(kind), digits),
            )


def _amounts(line: StatementLine) -> Sequence[int]:
    return line.list_amount_pusd, -line.discount_pusd, line.amount_pusd


def _line(line: StatementLine, digits: int) -> LineView:
    list_amount, discount, amount = (_padded(amount, digits) for amount in _amounts(line))
    return LineView(
        period=line.for_period,
        project=line.project or "—",
        api_key=line.api_key,
        model=line.model,
        token_class=CLASS_LABELS[line.token_class],
        quantity=f"{line.quantity:,}",
        list_amount=list_amount,
        discount=discount,
        amount=amount,
        rounded=format_cents(line.cents),
    )


def _digits(amounts: Iterable[int]) -> int:
    """After the point, that all of the amounts need to be exact."""
    return max((len(_fraction(amount)) for amount in amounts), default=0)


def _padded(amount: int, digits: int) -> str:
    """Exact, with zeros up to so many digits: points stand below each other."""
    return format_dollars(amount) + "0" * (digits - len(_fraction(amount)))


def _fraction(amount: int) -> str:
    return format_dollars(amount).partition(".")[2]


def _money_figures(amounts: Mapping[str, int]) -> Sequence[Figure]:
    digits = _digits(amounts.values())
    return [Figure(label=label, value=_padded(amount, digits)) for label, amount in amounts.items()]


def _totals(statement: Statement) -> Sequence[Figure]:
    return _money_figures(
        {
            "List price": statement.list_amount_pusd,
            "Discount": -statement.discount_pusd,
            "Amount, exact": statement.amount_pusd,
            "Residual of the statement before": statement.residual_brought_pusd,
            "Residual kept for the next": statement.residual_kept_pusd,
            "Rounding of lines": statement.rounding_cents * PICODOLLARS_PER_CENT,
        }
    )


def _savings(statement: Statement) -> Sequence[Figure]:
    savings = statement.savings
    share = format_basis_points(savings.cached_basis_points)
    return [
        Figure(label="Requests", value=f"{statement.requests:,}"),
        Figure(label="Input tokens", value=f"{savings.prompt_tokens:,}"),
        Figure(label="Of them cached", value=f"{savings.read_tokens:,} ({share} %)"),
        *_money_figures(
            {
                "Saved on cached tokens": savings.reads_pusd,
                "Premium on written tokens": -savings.write_premiums_pusd,
                "Pins": -savings.pins_pusd,
                "Net saving": savings.net_pusd,
            }
        ),
    ]


def _books(statement: Statement) -> str:
    books = statement.reconciliation
    if books.agrees:
        amount = format_dollars(books.ledger_pusd)
        return f"events = ledger = roll-ups: {books.ledger_tokens:,} tokens, {amount} {statement.currency}"
    ledger, rollups = format_dollars(books.ledger_pusd), format_dollars(books.rollup_pusd)
    return (
        f"events {books.events_tokens:,} tokens; ledger {books.ledger_tokens:,} tokens, {ledger}; "
        f"roll-ups {books.rollup_tokens:,} tokens, {rollups} {statement.currency}"
    )


def _period(statement: Statement) -> str:
    start = instants.to_datetime(statement.start).astimezone(zone_named(statement.time_zone))
    last = instants.to_datetime(Microseconds(statement.end - 1)).astimezone(zone_named(statement.time_zone))
    return f"{_day(start)} to {_day(last)} {last.year}, {statement.time_zone}"


def _day(moment: datetime) -> str:
    return f"{moment.day} {moment:%B}"


def _moment(instant: Microseconds, time_zone: str) -> str:
    local = instants.to_datetime(instant).astimezone(zone_named(time_zone))
    return f"{_day(local)} {local:%Y, %H:%M}, {time_zone}"


def _cells(statement: Statement) -> Iterator[Sequence[Cell]]:
    for line in statement.lines:
        yield (
            statement.number,
            statement.status.value,
            line.kind.value,
            line.for_period,
            None if line.project_id is None else str(line.project_id),
            line.project,
            str(line.api_key_id),
            line.api_key,
            line.model,
            line.token_class.value,
            line.quantity,
            line.list_amount_pusd,
            line.discount_pusd,
            line.amount_pusd,
            line.amount_without_cache_pusd,
            statement.currency,
        )


_HEADINGS: Final = (
    "month",
    "project",
    "key",
    "model",
    "tokens of",
    "quantity",
    "list price",
    "discount",
    "exact",
)
_FIRST_RIGHT: Final = 5


def _section_text(section: Section, currency: str) -> Iterable[str]:
    if not section.lines:
        return [section.title, "  none"]
    rows = [
        (
            line.period,
            line.project,
            line.api_key,
            line.model,
            line.token_class,
            line.quantity,
            line.list_amount,
            line.discount,
            line.amount,
            line.rounded,
        )
        for line in section.lines
    ]
    table = [(*_HEADINGS, currency), *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [section.title, *(_aligned(row, widths) for row in table)]


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [
        cell.rjust(width) if place >= _FIRST_RIGHT else cell.ljust(width)
        for place, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  " + "  ".join(cells).rstrip()


def _figures(figures: Sequence[Figure]) -> Iterable[str]:
    widest = max(len(figure.label) for figure in figures)
    longest = max(len(figure.value) for figure in figures)
    return [f"{figure.label.ljust(widest)}  {figure.value.rjust(longest)}" for figure in figures]

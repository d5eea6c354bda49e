"""The commands that read money: usage, statements, exports.

Knows arguments and where output goes. Does not know how anything is added up or shown.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated, BinaryIO, Final
from zoneinfo import ZoneInfo

import typer

from billing import instants
from billing.accounts import Tenant, find_tenant, list_tenants
from billing.calendar import HOUR_MICROSECONDS, Cutter, Span, days, hours, month_of, uncut, zone_named
from billing.db import Database
from billing.exports import ledger_rows
from billing.instants import Microseconds
from billing.issuing import issue_statement, preview_statement
from billing.money import format_basis_points, format_dollars
from billing.names import TenantNames, names_of
from billing.reports import (
    CURRENCY,
    MAX_SPANS,
    Dimension,
    GroupUsage,
    Selection,
    require_forwards,
    usage_within,
)
from billing.statements import Statement
from billing.totals import ClassTotals, UsageTotals
from billing.usage import TokenClass
from gateway import tables
from gateway.exports import LEDGER, ledger_cells
from gateway.statements import CLASS_LABELS, as_csv, as_json, as_text
from gateway.terminal import CommandRefused, TenantOption, open_current_database, print_table
from gateway.web.statements import as_html


class By(StrEnum):
    """What `headstart usage` tells apart."""

    PROJECT = "project"
    KEY = "key"
    MODEL = "model"
    CLASS = "class"
    DAY = "day"
    HOUR = "hour"


class StatementFormat(StrEnum):
    TEXT = "text"
    JSON = "json"
    CSV = "csv"
    HTML = "html"


_DIMENSIONS: Final = {By.PROJECT: Dimension.PROJECT, By.KEY: Dimension.API_KEY, By.MODEL: Dimension.MODEL}
_CUTTERS: Final[Mapping[By, Cutter]] = {By.DAY: days, By.HOUR: hours}
_FIGURES: Final = ("requests", "uncached", "cached", "written", "output", "list price", "amount", "saved")
_CLASS_FIGURES: Final = ("tokens of", "quantity", "list price", "discount", "amount", "saved")

SinceOption = Annotated[datetime | None, typer.Option(help="In the zone, included; default: the beginning.")]
UntilOption = Annotated[datetime | None, typer.Option(help="In the zone, excluded; default: now.")]
ZoneOption = Annotated[str | None, typer.Option(help="An IANA time zone; default: the tenant's.")]


def usage(
    tenant: TenantOption,
    since: SinceOption = None,
    until: UntilOption = None,
    zone: ZoneOption = None,
    by: Annotated[list[By] | None, typer.Option(help="May be given several times.")] = None,
) -> None:
    """Show what a tenant used, paid and saved."""
    with open_current_database() as database:
        tenant_id = find_tenant(database, name=tenant).id
        with database.read() as connection:
            names = names_of(connection, tenant_id)
            place = zone_named(zone or names.time_zone)
            start, end = _period(since, until, place)
            chosen = list(dict.fromkeys(by or ()))
            spans = _spans(chosen, start, end, place)
            dimensions = [_DIMENSIONS[one] for one in chosen if one in _DIMENSIONS]
            groups = usage_within(connection, Selection(tenant_ids=[tenant_id]), spans, by=dimensions)
    if not chosen:
        totals = sum((one.totals for one in groups), UsageTotals())
        print_table(("usage", tenant), _totals(totals), right_aligned=True)
    elif By.CLASS in chosen:
        print_table((*_headings(chosen), *_CLASS_FIGURES), list(_class_rows(groups, chosen, names)))
    else:
        print_table((*_headings(chosen), *_FIGURES), list(_group_rows(groups, chosen, names)))


def statement(
    tenant: Annotated[str | None, typer.Option(help="May be left out where there is one alone.")] = None,
    period: Annotated[str | None, typer.Option(help="A month, as 2026-11; default: the last one.")] = None,
    form: Annotated[StatementFormat, typer.Option("--format")] = StatementFormat.TEXT,
    preview: Annotated[bool, typer.Option("--preview", help="Of an open month, marked as such.")] = False,
) -> None:
    """Issue a closed month's statement, or print again the one that was issued."""
    now = instants.now()
    with open_current_database() as database:
        tenant_id = _only_tenant(database, tenant).id
        with database.read() as connection:
            zone = zone_named(names_of(connection, tenant_id).time_zone)
        if preview:
            asked = period or month_of(now, zone)
            drawn_up = preview_statement(database, tenant_id=tenant_id, period=asked, now=now)
            _print_statement(drawn_up, None, form)
            return
        asked = period or _month_before(now, zone)
        issued = issue_statement(database, tenant_id=tenant_id, period=asked, now=now)
        _print_statement(issued.statement, issued.digest, form)


def export(
    tenant: Annotated[str | None, typer.Option(help="Default: all of them.")] = None,
    since: SinceOption = None,
    until: UntilOption = None,
    zone: Annotated[str, typer.Option(help="An IANA time zone, for --since and --until.")] = "UTC",
    form: Annotated[tables.Format, typer.Option("--format")] = tables.Format.CSV,
    output: Annotated[Path | None, typer.Option(help="A file; default: standard output.")] = None,
) -> None:
    """Write every ledger line of a period, with a trailer that says how many there are and their sum."""
    start, end = _period(since, until, zone_named(zone))
    with open_current_database() as database:
        chosen = list_tenants(database) if tenant is None else [find_tenant(database, name=tenant)]
        rows = ledger_rows(database, tenant_ids=[one.id for one in chosen], start=start, end=end)
        try:
            with _opened(output) as file:
                tables.write_table(file, ledger_cells(rows), LEDGER, into=form)
        except tables.FormatMissing as missing:
            raise CommandRefused(str(missing)) from missing


def _period(
    since: datetime | None, until: datetime | None, zone: ZoneInfo
) -> tuple[Microseconds, Microseconds]:
    start = Microseconds(0) if since is None else _instant(since, zone)
    end = Microseconds(instants.now() + 1) if until is None else _instant(until, zone)
    if end < start:
        raise CommandRefused("--until is before --since")
    require_forwards(start, end)
    return start, end


def _instant(moment: datetime, zone: ZoneInfo) -> Microseconds:
    return instants.from_datetime(moment if moment.tzinfo is not None else moment.replace(tzinfo=zone))


def _month_before(now: Microseconds, zone: ZoneInfo) -> str:
    first = instants.to_datetime(now).astimezone(zone).replace(day=1)
    return f"{first - timedelta(days=1):%Y-%m}"


def _only_tenant(database: Database, name: str | None) -> Tenant:
    if name is not None:
        return find_tenant(database, name=name)
    tenants = list_tenants(database)
    if len(tenants) != 1:
        raise CommandRefused(f"there are {len(tenants)} tenants: say which with --tenant")
    return tenants[0]


def _print_statement(drawn_up: Statement, digest: bytes | None, form: StatementFormat) -> None:
    written: Mapping[StatementFormat, Callable[[], str]] = {
        StatementFormat.TEXT: lambda: as_text(drawn_up, digest),
        StatementFormat.JSON: lambda: as_json(drawn_up, digest).decode(),
        StatementFormat.CSV: lambda: as_csv(drawn_up).decode(),
        StatementFormat.HTML: lambda: as_html(drawn_up, digest),
    }
    typer.echo(written[form](), nl=False)


@contextmanager
def _opened(output: Path | None) -> Iterator[BinaryIO]:
    """The file, which is there whole or not at all; or standard output."""
    if output is None:
        yield sys.stdout.buffer
        return
    unfinished = output.with_name(f"{output.name}.unfinished")
    try:
        with unfinished.open("wb") as file:
            yield file
        unfinished.replace(output)
    except OSError as error:
        raise CommandRefused(f"cannot write {output}: {error.strerror}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _spans(chosen: Sequence[By], start: Microseconds, end: Microseconds, zone: ZoneInfo) -> Sequence[Span]:
    cutters = [one for one in chosen if one in _CUTTERS]
    if len(cutters) > 1:
        raise CommandRefused("--by is either day or hour")
    if not cutters:
        return uncut(start, end, zone)
    hours_each = {By.DAY: 24, By.HOUR: 1}[cutters[0]]
    if (end - start) // (hours_each * HOUR_MICROSECONDS) >= MAX_SPANS - 2:
        raise CommandRefused(f"more than {MAX_SPANS:,} of a {cutters[0]}: take a later --since")
    return _CUTTERS[cutters[0]](start, end, zone)


def _headings(chosen: Sequence[By]) -> Sequence[str]:
    return [one.value for one in chosen if one is not By.CLASS]


def _names(used: GroupUsage, chosen: Sequence[By], names: TenantNames) -> Sequence[str]:
    group = used.group
    known = {
        By.PROJECT: names.projects[group.project_id] if group.project_id is not None else "—",
        By.KEY: names.api_keys[group.api_key_id] if group.api_key_id is not None else "—",
        By.MODEL: group.model or "—",
        By.DAY: used.span.label,
        By.HOUR: used.span.label,
    }
    return [known[one] for one in chosen if one is not By.CLASS]


def _group_rows(
    groups: Sequence[GroupUsage], chosen: Sequence[By], names: TenantNames
) -> Iterator[Sequence[str]]:
    for used in groups:
        totals = used.totals
        counts = (
            totals.requests,
            totals.uncached_tokens,
            totals.read_tokens,
            totals.written_tokens,
            totals.output_tokens,
        )
        amounts = (totals.list_amount_pusd, totals.amount_pusd, totals.saved_pusd)
        yield [
            *_names(used, chosen, names),
            *(f"{count:,}" for count in counts),
            *map(format_dollars, amounts),
        ]


def _class_rows(
    groups: Sequence[GroupUsage], chosen: Sequence[By], names: TenantNames
) -> Iterator[Sequence[str]]:
    for used in groups:
        for token_class in TokenClass:
            totals = used.totals.by_class.get(token_class)
            if totals is not None:
                yield [*_names(used, chosen, names), CLASS_LABELS[token_class], *_class_figures(totals)]


def _class_figures(totals: ClassTotals) -> Sequence[str]:
    amounts = (totals.list_amount_pusd, totals.discount_pusd, totals.amount_pusd, totals.saved_pusd)
    return [f"{totals.quantity:,}", *map(format_dollars, amounts)]


def _totals(totals: UsageTotals) -> list[tuple[str, str]]:
    money: Callable[[int], str] = lambda amount: f"{format_dollars(amount)} {CURRENCY}"  # noqa: E731
    return [
        ("requests", f"{totals.requests:,}"),
        ("uncached tokens", f"{totals.uncached_tokens:,}"),
        ("cached tokens", f"{totals.read_tokens:,}"),
        ("written tokens", f"{totals.written_tokens:,}"),
        ("output tokens", f"{totals.output_tokens:,}"),
        ("hit share", f"{format_basis_points(totals.hit_basis_points)} %"),
        ("list price", money(totals.list_amount_pusd)),
        ("discount", money(totals.list_amount_pusd - totals.amount_pusd)),
        ("amount", money(totals.amount_pusd)),
        ("amount without cache", money(totals.amount_without_cache_pusd)),
        ("saved", money(totals.saved_pusd)),
    ]

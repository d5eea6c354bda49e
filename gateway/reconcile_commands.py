"""The command that compares the books: `headstart billing reconcile`.

Knows arguments, how workers are asked and how a run is shown. Does not know what is compared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Final
from uuid import UUID
from zoneinfo import ZoneInfo

import typer

from billing import instants
from billing.accounts import find_tenant
from billing.book_balances import WorkerCount
from billing.books import Difference
from billing.calendar import zone_named
from billing.instants import Microseconds
from billing.money import format_dollars
from billing.reconcile import MAX_RUNS, Run, encode, list_runs, reconcile
from billing.statements import Reconciliation
from gateway.settings import Settings
from gateway.terminal import CommandRefused, open_current_database, print_table, settings_from, shown
from gateway.workers import PhaseTimeouts, WorkerClient, WorkerError, open_session

DIFFERENT: Final = 1

books = typer.Typer(no_args_is_help=True, help="Whether the books agree.")

SinceOption = Annotated[datetime | None, typer.Option(help="In the zone, included; default: the beginning.")]
UntilOption = Annotated[
    datetime | None, typer.Option(help="In the zone, excluded; default: the last full quarter of an hour.")
]


@books.command("reconcile")
def reconcile_books(
    tenant: Annotated[
        str | None, typer.Option(help="A tenant's name; default: all, and the workers.")
    ] = None,
    since: SinceOption = None,
    until: UntilOption = None,
    zone: Annotated[str, typer.Option(help="An IANA time zone, for --since and --until.")] = "UTC",
    worker_url: Annotated[
        list[str] | None,
        typer.Option(help="Several times for several workers; default: HEADSTART_WORKER_URL."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: exact, in picodollars.")] = False,
) -> None:
    """Compare events, ledger, roll-ups, receipts, statements, budgets, workers. Status 1: they differ."""
    place = zone_named(zone)
    settings = settings_from()
    urls = worker_url or ([] if settings.worker_url is None else [settings.worker_url])
    with open_current_database() as database:
        run = reconcile(
            database,
            clock=instants.now,
            start=None if since is None else _instant(since, place),
            end=None if until is None else _instant(until, place),
            tenant_id=None if tenant is None else find_tenant(database, name=tenant).id,
            count_workers=_counter(urls, settings),
        )
    if as_json:
        typer.echo(encode(run))
    else:
        _print(run)
    if not run.agrees:
        raise typer.Exit(DIFFERENT)


@books.command("reconciliations")
def show_runs(
    limit: Annotated[int, typer.Option(min=1, max=MAX_RUNS, help="The latest so many.")] = 20,
) -> None:
    """Show the runs that are kept, the latest first."""
    with open_current_database() as database:
        runs = list_runs(database, limit=limit)
    rows = [
        (
            str(run.id),
            shown(run.started_at),
            shown(run.start),
            shown(run.end),
            "all" if run.tenant_id is None else str(run.tenant_id),
            f"{run.num_differences:,}",
        )
        for run in runs
    ]
    print_table(("id", "started (UTC)", "from", "until", "tenants", "differences"), rows)


def _counter(urls: Sequence[str], settings: Settings) -> Callable[[], Sequence[WorkerCount]]:
    if not urls:
        return lambda: ()
    timeouts = PhaseTimeouts(
        connect_seconds=settings.connect_timeout_seconds,
        first_event_seconds=settings.first_event_timeout_seconds,
        between_events_seconds=settings.between_events_timeout_seconds,
    )

    def count() -> Sequence[WorkerCount]:
        try:
            return asyncio.run(_count(urls, timeouts))
        except WorkerError as error:
            raise CommandRefused(f"the workers' counters cannot be read: {error}") from error

    return count


async def _count(urls: Sequence[str], timeouts: PhaseTimeouts) -> Sequence[WorkerCount]:
    async with open_session(timeouts) as session:
        clients = [WorkerClient(url.rstrip("/"), session, timeouts) for url in urls]
        return [await worker_count(client) for client in clients]


async def worker_count(client: WorkerClient) -> WorkerCount:
    """Raises `WorkerError`."""
    stats = await client.stats()
    return WorkerCount(
        worker=client.url,
        epoch=stats.epoch,
        computed=stats.prompt_tokens_computed,
        cached=stats.prompt_tokens_cached,
        output=stats.output_tokens,
        is_idle=stats.sequences_running == 0 and stats.sequences_waiting == 0,
        step_tokens=stats.step_tokens,
    )


def _instant(moment: datetime, zone: ZoneInfo) -> Microseconds:
    return instants.from_datetime(moment if moment.tzinfo is not None else moment.replace(tzinfo=zone))


def _print(run: Run) -> None:
    typer.echo(f"{shown(run.start)} to {shown(run.end)} UTC, run {run.id}")
    totals = [(one.tenant, one.books) for one in run.tenants]
    if len(totals) != 1:
        totals.append(("in total", run.total))
    books_heading = ("tenant", "tokens: events", "ledger", "roll-ups", "USD: ledger", "roll-ups")
    print_table(books_heading, [(name, *_figures(one)) for name, one in totals], right_aligned=True)
    if run.differences:
        names = {one.tenant_id: one.tenant for one in run.tenants}
        heading = ("differ", "tenant", "period (UTC)", "class", "price version", "what", "tokens", "pUSD")
        print_table(heading, [tuple(_cells(one, names)) for one in run.differences])
    for words in run.not_compared:
        typer.echo(f"not compared: {words}")
    if run.agrees:
        typer.echo("The books agree: difference 0.")
    else:
        typer.echo(f"The books differ: {run.num_differences:,} differences.")


def _figures(one: Reconciliation) -> Iterator[str]:
    for tokens in (one.events_tokens, one.ledger_tokens, one.rollup_tokens):
        yield f"{tokens:,}"
    for amount in (one.ledger_pusd, one.rollup_pusd):
        yield format_dollars(amount)


def _cells(one: Difference, names: Mapping[UUID, str]) -> Iterator[str]:
    times = "" if one.occurrences == 1 else f" ({one.occurrences:,} times)"
    yield one.check.value.replace("_", " and ")
    yield "" if one.tenant_id is None else names.get(one.tenant_id, str(one.tenant_id))
    yield "" if one.start is None or one.end is None else f"{shown(one.start)} to {shown(one.end)}"
    yield one.token_class.value if one.token_class is not None else ""
    yield str(one.price_version_id) if one.price_version_id is not None else ""
    yield one.subject + times
    yield f"{one.tokens:+,}"
    yield f"{one.pusd:+,}"

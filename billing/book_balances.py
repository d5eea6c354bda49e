"""What stands beside the ledger at this instant: balances of budgets, holds of limits, workers' counters.

Knows what each of them must be the sum of. Does not know how it was added up, nor who asks.

A worker counts since it started, all tenants together, and requests that it goes on with after their
clients have left. So its counters are compared when it was idle before and after the books were
read and no request is open; otherwise they must be no less than what was billed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, Select, case, func, or_, select

from billing import schema
from billing.books import CREDIT, Check, Difference, Window
from billing.calendar import LAST_INSTANT, Span, month, zone_named
from billing.instants import Microseconds
from billing.reports import Selection, usage_within
from billing.sums import ONE, exact_sum, exact_sums

ALL_TIME: Final = "total"
STEPS_BEYOND: Final = 2
"""Of a request that ended early: the one that ran, and one begun before the worker heard of it."""

_events: Final = schema.usage_events.c


class WorkerCount(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says that it did since it started: prompt tokens computed and found in cache, and output.

    `step_tokens` is the most that it computes in one step.
    """

    worker: str
    epoch: str
    computed: int
    cached: int
    output: int
    is_idle: bool
    step_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerComparison:
    """`not_compared` says in words what could not be told."""

    differences: Sequence[Difference]
    not_compared: Sequence[str]


def ledger_and_budgets(connection: Connection, window: Window) -> Iterator[Difference | str]:
    """What is posted against a live budget is what was spent in its period. In words: what cannot be told."""
    budgets, balances, tenants = schema.budgets.c, schema.budget_balances.c, schema.tenants.c
    chosen = (
        select(schema.budgets, balances.period.label("label"), balances.posted_pusd)
        .add_columns(tenants.time_zone, tenants.zone_since_us)
        .join(schema.budget_balances, balances.budget_id == budgets.id)
        .join(schema.tenants, tenants.id == budgets.tenant_id)
        .where(window.owns(budgets.tenant_id), budgets.removed_at_us.is_(None))
    )
    for row in connection.execute(chosen).all():
        span = _period(row)
        if row.label != ALL_TIME and row.zone_since_us is not None and span.start < row.zone_since_us:
            yield f"budget {row.id}, {row.label}: the tenant's zone was changed since it began"
            continue
        spent = _spent(connection, row, span)
        if spent != row.posted_pusd:
            yield Difference(
                check=Check.LEDGER_BUDGETS,
                tenant_id=row.tenant_id,
                start=span.start,
                end=span.end,
                subject=f"budget {row.id}, {row.label}",
                pusd=row.posted_pusd - spent,
            )


def held_reservations(connection: Connection, window: Window) -> Iterator[Difference]:
    """What balances and limits say is held of them is what open requests hold."""
    balances, budgets, held = schema.budget_balances.c, schema.budgets.c, schema.reservations.c
    reserved = (
        select(func.coalesce(func.sum(held.amount_pusd), 0))
        .where(held.balance_id == balances.id, held.state == "held")
        .scalar_subquery()
    )
    of_balances = (
        select(balances.budget_id, balances.period, balances.reserved_pusd, reserved.label("held_pusd"))
        .add_columns(budgets.tenant_id)
        .join(schema.budgets, budgets.id == balances.budget_id)
        .where(window.owns(budgets.tenant_id), balances.reserved_pusd != reserved)
    )
    for row in connection.execute(of_balances):
        yield Difference(
            check=Check.HELD_RESERVATIONS,
            tenant_id=row.tenant_id,
            subject=f"budget {row.budget_id}, {row.period}",
            pusd=int(row.reserved_pusd - row.held_pusd),
        )
    limits, holds = schema.limits.c, schema.limit_holds.c
    num_held = (
        select(func.count()).where(holds.limit_id == limits.id, holds.state == "held").scalar_subquery()
    )
    of_limits = select(limits.id, limits.tenant_id, limits.open_requests, num_held.label("num_held")).where(
        window.owns(limits.tenant_id), limits.open_requests != num_held
    )
    for row in connection.execute(of_limits):
        yield Difference(
            check=Check.HELD_RESERVATIONS,
            tenant_id=row.tenant_id,
            subject=f"limit {row.id}: {row.open_requests} open, {row.num_held} held",
            occurrences=abs(row.open_requests - row.num_held),
        )


def open_requests(connection: Connection) -> int:
    """Admitted, and neither ended nor given up."""
    requests = schema.requests.c
    return connection.execute(select(func.count()).where(requests.state == "admitted")).scalar_one()


def events_and_workers(
    connection: Connection, before: Sequence[WorkerCount], *, after: Sequence[WorkerCount], is_open: bool
) -> WorkerComparison:
    """`before` and `after` the connection's snapshot was taken; `is_open`, when a request was open in it."""
    billed = _billed_by_epoch(connection)
    later = {one.epoch: one for one in after}
    differences: list[Difference] = []
    words: list[str] = []
    for count in before:
        seen = later.get(count.epoch)
        if seen is None:
            words.append(f"worker {count.worker}, epoch {count.epoch}: it went away meanwhile")
            continue
        if is_open or not (count.is_idle and seen == count):
            words.append(
                f"worker {count.worker}, epoch {count.epoch}: it is busy, so that it counted no less than "
                "was billed is all that was compared"
            )
            differences.extend(_surplus(seen, billed.get(seen.epoch), is_exact=False))
        else:
            differences.extend(_surplus(seen, billed.get(seen.epoch), is_exact=True))
    for epoch, row in billed.items():
        if epoch not in later:
            named = f"epoch {epoch}" if epoch else "no epoch told"
            words.append(
                f"worker {row['worker']}, {named}: {row['num']:,} events; its counters are not to be had"
            )
    return WorkerComparison(differences=differences, not_compared=words)


def _billed_by_epoch(connection: Connection) -> Mapping[str, Any]:
    """What every epoch's events say, credits apart: no worker takes tokens back."""
    sums: dict[str, ColumnElement[int]] = {
        "num": ONE,
        "early": case((_events.kind == "final", 0), else_=1),
        "computed": _events.uncached_tokens
        + _events.write_auto_tokens
        + _events.write_5m_tokens
        + _events.write_1h_tokens,
        "cached": _events.read_tokens
        + _events.read_host_tokens
        + _events.read_disk_tokens
        + _events.read_remote_tokens,
        "output": _events.output_tokens,
    }

    def build(totals: Sequence[ColumnElement[Any]]) -> Select[Any]:
        by = (_events.worker_epoch, _events.worker)
        is_of_worker = or_(_events.worker.is_not(None), _events.worker_epoch.is_not(None))
        return select(*by, *totals).where(_events.kind != CREDIT, is_of_worker).group_by(*by)

    billed: dict[str, dict[str, Any]] = {}
    for row in exact_sums(connection, sums, build):
        epoch = row["worker_epoch"] or ""
        known = billed.setdefault(epoch, {"worker": row["worker"]} | dict.fromkeys(sums, 0))
        for name in sums:
            known[name] += exact_sum(row, name)
    return billed


def _surplus(count: WorkerCount, billed: Any, *, is_exact: bool) -> Iterator[Difference]:
    """What the worker counted beyond what was billed, kind by kind.

    Of a request that ended early it may have gone on for a little.
    """
    early = 0 if billed is None else billed["early"]
    for name in ("computed", "cached", "output"):
        surplus = getattr(count, name) - (0 if billed is None else billed[name])
        if surplus < 0 or (is_exact and surplus > early * STEPS_BEYOND * count.step_tokens):
            yield Difference(
                check=Check.EVENTS_WORKERS,
                subject=f"worker {count.worker}, epoch {count.epoch}: {name}",
                occurrences=1,
                tokens=surplus,
            )


def _period(row: Row[Any]) -> Span:
    if row.label == ALL_TIME:
        return Span(label=ALL_TIME, start=Microseconds(0), end=LAST_INSTANT)
    return month(row.label, zone_named(row.time_zone))


def _spent(connection: Connection, row: Row[Any], span: Span) -> int:
    selection = Selection(
        tenant_ids=[row.tenant_id],
        project_ids=None if row.project_id is None else [row.project_id],
        api_key_ids=None if row.api_key_id is None else [row.api_key_id],
    )
    return sum(one.totals.amount_pusd for one in usage_within(connection, selection, [span]))

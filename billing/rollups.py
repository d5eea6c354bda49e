"""Usage and money added up by 15 minutes, as they are posted.

Knows the roll-up tables and how they grow. Does not know how an event is rated, nor who reads.

A roll-up grows in the transaction that writes the events and lines it adds up, and by those alone
that the database returned as new: so it equals their sum at every commit. Rows are
added to in the order of their keys, and tables in one order, so that two posters never wait for
each other in a circle.

Each sum is kept twice: of a tenant's key, and of all tenants as one. The second is what an operator's
page reads, however many tenants there are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar
from uuid import UUID

from sqlalchemy import Connection, Table
from sqlalchemy.dialects import postgresql, sqlite

from billing import schema
from billing.errors import AmountTooLarge
from billing.instants import Microseconds, bucket_start
from billing.money import MAX_STORED
from billing.rating import LedgerLine
from billing.usage import Admission

REQUEST_SUMS: Final = ("requests", "aborted", "usage_missing", "delivered_tokens")
CLASS_SUMS: Final = ("quantity_tokens", "list_amount_pusd", "amount_pusd", "amount_without_cache_pusd")

_Narrow = TypeVar("_Narrow")
_Wide = TypeVar("_Wide")


class RollupKey(NamedTuple):
    """Whose usage of what, and in which 15 minutes."""

    tenant_id: UUID
    bucket_start_us: Microseconds
    api_key_id: UUID
    model: str


class ClassRollupKey(NamedTuple):
    tenant_id: UUID
    bucket_start_us: Microseconds
    api_key_id: UUID
    model: str
    token_class: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PostedEvent:
    """What roll-ups take of an event and its lines. A correction is no further request."""

    admission: Admission
    accounted_at: Microseconds
    requests: int
    aborted: int
    usage_missing: int
    delivered: int
    lines: Sequence[LedgerLine]


class DeploymentKey(NamedTuple):
    """All tenants as one."""

    bucket_start_us: Microseconds
    model: str


class DeploymentClassKey(NamedTuple):
    bucket_start_us: Microseconds
    model: str
    token_class: str


def add(connection: Connection, events: Iterable[PostedEvent]) -> None:
    """Adds what was just posted, in the caller's transaction.

    Raises AmountTooLarge, IntegrityError or DataError when a sum passes 64 bits: $9.2 million
    in 15 minutes.
    """
    requests: defaultdict[RollupKey, list[int]] = defaultdict(lambda: [0] * len(REQUEST_SUMS))
    classes: defaultdict[ClassRollupKey, list[int]] = defaultdict(lambda: [0] * len(CLASS_SUMS))
    for event in events:
        whose = event.admission
        key = RollupKey(whose.tenant_id, bucket_start(event.accounted_at), whose.api_key_id, whose.model)
        counted = (event.requests, event.aborted, event.usage_missing, event.delivered)
        _increase(requests[key], counted)
        for line in event.lines:
            amounts = (line.quantity, line.list_amount_pusd, line.amount_pusd, line.amount_without_cache_pusd)
            _increase(classes[ClassRollupKey(*key, line.token_class.value)], amounts)
    _grow(connection, schema.request_rollups, REQUEST_SUMS, requests)
    _grow(connection, schema.class_rollups, CLASS_SUMS, classes)
    of_all: dict[DeploymentKey, list[int]] = _summed(
        requests, lambda key: DeploymentKey(key.bucket_start_us, key.model)
    )
    classes_of_all: dict[DeploymentClassKey, list[int]] = _summed(
        classes, lambda key: DeploymentClassKey(key.bucket_start_us, key.model, key.token_class)
    )
    # Last: every poster adds to these rows, and the wait for them ends with the transaction.
    _grow(connection, schema.deployment_request_rollups, REQUEST_SUMS, of_all)
    _grow(connection, schema.deployment_class_rollups, CLASS_SUMS, classes_of_all)


def _summed(
    increments: Mapping[_Narrow, list[int]], widened: Callable[[_Narrow], _Wide]
) -> dict[_Wide, list[int]]:
    sums: dict[_Wide, list[int]] = {}
    for key, amounts in increments.items():
        _increase(sums.setdefault(widened(key), [0] * len(amounts)), amounts)
    return sums


def _increase(sums: list[int], by: Iterable[int]) -> None:
    for place, amount in enumerate(by):
        sums[place] += amount
        if abs(sums[place]) > MAX_STORED:
            raise AmountTooLarge(f"{sums[place]} in 15 minutes of one key and model")


def _grow(
    connection: Connection,
    table: Table,
    columns: Sequence[str],
    increments: Mapping[Any, Sequence[int]],
) -> None:
    rows = [key._asdict() | dict(zip(columns, increments[key], strict=True)) for key in sorted(increments)]
    if not rows:
        return
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    statement = dialect.insert(table)
    keys = [column.name for column in table.primary_key]
    grown = {column: table.c[column] + statement.excluded[column] for column in columns}
    connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=grown), rows)

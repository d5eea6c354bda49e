"""How requests met the cache: counted when they are posted, by quarter of an hour.

Knows terminal events, hits and times to the first token. Does not know prices, nor token classes beyond
what was read: `reports` has those. A hit is a request of which any token was read. Counted in
the transaction that posts the event, so that counts and events cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, RowMapping, Table, func, literal_column, select
from sqlalchemy.dialects import postgresql, sqlite

from billing import schema
from billing.calendar import Span
from billing.db import Database
from billing.ids import TenantId
from billing.instants import bucket_start
from billing.sql import place_text
from billing.usage import UsageEvent

NANOSECONDS_PER_MICROSECOND: Final = 1_000


class Outcome(StrEnum):
    """Whether anything of the prompt was read from the cache."""

    HIT = "hit"
    MISS = "miss"


class Facet(StrEnum):
    """What requests can be told apart by."""

    TENANT = "tenant_id"
    MODEL = "model"
    WORKER = "worker"
    OUTCOME = "outcome"
    MISS_REASON = "miss_reason"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeTotals:
    """`first_tokens` of the requests came to a first token, after `first_token_us` microseconds in all."""

    requests: int = 0
    prompt_tokens: int = 0
    read_tokens: int = 0
    first_tokens: int = 0
    first_token_us: int = 0

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.read_tokens

    def __add__(self, other: OutcomeTotals) -> OutcomeTotals:
        return OutcomeTotals(
            **{name: getattr(self, name) + getattr(other, name) for name in schema.CACHE_COUNTS}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeGroup:
    """Some requests of one span. `values` are those of the facets asked for, in their order."""

    span: Span
    values: tuple[Any, ...]
    totals: OutcomeTotals


def count_outcomes(connection: Connection, events: Iterable[UsageEvent]) -> None:
    """Adds terminal events that were just posted, each for the first and only time."""
    found: dict[tuple[Any, ...], OutcomeTotals] = {}
    for event in events:
        key = _key_of(event)
        found[key] = found.get(key, OutcomeTotals()) + _totals_of(event)
    if not found:
        return
    of_all: dict[tuple[Any, ...], OutcomeTotals] = {}
    for (_, *rest), totals in found.items():
        key = tuple(rest)
        of_all[key] = of_all.get(key, OutcomeTotals()) + totals
    _add(connection, schema.cache_buckets, found)
    _add(connection, schema.deployment_cache_buckets, of_all)


def _add(connection: Connection, table: Table, found: Mapping[tuple[Any, ...], OutcomeTotals]) -> None:
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    keys = [column.name for column in table.primary_key]
    added: Any = dialect.insert(table)
    more = {name: table.c[name] + added.excluded[name] for name in schema.CACHE_COUNTS}
    # In one order everywhere: two gateways that post at once do not wait for each other in a circle.
    rows = [
        dict(zip(keys, key, strict=True)) | {name: getattr(totals, name) for name in schema.CACHE_COUNTS}
        for key, totals in sorted(found.items(), key=lambda one: tuple(map(str, one[0])))
    ]
    connection.execute(added.on_conflict_do_update(index_elements=keys, set_=more), rows)


def outcomes(
    db: Database, spans: Sequence[Span], *, tenant_ids: Sequence[TenantId] | None, by: Sequence[Facet] = ()
) -> Sequence[OutcomeGroup]:
    """Every group that has requests in a span, in order of spans. None is all tenants.

    The spans follow each other without gaps, and begin and end with a quarter of an hour.
    """
    if not spans:
        return []
    assert all(bucket_start(span.start) == span.start for span in spans), "spans are made of buckets"
    table = _table_for(tenant_ids, by)
    buckets = table.c
    place = _place(str(buckets.bucket_us), [span.start for span in spans])
    apart = [buckets[facet.value] for facet in by]
    sums = [func.sum(buckets[name]).label(name) for name in schema.CACHE_COUNTS]
    chosen = (
        select(place.label("place"), *apart, *sums)
        .where(buckets.bucket_us >= spans[0].start, buckets.bucket_us < spans[-1].end)
        .group_by("place", *apart)
        .order_by("place")
    )
    if table is schema.cache_buckets:
        # For all tenants no condition, but the way into a key that begins with the tenant.
        tenants: Any = select(schema.tenants.c.id) if tenant_ids is None else tenant_ids
        chosen = chosen.where(buckets.tenant_id.in_(tenants))
    with db.read() as connection:
        return list(_groups(connection.execute(chosen).mappings(), spans, by))


def _table_for(tenant_ids: Sequence[TenantId] | None, by: Sequence[Facet]) -> Table:
    """The smaller one answers where no tenant is told from another."""
    is_of_all = tenant_ids is None and Facet.TENANT not in by
    return schema.deployment_cache_buckets if is_of_all else schema.cache_buckets


def _groups(rows: Iterable[RowMapping], spans: Sequence[Span], by: Sequence[Facet]) -> Iterator[OutcomeGroup]:
    for row in rows:
        yield OutcomeGroup(
            span=spans[row["place"]],
            values=tuple(row[facet.value] for facet in by),
            totals=OutcomeTotals(**{name: int(row[name]) for name in schema.CACHE_COUNTS}),
        )


def _key_of(event: UsageEvent) -> tuple[Any, ...]:
    admission = event.admission
    return (
        admission.tenant_id,
        bucket_start(admission.admitted_at),
        admission.model,
        event.worker or "",
        (Outcome.HIT if event.counts.cached else Outcome.MISS).value,
        event.miss_reason or "",
    )


def _totals_of(event: UsageEvent) -> OutcomeTotals:
    waited = event.first_token_ns
    return OutcomeTotals(
        requests=1,
        prompt_tokens=event.counts.prompt,
        read_tokens=event.counts.cached,
        first_tokens=0 if waited is None else 1,
        first_token_us=0 if waited is None else waited // NANOSECONDS_PER_MICROSECOND,
    )


def _place(column: str, starts: Sequence[int]) -> ColumnElement[int]:
    """A bucket's place among ascending starts: as many questions as in a binary search."""
    return literal_column(place_text(column, starts))

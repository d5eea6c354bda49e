"""How requests met the cache: counted when they are posted, by quarter of an hour.

Knows terminal events, hits and times to the first token. Does not know prices, nor token classes beyond
what was read: `reports` has those. A hit is a request of which any token was read. Counted in
the transaction that posts the event, so that counts and events cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, RowMapping, func, literal_column, select
from sqlalchemy.dialects import postgresql, sqlite

from billing import schema
from billing.calendar import Span
from billing.db import Database
from billing.ids import TenantId
from billing.instants import bucket_start
from billing.usage import UsageEvent

NANOSECONDS_PER_MICROSECOND: Final = 1_000

_buckets: Final = schema.cache_buckets.c
_KEY: Final = ("tenant_id", "bucket_us", "model", "worker", "outcome", "miss_reason")


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
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    table = schema.cache_buckets
    added: Any = dialect.insert(table)
    more = {name: table.c[name] + added.excluded[name] for name in schema.CACHE_COUNTS}
    # In one order everywhere: two gateways that post at once do not wait for each other in a circle.
    rows = [
        dict(zip(_KEY, key, strict=True)) | {name: getattr(totals, name) for name in schema.CACHE_COUNTS}
        for key, totals in sorted(found.items(), key=lambda one: tuple(map(str, one[0])))
    ]
    connection.execute(added.on_conflict_do_update(index_elements=list(_KEY), set_=more), rows)


def outcomes(
    db: Database, spans: Sequence[Span], *, tenant_ids: Sequence[TenantId] | None, by: Sequence[Facet] = ()
) -> Sequence[OutcomeGroup]:
    """Every group that has requests in a span, in order of spans. None is all tenants.

    The spans follow each other without gaps, and begin and end with a quarter of an hour.
    """
    if not spans:
        return []
    assert all(bucket_start(span.start) == span.start for span in spans), "spans are made of buckets"
    place = _place([span.start for span in spans])
    apart = [_buckets[facet.value] for facet in by]
    sums = [func.sum(_buckets[name]).label(name) for name in schema.CACHE_COUNTS]
    tenants: Any = select(schema.tenants.c.id) if tenant_ids is None else tenant_ids
    chosen = (
        select(place.label("place"), *apart, *sums)
        # For all tenants no condition, but the way into a key that begins with the tenant.
        .where(_buckets.tenant_id.in_(tenants))
        .where(_buckets.bucket_us >= spans[0].start, _buckets.bucket_us < spans[-1].end)
        .group_by("place", *apart)
        .order_by("place")
    )
    with db.read() as connection:
        return list(_groups(connection.execute(chosen).mappings(), spans, by))


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


def _place(starts: Sequence[int]) -> ColumnElement[int]:
    """A bucket's place among ascending starts: as many questions as in a binary search."""
    return literal_column(_place_text(starts, 0))


def _place_text(starts: Sequence[int], first: int) -> str:
    if len(starts) == 1:
        return str(first)
    middle = len(starts) // 2
    before, after = _place_text(starts[:middle], first), _place_text(starts[middle:], first + middle)
    return f"CASE WHEN cache_buckets.bucket_us < {int(starts[middle])} THEN {before} ELSE {after} END"

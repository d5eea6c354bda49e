"""What was used, paid and saved: in a period, by whatever it is asked for.

Knows roll-ups, events and ledger lines. Does not know how a figure is shown, nor where a
zone's days begin: whoever asks brings the spans.

Full 15-minute buckets are read from the roll-ups, and what a span cuts off a bucket from the events
of that bucket alone. Every event is accounted to one instant, so spans that follow each
other add up to the span that they make together, wherever they are cut.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any, Final, NamedTuple
from zoneinfo import ZoneInfo

from sqlalchemy import (
    ColumnElement,
    Connection,
    FromClause,
    RowMapping,
    Select,
    Table,
    literal_column,
    or_,
    select,
    true,
)

from billing import schema
from billing.calendar import UTC_ZONE, Cutter, Span, uncut
from billing.db import Database
from billing.errors import InvalidPeriod
from billing.ids import ApiKeyId, ProjectId, TenantId
from billing.instants import BUCKET_MICROSECONDS, Microseconds, bucket_start
from billing.sql import place_text
from billing.sums import ONE, exact_sum, exact_sums
from billing.totals import ClassTotals, UsageTotals
from billing.usage import TokenClass

CURRENCY: Final = "USD"
MAX_SPANS: Final = 1_500
"""As many as a day has minutes, and some. More would be a report that nobody reads."""

_events: Final = schema.usage_events.c
_lines: Final = schema.ledger_lines.c
_keys: Final = schema.api_keys.c


class Dimension(StrEnum):
    """What usage can be told apart by. Token classes are apart anyway, and time is cut by spans."""

    TENANT = "tenant_id"
    PROJECT = "project_id"
    API_KEY = "api_key_id"
    MODEL = "model"


class Group(NamedTuple):
    """Whose usage it is. None: not asked for, or a key that belongs to no project."""

    tenant_id: TenantId | None = None
    project_id: ProjectId | None = None
    api_key_id: ApiKeyId | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which usage is meant. None is no condition, and an empty collection is met by nothing."""

    tenant_ids: Collection[TenantId] | None = None
    project_ids: Collection[ProjectId] | None = None
    api_key_ids: Collection[ApiKeyId] | None = None
    models: Collection[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupUsage:
    """One group's usage in one span."""

    span: Span
    group: Group
    totals: UsageTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageReport:
    """One tenant's usage accounted to `[start, end)`. Spans without any are left out."""

    tenant_id: TenantId
    start: Microseconds
    end: Microseconds
    currency: str
    totals: UsageTotals
    spans: Sequence[GroupUsage]


def usage_report(
    db: Database,
    *,
    tenant_id: TenantId,
    start: Microseconds,
    end: Microseconds,
    cutter: Cutter = uncut,
    zone: ZoneInfo = UTC_ZONE,
) -> UsageReport:
    """A tenant's usage in `[start, end)`, also by the spans that `cutter` makes of it in a zone.

    Raises InvalidPeriod when `end` is before `start`.
    """
    require_forwards(start, end)
    spans = grouped_usage(db, Selection(tenant_ids=[tenant_id]), cutter(start, end, zone))
    return UsageReport(
        tenant_id=tenant_id,
        start=start,
        end=end,
        currency=CURRENCY,
        totals=sum((one.totals for one in spans), start=UsageTotals()),
        spans=spans,
    )


def require_forwards(start: Microseconds, end: Microseconds) -> None:
    """Raises InvalidPeriod."""
    if end < start:
        raise InvalidPeriod(f"the period ends ({end}) before it starts ({start})")


def grouped_usage(
    db: Database, selection: Selection, spans: Sequence[Span], *, by: Collection[Dimension] = ()
) -> Sequence[GroupUsage]:
    """Every group that has usage in a span, in order of spans, and of groups in none.

    The spans follow each other without gaps, as `calendar` cuts them; at most `MAX_SPANS`.
    """
    with db.read() as connection:
        return usage_within(connection, selection, spans, by=by)


def usage_within(
    connection: Connection, selection: Selection, spans: Sequence[Span], *, by: Collection[Dimension] = ()
) -> Sequence[GroupUsage]:
    """`grouped_usage`, in a transaction of the caller's."""
    assert len(spans) <= MAX_SPANS, "whoever asks has a limit of its own"
    assert all(span.start < span.end for span in spans), "a span holds something"
    assert all(earlier.end == later.start for earlier, later in pairwise(spans)), "spans leave no gaps"
    if not spans:
        return []
    query = _Query.made(connection, selection, spans, by)
    found: dict[tuple[int, Group], UsageTotals] = {}
    for place, group, totals in query.rows(connection):
        found[place, group] = found.get((place, group), UsageTotals()) + totals
    in_order = sorted(found, key=lambda key: key[0])
    return [
        GroupUsage(span=spans[place], group=group, totals=found[place, group]) for place, group in in_order
    ]


_Range = tuple[int, int]
"""From an instant to another, which is left out."""

_Row = tuple[int, Group, UsageTotals]
"""The place of a span, a group, and some of what it used there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """Rows that carry an instant, and whose they are."""

    rows: FromClause
    instant: ColumnElement[int]
    dimensions: Mapping[Dimension, ColumnElement[Any]]
    sums: Mapping[str, ColumnElement[int]]
    token_class: ColumnElement[str] | None = None
    is_counted: ColumnElement[bool] = field(default_factory=true)


_ADMITTED: Final = schema.usage_events.join(schema.requests, schema.requests.c.id == _events.request_id)
_EVENTS: Final = _Source(
    rows=_ADMITTED,
    instant=_events.accounted_at_us,
    dimensions={
        Dimension.TENANT: _events.tenant_id,
        Dimension.API_KEY: schema.requests.c.api_key_id,
        Dimension.MODEL: _events.model,
    },
    sums={"requests": ONE},
    # A correction is no further request.
    is_counted=_events.original_id.is_(None),
)
_LINES: Final = _Source(
    rows=_ADMITTED.join(schema.ledger_lines, _lines.event_id == _events.id),
    instant=_EVENTS.instant,
    dimensions=_EVENTS.dimensions,
    sums={
        "quantity": _lines.quantity_tokens,
        "list_amount_pusd": _lines.quantity_tokens * _lines.list_unit_pusd,
        "amount_pusd": _lines.amount_pusd,
        "amount_without_cache_pusd": _lines.amount_without_cache_pusd,
    },
    token_class=_lines.token_class,
)


_REQUEST_SUMS: Final = {"requests": "requests"}
_CLASS_SUMS: Final = {
    "quantity": "quantity_tokens",
    "list_amount_pusd": "list_amount_pusd",
    "amount_pusd": "amount_pusd",
    "amount_without_cache_pusd": "amount_without_cache_pusd",
}


def _rollup(table: Table, sums: Mapping[str, str]) -> _Source:
    return _Source(
        rows=table,
        instant=table.c.bucket_start_us,
        dimensions={one: table.c[one.value] for one in Dimension if one.value in table.c},
        sums={name: table.c[column] for name, column in sums.items()},
        token_class=table.c.get("token_class"),
    )


_ROLLUPS: Final = (
    _rollup(schema.request_rollups, _REQUEST_SUMS),
    _rollup(schema.class_rollups, _CLASS_SUMS),
)
_OF_ALL: Final = (
    _rollup(schema.deployment_request_rollups, _REQUEST_SUMS),
    _rollup(schema.deployment_class_rollups, _CLASS_SUMS),
)
"""The same sums of all tenants as one: far fewer rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Query:
    """`apart` is what rows are grouped by in SQL: keys instead of projects."""

    selection: Selection
    spans: Sequence[Span]
    by: Collection[Dimension]
    apart: Sequence[Dimension]
    projects: Mapping[ApiKeyId, ProjectId | None]

    @classmethod
    def made(
        cls, connection: Connection, selection: Selection, spans: Sequence[Span], by: Collection[Dimension]
    ) -> _Query:
        apart = [one for one in by if one is not Dimension.PROJECT]
        projects: Mapping[ApiKeyId, ProjectId | None] = {}
        if Dimension.PROJECT in by:
            # A key belongs to one project for as long as it lives: no row need be joined with it.
            projects = _projects(connection, selection)
            if Dimension.API_KEY not in apart:
                apart.append(Dimension.API_KEY)
        return cls(selection=selection, spans=spans, by=by, apart=apart, projects=projects)

    def rows(self, connection: Connection) -> Iterator[_Row]:
        """Full buckets from the roll-ups, and what spans cut off buckets from the events."""
        full = _joined(full for span in self.spans if (full := _full_buckets(span)) is not None)
        cut_off = _joined(part for span in self.spans for part in _cut_off(span))
        for ranges, counted, rated in (
            (full, *(_OF_ALL if self._is_of_all() else _ROLLUPS)),
            (cut_off, _EVENTS, _LINES),
        ):
            if ranges:
                yield from self._requests(connection, counted, ranges)
                yield from self._classes(connection, rated, ranges)

    def _is_of_all(self) -> bool:
        """Whether nobody's usage is told from anybody else's."""
        chosen = self.selection
        whose = (chosen.tenant_ids, chosen.project_ids, chosen.api_key_ids)
        return all(one is None for one in whose) and all(one is Dimension.MODEL for one in self.apart)

    def _requests(self, connection: Connection, source: _Source, ranges: Sequence[_Range]) -> Iterator[_Row]:
        for row in self._sums(connection, source, ranges):
            yield row["place"], self._group(row), UsageTotals(requests=exact_sum(row, "requests"))

    def _classes(self, connection: Connection, source: _Source, ranges: Sequence[_Range]) -> Iterator[_Row]:
        for row in self._sums(connection, source, ranges):
            totals = ClassTotals(**{name: exact_sum(row, name) for name in source.sums})
            by_class = {TokenClass(row["token_class"]): totals}
            yield row["place"], self._group(row), UsageTotals(by_class=by_class)

    def _sums(
        self, connection: Connection, source: _Source, ranges: Sequence[_Range]
    ) -> Sequence[RowMapping]:
        starts = [span.start for span in self.spans]
        place: ColumnElement[int] = literal_column(place_text(str(source.instant), starts))
        apart: list[ColumnElement[Any]] = [source.dimensions[one].label(one) for one in self.apart]
        if source.token_class is not None:
            apart.append(source.token_class.label("token_class"))
        within = or_(*(source.instant.between(start, end - 1) for start, end in ranges))

        def build(sums: Sequence[ColumnElement[Any]]) -> Select[Any]:
            chosen = select(place.label("place"), *apart, *sums).select_from(source.rows)
            wanted = chosen.where(within, source.is_counted, *self._conditions(source))
            # By no constant: the database would sort for it.
            return wanted.group_by(*(["place"] if len(starts) > 1 else []), *apart)

        rows = exact_sums(connection, source.sums, build)
        # Without anything to group by there is one row even of nothing.
        return [row for row in rows if not _is_empty(row, source)]

    def _conditions(self, source: _Source) -> Iterator[ColumnElement[bool]]:
        chosen = self.selection
        wanted = {
            Dimension.TENANT: chosen.tenant_ids,
            Dimension.API_KEY: chosen.api_key_ids,
            Dimension.MODEL: chosen.models,
        }
        for dimension, values in wanted.items():
            if values is not None:
                yield source.dimensions[dimension].in_(values)
        if chosen.project_ids is not None:
            of_projects = select(_keys.id).where(_keys.project_id.in_(chosen.project_ids))
            yield source.dimensions[Dimension.API_KEY].in_(of_projects)
        if chosen.tenant_ids is None and Dimension.TENANT in source.dimensions:
            # No condition, but the way into an index that begins with the tenant.
            yield source.dimensions[Dimension.TENANT].in_(select(schema.tenants.c.id))

    def _group(self, row: RowMapping) -> Group:
        named = {one.value: row[one] for one in self.by if one is not Dimension.PROJECT}
        if Dimension.PROJECT in self.by:
            named[Dimension.PROJECT.value] = self.projects[row[Dimension.API_KEY]]
        return Group(**named)


def _projects(connection: Connection, selection: Selection) -> dict[ApiKeyId, ProjectId | None]:
    chosen = select(_keys.id, _keys.project_id)
    if selection.tenant_ids is not None:
        chosen = chosen.where(_keys.tenant_id.in_(selection.tenant_ids))
    return {row.id: row.project_id for row in connection.execute(chosen)}


def _is_empty(row: RowMapping, source: _Source) -> bool:
    return all(value is None for name, value in row.items() if name.startswith(tuple(source.sums)))


def _full_buckets(span: Span) -> _Range | None:
    start, end = bucket_start(Microseconds(span.start + BUCKET_MICROSECONDS - 1)), bucket_start(span.end)
    return (start, end) if start < end else None


def _cut_off(span: Span) -> Iterator[_Range]:
    """What is left of a span beside its full buckets."""
    full = _full_buckets(span)
    parts = [(span.start, span.end)] if full is None else [(span.start, full[0]), (full[1], span.end)]
    return (part for part in parts if part[0] < part[1])


def _joined(ranges: Iterable[_Range]) -> Sequence[_Range]:
    """Ascending ranges; those that touch become one."""
    joined: list[_Range] = []
    for start, end in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined

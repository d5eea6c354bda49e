"""Panels of what the workers' caches did since they started, and hold now.

Knows a worker's statistics. Does not know how they were asked for. A tenant sees its own rows; what
only exists for all together, an admin alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gateway.web.charts import Series, grouped_bars
from gateway.web.live import LiveCache, ScopeNames, rows_of
from gateway.web.panels import Cell, Panel, Table, columns, count, duration, percent, size, text
from gateway.web.visits import Visit
from model_worker.protocol import CacheStatistics, DurationCounts, ScopeStatistics

NO_WORKER: Final = "No worker is configured."
PROMISES: Final = ((300.0, "5 minutes"), (3_600.0, "1 hour"))
"""What a write can be promised to stay for, without being read."""


def live_panels(live: Sequence[LiveCache], names: ScopeNames, visit: Visit) -> Sequence[Panel]:
    own = (memory_panel(live, names, visit), writes_panel(live, names, visit))
    if not visit.is_admin or visit.tenant is not None:
        return own
    times = (panel for cache in live for panel in _time_panels(cache))
    return (*own, *times, tiers_panel(live), conversations_panel(live))


def memory_panel(live: Sequence[LiveCache], names: ScopeNames, visit: Visit) -> Panel:
    rows: list[Sequence[Cell]] = []
    for cache in live:
        seen = cache.statistics
        if seen is None:
            rows.append(_away(cache, 3))
            continue
        rows += [
            _memory_row(cache, name, row, seen)
            for name, row in rows_of(cache, names, visit.tenant_ids)
            if row.resident_blocks
        ]
    return Panel(
        key="memory",
        title="Memory by tenant",
        hint="Keys and values that lie in the workers' memory now, held or findable.",
        table=Table(
            caption="Resident now, by worker and tenant",
            columns=columns("Worker", "Tenant", "Tokens", "Memory", num_texts=2),
            rows=rows,
        )
        if rows
        else None,
        empty="Nothing is cached at the moment." if live else NO_WORKER,
    )


def _memory_row(cache: LiveCache, name: str, row: ScopeStatistics, seen: CacheStatistics) -> Sequence[Cell]:
    num_tokens = row.resident_blocks * seen.block_size
    num_bytes = num_tokens * seen.kv_bytes_per_token
    return (
        text(cache.worker),
        text(name, value=row.scope),
        count(num_tokens),
        size(num_bytes),
    )


def writes_panel(live: Sequence[LiveCache], names: ScopeNames, visit: Visit) -> Panel:
    """Whether what was stored was read again."""
    rows: list[Sequence[Cell]] = []
    for cache in live:
        if cache.statistics is None:
            rows.append(_away(cache, 7))
            continue
        rows += [
            _writes_row(cache, name, row, cache.statistics)
            for name, row in rows_of(cache, names, visit.tenant_ids)
            if row.stored_blocks
        ]
    return Panel(
        key="writes",
        title="What was stored, and read again",
        is_wide=True,
        hint="Since the worker started. Wasted is what left without having been read once.",
        table=Table(
            caption="Stored tokens, by worker and tenant",
            columns=columns(
                "Worker",
                "Tenant",
                "Stored",
                "Read",
                "Reads per stored token",
                "Evicted",
                "Wasted",
                "Share wasted",
            ),
            rows=rows,
        )
        if rows
        else None,
        empty="Nothing was stored since the workers started." if live else NO_WORKER,
    )


def _writes_row(cache: LiveCache, name: str, row: ScopeStatistics, seen: CacheStatistics) -> Sequence[Cell]:
    stored = row.stored_blocks * seen.block_size
    hundredths = row.hit_tokens * 100 // stored
    ratio = f"{hundredths // 100}.{hundredths % 100:02d}"
    return (
        text(cache.worker),
        text(name, value=row.scope),
        count(stored),
        count(row.hit_tokens),
        text(ratio),
        count(row.evicted_blocks * seen.block_size),
        count(row.wasted_blocks * seen.block_size),
        percent(row.wasted_blocks, row.stored_blocks),
    )


def _time_panels(cache: LiveCache) -> Sequence[Panel]:
    """How long until a block is read again, and how long until it has to go."""
    seen = cache.statistics
    title = f"Reuse gap and age at eviction, {cache.worker}"
    key = f"times-{cache.worker}"
    if seen is None:
        return (Panel(key=key, title=title, empty=f"{cache.worker} is away: {cache.away_because}."),)
    gap, idle = seen.reuse_gap, seen.idle_before_eviction
    if not gap.total and not idle.total:
        return (Panel(key=key, title=title, empty="Nothing was read again or evicted yet."),)
    places = _used_places(gap, idle)
    labels = [_under(gap.upper_seconds[place]) for place in places]
    return (
        Panel(
            key=key,
            title=title,
            hint=_promises(idle),
            figure=grouped_bars(
                labels,
                (
                    Series(
                        name="Read again", colour="cached", values=[gap.blocks[place] for place in places]
                    ),
                    Series(name="Evicted", colour="write", values=[idle.blocks[place] for place in places]),
                ),
                unit="blocks",
            ),
            says="Chart of blocks by the time since their last use: when read again, and when evicted.",
            table=Table(
                caption=f"Blocks of {seen.block_size} tokens, by the time since their last use",
                columns=columns("Under", "Read again", "Evicted"),
                rows=[
                    (
                        duration(gap.upper_seconds[place]),
                        count(gap.blocks[place]),
                        count(idle.blocks[place]),
                    )
                    for place in places
                ],
                total=(text("Total"), count(gap.total), count(idle.total)),
            ),
        ),
    )


def _used_places(*durations: DurationCounts) -> Sequence[int]:
    """From the first bucket that holds anything to the last."""
    used = [place for one in durations for place, blocks in enumerate(one.blocks) if blocks]
    return range(min(used), max(used) + 1)


def _at(places: Sequence[int], durations: DurationCounts) -> Sequence[int]:
    return [durations.blocks[place] for place in places]


def _promises(idle: DurationCounts) -> str:
    """What a promise of a time would have had to hold against pressure."""
    if not idle.total:
        return "Nothing had to make room yet: every promise of a time would have held."
    parts = []
    for seconds, name in PROMISES:
        within = sum(
            blocks for upper, blocks in zip(idle.upper_seconds, idle.blocks, strict=True) if upper <= seconds
        )
        parts.append(f"{within * 100 // idle.total} % went before {name}")
    return f"Of what had to make room, {' and '.join(parts)} since its last use."


def tiers_panel(live: Sequence[LiveCache]) -> Panel:
    rows: list[Sequence[Cell]] = []
    for cache in live:
        if cache.statistics is None:
            rows.append(_away(cache, 3))
            continue
        seen = cache.statistics
        for tier, blocks in seen.resident_blocks_by_tier.items():
            num_tokens = blocks * seen.block_size
            rows.append(
                (
                    text(cache.worker),
                    text(tier),
                    count(num_tokens),
                    size(num_tokens * seen.kv_bytes_per_token),
                )
            )
    return Panel(
        key="tiers",
        title="By tier",
        table=Table(
            caption="Resident now, by worker and tier",
            columns=columns("Worker", "Tier", "Tokens", "Memory", num_texts=2),
            rows=rows,
        )
        if rows
        else None,
        empty=NO_WORKER,
    )


def conversations_panel(live: Sequence[LiveCache]) -> Panel:
    rows = [
        _away(cache, 3)
        if cache.statistics is None
        else (
            text(cache.worker),
            count(cache.statistics.sequences_running),
            size(cache.statistics.kv_bytes_held),
            size(cache.statistics.kv_bytes_per_conversation),
        )
        for cache in live
    ]
    return Panel(
        key="conversations",
        title="Memory by conversation",
        hint="Of those that are generating now; what several share counts once.",
        table=Table(
            caption="Running conversations, by worker",
            columns=columns("Worker", "Running", "Memory held", "Each, on average"),
            rows=rows,
        )
        if rows
        else None,
        empty=NO_WORKER,
    )


def _away(cache: LiveCache, num_others: int) -> Sequence[Cell]:
    """A worker that gives no figures is in its place, with the reason."""
    return (
        text(cache.worker),
        text(f"away: {cache.away_because}"),
        *(text("") for _ in range(num_others - 1)),
    )


def _under(seconds: float) -> str:
    cell = duration(seconds)
    return f"{cell.shown} {cell.unit}"

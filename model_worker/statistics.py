"""What a worker tells of its cache: the store's statistics as the protocol's.

Knows both. Does not know HTTP or threads: whoever calls owns the store.
"""

from __future__ import annotations

import math
from typing import Final

from model_worker.protocol import (
    OTHER_SCOPES,
    CacheStatistics,
    DurationCounts,
    HotPrefix,
    ScopeStatistics,
    StandingPin,
    WorkerStats,
)
from prefix_store.statistics import Durations, Tally
from prefix_store.store import PrefixStore

MAX_SCOPES: Final = 100
MAX_PREFIXES: Final = 100
MAX_PINS: Final = 100
DEVICE: Final = "device"


def cache_statistics(
    store: PrefixStore, stats: WorkerStats, *, now: float, uptime_seconds: float
) -> CacheStatistics:
    """`now` is on the store's clock."""
    total = store.statistics.total()
    blocks = store.counts
    return CacheStatistics(
        block_size=store.block_size,
        kv_bytes_per_token=stats.kv_bytes_per_token,
        kv_bytes_held=stats.kv_bytes_held,
        kv_bytes_per_conversation=stats.kv_bytes_per_conversation,
        sequences_running=stats.sequences_running,
        uptime_seconds=uptime_seconds,
        total=_scope("", total),
        scopes=_scopes(store.statistics.rows()),
        reuse_gap=_durations(total.reuse_gap),
        idle_before_eviction=_durations(total.idle_before_eviction),
        prefixes=_prefixes(store, now),
        pins=_pins(store, now),
        resident_blocks_by_tier={DEVICE: blocks.cached + blocks.held},
    )


def _scopes(rows: dict[str, Tally]) -> list[ScopeStatistics]:
    """Those that hold the most, and one row for all others: together they are the total."""
    rest = Tally()
    if (folded := rows.pop(OTHER_SCOPES, None)) is not None:
        rest.add_all(folded)
    largest = sorted(rows.items(), key=lambda row: (row[1].resident_blocks, row[1].queries), reverse=True)
    for _, tally in largest[MAX_SCOPES:]:
        rest.add_all(tally)
    shown = [_scope(scope, tally) for scope, tally in largest[:MAX_SCOPES]]
    return [*shown, _scope(OTHER_SCOPES, rest)] if rest.queries or rest.stored_blocks else shown


def _scope(scope: str, tally: Tally) -> ScopeStatistics:
    return ScopeStatistics(
        scope=scope,
        queries=tally.queries,
        query_tokens=tally.query_tokens,
        hit_queries=tally.hit_queries,
        hit_tokens=tally.hit_tokens,
        stored_blocks=tally.stored_blocks,
        resident_blocks=tally.resident_blocks,
        evicted_blocks=tally.evicted_blocks,
        wasted_blocks=tally.wasted_blocks,
        misses={reason.value: count for reason, count in tally.misses.items()},
    )


def _durations(durations: Durations) -> DurationCounts:
    return DurationCounts(
        upper_seconds=durations.upper_seconds(),
        blocks=durations.counts,
        mean_seconds=durations.mean_seconds,
    )


def _prefixes(store: PrefixStore, now: float) -> list[HotPrefix]:
    return [
        HotPrefix(
            name=prefix.name.hex(),
            scope=prefix.scope,
            num_scopes=prefix.num_scopes,
            num_tokens=prefix.num_blocks * store.block_size,
            hits=prefix.hits,
            idle_seconds=max(now - prefix.last_used, 0.0),
        )
        for prefix in store.hottest(MAX_PREFIXES)
    ]


def _pins(store: PrefixStore, now: float) -> list[StandingPin]:
    return [
        StandingPin(
            scope=pin.scope,
            num_tokens=pin.num_tokens,
            ttl_seconds=None if math.isinf(pin.ttl_seconds) else pin.ttl_seconds,
            seconds_left=None if math.isinf(pin.expires_at) else max(pin.expires_at - now, 0.0),
        )
        for pin in store.pins()[:MAX_PINS]
    ]

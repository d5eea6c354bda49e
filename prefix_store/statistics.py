"""What the store has seen, in total and for each scope.

Knows counts and durations. Does not know prices or requests. The rows always
add up to the total: scopes beyond the limit are folded into one row, `other`.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from prefix_store.misses import MissReason

OTHER = "other"

_BUCKETS = 40
_SMALLEST_EXPONENT = -10


class Durations:
    """How long, by powers of two from about a millisecond to decades; weighted by blocks."""

    __slots__ = ("count", "counts", "sum_seconds")

    def __init__(self) -> None:
        self.counts = [0] * _BUCKETS
        self.count = 0
        self.sum_seconds = 0.0

    def add(self, seconds: float, weight: int) -> None:
        exponent = math.frexp(seconds)[1] - _SMALLEST_EXPONENT if seconds > 0.0 else 0
        self.counts[min(max(exponent, 0), _BUCKETS - 1)] += weight
        self.count += weight
        self.sum_seconds += seconds * weight

    def add_all(self, other: Durations) -> None:
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.count += other.count
        self.sum_seconds += other.sum_seconds

    def upper_seconds(self) -> list[float]:
        """What each of `counts` is shorter than, in seconds."""
        return [float(2.0 ** (bucket + _SMALLEST_EXPONENT)) for bucket in range(_BUCKETS)]

    @property
    def mean_seconds(self) -> float:
        return self.sum_seconds / self.count if self.count else 0.0

    def quantile_seconds(self, share: float) -> float:
        """Upper bound of the bucket in which that share of all is reached; 0.0 when there is nothing."""
        wanted = share * self.count
        seen = 0
        for bucket, count in enumerate(self.counts):
            seen += count
            if count and seen >= wanted:
                return float(2.0 ** (bucket + _SMALLEST_EXPONENT))
        return 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class Tally:
    """Counts of one scope, or of all.

    A query is one `acquire`; `hit_tokens` of its `query_tokens` were cached. A block
    is wasted when it leaves without having been read once.
    """

    queries: int = 0
    query_tokens: int = 0
    hit_queries: int = 0
    hit_tokens: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0
    evicted_blocks: int = 0
    wasted_blocks: int = 0
    reuse_gap: Durations = field(default_factory=Durations)
    idle_before_eviction: Durations = field(default_factory=Durations)
    misses: Counter[MissReason] = field(default_factory=Counter)

    @property
    def resident_blocks(self) -> int:
        return self.stored_blocks - self.removed_blocks

    @property
    def hit_share(self) -> float:
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0

    def add_all(self, other: Tally) -> None:
        self.queries += other.queries
        self.query_tokens += other.query_tokens
        self.hit_queries += other.hit_queries
        self.hit_tokens += other.hit_tokens
        self.stored_blocks += other.stored_blocks
        self.removed_blocks += other.removed_blocks
        self.evicted_blocks += other.evicted_blocks
        self.wasted_blocks += other.wasted_blocks
        self.reuse_gap.add_all(other.reuse_gap)
        self.idle_before_eviction.add_all(other.idle_before_eviction)
        self.misses.update(other.misses)


class Statistics:
    """A tally for each of the scopes seen last, one for all others; `total()` is their sum."""

    def __init__(self, *, max_scopes: int = 1000) -> None:
        if max_scopes < 1:
            raise ValueError("max_scopes must be at least 1")
        self._max_scopes = max_scopes
        self._by_scope: dict[str, Tally] = {}
        self._other = Tally()
        # The last one asked for: reports come in bursts of one scope.
        self._scope: str | None = None
        self._tally = self._other

    def of(self, scope: str) -> Tally:
        """The row of a scope, to count in. The scope not seen for longest may be folded for it."""
        if scope != self._scope:
            self._tally = self._bring_to_front(scope)
            self._scope = scope
        return self._tally

    def _bring_to_front(self, scope: str) -> Tally:
        tally = self._by_scope.pop(scope, None)
        if tally is None:
            tally = Tally()
            if len(self._by_scope) >= self._max_scopes:
                self._other.add_all(self._by_scope.pop(next(iter(self._by_scope))))
        self._by_scope[scope] = tally
        return tally

    def rows(self) -> dict[str, Tally]:
        """All rows; `other` among them once a scope was folded."""
        rows = dict(self._by_scope)
        if self._other.queries or self._other.stored_blocks or self._other.removed_blocks:
            rows[OTHER] = self._other
        return rows

    def total(self) -> Tally:
        total = Tally()
        for tally in self.rows().values():
            total.add_all(tally)
        return total

"""What a tenant used, paid and saved in a period.

Knows events and ledger lines. Does not know time zones or how a figure is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from billing.db import Database
from billing.ids import TenantId
from billing.instants import Microseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageTotals:
    """Exact sums. Written tokens are part of the prompt, like uncached and read ones."""

    requests: int = 0
    uncached_tokens: int = 0
    read_tokens: int = 0
    written_tokens: int = 0
    output_tokens: int = 0
    amount_pusd: int = 0
    amount_without_cache_pusd: int = 0

    @property
    def prompt_tokens(self) -> int:
        return self.uncached_tokens + self.read_tokens + self.written_tokens

    @property
    def saved_pusd(self) -> int:
        """Reads at the discount, minus write premiums: can be negative."""
        return self.amount_without_cache_pusd - self.amount_pusd

    @property
    def hit_share(self) -> Fraction:
        """Read tokens of all prompt tokens, exact; 0 when there were none."""
        raise NotImplementedError

    @property
    def hit_basis_points(self) -> int:
        """`hit_share` in hundredths of a percent, rounded down. `money.format_basis_points` shows it."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageBucket:
    """The requests admitted in the 15 minutes from `start`."""

    start: Microseconds
    totals: UsageTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageReport:
    """Requests admitted in `[start, end)`. Buckets without requests are left out."""

    tenant_id: TenantId
    start: Microseconds
    end: Microseconds
    currency: str
    totals: UsageTotals
    buckets: Sequence[UsageBucket]


def usage_report(db: Database, *, tenant_id: TenantId, start: Microseconds, end: Microseconds) -> UsageReport:
    """Raises ValueError when `end` is before `start`."""
    raise NotImplementedError

"""What usage adds up to, as values.

Knows counts, picodollars and token classes. Does not know where they were added up,
or for whom. Addition is exact, and its order does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final

from billing.usage import TokenClass

READS: Final = (
    TokenClass.READ,
    TokenClass.READ_HOST,
    TokenClass.READ_DISK,
    TokenClass.READ_REMOTE,
)
WRITES: Final = (TokenClass.WRITE_AUTO, TokenClass.WRITE_5M, TokenClass.WRITE_1H)
PROMPT: Final = (TokenClass.INPUT, *READS, *WRITES)
"""Every prompt token is in exactly one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassTotals:
    """Of one token class: tokens (token-hours for pins), and what they cost in picodollars.

    At list price, as the tenant pays, and had there been no cache.
    """

    quantity: int = 0
    list_amount_pusd: int = 0
    amount_pusd: int = 0
    amount_without_cache_pusd: int = 0

    @property
    def discount_pusd(self) -> int:
        return self.list_amount_pusd - self.amount_pusd

    @property
    def saved_pusd(self) -> int:
        """By the cache: positive for reads, negative for the premium on writes."""
        return self.amount_without_cache_pusd - self.amount_pusd

    def __add__(self, other: ClassTotals) -> ClassTotals:
        return ClassTotals(
            quantity=self.quantity + other.quantity,
            list_amount_pusd=self.list_amount_pusd + other.list_amount_pusd,
            amount_pusd=self.amount_pusd + other.amount_pusd,
            amount_without_cache_pusd=self.amount_without_cache_pusd + other.amount_without_cache_pusd,
        )

    def __neg__(self) -> ClassTotals:
        return ClassTotals(
            quantity=-self.quantity,
            list_amount_pusd=-self.list_amount_pusd,
            amount_pusd=-self.amount_pusd,
            amount_without_cache_pusd=-self.amount_without_cache_pusd,
        )


NOTHING: Final = ClassTotals()


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageTotals:
    """Requests, and the totals of each class that has any. All else is derived."""

    requests: int = 0
    by_class: Mapping[TokenClass, ClassTotals] = field(default_factory=dict)

    def of(self, classes: Iterable[TokenClass]) -> ClassTotals:
        """Several classes as one."""
        return sum((self.by_class.get(one, NOTHING) for one in classes), NOTHING)

    def tokens(self, token_class: TokenClass) -> int:
        return self.by_class.get(token_class, NOTHING).quantity

    @property
    def uncached_tokens(self) -> int:
        return self.tokens(TokenClass.INPUT)

    @property
    def read_tokens(self) -> int:
        """From any tier."""
        return self.of(READS).quantity

    @property
    def written_tokens(self) -> int:
        """They are part of the prompt, like uncached and read ones."""
        return self.of(WRITES).quantity

    @property
    def output_tokens(self) -> int:
        return self.tokens(TokenClass.OUTPUT)

    @property
    def prompt_tokens(self) -> int:
        return self.of(PROMPT).quantity

    @property
    def list_amount_pusd(self) -> int:
        return self.of(TokenClass).list_amount_pusd

    @property
    def amount_pusd(self) -> int:
        return self.of(TokenClass).amount_pusd

    @property
    def amount_without_cache_pusd(self) -> int:
        return self.of(TokenClass).amount_without_cache_pusd

    @property
    def saved_pusd(self) -> int:
        """Reads at the discount, minus write premiums and pins: can be negative."""
        return self.of(TokenClass).saved_pusd

    @property
    def hit_share(self) -> Fraction:
        """Read tokens of all prompt tokens, exact; 0 when there were none."""
        return Fraction(self.read_tokens, self.prompt_tokens or 1)

    @property
    def hit_basis_points(self) -> int:
        """`hit_share` in hundredths of a percent, rounded down. `money.format_basis_points` shows it."""
        return self.read_tokens * 10_000 // (self.prompt_tokens or 1)

    def __add__(self, other: UsageTotals) -> UsageTotals:
        both = {one: self.of([one]) + other.of([one]) for one in TokenClass}
        return UsageTotals(
            requests=self.requests + other.requests,
            by_class={one: totals for one, totals in both.items() if totals != NOTHING},
        )

    def __neg__(self) -> UsageTotals:
        return UsageTotals(
            requests=-self.requests, by_class={one: -totals for one, totals in self.by_class.items()}
        )

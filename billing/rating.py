"""From counts to ledger lines.

Knows token classes and the prices in force for a request. Does not know tables: rating is a pure
function, so that a line can be checked, and re-rated, at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from billing.errors import AmountTooLarge
from billing.ids import PriceVersionId
from billing.money import MAX_STORED
from billing.prices import ModelPrice, discounted
from billing.usage import TokenClass, TokenCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLine:
    """`quantity` tokens of one class at one unit price. Exact: `amount_pusd` is their product.

    Token-hours, for a pin. Negative in a correction. `list_…` units are those of the
    book, before the tenant's discount.
    """

    token_class: TokenClass
    quantity: int
    list_unit_pusd: int
    list_unit_without_cache_pusd: int
    discount_basis_points: int
    price_version_id: PriceVersionId

    @property
    def unit_pusd(self) -> int:
        return discounted(self.list_unit_pusd, self.discount_basis_points)

    @property
    def unit_without_cache_pusd(self) -> int:
        return discounted(self.list_unit_without_cache_pusd, self.discount_basis_points)

    @property
    def list_amount_pusd(self) -> int:
        return self.quantity * self.list_unit_pusd

    @property
    def amount_pusd(self) -> int:
        return self.quantity * self.unit_pusd

    @property
    def amount_without_cache_pusd(self) -> int:
        if self.token_class is TokenClass.PIN:
            return 0  # without a cache nobody would have bought it
        return self.quantity * self.unit_without_cache_pusd


def rate(counts: TokenCounts, price: ModelPrice) -> tuple[LedgerLine, ...]:
    """A line for every class with tokens. Pure: the same counts and versions give the same lines.

    Raises UnpricedModel when a class has tokens and no price, AmountTooLarge
    when a line does not fit its column.
    """
    return rate_quantities(counts.by_class(), price)


def rate_quantities(
    quantities: Iterable[tuple[TokenClass, int]], price: ModelPrice
) -> tuple[LedgerLine, ...]:
    """`rate` for quantities with a sign: those of a correction are differences."""
    return tuple(_line(token_class, quantity, price) for token_class, quantity in quantities if quantity)


def differences(
    now: Sequence[tuple[TokenClass, int]], before: Sequence[tuple[TokenClass, int]]
) -> tuple[tuple[TokenClass, int], ...]:
    """What is more now than before, class by class; both in the order of `TokenCounts.by_class`."""
    return tuple(
        (token_class, quantity - former)
        for (token_class, quantity), (_, former) in zip(now, before, strict=True)
    )


def _line(token_class: TokenClass, quantity: int, price: ModelPrice) -> LedgerLine:
    version = price.version(token_class)
    line = LedgerLine(
        token_class=token_class,
        quantity=quantity,
        list_unit_pusd=version.unit_pusd,
        list_unit_without_cache_pusd=price.version(_class_without_cache(token_class)).unit_pusd,
        discount_basis_points=price.discount_basis_points,
        price_version_id=version.id,
    )
    if abs(quantity) * max(line.list_unit_pusd, line.list_unit_without_cache_pusd) > MAX_STORED:
        raise AmountTooLarge(f"{quantity} {token_class} tokens at {line.list_unit_pusd} picodollars")
    return line


def _class_without_cache(token_class: TokenClass) -> TokenClass:
    """What a token would have been without a cache: every prompt token would be plain input."""
    return token_class if token_class in {TokenClass.OUTPUT, TokenClass.PIN} else TokenClass.INPUT

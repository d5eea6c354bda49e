"""Picodollars, and how they are written down.

Knows integers and strings. Does not know prices or currencies' rates. Every string here is
exact; `rounded_cents` is the one place that rounds, and says by how much.
"""

from __future__ import annotations

import re
from typing import Final, NewType

from billing.errors import InvalidAmount

Picodollars = NewType("Picodollars", int)
"""1e-12 dollars. One picodollar per token is one micro-dollar per million tokens."""

PICODOLLARS_PER_DOLLAR = 10**12
PICODOLLARS_PER_CENT = 10**10
_FRACTION_DIGITS = 12
_LEAST_FRACTION_DIGITS = 2
_DOLLARS: Final = re.compile(r"([0-9]{1,12})(?:\.([0-9]{1,12}))?")

MAX_STORED = 2**63 - 1
"""What a signed 64-bit column holds; about 9.2 million dollars."""


def format_dollars(amount: int) -> str:
    """Picodollars as an exact decimal string: 54_399_000_000 is "0.054399", 10**12 is "1.00"."""
    dollars, rest = divmod(abs(amount), PICODOLLARS_PER_DOLLAR)
    fraction = f"{rest:0{_FRACTION_DIGITS}d}".rstrip("0").ljust(_LEAST_FRACTION_DIGITS, "0")
    return f"{'-' if amount < 0 else ''}{dollars}.{fraction}"


def parse_dollars(text: str) -> int:
    """An amount of dollars as picodollars, exact: "0.054399" is 54_399_000_000. Raises InvalidAmount."""
    found = _DOLLARS.fullmatch(text)
    if found is None:
        raise InvalidAmount(f"{text!r} is no amount of dollars; amounts look like '25' or '0.50'")
    return int(found[1]) * PICODOLLARS_PER_DOLLAR + int((found[2] or "").ljust(_FRACTION_DIGITS, "0"))


def rounded_cents(amount: int) -> tuple[int, int]:
    """Picodollars as whole cents, half to even, and the residual: what the cents leave out, in picodollars.

    A residual is at most half a cent, either way, and no money: whoever rounds keeps it.
    """
    cents, rest = divmod(amount, PICODOLLARS_PER_CENT)
    if 2 * rest > PICODOLLARS_PER_CENT or (2 * rest == PICODOLLARS_PER_CENT and cents % 2):
        cents += 1
    return cents, amount - cents * PICODOLLARS_PER_CENT


def format_cents(cents: int) -> str:
    """Whole cents as dollars, with two digits after the point: -5 is "-0.05"."""
    return format_dollars(cents * PICODOLLARS_PER_CENT)


def format_basis_points(basis_points: int) -> str:
    """Hundredths of a percent as a percentage: 9735 is "97.35"."""
    whole, rest = divmod(abs(basis_points), 100)
    return f"{'-' if basis_points < 0 else ''}{whole}.{rest:02d}"

"""The price book: immutable versions of unit prices.

Knows models, token classes and picodollars per token. Does not know usage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from billing.db import Database
from billing.ids import PriceVersionId
from billing.instants import Microseconds
from billing.usage import TokenClass

ANY_MODEL = "*"
"""The entry of a book that prices every model it does not name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceSheet:
    """One checked book: picodollars per token, for every class of every model it names."""

    name: str
    currency: str
    units: Mapping[str, Mapping[TokenClass, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceVersion:
    """One unit price, from an instant on, until a later version of the same model and class."""

    id: PriceVersionId
    model: str
    token_class: TokenClass
    unit_pusd: int
    effective_from: Microseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPrice:
    """The versions in force for one model at one instant, a version for every class."""

    model: str
    versions: Mapping[TokenClass, PriceVersion]


def parse_price_sheet(text: str) -> PriceSheet:
    """Raises InvalidPriceBook, naming the entry that breaks a rule."""
    raise NotImplementedError


def load_price_sheet(path: Path) -> PriceSheet:
    """Raises InvalidPriceBook, also when the file cannot be read."""
    raise NotImplementedError


def default_price_sheet() -> PriceSheet:
    """The book that comes with the package (`billing/default_prices.yaml`)."""
    raise NotImplementedError


def publish(db: Database, sheet: PriceSheet, *, effective_from: Microseconds, now: Microseconds) -> int:
    """Adds versions for the models whose units changed; returns how many versions were added.

    Raises BackdatedPrice when `effective_from` is before `now` or not after the last version.
    The first book of an empty database is in force from the beginning of time.
    """
    raise NotImplementedError


def ensure_published(db: Database, sheet: PriceSheet, *, now: Microseconds) -> int:
    """Publishes the sheet if the database has no price at all (first start); returns versions added."""
    raise NotImplementedError


def price_in_force(db: Database, *, model: str, at: Microseconds) -> ModelPrice:
    """The model's own entry, or the book's `*`. Raises UnpricedModel."""
    raise NotImplementedError


def price_history(db: Database) -> list[PriceVersion]:
    """Every version ever published, by model, class and instant."""
    raise NotImplementedError

"""The price book: immutable versions of unit prices.

Knows models, token classes and picodollars per token. Does not know usage.

A version is in force from its instant until the next version of its model and
class begins. So versions cannot overlap, and none is ever changed. A version
may only begin after every earlier one, and not in the past: what was in force
at an instant stays so for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Row, func, insert, select, text

from billing import schema
from billing.db import Database
from billing.errors import BackdatedPrice, UnpricedModel
from billing.ids import PriceVersionId, new_id
from billing.instants import Clock, Microseconds
from billing.price_sheet import ANY_MODEL, PriceSheet
from billing.usage import Admission, TokenClass

BEGINNING_OF_TIME = Microseconds(0)

RECENT_NS: Final = 1_000_000_000
RECENT_MODELS: Final = 1_024

_PRICES_LOCK = 0x4EAD57A8
"""Any constant: the advisory lock that keeps publishing and pricing apart."""


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
    """The versions in force for one model at one instant, one for every class, and the tenant's discount."""

    model: str
    versions: Mapping[TokenClass, PriceVersion]
    discount_basis_points: int = 0

    def version(self, token_class: TokenClass) -> PriceVersion:
        """Raises UnpricedModel when the class has no price: it is never free by accident."""
        found = self.versions.get(token_class)
        if found is None:
            raise UnpricedModel(f"{self.model}: no price for {token_class} tokens")
        return found


def discounted(list_unit_pusd: int, basis_points: int) -> int:
    """Rounded down, in the tenant's favour: a unit stays a whole number, so an amount stays exact."""
    return list_unit_pusd * (10_000 - basis_points) // 10_000


def publish(
    db: Database, sheet: PriceSheet, *, clock: Clock, effective_from: Microseconds | None = None
) -> int:
    """Adds versions for the units that changed, from an instant on (None: at once); returns how many.

    Raises BackdatedPrice when `effective_from` is in the past or not after the last version.
    A model that the sheet leaves out keeps its price.
    """
    with db.write() as connection:
        _lock_prices(connection, shared=False)
        # Read under the lock: no event priced by the old version can be admitted after this instant.
        now = clock()
        start = now if effective_from is None else effective_from
        if start < now:
            raise BackdatedPrice("a price cannot begin in the past")
        return _insert_changed(connection, sheet, effective_from=start, now=now)


def ensure_published(db: Database, sheet: PriceSheet, *, clock: Clock) -> int:
    """Publishes the sheet if there is no price at all (first start); returns the versions added.

    The first prices are in force from the beginning of time: nothing was priced before them.
    """
    with db.write() as connection:
        _lock_prices(connection, shared=False)
        if connection.execute(select(func.count()).select_from(schema.price_versions)).scalar_one():
            return 0
        return _insert_changed(connection, sheet, effective_from=BEGINNING_OF_TIME, now=clock())


def price_in_force(db: Database, *, model: str, at: Microseconds) -> ModelPrice:
    """The model's own entry, or the book's `*`. Raises UnpricedModel."""
    with db.read() as connection:
        return BookHistory.load(connection, [model]).price(model, at)


def price_history(db: Database) -> list[PriceVersion]:
    """Every version ever published, by model, class and instant."""
    versions = schema.price_versions.c
    with db.read() as connection:
        rows = connection.execute(
            select(schema.price_versions).order_by(
                versions.model, versions.token_class, versions.effective_from_us
            )
        ).all()
    return [_version(row) for row in rows]


class BookHistory:
    """The versions of some models as one transaction sees them, to price many requests at once."""

    def __init__(self, versions: Mapping[tuple[str, TokenClass], list[PriceVersion]]) -> None:
        self._versions = versions  # each list from the latest to the earliest

    @classmethod
    def load(cls, connection: Connection, models: Iterable[str]) -> BookHistory:
        """No new version can begin to apply to these models until the transaction ends."""
        _lock_prices(connection, shared=True)
        columns = schema.price_versions.c
        latest_first = (
            select(schema.price_versions)
            .where(columns.model.in_({*models, ANY_MODEL}))
            .order_by(columns.effective_from_us.desc())
        )
        versions: dict[tuple[str, TokenClass], list[PriceVersion]] = {}
        for row in connection.execute(latest_first):
            version = _version(row)
            versions.setdefault((version.model, version.token_class), []).append(version)
        return cls(versions)

    def price(self, model: str, at: Microseconds) -> ModelPrice:
        """The model's own entry in force at the instant, or that of `*`. Raises UnpricedModel."""
        for name in (model, ANY_MODEL):
            found = self._in_force(name, at)
            if found:
                return ModelPrice(model=model, versions=found)
        raise UnpricedModel(f"no price in force for model {model!r}")

    def _in_force(self, name: str, at: Microseconds) -> dict[TokenClass, PriceVersion]:
        found: dict[TokenClass, PriceVersion] = {}
        for token_class in TokenClass:
            for version in self._versions.get((name, token_class), ()):
                if version.effective_from <= at:
                    found[token_class] = version
                    break
        return found


class RecentBook:
    """The book as it was up to a moment ago, for admissions: they only ask whether a model has a price, and
    about how much a request may cost. Lines are rated by the book itself.

    Belongs to one thread. A model that has no price is looked up anew each time.
    """

    def __init__(self, *, monotonic_ns: Callable[[], int]) -> None:
        self._monotonic_ns = monotonic_ns
        self._by_model: dict[str, tuple[int, BookHistory]] = {}

    def price(self, connection: Connection, admission: Admission) -> ModelPrice:
        """Raises UnpricedModel."""
        known = self.known_price(admission)
        if known is not None:
            return known
        model = admission.model
        book = BookHistory.load(connection, [model])
        if len(self._by_model) >= RECENT_MODELS:
            self._by_model.clear()
        self._by_model[model] = (self._monotonic_ns() + RECENT_NS, book)
        return book.price(model, admission.admitted_at)

    def known_price(self, admission: Admission) -> ModelPrice | None:
        """None when the database must be asked."""
        until, book = self._by_model.get(admission.model, (0, None))
        if book is None or self._monotonic_ns() >= until:
            return None
        with suppress(UnpricedModel):
            return book.price(admission.model, admission.admitted_at)
        return None


def _insert_changed(
    connection: Connection, sheet: PriceSheet, *, effective_from: Microseconds, now: Microseconds
) -> int:
    latest = _latest(connection)
    changed = []
    for model, units in sheet.units.items():
        for token_class, unit in units.items():
            known = latest.get((model, token_class))
            if known is not None and known.effective_from > effective_from:
                raise BackdatedPrice(f"{model} {token_class}: a version that begins later is published")
            if known is None or known.unit_pusd != unit:
                changed.append((model, token_class, unit))
    if changed:
        common = {
            "book": sheet.name,
            "currency": sheet.currency,
            "effective_from_us": effective_from,
            "created_at_us": now,
        }
        connection.execute(
            insert(schema.price_versions),
            [
                {
                    "id": new_id(),
                    "model": model,
                    "token_class": token_class.value,
                    "unit_pusd": unit,
                    **common,
                }
                for model, token_class, unit in changed
            ],
        )
    return len(changed)


def _latest(connection: Connection) -> dict[tuple[str, TokenClass], PriceVersion]:
    rows = connection.execute(
        select(schema.price_versions).order_by(schema.price_versions.c.effective_from_us)
    )
    return {(version.model, version.token_class): version for version in map(_version, rows)}


def _lock_prices(connection: Connection, *, shared: bool) -> None:
    if connection.dialect.name == "postgresql":
        mode = "_shared" if shared else ""
        connection.execute(text(f"SELECT pg_advisory_xact_lock{mode}(:key)"), {"key": _PRICES_LOCK})
    # SQLite: BEGIN IMMEDIATE already holds the only write lock.


def _version(row: Row[Any]) -> PriceVersion:
    return PriceVersion(
        id=PriceVersionId(row.id),
        model=row.model,
        token_class=TokenClass(row.token_class),
        unit_pusd=row.unit_pusd,
        effective_from=Microseconds(row.effective_from_us),
    )

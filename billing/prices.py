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

from sqlalchemy import ColumnElement, Connection, Row, func, insert, select, text

from billing import schema
from billing.db import Database
from billing.errors import BackdatedPrice, InvalidDiscount, UnknownTenant, UnpricedModel
from billing.ids import PriceVersionId, TenantId, new_id
from billing.instants import Clock, Microseconds
from billing.price_sheet import ANY_MODEL, PriceSheet
from billing.usage import Admission, TokenClass

BEGINNING_OF_TIME = Microseconds(0)

ALL_BASIS_POINTS: Final = 10_000
RECENT_NS: Final = 1_000_000_000
RECENT_BOOKS: Final = 4_096

TIERS: Final = (TokenClass.READ_HOST, TokenClass.READ_DISK, TokenClass.READ_REMOTE)

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
    tenant_id: TenantId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPrice:
    """The versions in force for one model at one instant, one for every class, and the tenant's discount."""

    model: str
    versions: Mapping[TokenClass, PriceVersion]
    discount_basis_points: int = 0

    def version(self, token_class: TokenClass) -> PriceVersion:
        """Raises UnpricedModel when the class has no price: it is never free by accident."""
        found = self.versions.get(token_class)
        if found is None and token_class in TIERS:
            found = self.versions.get(TokenClass.READ)
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
    A model that the sheet leaves out keeps its price. Raises UnknownTenant for a tenant's own book.
    """
    with db.write() as connection:
        _lock_prices(connection, shared=False)
        # Read under the lock: no event priced by the old version can be admitted after this instant.
        now = clock()
        start = now if effective_from is None else effective_from
        if start < now:
            raise BackdatedPrice("a price cannot begin in the past")
        return _insert_changed(connection, sheet, effective_from=start, now=now)


def set_discount(
    db: Database,
    *,
    tenant_id: TenantId,
    basis_points: int,
    clock: Clock,
    effective_from: Microseconds | None = None,
) -> Microseconds:
    """A tenant's discount on every unit from an instant on (None: at once), which is returned.

    Raises InvalidDiscount, UnknownTenant, or BackdatedPrice when it would begin in the past or
    not after the last one.
    """
    if not 0 <= basis_points <= ALL_BASIS_POINTS:
        raise InvalidDiscount(f"a discount is between 0 and {ALL_BASIS_POINTS} basis points")
    discounts = schema.tenant_discounts.c
    with db.write() as connection:
        _lock_prices(connection, shared=False)
        now = clock()
        start = now if effective_from is None else effective_from
        if (
            connection.execute(
                select(schema.tenants.c.id).where(schema.tenants.c.id == tenant_id)
            ).one_or_none()
            is None
        ):
            raise UnknownTenant(f"no tenant has the id {tenant_id}")
        last = connection.execute(
            select(func.max(discounts.effective_from_us)).where(discounts.tenant_id == tenant_id)
        ).scalar_one()
        if start < now or (last is not None and start <= last):
            raise BackdatedPrice("a discount begins neither in the past nor before another")
        connection.execute(
            insert(schema.tenant_discounts).values(
                id=new_id(),
                tenant_id=tenant_id,
                basis_points=basis_points,
                effective_from_us=start,
                created_at_us=now,
            )
        )
    return start


def ensure_published(db: Database, sheet: PriceSheet, *, clock: Clock) -> int:
    """Publishes the sheet if there is no price at all (first start); returns the versions added.

    The first prices are in force from the beginning of time: nothing was priced before them.
    """
    with db.write() as connection:
        _lock_prices(connection, shared=False)
        if connection.execute(select(func.count()).select_from(schema.price_versions)).scalar_one():
            return 0
        return _insert_changed(connection, sheet, effective_from=BEGINNING_OF_TIME, now=clock())


def price_in_force(
    db: Database, *, model: str, at: Microseconds, tenant_id: TenantId | None = None
) -> ModelPrice:
    """What a tenant pays, or what the list says: see `BookHistory.price`. Raises UnpricedModel."""
    with db.read() as connection:
        owners = [] if tenant_id is None else [tenant_id]
        return BookHistory.load(connection, [model], owners).price(model, at, tenant_id)


def price_history(db: Database, *, tenant_id: TenantId | None = None) -> list[PriceVersion]:
    """Every version of the list ever published, or of a tenant's own, by model, class and instant."""
    versions = schema.price_versions.c
    with db.read() as connection:
        rows = connection.execute(
            select(schema.price_versions)
            .where(_is_owner(tenant_id))
            .order_by(versions.model, versions.token_class, versions.effective_from_us)
        ).all()
    return [_version(row) for row in rows]


def require_tenant(connection: Connection, name: str) -> TenantId:
    """Raises UnknownTenant."""
    tenants = schema.tenants.c
    tenant_id = connection.execute(select(tenants.id).where(tenants.name == name)).scalar_one_or_none()
    if tenant_id is None:
        raise UnknownTenant(f"no tenant is named {name!r}")
    return TenantId(tenant_id)


_VersionKey = tuple[TenantId | None, str, TokenClass]


class BookHistory:
    """The versions of some models and the discounts of some tenants as one transaction sees them."""

    def __init__(
        self,
        versions: Mapping[_VersionKey, list[PriceVersion]],
        discounts: Mapping[TenantId, list[tuple[Microseconds, int]]],
    ) -> None:
        # Each list from the latest to the earliest.
        self._versions = versions
        self._discounts = discounts

    @classmethod
    def load(
        cls, connection: Connection, models: Iterable[str], tenant_ids: Iterable[TenantId] = ()
    ) -> BookHistory:
        """No new version can begin to apply to these models until the transaction ends."""
        _lock_prices(connection, shared=True)
        owners = set(tenant_ids)
        columns, given = schema.price_versions.c, schema.tenant_discounts.c
        latest_first = (
            select(schema.price_versions)
            .where(columns.model.in_({*models, ANY_MODEL}))
            .where(columns.tenant_id.is_(None) | columns.tenant_id.in_(owners))
            .order_by(columns.effective_from_us.desc())
        )
        versions: dict[_VersionKey, list[PriceVersion]] = {}
        for row in connection.execute(latest_first):
            version = _version(row)
            key = (version.tenant_id, version.model, version.token_class)
            versions.setdefault(key, []).append(version)
        discounts: dict[TenantId, list[tuple[Microseconds, int]]] = {}
        last_first = select(schema.tenant_discounts).where(given.tenant_id.in_(owners))
        for row in connection.execute(last_first.order_by(given.effective_from_us.desc())):
            discounts.setdefault(row.tenant_id, []).append((row.effective_from_us, row.basis_points))
        return cls(versions, discounts)

    def price(self, model: str, at: Microseconds, tenant_id: TenantId | None = None) -> ModelPrice:
        """The versions in force at the instant, and the tenant's discount.

        The list's entry for the model, or that of `*`; a class that the tenant's own entry
        prices goes before it. Raises UnpricedModel.
        """
        listed = self._entry(None, model, at)
        own = self._entry(tenant_id, model, at) if tenant_id is not None else {}
        if not listed and not own:
            raise UnpricedModel(f"no price in force for model {model!r}")
        return ModelPrice(
            model=model, versions=listed | own, discount_basis_points=self._discount(tenant_id, at)
        )

    def _entry(self, owner: TenantId | None, model: str, at: Microseconds) -> dict[TokenClass, PriceVersion]:
        return self._in_force(owner, model, at) or self._in_force(owner, ANY_MODEL, at)

    def _in_force(
        self, owner: TenantId | None, name: str, at: Microseconds
    ) -> dict[TokenClass, PriceVersion]:
        found: dict[TokenClass, PriceVersion] = {}
        for token_class in TokenClass:
            for version in self._versions.get((owner, name, token_class), ()):
                if version.effective_from <= at:
                    found[token_class] = version
                    break
        return found

    def _discount(self, tenant_id: TenantId | None, at: Microseconds) -> int:
        given = self._discounts.get(tenant_id, ()) if tenant_id is not None else ()
        return next((basis_points for start, basis_points in given if start <= at), 0)


class RecentBook:
    """The book as it was up to a moment ago, for admissions: they only ask whether a model has a price, and
    about how much a request may cost. Lines are rated by the book itself.

    Belongs to one thread. A model that has no price is looked up anew each time.
    """

    def __init__(self, *, monotonic_ns: Callable[[], int]) -> None:
        self._monotonic_ns = monotonic_ns
        self._books: dict[tuple[str, TenantId], tuple[int, BookHistory]] = {}

    def price(self, connection: Connection, admission: Admission) -> ModelPrice:
        """Raises UnpricedModel."""
        known = self.known_price(admission)
        if known is not None:
            return known
        model, tenant_id = admission.model, admission.tenant_id
        book = BookHistory.load(connection, [model], [tenant_id])
        if len(self._books) >= RECENT_BOOKS:
            self._books.clear()
        self._books[model, tenant_id] = (self._monotonic_ns() + RECENT_NS, book)
        return book.price(model, admission.admitted_at, tenant_id)

    def known_price(self, admission: Admission) -> ModelPrice | None:
        """None when the database must be asked."""
        until, book = self._books.get((admission.model, admission.tenant_id), (0, None))
        if book is None or self._monotonic_ns() >= until:
            return None
        with suppress(UnpricedModel):
            return book.price(admission.model, admission.admitted_at, admission.tenant_id)
        return None


def _insert_changed(
    connection: Connection, sheet: PriceSheet, *, effective_from: Microseconds, now: Microseconds
) -> int:
    owner = None if sheet.tenant is None else require_tenant(connection, sheet.tenant)
    latest = _latest(connection, owner)
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
            "tenant_id": owner,
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


def _is_owner(tenant_id: TenantId | None) -> ColumnElement[bool]:
    owner = schema.price_versions.c.tenant_id
    return owner.is_(None) if tenant_id is None else owner == tenant_id


def _latest(connection: Connection, tenant_id: TenantId | None) -> dict[tuple[str, TokenClass], PriceVersion]:
    own = select(schema.price_versions).where(_is_owner(tenant_id))
    rows = connection.execute(own.order_by(schema.price_versions.c.effective_from_us))
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
        tenant_id=row.tenant_id,
    )

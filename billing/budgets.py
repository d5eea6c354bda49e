"""Budgets: what a tenant, a project or a key may spend in a month or in all.

Knows budgets, their balances and what is reserved of them. Does not know rates,
journals or HTTP.

A reservation: `held → settled | released | expired`. It is held in the transaction that
admits its request, and ends in the one that posts the request's event: settled, or
released when nothing was used. One whose lease ran out expires. A balance's `reserved`
is the sum of what is held of it, `posted` the sum of all posted since the budget was made.

Whoever decides over a balance holds its row, so decisions are made one after another,
in the order of the admissions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final
from uuid import UUID
from zoneinfo import ZoneInfo

from sqlalchemy import Connection, Row, Select, bindparam, insert, select, text, update
from sqlalchemy.dialects import postgresql, sqlite

from billing import instants, schema
from billing.calendar import Span, month, month_of, zone_named
from billing.db import Database
from billing.errors import BudgetBelowPosted, BudgetExceeded, InvalidBudget, UnknownBudget
from billing.ids import ApiKeyId, BudgetId, ProjectId, RequestId, TenantId, new_id
from billing.instants import Microseconds
from billing.money import MAX_STORED, format_dollars
from billing.prices import ModelPrice, discounted
from billing.reports import Selection, usage_within
from billing.sql import among
from billing.totals import READS, WRITES
from billing.usage import Admission, Estimate, TokenClass

ALL_TIME: Final = "total"
"""The one period of a budget that never begins anew."""

_budgets: Final = schema.budgets.c
_balances: Final = schema.budget_balances.c
_reservations: Final = schema.reservations.c


class Period(StrEnum):
    """How long a budget lasts. Months are those of the tenant's zone."""

    MONTH = "month"
    TOTAL = "total"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Whose spending: a key's, a project's, or else the whole tenant's."""

    tenant_id: TenantId
    project_id: ProjectId | None = None
    api_key_id: ApiKeyId | None = None

    @property
    def id(self) -> UUID:
        return self.api_key_id or self.project_id or self.tenant_id

    @property
    def ids(self) -> tuple[UUID, ...]:
        """All that a budget over a request of this scope can be named by."""
        ids = (self.tenant_id, self.project_id, self.api_key_id)
        return tuple(one for one in ids if one is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A limit in picodollars, and what stands against it in the period that is now."""

    id: BudgetId
    scope: Scope
    period: Period
    limit_pusd: int
    posted_pusd: int = 0
    reserved_pusd: int = 0

    @property
    def left_pusd(self) -> int:
        """For what is not reserved yet. Never less than nothing."""
        return max(0, self.limit_pusd - self.posted_pusd - self.reserved_pusd)


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """What a posted event costs, and when it is accounted to."""

    request_id: RequestId
    scope: Scope
    accounted_at: Microseconds
    amount_pusd: int


def worst_case_pusd(price: ModelPrice, estimate: Estimate) -> int:
    """What the request costs at most: known reads at the dearest tier's price, the rest of the prompt at
    the dearest input class, all of the output.

    A class without a price does not count: to use it is refused when it is rated.
    """
    reads = _dearest(price, READS)
    inputs = _dearest(price, (TokenClass.INPUT, *WRITES))
    output = _dearest(price, (TokenClass.OUTPUT,))
    return estimate.read * reads + (estimate.prompt - estimate.read) * inputs + estimate.output * output


def set_budget(db: Database, scope: Scope, *, period: Period, limit_pusd: int, now: Microseconds) -> Budget:
    """Makes the scope's budget for the period, or changes its limit from now on.

    Raises BudgetBelowPosted when more was already spent in the period that is now,
    InvalidBudget for a limit that cannot be stored or a scope that is not the tenant's.
    """
    if not 0 <= limit_pusd <= MAX_STORED:
        raise InvalidBudget(f"a budget is between 0 and {format_dollars(MAX_STORED)} dollars")
    if scope.project_id is not None and scope.api_key_id is not None:
        raise InvalidBudget("a budget is for a project or for a key, not for both")
    with db.write() as connection:
        # Nothing is admitted or posted meanwhile, so what was posted before is counted once.
        _keep_others_out(connection)
        _require_own(connection, scope)
        zone = _zone_of(connection, scope.tenant_id)
        label = _label(period, now, zone)
        known = connection.execute(_live([scope.id]).where(_budgets.period == period.value)).one_or_none()
        posted = _posted(connection, scope, _span(period, label, now, zone))
        if posted > limit_pusd:
            raise BudgetBelowPosted(
                f"{format_dollars(posted)} dollars are spent already; "
                f"a budget of {format_dollars(limit_pusd)} is below that"
            )
        if known is None:
            budget_id = _insert_budget(connection, scope, period, limit_pusd, now)
            _insert_balance(connection, budget_id, label, limit_pusd, posted)
        else:
            budget_id = BudgetId(known.id)
            _change_limit(connection, budget_id, label, limit_pusd)
        return _with_balance(connection, _budget(_by_id(connection, budget_id)), label)


def remove_budget(db: Database, budget_id: BudgetId, *, now: Microseconds) -> None:
    """It limits nothing any more; what is held of it still ends. Raises UnknownBudget."""
    with db.write() as connection:
        removed = connection.execute(
            update(schema.budgets)
            .where(_budgets.id == budget_id, _budgets.removed_at_us.is_(None))
            .values(removed_at_us=now)
        )
        if removed.rowcount == 0:
            raise UnknownBudget(f"there is no budget {budget_id}")


def list_budgets(db: Database, *, tenant_id: TenantId, now: Microseconds) -> Sequence[Budget]:
    """The tenant's budgets with the balances of the periods that are now, oldest first."""
    with db.read() as connection:
        zone = _zone_of(connection, tenant_id)
        found = connection.execute(
            select(schema.budgets)
            .where(_budgets.tenant_id == tenant_id, _budgets.removed_at_us.is_(None))
            .order_by(_budgets.created_at_us, _budgets.id)
        ).all()
        return [
            _with_balance(connection, budget, _label(budget.period, now, zone))
            for budget in map(_budget, found)
        ]


class Reserving:
    """Decides over the reservations of one batch of admissions, and writes them.

    Between `load` and the end of the transaction nobody else decides over these balances.
    """

    def __init__(
        self, rules: Mapping[UUID, Sequence[_Rule]], balances: Mapping[_BalanceKey, _Balance]
    ) -> None:
        self._rules = rules
        self._balances = dict(balances)
        self._held: list[tuple[RequestId, _BalanceKey, int]] = []

    @classmethod
    def load(cls, connection: Connection, admissions: Sequence[Admission]) -> Reserving:
        """One look when nobody among them has a budget."""
        rules = _rules(connection, map(scope_of, admissions))
        if not rules:
            return cls({}, {})
        keys = {
            rule.balance_at(one.admitted_at): rule
            for one in admissions
            for rule in _ruling(rules, scope_of(one))
        }
        balances = _locked_balances(connection, keys)
        if _make_missing(connection, keys, known=balances):
            balances = _locked_balances(connection, keys)
        return cls(rules, balances)

    def has_budget(self, admission: Admission) -> bool:
        return bool(_ruling(self._rules, scope_of(admission)))

    def reserve(self, admission: Admission, price: ModelPrice, estimate: Estimate) -> BudgetExceeded | None:
        """Out of every budget over the request, or out of none: then why not."""
        ruling = _ruling(self._rules, scope_of(admission))
        if not ruling:
            return None
        amount = worst_case_pusd(price, estimate)
        keys = [rule.balance_at(admission.admitted_at) for rule in ruling]
        for rule, key in zip(ruling, keys, strict=True):
            if self._balances[key].room_pusd < amount:
                return BudgetExceeded(f"the {rule.words} budget does not have room for this request")
        for key in keys:
            self._balances[key] = self._balances[key].with_reserved(amount)
            self._held.append((admission.request_id, key, amount))
        return None

    def write(
        self, connection: Connection, admitted: set[RequestId], lease_until: Mapping[RequestId, int]
    ) -> None:
        """Holds what was reserved for those whose rows are written; the others reserve nothing."""
        held = [one for one in self._held if one[0] in admitted]
        if not held:
            return
        connection.execute(
            insert(schema.reservations),
            [
                {
                    "request_id": request_id,
                    "balance_id": self._balances[key].id,
                    "amount_pusd": amount,
                    "state": "held",
                    "lease_until_us": lease_until[request_id],
                }
                for request_id, key, amount in held
            ],
        )
        growth: Counter[UUID] = Counter()
        for _, key, amount in held:
            growth[self._balances[key].id] += amount
        for balance_id, amount in sorted(growth.items()):
            # The condition cannot fail while the rows are held; it states what a reservation is.
            connection.execute(
                update(schema.budget_balances)
                .where(
                    _balances.id == balance_id,
                    _balances.posted_pusd + _balances.reserved_pusd + amount <= _balances.limit_pusd,
                )
                .values(reserved_pusd=_balances.reserved_pusd + amount)
            )


def settle(connection: Connection, charges: Sequence[Charge], now: Microseconds) -> None:
    """Ends the reservations of posted events and counts what they cost. In the posting transaction.

    Every charge is given once: that of an event which the database took.
    """
    held = _held_of(connection, [charge.request_id for charge in charges])
    amounts = {charge.request_id: charge.amount_pusd for charge in charges}
    _end(connection, [(row, amounts[row.request_id]) for row in held], now)
    rules = _rules(connection, (charge.scope for charge in charges))
    posted: Counter[_BalanceKey] = Counter()
    keys: dict[_BalanceKey, _Rule] = {}
    for charge in charges:
        for rule in _ruling(rules, charge.scope):
            if rule.counts_at(charge.accounted_at):
                key = rule.balance_at(charge.accounted_at)
                keys[key] = rule
                posted[key] += charge.amount_pusd
    ids = _balance_ids(connection, keys)
    if _make_missing(connection, keys, known=ids):
        ids = _balance_ids(connection, keys)
    _move(connection, freed=_freed(held), posted={ids[key]: amount for key, amount in posted.items()})


def narrow(connection: Connection, worst: Mapping[RequestId, int]) -> None:
    """Lets go of what is reserved beyond the worst case that is left, in picodollars."""
    shrunk = [
        (row, worst[row.request_id])
        for row in _held_of(connection, list(worst))
        if worst[row.request_id] < row.amount_pusd
    ]
    if not shrunk:
        return
    connection.execute(
        _one_reservation().values(amount_pusd=bindparam("new_amount")),
        [{**_key_of(row), "new_amount": amount} for row, amount in shrunk],
    )
    freed: Counter[UUID] = Counter()
    for row, amount in shrunk:
        freed[row.balance_id] += row.amount_pusd - amount
    _move(connection, freed=freed, posted={})


def expire(connection: Connection, now: Microseconds) -> int:
    """Releases what is held beyond its lease; returns how many. A later event is still counted."""
    late = connection.execute(
        select(schema.reservations)
        .where(_reservations.state == "held", _reservations.lease_until_us <= now)
        .with_for_update(skip_locked=True)
    ).all()
    if late:
        connection.execute(
            _one_reservation().values(state="expired", ended_at_us=now), [_key_of(row) for row in late]
        )
        _move(connection, freed=_freed(late), posted={})
    return len(late)


def scope_of(admission: Admission) -> Scope:
    return Scope(
        tenant_id=admission.tenant_id, project_id=admission.project_id, api_key_id=admission.api_key_id
    )


_BalanceKey = tuple[BudgetId, str]
"""A budget and the label of one of its periods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """A budget as a batch sees it."""

    budget_id: BudgetId
    words: str
    period: Period
    limit_pusd: int
    zone: ZoneInfo
    created_at: Microseconds

    def balance_at(self, instant: Microseconds) -> _BalanceKey:
        return self.budget_id, _label(self.period, instant, self.zone)

    def counts_at(self, instant: Microseconds) -> bool:
        """Periods that were over before the budget was made have no balance."""
        return (
            self.period is Period.TOTAL
            or instant >= month(month_of(self.created_at, self.zone), self.zone).start
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Balance:
    id: UUID
    limit_pusd: int
    posted_pusd: int
    reserved_pusd: int

    @property
    def room_pusd(self) -> int:
        return self.limit_pusd - self.posted_pusd - self.reserved_pusd

    def with_reserved(self, amount_pusd: int) -> _Balance:
        return replace(self, reserved_pusd=self.reserved_pusd + amount_pusd)


def _dearest(price: ModelPrice, classes: Iterable[TokenClass]) -> int:
    units = (price.versions[one].unit_pusd for one in classes if one in price.versions)
    return discounted(max(units, default=0), price.discount_basis_points)


def _ruling(rules: Mapping[UUID, Sequence[_Rule]], scope: Scope) -> list[_Rule]:
    if not rules:
        return []
    return [rule for one in scope.ids for rule in rules.get(one, ())]


def _rules(connection: Connection, scopes: Iterable[Scope]) -> dict[UUID, list[_Rule]]:
    ids = {one for scope in scopes for one in scope.ids}
    rules: dict[UUID, list[_Rule]] = {}
    for row in connection.execute(_live(ids)):
        rule = _Rule(
            budget_id=BudgetId(row.id),
            words=f"{_scope_word(row)}'s {_period_word(row)}",
            period=Period(row.period),
            limit_pusd=row.limit_pusd,
            zone=zone_named(row.time_zone),
            created_at=row.created_at_us,
        )
        rules.setdefault(row.scope_id, []).append(rule)
    return rules


def among_scopes(scope_ids: Collection[Any]) -> Select[Any]:
    """The budgets over any of these, to ask whether there are some."""
    return select(_budgets.id).where(_budgets.scope_id.in_(scope_ids), _budgets.removed_at_us.is_(None))


def _live(scope_ids: Iterable[UUID]) -> Any:
    return (
        select(schema.budgets, schema.tenants.c.time_zone)
        .join(schema.tenants, schema.tenants.c.id == _budgets.tenant_id)
        .where(_budgets.scope_id.in_(list(scope_ids)), _budgets.removed_at_us.is_(None))
    )


def _scope_word(row: Row[Any]) -> str:
    if row.api_key_id is not None:
        return "key"
    return "tenant" if row.project_id is None else "project"


def _period_word(row: Row[Any]) -> str:
    return {"month": "monthly", "total": "total"}[row.period]


def _label(period: Period, instant: Microseconds, zone: ZoneInfo) -> str:
    return ALL_TIME if period is Period.TOTAL else month_of(instant, zone)


def _span(period: Period, label: str, now: Microseconds, zone: ZoneInfo) -> Span:
    """The period that holds the instant `now`."""
    if period is Period.MONTH:
        return month(label, zone)
    return Span(label=label, start=Microseconds(0), end=instants.later(now, timedelta(days=1)))


def _insert_or_keep(connection: Connection, rows: Sequence[Mapping[str, object]]) -> None:
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    statement = dialect.insert(schema.budget_balances)
    connection.execute(statement.on_conflict_do_nothing(index_elements=["budget_id", "period"]), list(rows))


def _make_missing(
    connection: Connection, keys: Mapping[_BalanceKey, _Rule], *, known: Container[_BalanceKey]
) -> bool:
    """A period's balance begins at nothing with the first request of the period. Whether any was missing."""
    missing = [
        _balance_row(*key, keys[key].limit_pusd, posted_pusd=0) for key in sorted(keys) if key not in known
    ]
    if missing:
        _insert_or_keep(connection, missing)
    return bool(missing)


def _locked_balances(
    connection: Connection, keys: Mapping[_BalanceKey, _Rule]
) -> dict[_BalanceKey, _Balance]:
    # In order of id, as everybody locks them: nobody waits in a circle.
    rows = connection.execute(_balances_of(keys).order_by(_balances.id).with_for_update())
    return {
        (BudgetId(row.budget_id), row.period): _Balance(
            id=row.id,
            limit_pusd=row.limit_pusd,
            posted_pusd=row.posted_pusd,
            reserved_pusd=row.reserved_pusd,
        )
        for row in rows
    }


def _balance_ids(connection: Connection, keys: Mapping[_BalanceKey, _Rule]) -> dict[_BalanceKey, UUID]:
    if not keys:
        return {}
    return {(BudgetId(row.budget_id), row.period): row.id for row in connection.execute(_balances_of(keys))}


def _balances_of(keys: Iterable[_BalanceKey]) -> Any:
    budget_ids, labels = {key[0] for key in keys}, {key[1] for key in keys}
    return select(schema.budget_balances).where(
        _balances.budget_id.in_(budget_ids), _balances.period.in_(labels)
    )


def _balance_row(budget_id: BudgetId, label: str, limit_pusd: int, *, posted_pusd: int) -> dict[str, object]:
    return {
        "id": new_id(),
        "budget_id": budget_id,
        "period": label,
        "limit_pusd": limit_pusd,
        "posted_pusd": posted_pusd,
        "reserved_pusd": 0,
    }


def _held_of(connection: Connection, ids: Sequence[RequestId]) -> Sequence[Row[Any]]:
    return connection.execute(
        select(schema.reservations)
        .where(among(connection, _reservations.request_id, ids), _reservations.state == "held")
        .order_by(_reservations.request_id, _reservations.balance_id)
        .with_for_update()
    ).all()


def _freed(rows: Iterable[Row[Any]]) -> Counter[UUID]:
    freed: Counter[UUID] = Counter()
    for row in rows:
        freed[row.balance_id] += row.amount_pusd
    return freed


def _one_reservation() -> Any:
    return update(schema.reservations).where(
        _reservations.request_id == bindparam("of_request"),
        _reservations.balance_id == bindparam("of_balance"),
    )


def _key_of(row: Row[Any]) -> dict[str, object]:
    return {"of_request": row.request_id, "of_balance": row.balance_id}


def _end(connection: Connection, ended: Sequence[tuple[Row[Any], int]], now: Microseconds) -> None:
    if not ended:
        return
    rows = [
        {
            **_key_of(row),
            "new_state": "settled" if amount else "released",
            "new_settled": amount or None,
            "new_ended": now,
        }
        for row, amount in ended
    ]
    connection.execute(
        _one_reservation().values(
            state=bindparam("new_state"),
            settled_pusd=bindparam("new_settled"),
            ended_at_us=bindparam("new_ended"),
        ),
        rows,
    )


def _move(connection: Connection, *, freed: Mapping[UUID, int], posted: Mapping[UUID, int]) -> None:
    """Changes balances in the order in which everybody locks them."""
    for balance_id in sorted(freed.keys() | posted.keys()):
        connection.execute(
            update(schema.budget_balances)
            .where(_balances.id == balance_id)
            .values(
                reserved_pusd=_balances.reserved_pusd - freed.get(balance_id, 0),
                posted_pusd=_balances.posted_pusd + posted.get(balance_id, 0),
            )
        )


def _keep_others_out(connection: Connection) -> None:
    """Waits for transactions that have looked for budgets, and makes new ones wait."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("LOCK TABLE budgets IN ACCESS EXCLUSIVE MODE"))
    # SQLite: BEGIN IMMEDIATE already holds the only write lock.


def _zone_of(connection: Connection, tenant_id: TenantId) -> ZoneInfo:
    tenants = schema.tenants.c
    name = connection.execute(select(tenants.time_zone).where(tenants.id == tenant_id)).scalar_one_or_none()
    if name is None:
        raise InvalidBudget(f"there is no tenant {tenant_id}")
    return zone_named(name)


def _require_own(connection: Connection, scope: Scope) -> None:
    for what, table, one in (
        ("project", schema.projects, scope.project_id),
        ("key", schema.api_keys, scope.api_key_id),
    ):
        owned = select(table.c.id).where(table.c.id == one, table.c.tenant_id == scope.tenant_id)
        if one is not None and connection.execute(owned).one_or_none() is None:
            raise InvalidBudget(f"the tenant has no {what} {one}")


def _posted(connection: Connection, scope: Scope, span: Span) -> int:
    """What the ledger says was spent by the scope in the period."""
    selection = Selection(
        tenant_ids=[scope.tenant_id],
        project_ids=None if scope.project_id is None else [scope.project_id],
        api_key_ids=None if scope.api_key_id is None else [scope.api_key_id],
    )
    return sum(one.totals.amount_pusd for one in usage_within(connection, selection, [span], by=()))


def _insert_budget(
    connection: Connection, scope: Scope, period: Period, limit_pusd: int, now: Microseconds
) -> BudgetId:
    budget_id = BudgetId(new_id())
    connection.execute(
        insert(schema.budgets).values(
            id=budget_id,
            tenant_id=scope.tenant_id,
            project_id=scope.project_id,
            api_key_id=scope.api_key_id,
            scope_id=scope.id,
            period=period.value,
            limit_pusd=limit_pusd,
            created_at_us=now,
        )
    )
    return budget_id


def _insert_balance(
    connection: Connection, budget_id: BudgetId, label: str, limit_pusd: int, posted_pusd: int
) -> None:
    connection.execute(
        insert(schema.budget_balances).values(
            _balance_row(budget_id, label, limit_pusd, posted_pusd=posted_pusd)
        )
    )


def _change_limit(connection: Connection, budget_id: BudgetId, label: str, limit_pusd: int) -> None:
    """Of the budget and its balance of this period; those of periods that are over keep theirs."""
    connection.execute(update(schema.budgets).where(_budgets.id == budget_id).values(limit_pusd=limit_pusd))
    connection.execute(
        update(schema.budget_balances)
        .where(_balances.budget_id == budget_id, _balances.period == label)
        .values(limit_pusd=limit_pusd)
    )


def _by_id(connection: Connection, budget_id: BudgetId) -> Row[Any]:
    return connection.execute(select(schema.budgets).where(_budgets.id == budget_id)).one()


def _budget(row: Row[Any]) -> Budget:
    return Budget(
        id=BudgetId(row.id),
        scope=Scope(tenant_id=row.tenant_id, project_id=row.project_id, api_key_id=row.api_key_id),
        period=Period(row.period),
        limit_pusd=row.limit_pusd,
    )


def _with_balance(connection: Connection, budget: Budget, label: str) -> Budget:
    balance = connection.execute(
        select(schema.budget_balances).where(_balances.budget_id == budget.id, _balances.period == label)
    ).one_or_none()
    if balance is None:
        return budget
    return replace(budget, posted_pusd=balance.posted_pusd, reserved_pusd=balance.reserved_pusd)

"""Rate limits: requests and tokens per minute, and requests at a time.

Knows limits, their buckets and what open requests hold of them. Does not know prices,
journals or HTTP.

Each of the two rates is a bucket that leaks (ITU-T I.371): a request or a token pours in
`PARTS`, and `limit` parts leak out every microsecond, which makes `limit` of them a minute.
What would overflow is refused, and because all of it are whole numbers, the time until
there is room is exact. An idle limit takes a minute's worth at once.

Tokens are poured in before the request starts, as many as it can use; when it ends, those
that it did not use are taken out again. A hold: `held → settled | expired`, in the same
transactions as a reservation of money.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal
from uuid import UUID

from sqlalchemy import Connection, Row, Select, bindparam, case, insert, select, update

from billing import schema
from billing.db import Database
from billing.errors import InvalidLimit, LimitReached
from billing.ids import ApiKeyId, RequestId, TenantId, new_id
from billing.instants import MICROSECONDS_PER_SECOND, Microseconds
from billing.sql import among
from billing.usage import Admission, Estimate, TokenCounts

PARTS: Final = 60 * MICROSECONDS_PER_SECOND
"""Of one request or token: as many as a minute has microseconds."""
MAX_LIMIT: Final = 10**10
"""A full bucket of it fits 64 bits."""
ALL_BASIS_POINTS: Final = 10_000

What = Literal["requests", "tokens", "concurrent"]

_limits: Final = schema.limits.c
_holds: Final = schema.limit_holds.c


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a key, or a tenant, may do. None is no limit.

    Cached tokens count with `cached_weight_basis_points` of one.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    cached_weight_basis_points: int = ALL_BASIS_POINTS

    def __post_init__(self) -> None:
        for name in ("requests_per_minute", "tokens_per_minute", "concurrent_requests"):
            limit = getattr(self, name)
            if limit is not None and not 0 < limit <= MAX_LIMIT:
                raise InvalidLimit(f"{name} is {limit}; a limit is between 1 and {MAX_LIMIT}")
        if not 0 <= self.cached_weight_basis_points <= ALL_BASIS_POINTS:
            raise InvalidLimit(
                f"cached_weight_basis_points is {self.cached_weight_basis_points}; "
                f"a weight is between 0 and {ALL_BASIS_POINTS}"
            )

    def weigh(self, *, cached: int, others: int) -> int:
        """Tokens as the token limit counts them, rounded up."""
        return others + -(-cached * self.cached_weight_basis_points // ALL_BASIS_POINTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """How full one rate is: of `limit` a minute, `remaining` now, and how long until it is empty again."""

    limit: int
    remaining: int
    reset_after_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a client is told of its rates. None: there is no limit on it."""

    requests: Allowance | None
    tokens: Allowance | None


class RateLimited(LimitReached):
    """One limit has no room for the request. `retry_after_us` is the time truly left, if nothing else comes.

    It is None when waiting cannot be timed (concurrent requests) or never helps: then the
    request is larger than its whole limit, and `is_hopeless`.
    """

    def __init__(
        self, message: str, *, what: What, standing: Standing, retry_after_us: int | None, is_hopeless: bool
    ) -> None:
        super().__init__(message)
        self.what = what
        self.standing = standing
        self.retry_after_us = retry_after_us
        self.is_hopeless = is_hopeless


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """How full the limits of one scope are at `at`, in parts. Pure: every change is a new value."""

    limits: Limits
    requests_level: int
    tokens_level: int
    open_requests: int
    at: Microseconds

    def leaked(self, now: Microseconds) -> Buckets:
        """As of `now`; clocks of several processes differ, and time never runs backwards here."""
        passed = max(0, now - self.at)
        return replace(
            self,
            requests_level=max(0, self.requests_level - passed * (self.limits.requests_per_minute or 0)),
            tokens_level=max(0, self.tokens_level - passed * (self.limits.tokens_per_minute or 0)),
            at=Microseconds(self.at + passed),
        )

    def under(self, limits: Limits) -> Buckets:
        """By other limits from now on. A rate without a limit keeps nothing."""
        return replace(
            self,
            limits=limits,
            requests_level=self.requests_level if limits.requests_per_minute else 0,
            tokens_level=self.tokens_level if limits.tokens_per_minute else 0,
        )

    def filled(self, tokens: int) -> Buckets:
        """With one more request. A rate without a limit keeps nothing."""
        return replace(
            self,
            requests_level=self.requests_level + (PARTS if self.limits.requests_per_minute else 0),
            tokens_level=self.tokens_level + (PARTS * tokens if self.limits.tokens_per_minute else 0),
            open_requests=self.open_requests + 1,
        )

    def emptied(self, tokens: int) -> Buckets:
        """Without a request that did not come to be."""
        return replace(
            self,
            requests_level=max(0, self.requests_level - PARTS),
            tokens_level=max(0, self.tokens_level - PARTS * tokens),
            open_requests=self.open_requests - 1,
        )

    def refusal(self, tokens: int) -> RateLimited | None:
        """Why one more request with so many tokens does not fit now."""
        limits = self.limits
        if limits.concurrent_requests is not None and self.open_requests >= limits.concurrent_requests:
            return self._limited("concurrent", limits.concurrent_requests, None)
        if limits.tokens_per_minute is not None and tokens > limits.tokens_per_minute:
            return self._limited("tokens", limits.tokens_per_minute, None, is_hopeless=True)
        waits: list[tuple[int, What, int]] = []
        if limits.requests_per_minute is not None:
            wait_us = _wait_us(self.requests_level, PARTS, limits.requests_per_minute)
            waits.append((wait_us, "requests", limits.requests_per_minute))
        if limits.tokens_per_minute is not None:
            wait_us = _wait_us(self.tokens_level, PARTS * tokens, limits.tokens_per_minute)
            waits.append((wait_us, "tokens", limits.tokens_per_minute))
        wait_us, what, limit = max(waits, default=(0, "requests", 0))
        return self._limited(what, limit, wait_us) if wait_us > 0 else None

    @property
    def standing(self) -> Standing:
        return Standing(
            requests=_allowance(self.limits.requests_per_minute, self.requests_level),
            tokens=_allowance(self.limits.tokens_per_minute, self.tokens_level),
        )

    def _limited(
        self, what: What, limit: int, retry_after_us: int | None, *, is_hopeless: bool = False
    ) -> RateLimited:
        words = f"{limit} requests at a time" if what == "concurrent" else f"{limit} {what} per minute"
        return RateLimited(
            f"the request is larger than the limit of {words}" if is_hopeless else f"the limit is {words}",
            what=what,
            standing=self.standing,
            retry_after_us=retry_after_us,
            is_hopeless=is_hopeless,
        )


def set_limits(
    db: Database, limits: Limits, *, tenant_id: TenantId, api_key_id: ApiKeyId | None, now: Microseconds
) -> None:
    """Of a key, or of all keys of the tenant that have none of their own. What stands in the buckets stays.

    Raises InvalidLimit when the key is not the tenant's.
    """
    values = {
        "requests_per_minute": limits.requests_per_minute,
        "tokens_per_minute": limits.tokens_per_minute,
        "concurrent_requests": limits.concurrent_requests,
        "cached_weight_basis_points": limits.cached_weight_basis_points,
    }
    with db.write() as connection:
        _require_own(connection, tenant_id, api_key_id)
        scope_id = api_key_id or tenant_id
        known = select(schema.limits).where(_limits.scope_id == scope_id).with_for_update()
        row = connection.execute(known).one_or_none()
        if row is None:
            empty = {"requests_level": 0, "tokens_level": 0, "level_at_us": now, "open_requests": 0}
            owner = {"tenant_id": tenant_id, "api_key_id": api_key_id, "scope_id": scope_id}
            connection.execute(insert(schema.limits).values(id=new_id(), **owner, **values, **empty))
            return
        buckets = _buckets(row).leaked(now).under(limits)  # by the former rates until now
        connection.execute(
            update(schema.limits).where(_limits.id == row.id).values(**values, **_levels(buckets))
        )


def limits_of(db: Database, *, tenant_id: TenantId) -> Mapping[ApiKeyId | None, Limits]:
    """By key; None stands for the tenant."""
    with db.read() as connection:
        rows = connection.execute(
            select(schema.limits).where(_limits.tenant_id == tenant_id).order_by(_limits.id)
        ).all()
    return {row.api_key_id: _limits_of_row(row) for row in rows}


class Throttling:
    """Decides over the limits of one batch of admissions, and writes what they hold.

    Between `load` and the end of the transaction nobody else decides over these limits.
    """

    def __init__(self, buckets: Mapping[UUID, tuple[UUID, Buckets]]) -> None:
        self._ids = {scope_id: limit_id for scope_id, (limit_id, _) in buckets.items()}
        self._buckets = {scope_id: one for scope_id, (_, one) in buckets.items()}
        self._held: list[tuple[RequestId, UUID, int]] = []

    @classmethod
    def load(cls, connection: Connection, admissions: Iterable[Admission]) -> Throttling:
        """One look when nobody among them has a limit."""
        scope_ids = {one for admission in admissions for one in (admission.api_key_id, admission.tenant_id)}
        # In order of id, as everybody locks them: nobody waits in a circle.
        rows = connection.execute(
            select(schema.limits)
            .where(_limits.scope_id.in_(scope_ids))
            .order_by(_limits.id)
            .with_for_update()
        )
        return cls({row.scope_id: (row.id, _buckets(row)) for row in rows})

    def refusal(self, admission: Admission, estimate: Estimate) -> RateLimited | None:
        """Why the request may not start now. Changes nothing."""
        scope_id = self._scope_id(admission)
        if scope_id is None:
            return None
        self._buckets[scope_id] = self._buckets[scope_id].leaked(admission.admitted_at)
        return self._buckets[scope_id].refusal(_at_most(self._buckets[scope_id].limits, estimate))

    def hold(self, admission: Admission, estimate: Estimate) -> Standing | None:
        """Pours in what the request can use at most. How it stands then; None when nothing limits it."""
        scope_id = self._scope_id(admission)
        if scope_id is None:
            return None
        tokens = _at_most(self._buckets[scope_id].limits, estimate)
        self._buckets[scope_id] = self._buckets[scope_id].filled(tokens)
        self._held.append((admission.request_id, scope_id, tokens))
        return self._buckets[scope_id].standing

    def write(
        self, connection: Connection, admitted: set[RequestId], lease_until: Mapping[RequestId, int]
    ) -> None:
        """Keeps what is held by those whose rows are written."""
        held = [one for one in self._held if one[0] in admitted]
        for request_id, scope_id, tokens in self._held:
            if request_id not in admitted:  # told of before: it holds nothing a second time
                self._buckets[scope_id] = self._buckets[scope_id].emptied(tokens)
        if not held:
            return
        connection.execute(
            insert(schema.limit_holds),
            [
                {
                    "request_id": request_id,
                    "limit_id": self._ids[scope_id],
                    "tokens": tokens,
                    "state": "held",
                    "lease_until_us": lease_until[request_id],
                }
                for request_id, scope_id, tokens in held
            ],
        )
        for scope_id in sorted({scope_id for _, scope_id, _ in held}):
            buckets = self._buckets[scope_id]
            connection.execute(
                update(schema.limits)
                .where(_limits.id == self._ids[scope_id])
                .values(**_levels(buckets), open_requests=buckets.open_requests)
            )

    def _scope_id(self, admission: Admission) -> UUID | None:
        """A key with limits of its own is bound by those alone."""
        found = (one for one in (admission.api_key_id, admission.tenant_id) if one in self._buckets)
        return next(found, None)


def settle(connection: Connection, used: Mapping[RequestId, TokenCounts], now: Microseconds) -> None:
    """Ends what these requests hold, and takes out what they did not use. In the posting transaction."""
    held = _held_of(connection, used)
    _end(connection, held, "settled", now)
    unused: Counter[UUID] = Counter()
    for row in held:
        counts = used[row.request_id]
        weighed = _weigh(row, cached=counts.cached, others=counts.prompt - counts.cached + counts.output)
        unused[row.limit_id] += max(0, row.tokens - weighed)
    _let_go(connection, Counter(row.limit_id for row in held), unused)


def narrow(connection: Connection, estimates: Mapping[RequestId, Estimate]) -> None:
    """Takes out what these requests, as is known now, cannot use."""
    unused: Counter[UUID] = Counter()
    shrunk = []
    for row in _held_of(connection, estimates):
        estimate = estimates[row.request_id]
        tokens = _weigh(row, cached=estimate.read, others=estimate.prompt - estimate.read + estimate.output)
        if tokens < row.tokens:
            shrunk.append({"of_request": row.request_id, "new_tokens": tokens})
            unused[row.limit_id] += row.tokens - tokens
    if shrunk:
        connection.execute(_one_hold().values(tokens=bindparam("new_tokens")), shrunk)
        _let_go(connection, Counter(), unused)


def expire(connection: Connection, now: Microseconds) -> int:
    """Ends what is held beyond its lease; returns how many. Its tokens count as used."""
    late = connection.execute(
        select(schema.limit_holds)
        .where(_holds.state == "held", _holds.lease_until_us <= now)
        .with_for_update(skip_locked=True)
    ).all()
    _end(connection, late, "expired", now)
    _let_go(connection, Counter(row.limit_id for row in late), Counter())
    return len(late)


def _end(connection: Connection, rows: Sequence[Row[Any]], state: str, now: Microseconds) -> None:
    if rows:
        connection.execute(
            update(schema.limit_holds)
            .where(_holds.request_id.in_([row.request_id for row in rows]))
            .values(state=state, ended_at_us=now)
        )


def among_scopes(scope_ids: Collection[Any]) -> Select[Any]:
    """The limits of any of these, to ask whether there are some."""
    return select(_limits.id).where(_limits.scope_id.in_(scope_ids))


def _held_of(connection: Connection, ids: Iterable[RequestId]) -> Sequence[Row[Any]]:
    return connection.execute(
        select(schema.limit_holds, _limits.cached_weight_basis_points)
        .join(schema.limits, _limits.id == _holds.limit_id)
        .where(among(connection, _holds.request_id, ids), _holds.state == "held")
        .order_by(_holds.request_id)
        .with_for_update(of=schema.limit_holds)
    ).all()


def _one_hold() -> Any:
    return update(schema.limit_holds).where(_holds.request_id == bindparam("of_request"))


def _weigh(row: Row[Any], *, cached: int, others: int) -> int:
    weight = Limits(cached_weight_basis_points=row.cached_weight_basis_points)
    return weight.weigh(cached=cached, others=others)


def _let_go(connection: Connection, num_ended: Mapping[UUID, int], unused: Mapping[UUID, int]) -> None:
    """Changes limits in the order in which everybody locks them."""
    for limit_id in sorted(num_ended.keys() | unused.keys()):
        parts = unused.get(limit_id, 0) * PARTS
        connection.execute(
            update(schema.limits)
            .where(_limits.id == limit_id)
            .values(
                open_requests=_limits.open_requests - num_ended.get(limit_id, 0),
                # What leaked out in the meantime cannot be taken out again.
                tokens_level=case((_limits.tokens_level > parts, _limits.tokens_level - parts), else_=0),
            )
        )


def _at_most(limits: Limits, estimate: Estimate) -> int:
    return limits.weigh(cached=estimate.read, others=estimate.prompt - estimate.read + estimate.output)


def _wait_us(level: int, poured: int, limit: int) -> int:
    """Until it fits, rounded up to a whole microsecond."""
    return max(0, -((limit * PARTS - level - poured) // limit))


def _allowance(limit: int | None, level: int) -> Allowance | None:
    if limit is None:
        return None
    return Allowance(
        limit=limit, remaining=max(0, limit * PARTS - level) // PARTS, reset_after_us=-(-level // limit)
    )


def _buckets(row: Row[Any]) -> Buckets:
    return Buckets(
        limits=_limits_of_row(row),
        requests_level=row.requests_level,
        tokens_level=row.tokens_level,
        open_requests=row.open_requests,
        at=row.level_at_us,
    )


def _limits_of_row(row: Row[Any]) -> Limits:
    return Limits(
        requests_per_minute=row.requests_per_minute,
        tokens_per_minute=row.tokens_per_minute,
        concurrent_requests=row.concurrent_requests,
        cached_weight_basis_points=row.cached_weight_basis_points,
    )


def _levels(buckets: Buckets) -> dict[str, int]:
    return {
        "requests_level": buckets.requests_level,
        "tokens_level": buckets.tokens_level,
        "level_at_us": buckets.at,
    }


def _require_own(connection: Connection, tenant_id: TenantId, api_key_id: ApiKeyId | None) -> None:
    keys = schema.api_keys.c
    owned = select(keys.id).where(keys.id == api_key_id, keys.tenant_id == tenant_id)
    if api_key_id is not None and connection.execute(owned).one_or_none() is None:
        raise InvalidLimit(f"the tenant has no key {api_key_id}")

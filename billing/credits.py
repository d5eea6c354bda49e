"""A promise that was broken is paid back.

Knows what was written for how long, and what of it was reported as gone too early. Does not know
caches, or how a report comes here.

Whoever writes cached tokens by TTL pays a premium for the promise. When they are evicted before
their time, the broken tokens are rated again as what they turned out to be, plain input: one event
of kind `credit` takes them from the class they were written in and adds them to the uncached ones, at the
original's price versions and discount. A report is credited once, however often it comes, and all
reports of a request together never more than was written.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from sqlalchemy import Connection, Row, func, insert, select

from billing import schema
from billing.db import Database
from billing.errors import InvalidPromise, UnknownRequest
from billing.ids import EventId, RequestId
from billing.instants import Microseconds
from billing.ledger import CREDIT, Credit, post_credit
from billing.usage import Admission, TokenClass

WRITES_BY_TTL: Final = {
    TokenClass.WRITE_5M: schema.usage_events.c.write_5m_tokens,
    TokenClass.WRITE_1H: schema.usage_events.c.write_1h_tokens,
}
MAX_PROMISE_CHARACTERS: Final = 128

_events: Final = schema.usage_events.c
_broken: Final = schema.broken_promises.c


class BrokenPromise(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`tokens` of a request's writes by TTL were gone at `broken_at`, before `promised_until`.

    `promise` is the reporter's own name for it, one of its request's: a block's name, say. A promise
    may be broken in parts, each under a name of its own. Instants are microseconds since 1970, UTC.
    """

    request_id: RequestId
    promise: str
    token_class: TokenClass
    tokens: int
    promised_until: Microseconds
    broken_at: Microseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """The credit for a report. `is_new` is false when the report had come before."""

    credit_id: EventId
    amount_pusd: int
    is_new: bool


def credit(db: Database, broken: BrokenPromise, *, now: Microseconds) -> Granted:
    """Credits a broken promise, once. The amount is negative, or 0 where writing cost no more than input.

    Raises InvalidPromise, or UnknownRequest when the request has not ended (yet).
    """
    _require_possible(broken)
    with db.write() as connection:
        original = _original(connection, broken.request_id)
        known = _known(connection, original, broken)
        if known is not None:
            return Granted(credit_id=known, amount_pusd=_amount(connection, known), is_new=False)
        _require_written(connection, original, broken)
        credit_id = post_credit(connection, _credit(original, broken), now=now)
        connection.execute(insert(schema.broken_promises).values(_row(original, broken, credit_id, now)))
        return Granted(credit_id=credit_id, amount_pusd=_amount(connection, credit_id), is_new=True)


def num_credits(connection: Connection) -> int:
    """How many were ever granted. For metrics."""
    return connection.execute(select(func.count()).select_from(schema.broken_promises)).scalar_one()


def _require_possible(broken: BrokenPromise) -> None:
    if broken.token_class not in WRITES_BY_TTL:
        raise InvalidPromise("token_class", f"{broken.token_class} tokens are promised for no time")
    if broken.tokens <= 0:
        raise InvalidPromise("tokens", "nothing was broken")
    if not (0 < len(broken.promise) <= MAX_PROMISE_CHARACTERS and broken.promise.isprintable()):
        raise InvalidPromise("promise", f"must be 1 to {MAX_PROMISE_CHARACTERS} printable characters")
    if not 0 <= broken.broken_at < broken.promised_until < 2**63:
        raise InvalidPromise("broken_at", "is not before promised_until, so the promise was kept")


def _original(connection: Connection, request_id: RequestId) -> Row[Any]:
    """The end of the request. Reports of one request wait for each other."""
    requests = schema.requests.c
    connection.execute(select(requests.id).where(requests.id == request_id).with_for_update())
    found = connection.execute(
        select(schema.usage_events, requests.api_key_id, requests.project_id)
        .join(schema.requests, requests.id == _events.request_id)
        .where(_events.request_id == request_id, _events.original_id.is_(None))
    ).one_or_none()
    if found is None:
        raise UnknownRequest(f"no request has ended under the id {request_id}")
    return found


def _known(connection: Connection, original: Row[Any], broken: BrokenPromise) -> EventId | None:
    row = connection.execute(
        select(schema.broken_promises).where(
            _broken.original_id == original.id, _broken.promise == broken.promise
        )
    ).one_or_none()
    if row is None:
        return None
    said = (row.token_class, row.tokens, row.promised_until_us, row.broken_at_us)
    if said != (broken.token_class.value, broken.tokens, broken.promised_until, broken.broken_at):
        raise InvalidPromise("promise", f"{broken.promise} was reported before, in other words")
    return EventId(row.credit_id)


def _require_written(connection: Connection, original: Row[Any], broken: BrokenPromise) -> None:
    if broken.broken_at < original.admitted_at_us:
        raise InvalidPromise("broken_at", "is before the request")
    # Corrections included, and earlier credits, which are negative.
    written = connection.execute(
        select(WRITES_BY_TTL[broken.token_class]).where(
            (_events.id == original.id) | (_events.original_id == original.id)
        )
    )
    left = sum(written.scalars())
    if broken.tokens > left:
        raise InvalidPromise(
            "tokens",
            f"{broken.tokens} are broken, but {left} {broken.token_class} tokens are left to credit",
        )


def _credit(original: Row[Any], broken: BrokenPromise) -> Credit:
    return Credit(
        original=Admission(
            request_id=original.request_id,
            tenant_id=original.tenant_id,
            api_key_id=original.api_key_id,
            project_id=original.project_id,
            model=original.model,
            admitted_at=original.admitted_at_us,
        ),
        original_id=EventId(original.id),
        quantities={broken.token_class: -broken.tokens, TokenClass.INPUT: broken.tokens},
        digest=hashlib.sha256(f"{CREDIT} {broken.promise}".encode()).digest(),
        granted_at=broken.broken_at,
    )


def _row(
    original: Row[Any], broken: BrokenPromise, credit_id: EventId, now: Microseconds
) -> dict[str, object]:
    return {
        "credit_id": credit_id,
        "original_id": original.id,
        "promise": broken.promise,
        "token_class": broken.token_class.value,
        "tokens": broken.tokens,
        "promised_until_us": broken.promised_until,
        "broken_at_us": broken.broken_at,
        "reported_at_us": now,
    }


def _amount(connection: Connection, credit_id: EventId) -> int:
    lines = schema.ledger_lines.c
    amounts = connection.execute(select(lines.amount_pusd).where(lines.event_id == credit_id)).scalars()
    return sum(amounts)

"""Receipts as rows: which events are due one, and each tenant's chain of them.

Knows tables and locks. Does not know how a receipt is signed or checked, nor threads.

Whoever posts an event writes in the same transaction that a receipt is due; sealing takes that
away again in the transaction that writes the receipt. So after any crash each event has a receipt
or is due one, and the keys of the table give it one alone.

Receipts are signed from a snapshot, with nothing locked, and written under a lock of their
tenants' chains if those still end where the snapshot said; or else they are signed anew. So any
number of processes may seal, one of them always gets on, and nobody waits for a signature.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Connection, Row, Select, delete, func, select, text
from sqlalchemy.dialects import postgresql, sqlite

from billing import schema
from billing.db import Database
from billing.errors import UnknownReceipt, UnknownRequest
from billing.ids import EventId, RequestId, TenantId
from billing.instants import Microseconds
from billing.money import format_dollars
from billing.receipt_keys import PublicKey, SigningKey
from billing.receipts import Link, Receipt, ReceiptLine, SignedReceipt, farthest_tier, sign, written_instant
from billing.sql import among, insert_many
from billing.totals import PROMPT, READS, WRITES
from billing.usage import TokenClass

BATCH_EVENTS: Final = 64
"""As many receipts are written in one transaction, which on SQLite keeps everybody else waiting."""

PAGE_RECEIPTS: Final = 1_000

_CHAIN_LOCKS: Final = 0x4EAD57A9 - 2**31
"""Any constant: the class of the advisory locks that keep each chain in one hand."""

_events: Final = schema.usage_events.c
_lines: Final = schema.ledger_lines.c
_dues: Final = schema.receipt_dues.c
_receipts: Final = schema.receipts.c


def note_due(connection: Connection, events: Iterable[tuple[EventId, TenantId]]) -> None:
    """In the transaction that posts the events."""
    rows = [{"event_id": event_id, "tenant_id": tenant_id} for event_id, tenant_id in events]
    insert_many(connection, schema.receipt_dues, rows)


def publish_key(db: Database, key: PublicKey, *, now: Microseconds) -> None:
    """Keeps the public half for ever, so that its receipts can be checked when it signs no more."""
    dialect = postgresql if db.engine.dialect.name == "postgresql" else sqlite
    row = {"id": key.id, "public_key": key.raw, "first_used_at_us": now}
    with db.write() as connection:
        keys = schema.receipt_keys
        if connection.execute(select(keys.c.id).where(keys.c.id == key.id)).one_or_none() is None:
            connection.execute(dialect.insert(keys).values(row).on_conflict_do_nothing())


def public_keys(db: Database) -> Sequence[PublicKey]:
    """All that ever signed, oldest first."""
    keys = schema.receipt_keys.c
    with db.read() as connection:
        found = connection.execute(select(keys.public_key).order_by(keys.first_used_at_us, keys.id))
        return [PublicKey(raw) for raw in found.scalars()]


def seal_next(db: Database, key: SigningKey, *, now: Microseconds) -> int:
    """Issues receipts for the events that wait longest; returns how many. The key must be published."""
    oldest = select(_dues.event_id).order_by(_dues.event_id).limit(BATCH_EVENTS)
    return _seal(db, key, oldest, now)


def seal_request(
    db: Database, key: SigningKey, *, tenant_id: TenantId, request_id: RequestId, now: Microseconds
) -> int:
    """Issues what receipts are due for one request, before all others."""
    of_request = (
        select(_dues.event_id)
        .join(schema.usage_events, _events.id == _dues.event_id)
        .where(_events.tenant_id == tenant_id, _events.request_id == request_id)
    )
    return _seal(db, key, of_request, now)


def num_due(db: Database, *, at_most: int) -> int:
    """How many events have no receipt yet, counted up to a limit."""
    some = select(_dues.event_id).limit(at_most).subquery()
    with db.read() as connection:
        return connection.execute(select(func.count()).select_from(some)).scalar_one()


def receipts_of(db: Database, request_id: RequestId, *, tenant_id: TenantId | None = None) -> Sequence[str]:
    """The documents of a request's end and its corrections, in order.

    Raises UnknownRequest when no request has the id, or none of that tenant; UnknownReceipt when
    nothing of it is sealed yet.
    """
    requests = schema.requests.c
    known = select(requests.id).where(requests.id == request_id)
    issued = select(_receipts.document).where(_receipts.request_id == request_id)
    if tenant_id is not None:
        known = known.where(requests.tenant_id == tenant_id)
        issued = issued.where(_receipts.tenant_id == tenant_id)
    with db.read() as connection:
        documents = connection.execute(issued.order_by(_receipts.sequence)).scalars().all()
        if not documents and connection.execute(known).one_or_none() is None:
            raise UnknownRequest(f"no request has the id {request_id}")
    if not documents:
        raise UnknownReceipt(f"request {request_id} has no receipt yet: it has not ended, or not been posted")
    return documents


def chain_documents(connection: Connection, tenant_id: TenantId, *, after: int = 0) -> Iterator[str]:
    """A tenant's receipts in order, from number `after + 1` on, page by page."""
    page = (
        select(_receipts.sequence, _receipts.document)
        .where(_receipts.tenant_id == tenant_id)
        .order_by(_receipts.sequence)
        .limit(PAGE_RECEIPTS)
    )
    while rows := connection.execute(page.where(_receipts.sequence > after)).all():
        yield from (row.document for row in rows)
        after = rows[-1].sequence


def _seal(db: Database, key: SigningKey, candidates: Select[Any], now: Microseconds) -> int:
    """How many receipts were issued; none only when none is due."""
    while True:
        with db.read() as connection:
            ids = connection.execute(candidates).scalars().all()
            if not ids:
                return 0
            events = connection.execute(
                _due_events().where(among(connection, _dues.event_id, ids)).order_by(_events.id)
            ).all()
            ends = _ends(connection, {event.tenant_id for event in events})
            signed = _signed(connection, events, ends, key, now)
        with db.write() as connection:
            num_written = _write(connection, signed, ends, now)
        if num_written:
            return num_written


def _write(
    connection: Connection, signed: Sequence[SignedReceipt], ends: Mapping[UUID, Link], now: Microseconds
) -> int:
    """Of those tenants whose chains nobody else has made longer since."""
    _lock_chains(connection, set(ends))
    grown = {tenant_id for tenant_id, end in _ends(connection, ends).items() if end != ends[tenant_id]}
    fitting = [one for one in signed if one.receipt.tenant_id not in grown]
    if fitting:
        insert_many(connection, schema.receipts, [_row(one, now) for one in fitting])
        ids = [one.receipt.event_id for one in fitting]
        connection.execute(delete(schema.receipt_dues).where(among(connection, _dues.event_id, ids)))
    return len(fitting)


def _due_events() -> Select[Any]:
    requests, keys = schema.requests.c, schema.api_keys.c
    return (
        select(schema.usage_events, requests.api_key_id, keys.project_id)
        .join(schema.receipt_dues, _dues.event_id == _events.id)
        .join(schema.requests, requests.id == _events.request_id)
        .join(schema.api_keys, keys.id == requests.api_key_id)
    )


def _lock_chains(connection: Connection, tenant_ids: set[UUID]) -> None:
    """In one order, so that nobody waits in a circle."""
    if connection.dialect.name != "postgresql":
        return  # BEGIN IMMEDIATE already holds the only write lock
    chains = sorted({int.from_bytes(one.bytes[-4:], signed=True) for one in tenant_ids})
    take = text("SELECT pg_advisory_xact_lock(:locks, chain) FROM unnest(CAST(:chains AS int[])) AS chain")
    connection.execute(take, {"locks": _CHAIN_LOCKS, "chains": chains})


def _signed(
    connection: Connection,
    events: Sequence[Row[Any]],
    ends: Mapping[UUID, Link],
    key: SigningKey,
    now: Microseconds,
) -> list[SignedReceipt]:
    lines: dict[UUID, list[Row[Any]]] = {event.id: [] for event in events}
    posted = select(schema.ledger_lines).where(among(connection, _lines.event_id, lines))
    for line in connection.execute(posted):
        lines[line.event_id].append(line)
    grown = dict(ends)
    signed = []
    for event in events:
        end = grown[event.tenant_id]
        one = sign(_receipt(event, lines[event.id], end, key_id=key.public.id, now=now), key)
        grown[event.tenant_id] = Link(sequence=end.sequence + 1, digest=one.digest)
        signed.append(one)
    return signed


def _ends(connection: Connection, tenant_ids: Iterable[UUID]) -> dict[UUID, Link]:
    """Where each tenant's chain has come to."""
    ids, others = list(tenant_ids), schema.receipts.alias()
    last = select(func.max(others.c.sequence)).where(others.c.tenant_id == schema.tenants.c.id)
    found = (
        select(_receipts.tenant_id, _receipts.sequence, _receipts.digest)
        .join(schema.tenants, _receipts.tenant_id == schema.tenants.c.id)
        .where(among(connection, schema.tenants.c.id, ids), _receipts.sequence == last.scalar_subquery())
    )
    ends = {
        row.tenant_id: Link(sequence=row.sequence, digest=row.digest) for row in connection.execute(found)
    }
    return {tenant_id: ends.get(tenant_id, Link()) for tenant_id in ids}


def _receipt(
    event: Row[Any], lines: Iterable[Row[Any]], end: Link, *, key_id: str, now: Microseconds
) -> Receipt:
    tokens = {
        one: event._mapping[column] for one, column in zip(TokenClass, schema.COUNT_COLUMNS, strict=True)
    }
    order = list(TokenClass)
    written = sorted(map(_line, lines), key=lambda line: order.index(line.token_class))
    return Receipt(
        tenant_id=event.tenant_id,
        sequence=end.sequence + 1,
        previous=end.digest.hex(),
        event_id=event.id,
        request_id=event.request_id,
        original_id=event.original_id,
        kind=event.kind,
        api_key_id=event.api_key_id,
        project_id=event.project_id,
        model=event.model,
        usage_state=event.usage_state,
        finish_reason=event.finish_reason,
        worker=event.worker,
        tier=farthest_tier(tokens),
        deepest_block=event.deepest_block,
        miss_reason=event.miss_reason,
        tokens=tokens,
        prompt_tokens=sum(tokens[one] for one in PROMPT),
        cached_tokens=sum(tokens[one] for one in READS),
        written_tokens=sum(tokens[one] for one in WRITES),
        delivered_tokens=event.delivered_tokens,
        lines=tuple(written),
        **_amounts(written),
        admitted_at=written_instant(event.admitted_at_us),
        accounted_at=written_instant(event.accounted_at_us),
        finished_at=written_instant(event.finished_at_us),
        issued_at=written_instant(now),
        key_id=key_id,
    )


def _line(row: Row[Any]) -> ReceiptLine:
    return ReceiptLine(
        token_class=TokenClass(row.token_class),
        quantity=row.quantity_tokens,
        price_version_id=row.price_version_id,
        list_unit_pusd=row.list_unit_pusd,
        discount_basis_points=row.discount_basis_points,
        unit_pusd=row.unit_pusd,
        list_amount_pusd=row.quantity_tokens * row.list_unit_pusd,
        amount_pusd=row.amount_pusd,
        amount_without_cache_pusd=row.amount_without_cache_pusd,
    )


def _amounts(lines: Sequence[ReceiptLine]) -> Mapping[str, Any]:
    """Each amount in dollars and in picodollars."""
    amount = sum(line.amount_pusd for line in lines)
    without_cache = sum(line.amount_without_cache_pusd for line in lines)
    exact = {
        "list_amount": sum(line.list_amount_pusd for line in lines),
        "amount": amount,
        "amount_without_cache": without_cache,
        "saved": without_cache - amount,
    }
    return {name: format_dollars(one) for name, one in exact.items()} | {
        f"{name}_pusd": one for name, one in exact.items()
    }


def _row(signed: SignedReceipt, now: Microseconds) -> dict[str, object]:
    receipt = signed.receipt
    return {
        "event_id": receipt.event_id,
        "tenant_id": receipt.tenant_id,
        "request_id": receipt.request_id,
        "sequence": receipt.sequence,
        "key_id": receipt.key_id,
        "document": signed.document,
        "digest": signed.digest,
        "issued_at_us": now,
    }

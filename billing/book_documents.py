"""Documents beside the ledger: receipts, statements and reports of broken promises.

Knows what each of them says of usage and money. Does not know how it came to be written, nor who asks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
from sqlalchemy import Connection, Row, func, select, text

from billing import receipts, schema, statements
from billing.books import COUNT_OF, COUNTED, CREDIT, Check, Difference, Window, in_bucket, streamed
from billing.receipts import Receipt
from billing.sums import exact_sum, exact_sums
from billing.usage import TokenClass

_events: Final = schema.usage_events.c
_lines: Final = schema.ledger_lines.c


def ledger_and_receipts(connection: Connection, window: Window) -> Iterator[Difference]:
    """Every event has a receipt, or is due one; it says what event and ledger say, and has its own digest."""
    issued, due = schema.receipts.c, schema.receipt_dues.c
    amount = (
        select(func.coalesce(func.sum(_lines.amount_pusd), 0))
        .where(_lines.event_id == _events.id)
        .scalar_subquery()
    )
    chosen = (
        select(
            _events.tenant_id,
            _events.request_id,
            _events.accounted_at_us,
            COUNTED.label("tokens"),
            amount.label("pusd"),
            issued.document,
            issued.digest,
        )
        .outerjoin(schema.receipts, issued.event_id == _events.id)
        .outerjoin(schema.receipt_dues, due.event_id == _events.id)
        .where(window.holds_event(), issued.event_id.is_not(None) | due.event_id.is_(None))
    )
    for row in streamed(connection, chosen):
        found = _receipt_flaw(row)
        if found is not None:
            words, tokens, pusd = found
            yield in_bucket(
                Check.LEDGER_RECEIPTS,
                row.tenant_id,
                row.accounted_at_us,
                f"request {row.request_id}: {words}",
                tokens=tokens,
                pusd=pusd,
            )


def receipt_chains(connection: Connection, window: Window) -> Iterator[Difference]:
    """Each tenant's receipts are numbered without a gap."""
    issued = schema.receipts.c
    numbered = (
        select(issued.tenant_id, func.count().label("num"), func.max(issued.sequence).label("last"))
        .where(window.owns(issued.tenant_id))
        .group_by(issued.tenant_id)
    )
    for row in connection.execute(numbered):
        if row.num != row.last:
            yield Difference(
                check=Check.LEDGER_RECEIPTS,
                tenant_id=row.tenant_id,
                subject=f"the last receipt has number {row.last}, but there are {row.num}",
                occurrences=row.last - row.num,
            )


def ledger_and_statements(connection: Connection, window: Window) -> Iterator[Difference]:
    """Each statement of the window says, class by class, what the ledger of its period says."""
    issued = schema.statements.c
    chosen = (
        select(schema.statements)
        .where(window.owns(issued.tenant_id), issued.start_us >= window.start, issued.end_us <= window.end)
        .order_by(issued.tenant_id, issued.end_us)
    )
    for row in streamed(connection, chosen, at_a_time=1):
        place = Difference(
            check=Check.LEDGER_STATEMENTS,
            tenant_id=row.tenant_id,
            start=row.start_us,
            end=row.end_us,
            subject=f"statement {row.number}",
        )
        yield from _statement_flaws(connection, row, place)


def promises_and_credits(connection: Connection, window: Window) -> Iterator[Difference]:
    """Every credit gives back what a broken promise reports, and every report is credited."""
    broken = schema.broken_promises.c
    credits_of = (
        select(schema.usage_events, broken.token_class, broken.tokens)
        .outerjoin(schema.broken_promises, broken.credit_id == _events.id)
        .where(window.holds_event(), _events.kind == CREDIT, text(schema.OUT_OF_PERIOD))
    )
    for row in streamed(connection, credits_of):
        if row.token_class is None:
            yield in_bucket(
                Check.PROMISES_CREDITS,
                row.tenant_id,
                row.accounted_at_us,
                f"request {row.request_id}: a credit for no promise",
                tokens=row.uncached_tokens,
            )
            continue
        given = -getattr(row, COUNT_OF[TokenClass(row.token_class)])
        if given != row.tokens or row.uncached_tokens != row.tokens:
            yield in_bucket(
                Check.PROMISES_CREDITS,
                row.tenant_id,
                row.accounted_at_us,
                f"request {row.request_id}",
                token_class=TokenClass(row.token_class),
                tokens=given - row.tokens,
            )


class _ReceiptFigures(msgspec.Struct):
    """Of a receipt, what the ledger is asked for. All else is left unread."""

    tokens: dict[TokenClass, int]
    amount_pusd: int


_FIGURES: Final = msgspec.json.Decoder(_ReceiptFigures)


def _receipt_flaw(row: Row[Any]) -> tuple[str, int, int] | None:
    """What is wrong, and the receipt's surplus of tokens and picodollars."""
    if row.document is None:
        return "no receipt", -row.tokens, -int(row.pusd)
    if receipts.digest_of(row.document) != bytes(row.digest):
        return "the receipt is not the one that was digested", 0, 0
    try:
        figures = _FIGURES.decode(row.document)
        tokens, pusd = figures.tokens, figures.amount_pusd
    except msgspec.MsgspecError:
        # Wider than 64 bits, if it is a receipt at all.
        whole = _whole_receipt(row.document)
        if whole is None:
            return "the receipt cannot be read", 0, 0
        tokens, pusd = whole.tokens, whole.amount_pusd
    surplus = sum(tokens.values()) - row.tokens, pusd - int(row.pusd)
    return ("the receipt", *surplus) if any(surplus) else None


def _whole_receipt(document: str) -> Receipt | None:
    try:
        values = json.loads(document)
        values.pop("signature", None)
        return msgspec.convert(values, Receipt)
    except (ValueError, AttributeError, msgspec.MsgspecError):
        return None


def _statement_flaws(connection: Connection, row: Row[Any], place: Difference) -> Iterator[Difference]:
    change = msgspec.structs.replace
    if statements.digest(row.document) != bytes(row.digest):
        yield change(place, subject=f"{place.subject}: not the document that was digested")
    try:
        said = statements.decode(row.document)
    except (ValueError, msgspec.MsgspecError):
        yield change(place, subject=f"{place.subject}: cannot be read")
        return
    quantities: dict[TokenClass, int] = dict.fromkeys(TokenClass, 0)
    amounts = dict.fromkeys(TokenClass, 0)
    for line in said.lines:
        quantities[line.token_class] += line.quantity
        amounts[line.token_class] += line.amount_pusd
    posted = _ledger_by_class(connection, row)
    for one in TokenClass:
        tokens, pusd = posted.get(one, (0, 0))
        if (quantities[one], amounts[one]) != (tokens, pusd):
            yield change(place, token_class=one, tokens=quantities[one] - tokens, pusd=amounts[one] - pusd)
    before = connection.execute(
        select(schema.statements.c.document)
        .where(schema.statements.c.tenant_id == row.tenant_id, schema.statements.c.end_us <= row.start_us)
        .order_by(schema.statements.c.end_us.desc())
        .limit(1)
    ).scalar_one_or_none()
    kept = 0 if before is None else statements.decode(before).residual_kept_pusd
    if said.residual_brought_pusd != kept:
        yield change(
            place, subject=f"{place.subject}: residual brought", pusd=said.residual_brought_pusd - kept
        )


def _ledger_by_class(connection: Connection, statement: Row[Any]) -> Mapping[TokenClass, tuple[int, int]]:
    within = (_events.tenant_id == statement.tenant_id) & _events.accounted_at_us.between(
        statement.start_us, statement.end_us - 1
    )
    joined = schema.usage_events.join(schema.ledger_lines, _lines.event_id == _events.id)
    rows = exact_sums(
        connection,
        {"tokens": _lines.quantity_tokens, "pusd": _lines.amount_pusd},
        lambda sums: (
            select(_lines.token_class, *sums).select_from(joined).where(within).group_by(_lines.token_class)
        ),
    )
    return {
        TokenClass(row["token_class"]): (exact_sum(row, "tokens"), exact_sum(row, "pusd")) for row in rows
    }

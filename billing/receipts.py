"""A receipt: what one event counted and cost, signed, and linked to the receipt before it.

Knows how a receipt is written, signed and checked. Does not know tables: whoever has the public
key can check receipts without any of ours.

A receipt is one line of canonical JSON: sorted names, no spaces, UTF-8, integers of any size. For
what RFC 8785 can say that is its form too (it has no integers beyond 53 bits). The Ed25519
signature is of the line without its `signature`. `previous` is the SHA-256 of the whole line
before, so that of a tenant's receipts none can be left out, put in or moved.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal
from uuid import UUID

import msgspec

from billing.instants import Microseconds, to_datetime
from billing.money import format_dollars
from billing.prices import discounted
from billing.receipt_keys import SIGNATURE_BYTES, PublicKey, SigningKey
from billing.totals import PROMPT, READS, WRITES
from billing.usage import TokenClass

FIRST_PREVIOUS: Final = bytes(32)
"""What the first receipt of a tenant has in place of a receipt before it."""

MAX_LINE_BYTES: Final = 64 * 1024

TIERS: Final[dict[TokenClass, str]] = {
    TokenClass.READ: "device",
    TokenClass.READ_HOST: "host",
    TokenClass.READ_DISK: "disk",
    TokenClass.READ_REMOTE: "remote",
}
"""Nearest first."""

AMOUNTS: Final = ("list_amount", "amount", "amount_without_cache", "saved")


class ReceiptLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one token class, as the ledger has it. Integers are exact; amounts are picodollars."""

    token_class: TokenClass
    quantity: int
    price_version_id: UUID
    list_unit_pusd: int
    discount_basis_points: int
    unit_pusd: int
    list_amount_pusd: int
    amount_pusd: int
    amount_without_cache_pusd: int


class Receipt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is signed. `tokens` has all classes, disjoint; sums stand beside their parts, and are checked.

    `tier` is the farthest one that anything was read from. Instants are RFC 3339, UTC.
    Amounts are dollars as decimal strings, and picodollars.
    """

    object: Literal["receipt"] = "receipt"
    version: Literal[1] = 1
    tenant_id: UUID
    sequence: int
    previous: str
    event_id: UUID
    request_id: UUID
    original_id: UUID | None
    kind: Literal["final", "aborted", "adjustment", "credit"]
    api_key_id: UUID
    project_id: UUID | None
    model: str
    usage_state: str
    finish_reason: str | None
    worker: str | None
    tier: str | None
    deepest_block: str | None
    miss_reason: str | None
    tokens: dict[TokenClass, int]
    prompt_tokens: int
    cached_tokens: int
    written_tokens: int
    delivered_tokens: int
    lines: tuple[ReceiptLine, ...]
    currency: Literal["USD"] = "USD"
    list_amount: str
    list_amount_pusd: int
    amount: str
    amount_pusd: int
    amount_without_cache: str
    amount_without_cache_pusd: int
    saved: str
    saved_pusd: int
    admitted_at: str
    accounted_at: str
    finished_at: str
    issued_at: str
    key_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedReceipt:
    """`document` is the line, without its newline; `digest` its SHA-256."""

    receipt: Receipt
    document: str

    @property
    def digest(self) -> bytes:
        return digest_of(self.document)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Where a chain has come to: the last receipt's number and digest."""

    sequence: int = 0
    digest: bytes = FIRST_PREVIOUS


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaw:
    """Why a file is refused. `line` counts from 1; `subject` names the receipt as far as it can be read."""

    line: int
    subject: str
    reason: str

    def __str__(self) -> str:
        return f"line {self.line}, {self.subject}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """What a file holds of one tenant: receipts `first` to `last`, and the digest of the last."""

    first: int
    last: int
    digest: bytes


@dataclass(slots=True, kw_only=True)
class Verification:
    """What came of checking a file."""

    num_receipts: int = 0
    chains: dict[UUID, Chain] = field(default_factory=dict)
    flaws: list[Flaw] = field(default_factory=list)


class _Unreadable(Exception):
    """The line is no receipt. The message says why."""


def canonical(values: object) -> str:
    """The one form: equal values give equal bytes. Integers of any size, and no floats."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def written_instant(instant: Microseconds) -> str:
    """RFC 3339 with all six digits."""
    return to_datetime(instant).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def digest_of(document: str) -> bytes:
    """SHA-256 of a receipt's whole line, which the next one names."""
    return _digest(document.encode())


def farthest_tier(tokens: Mapping[TokenClass, int]) -> str | None:
    """None where nothing was read."""
    return next((TIERS[one] for one in reversed(TIERS) if tokens[one]), None)


def sign(receipt: Receipt, key: SigningKey) -> SignedReceipt:
    """Raises nothing: whoever makes a receipt names this key in it."""
    assert receipt.key_id == key.public.id, "a receipt names the key that signs it"
    values = msgspec.to_builtins(receipt)
    signature = key.sign(canonical(values).encode())
    return SignedReceipt(receipt=receipt, document=canonical(values | {"signature": signature.hex()}))


def verify(lines: Iterable[bytes], keys: Mapping[str, PublicKey]) -> Verification:
    """Checks a file of receipts: form, signature, arithmetic, and that each tenant's follow each other.

    Lines come with their newlines; `keys` are the public ones, by id. Needs nothing else.
    """
    found = Verification()
    number = 0
    for number, line in enumerate(lines, start=1):
        found.flaws.extend(_flaws_of_line(number, line, keys, found))
    if number == 0:
        found.flaws.append(Flaw(line=0, subject="no receipt", reason="the file is empty"))
    return found


def arithmetic_flaws(receipt: Receipt) -> Iterator[str]:
    """What does not add up."""
    tokens = receipt.tokens
    if set(tokens) != set(TokenClass):
        yield "a token class is missing"
        return
    for name, classes in (("prompt", PROMPT), ("cached", READS), ("written", WRITES)):
        if getattr(receipt, f"{name}_tokens") != sum(tokens[one] for one in classes):
            yield f"{name}_tokens is not the sum of its parts"
    if {line.token_class: line.quantity for line in receipt.lines} != {
        one: quantity for one, quantity in tokens.items() if quantity
    } or len({line.token_class for line in receipt.lines}) != len(receipt.lines):
        yield "the lines are not of the tokens that were counted"
    if receipt.tier != farthest_tier(tokens):
        yield "the tier is not that of the tokens read"
    for line in receipt.lines:
        yield from _line_flaws(line)
    yield from _total_flaws(receipt)


def _line_flaws(line: ReceiptLine) -> Iterator[str]:
    if line.unit_pusd != discounted(line.list_unit_pusd, line.discount_basis_points):
        yield f"{line.token_class}: the unit is not the list unit less the discount"
    if line.list_amount_pusd != line.quantity * line.list_unit_pusd:
        yield f"{line.token_class}: the list amount is not quantity times unit"
    if line.amount_pusd != line.quantity * line.unit_pusd:
        yield f"{line.token_class}: the amount is not quantity times unit"


def _total_flaws(receipt: Receipt) -> Iterator[str]:
    for name in AMOUNTS[:-1]:
        if getattr(receipt, f"{name}_pusd") != sum(getattr(line, f"{name}_pusd") for line in receipt.lines):
            yield f"{name}_pusd is not the sum of the lines"
    if receipt.saved_pusd != receipt.amount_without_cache_pusd - receipt.amount_pusd:
        yield "saved_pusd is not amount_without_cache_pusd less amount_pusd"
    for name in AMOUNTS:
        if getattr(receipt, name) != format_dollars(getattr(receipt, f"{name}_pusd")):
            yield f"{name} is not {name}_pusd in dollars"


def _flaws_of_line(
    number: int, line: bytes, keys: Mapping[str, PublicKey], found: Verification
) -> Iterator[Flaw]:
    try:
        receipt, signature = _read(line)
    except _Unreadable as fault:
        yield Flaw(line=number, subject="no receipt", reason=str(fault))
        return
    found.num_receipts += 1
    subject = f"receipt {receipt.sequence} of tenant {receipt.tenant_id} (request {receipt.request_id})"
    for reason in (
        *_signature_flaws(receipt, signature, keys),
        *_chain_flaws(receipt, found.chains.get(receipt.tenant_id)),
        *arithmetic_flaws(receipt),
    ):
        yield Flaw(line=number, subject=subject, reason=reason)
    former = found.chains.get(receipt.tenant_id)
    found.chains[receipt.tenant_id] = Chain(
        first=receipt.sequence if former is None else former.first,
        last=receipt.sequence,
        digest=_digest(line[:-1]),
    )


def _read(line: bytes) -> tuple[Receipt, bytes]:
    """The receipt and its signature, if the line is exactly what they are written as."""
    if len(line) > MAX_LINE_BYTES:
        raise _Unreadable("longer than any receipt")
    if not line.endswith(b"\n"):
        raise _Unreadable("cut off: the last line does not end")
    try:
        values: Any = json.loads(line)
        signature = bytes.fromhex(values.pop("signature"))
        receipt = msgspec.convert(values, Receipt)
        written = canonical(msgspec.to_builtins(receipt) | {"signature": signature.hex()}).encode() + b"\n"
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError, msgspec.MsgspecError) as error:
        raise _Unreadable(f"not the form of a receipt: {error}") from error
    if written != line:
        raise _Unreadable("not in canonical form")
    return receipt, signature


def _signature_flaws(receipt: Receipt, signature: bytes, keys: Mapping[str, PublicKey]) -> Iterator[str]:
    key = keys.get(receipt.key_id)
    if key is None:
        yield f"signed with key {receipt.key_id}, which is not among the public keys given"
    elif len(signature) != SIGNATURE_BYTES or not key.has_signed(
        canonical(msgspec.to_builtins(receipt)).encode(), signature
    ):
        yield "the signature is not of this receipt: it was changed"


def _chain_flaws(receipt: Receipt, before: Chain | None) -> Iterator[str]:
    if before is None:
        if receipt.sequence < 1 or (receipt.sequence == 1 and receipt.previous != FIRST_PREVIOUS.hex()):
            yield "it begins no chain"
        return
    if receipt.sequence != before.last + 1:
        yield f"it follows receipt {before.last}: receipts are missing, repeated or out of order"
    elif receipt.previous != before.digest.hex():
        yield f"it does not follow from receipt {before.last} as it stands here"


def _digest(document: bytes) -> bytes:
    return hashlib.sha256(document).digest()

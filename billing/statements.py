"""A month's statement: what a tenant used and owes, line by line.

Knows lines, cents and residuals. Does not know tables, nor how a statement looks.

Amounts are exact up to the line. There they are rounded to cents, half to even, and the
residual is kept. What is due is the exact total rounded once, together with the residual of the
statement before; so rounding never grows, and over all statements cents and the last residual add up
to every picodollar that was used. `rounding_cents` closes the column of rounded lines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from billing.ids import ApiKeyId, ProjectId, TenantId
from billing.instants import Microseconds
from billing.money import rounded_cents
from billing.totals import PROMPT, READS, WRITES
from billing.usage import TokenClass

_NUMBER_DIGITS: Final = 8


class LineKind(StrEnum):
    """Of its own period; corrected or come late, from an earlier one; or granted."""

    USAGE = "usage"
    ADJUSTMENT = "adjustment"
    CREDIT = "credit"


class Status(StrEnum):
    """A final statement never changes. A preview is none: its period is still open."""

    FINAL = "final"
    PREVIEW = "preview"


class StatementLine(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens (token-hours for pins) of one class, and what they cost, exactly.

    `for_period` is the month of the requests it is for.
    """

    kind: LineKind
    for_period: str
    project_id: ProjectId | None
    project: str | None
    api_key_id: ApiKeyId
    api_key: str
    model: str
    token_class: TokenClass
    quantity: int
    list_amount_pusd: int
    amount_pusd: int
    amount_without_cache_pusd: int

    @property
    def discount_pusd(self) -> int:
        return self.list_amount_pusd - self.amount_pusd

    @property
    def cents(self) -> int:
        return rounded_cents(self.amount_pusd)[0]

    @property
    def residual_pusd(self) -> int:
        return rounded_cents(self.amount_pusd)[1]


class Reconciliation(msgspec.Struct, frozen=True, kw_only=True):
    """The same period in three books. Tokens of all classes together; events have no amounts."""

    events_tokens: int
    ledger_tokens: int
    rollup_tokens: int
    ledger_pusd: int
    rollup_pusd: int

    @property
    def agrees(self) -> bool:
        tokens = {self.events_tokens, self.ledger_tokens, self.rollup_tokens}
        return len(tokens) == 1 and self.ledger_pusd == self.rollup_pusd


class Savings(msgspec.Struct, frozen=True, kw_only=True):
    """What the cache did to the period's own usage. All in picodollars; premiums and pins cost."""

    prompt_tokens: int
    read_tokens: int
    reads_pusd: int
    write_premiums_pusd: int
    pins_pusd: int

    @property
    def net_pusd(self) -> int:
        return self.reads_pusd - self.write_premiums_pusd - self.pins_pusd

    @property
    def cached_basis_points(self) -> int:
        """Read of all prompt tokens, in hundredths of a percent, rounded down."""
        return self.read_tokens * 10_000 // (self.prompt_tokens or 1)


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant's month in its own zone. Totals are derived, so they cannot disagree with the lines."""

    number: str
    status: Status
    tenant_id: TenantId
    tenant: str
    period: str
    time_zone: str
    start: Microseconds
    end: Microseconds
    issued_at: Microseconds
    currency: str
    requests: int
    lines: Sequence[StatementLine]
    residual_brought_pusd: int
    reconciliation: Reconciliation

    def of_kind(self, kind: LineKind) -> Sequence[StatementLine]:
        return [line for line in self.lines if line.kind is kind]

    def amount_of_kind(self, kind: LineKind) -> int:
        """Picodollars, exact."""
        return sum(line.amount_pusd for line in self.of_kind(kind))

    @property
    def list_amount_pusd(self) -> int:
        return sum(line.list_amount_pusd for line in self.lines)

    @property
    def discount_pusd(self) -> int:
        return self.list_amount_pusd - self.amount_pusd

    @property
    def amount_pusd(self) -> int:
        return sum(line.amount_pusd for line in self.lines)

    @property
    def due_cents(self) -> int:
        return rounded_cents(self.amount_pusd + self.residual_brought_pusd)[0]

    @property
    def residual_kept_pusd(self) -> int:
        """For the next statement."""
        return rounded_cents(self.amount_pusd + self.residual_brought_pusd)[1]

    @property
    def rounding_cents(self) -> int:
        """What the rounded lines are short of what is due."""
        return self.due_cents - sum(line.cents for line in self.lines)

    @property
    def savings(self) -> Savings:
        usage = self.of_kind(LineKind.USAGE)
        return Savings(
            prompt_tokens=_quantity(usage, PROMPT),
            read_tokens=_quantity(usage, READS),
            reads_pusd=_saved(usage, READS),
            write_premiums_pusd=-_saved(usage, WRITES),
            pins_pusd=-_saved(usage, [TokenClass.PIN]),
        )


def statement_number(tenant_id: TenantId, period: str) -> str:
    """`HS-2026-11-9C2B1F3A`: the month, and the end of the tenant's id."""
    return f"HS-{period}-{tenant_id.hex[-_NUMBER_DIGITS:].upper()}"


def encode(statement: Statement) -> str:
    """The one canonical form: JSON with sorted names and no spaces. Integers of any size."""
    # Not msgspec's JSON, whose integers have 64 bits: a total may have more.
    return json.dumps(
        msgspec.to_builtins(statement), sort_keys=True, separators=(",", ":"), ensure_ascii=False
    )


def decode(document: str) -> Statement:
    return msgspec.convert(json.loads(document), Statement)


def digest(document: str) -> bytes:
    """SHA-256 of the canonical form."""
    return hashlib.sha256(document.encode()).digest()


def _quantity(lines: Iterable[StatementLine], classes: Iterable[TokenClass]) -> int:
    chosen = set(classes)
    return sum(line.quantity for line in lines if line.token_class in chosen)


def _saved(lines: Iterable[StatementLine], classes: Iterable[TokenClass]) -> int:
    chosen = set(classes)
    return sum(
        line.amount_without_cache_pusd - line.amount_pusd for line in lines if line.token_class in chosen
    )

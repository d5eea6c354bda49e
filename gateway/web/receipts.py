"""A request's receipts on its page, and each of them as a file.

Knows a receipt's words and how a file is named. Does not know how one is signed: what is
downloaded is the signed line, byte by byte.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from starlette.responses import Response

from billing.db import Database
from billing.errors import DatabaseUnavailable, UnknownReceipt
from billing.ids import RequestId, TenantId
from billing.receipt_chain import receipts_of
from billing.receipts import digest_of
from billing.sealer import Sealer
from gateway.edge.errors import NotFound
from gateway.web.panels import Cell, Column, Panel, Table, code, columns, count, link, money, text

KEYS: Final = "/v1/receipts/keys"
_SHOWN_DIGITS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedReceipt:
    """`document` is the signed line, without its newline; `said` is what it says."""

    document: str
    said: Mapping[str, Any]

    @property
    def number(self) -> int:
        """Its place in its tenant's chain."""
        number: int = self.said["sequence"]
        return number

    @property
    def file_name(self) -> str:
        return f"headstart-receipt-{self.number}.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiptDesk:
    """Where receipts are asked for. Its methods block, and raise `DatabaseUnavailable`."""

    database: Database
    sealer: Sealer

    def issued(
        self, request_id: RequestId, *, tenant_id: TenantId, num_events: int
    ) -> Sequence[IssuedReceipt]:
        """All that can be had now: what is due is sealed first, where anything can be written."""
        found = self._found(request_id, tenant_id)
        if len(found) < num_events:
            with suppress(DatabaseUnavailable):
                self.sealer.seal_request(tenant_id=tenant_id, request_id=request_id)
            found = self._found(request_id, tenant_id)
        return found

    def _found(self, request_id: RequestId, tenant_id: TenantId) -> Sequence[IssuedReceipt]:
        try:
            documents = receipts_of(self.database, request_id, tenant_id=tenant_id)
        except UnknownReceipt:
            return ()
        return [IssuedReceipt(document=one, said=json.loads(one)) for one in documents]


def receipts_panel(
    issued: Sequence[IssuedReceipt], address: str, carried: Mapping[str, str], *, num_due: int
) -> Panel:
    """`address` is that of the request. `num_due` are still to be sealed."""
    return Panel(
        key="receipts",
        title="Receipts",
        hint="Signed with Ed25519, and each names the digest of the one before it. "
        f"`headstart receipts verify FILE --public-key KEYS` checks a file offline.{_due(num_due)}",
        is_wide=True,
        table=Table(
            caption="By their number in the tenant's chain",
            columns=[
                *columns("Number", "Of", "Amount", "Saved", num_texts=2),
                Column(label="SHA-256", is_number=False),
            ],
            rows=[_row(one) for one in issued],
        )
        if issued
        else None,
        empty="The receipt is not sealed yet. Reload the page in a moment.",
        links=(
            *((f"Download receipt {one.number}", link(f"{address}/{one.number}", carried)) for one in issued),
            ("The public keys", KEYS),
        ),
    )


def receipt_file(issued: Sequence[IssuedReceipt], number: str) -> Response:
    """Raises `NotFound` for a number that is none of these."""
    found = next((one for one in issued if str(one.number) == number), None)
    if found is None:
        raise NotFound("The request has no such receipt.")
    return Response(
        found.document + "\n",
        media_type="application/x-ndjson",
        headers={
            "content-disposition": f'attachment; filename="{found.file_name}"',
            "cache-control": "no-store",
        },
    )


def _row(one: IssuedReceipt) -> Sequence[Cell]:
    said, digest = one.said, digest_of(one.document).hex()
    return (
        count(one.number),
        text(said["kind"]),
        money(said["amount_pusd"]),
        money(said["saved_pusd"]),
        code(f"{digest[:_SHOWN_DIGITS]}…", value=digest),
    )


def _due(num_due: int) -> str:
    return f" {num_due} more will follow in a moment." if num_due else ""

"""The commands on receipts: show, export, verify, keys.

Knows arguments, files and how a result is told. Does not know how a receipt is signed or checked.
`verify` opens no database and reads no setting: it is for whoever has a file and a public key.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, Final
from uuid import UUID

import typer

from billing.accounts import find_tenant
from billing.ids import RequestId
from billing.receipt_chain import chain_documents, public_keys, receipts_of
from billing.receipt_keys import decode_key_set, encode_key_set
from billing.receipts import MAX_LINE_BYTES, Verification
from billing.receipts import verify as verify_lines
from gateway.terminal import CommandRefused, TenantOption, open_current_database

SHOWN_FLAWS: Final = 20

receipts = typer.Typer(no_args_is_help=True, help="Signed proof of what each request used and cost.")


@receipts.command("show")
def show(request_id: UUID) -> None:
    """Print the receipts of a request: that of its end, and one for each correction."""
    with open_current_database() as database:
        for document in receipts_of(database, RequestId(request_id)):
            typer.echo(document)


@receipts.command("export")
def export(
    tenant: TenantOption,
    after: Annotated[int, typer.Option(min=0, help="The number of the last receipt that is known.")] = 0,
) -> None:
    """Print a tenant's receipts, one a line, in the order of their chain."""
    with open_current_database() as database:
        tenant_id = find_tenant(database, name=tenant).id
        with database.read() as connection:
            for document in chain_documents(connection, tenant_id, after=after):
                sys.stdout.buffer.write(document.encode() + b"\n")


@receipts.command("keys")
def keys() -> None:
    """Print every public key that receipts were ever signed with, as a JSON Web Key Set."""
    with open_current_database() as database:
        sys.stdout.buffer.write(encode_key_set(public_keys(database)))


@receipts.command("verify")
def verify(
    file: Annotated[Path, typer.Argument(help="Receipts, one a line, as export prints them.")],
    public_key: Annotated[Path, typer.Option(help="A key set, as keys prints it.")],
) -> None:
    """Check receipts with nothing but the public key. The exit status is 1 when anything is wrong."""
    try:
        known = decode_key_set(public_key.read_bytes())
        with file.open("rb") as opened:
            found = verify_lines(_lines(opened), known)
    except OSError as error:
        raise CommandRefused(f"cannot read {error.filename}: {error.strerror}") from error
    _tell(found)


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """In pieces, where a line is longer than any receipt: no memory is needed to refuse it."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        yield line


def _tell(found: Verification) -> None:
    for flaw in found.flaws[:SHOWN_FLAWS]:
        typer.echo(str(flaw), err=True)
    if found.flaws:
        raise CommandRefused(f"refused: {len(found.flaws)} flaws in {found.num_receipts} receipts")
    for tenant_id, chain in found.chains.items():
        typer.echo(
            f"tenant {tenant_id}: receipts {chain.first} to {chain.last} are sound; "
            f"the digest of the last is {chain.digest.hex()}"
        )

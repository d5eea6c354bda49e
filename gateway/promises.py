"""`POST /v1/organization/broken_promises`: whoever runs the caches reports what they did not keep.

Knows the report's JSON and its answer's. Does not know what a promise is worth: billing credits it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

import msgspec

from billing import instants
from billing.credits import BrokenPromise, credit
from billing.db import Database
from billing.errors import InvalidPromise, UnknownRequest
from billing.money import format_dollars
from billing.reports import CURRENCY
from gateway.edge import json_body
from gateway.edge.errors import InvalidRequest, NotFound
from gateway.edge.openai import refuse_invalid

MAX_REPORT_BYTES: Final = 16 * 1024

_DECODER: Final = msgspec.json.Decoder(BrokenPromise)


def parse(body: bytes) -> BrokenPromise:
    """Raises `InvalidRequest` that names the field at fault."""
    try:
        return _DECODER.decode(body)
    except msgspec.ValidationError as error:
        refuse_invalid(str(error))
    except msgspec.DecodeError:
        raise json_body.explain_malformed(body) from None


def answer(database: Database, broken: BrokenPromise, *, count: Callable[[int], None]) -> bytes:
    """The credit; the same one each time that the report comes. Blocks. `count` is told a new one's amount.

    Raises `InvalidRequest`, `NotFound` or `DatabaseUnavailable`.
    """
    try:
        granted = credit(database, broken, now=instants.now())
    except InvalidPromise as error:
        raise InvalidRequest(f"The promise cannot be credited: {error}.", param=error.field) from error
    except UnknownRequest as error:
        raise NotFound("No request has ended under this id.", code="request_not_found") from error
    if granted.is_new:
        count(granted.amount_pusd)
    body = {
        "object": "credit",
        "id": str(granted.credit_id),
        "request_id": str(broken.request_id),
        "promise": broken.promise,
        "currency": CURRENCY.lower(),
        "amount": format_dollars(granted.amount_pusd),
        "amount_pusd": granted.amount_pusd,
        "is_new": granted.is_new,
    }
    return json.dumps(body).encode()

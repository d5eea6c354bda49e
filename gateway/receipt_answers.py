"""`GET /v1/receipts/…`: a request's receipts, and the keys they are checked with.

Knows the answers' JSON and refusals. Does not know how a receipt is made.
"""

from __future__ import annotations

from uuid import UUID

from billing.db import Database
from billing.errors import UnknownReceipt, UnknownRequest
from billing.ids import RequestId, TenantId
from billing.receipt_chain import public_keys, receipts_of
from billing.receipt_keys import PublicKey, encode_key_set
from billing.sealer import Sealer
from gateway.edge.errors import InvalidRequest, NotFound


def parse(written: str) -> RequestId:
    """Raises `InvalidRequest` for what is no id of a request."""
    try:
        return RequestId(UUID(written))
    except ValueError as error:
        raise InvalidRequest(
            "'request_id' must be the id of a request, as the header x-request-id tells.", param="request_id"
        ) from error


def answer(database: Database, sealer: Sealer, tenant_id: TenantId, request_id: RequestId) -> bytes:
    """Each receipt byte by byte as it was signed. Blocks. Raises `NotFound` or `DatabaseUnavailable`."""
    sealer.seal_request(tenant_id=tenant_id, request_id=request_id)
    try:
        documents = receipts_of(database, request_id, tenant_id=tenant_id)
    except UnknownRequest as error:
        raise NotFound("No request of yours has this id.", code="request_not_found") from error
    except UnknownReceipt as error:
        raise NotFound(
            "The request has no receipt yet: it has not ended.", code="receipt_not_issued"
        ) from error
    return f'{{"object":"list","data":[{",".join(documents)}]}}'.encode()


def key_set(database: Database, current: PublicKey) -> bytes:
    """Every key that ever signed here, and the one that signs now. Blocks. Raises `DatabaseUnavailable`."""
    known = {key.id: key for key in (*public_keys(database), current)}
    return encode_key_set(known.values())

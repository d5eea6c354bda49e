"""Id types. Knows UUIDs; does not know what they name.

New ids are UUIDv7: they sort by time of creation, so indexes grow at one end.
"""

from __future__ import annotations

from typing import NewType
from uuid import UUID

from uuid_utils.compat import uuid7

TenantId = NewType("TenantId", UUID)
ProjectId = NewType("ProjectId", UUID)
ApiKeyId = NewType("ApiKeyId", UUID)
RequestId = NewType("RequestId", UUID)
EventId = NewType("EventId", UUID)
LineId = NewType("LineId", UUID)
PriceVersionId = NewType("PriceVersionId", UUID)
BudgetId = NewType("BudgetId", UUID)
ReconciliationId = NewType("ReconciliationId", UUID)
JournalId = NewType("JournalId", UUID)
"""One journal directory, for as long as it exists."""
ProcessId = NewType("ProcessId", UUID)
"""One run of a metering process, from start to end."""


def new_request_id() -> RequestId:
    """A request id is made here and never taken from an upstream or a client."""
    return RequestId(uuid7())


def new_id() -> UUID:
    """A fresh UUIDv7, for the caller to wrap in its type."""
    return uuid7()

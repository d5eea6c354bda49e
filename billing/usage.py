"""What one request used, as values.

Knows counts and instants. Does not know prices, tables or files.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from billing.errors import InvalidUsage
from billing.ids import ApiKeyId, ProjectId, RequestId, TenantId
from billing.instants import Microseconds

MAX_TOKENS: Final = 10**12
"""More tokens than any request has; above it a count is a mistake."""
MAX_MODEL_CHARACTERS: Final = 256
MAX_REASON_CHARACTERS: Final = 64
MAX_WORKER_CHARACTERS: Final = 128
MAX_BLOCK_NAME_CHARACTERS: Final = 64
MAX_EPOCH_CHARACTERS: Final = 64

ABANDONED: Final = "abandoned"
"""The finish reason of a request whose process died or forgot it."""


class TokenClass(StrEnum):
    """Every token of a request is in exactly one class; each class has its own price.

    `read` tokens lay in the memory of the device; those of `read_host`, `read_disk` and
    `read_remote` had to be fetched from that tier. `pin` counts token-hours.
    """

    INPUT = "input"
    READ = "read"
    READ_HOST = "read_host"
    READ_DISK = "read_disk"
    READ_REMOTE = "read_remote"
    WRITE_AUTO = "write_auto"
    WRITE_5M = "write_5m"
    WRITE_1H = "write_1h"
    OUTPUT = "output"
    PIN = "pin"


class UsageKind(StrEnum):
    """How a request ended. Both are terminal, and a request has one terminal event."""

    FINAL = "final"
    ABORTED = "aborted"


class TokenCounts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Disjoint counts. The prompt is derived, so it cannot disagree with its parts.

    `uncached` tokens were computed, `read` tokens came from the cache, and the
    `write_…` tokens were computed and promised to the cache for that long. `pin_hours`
    are token-hours: tokens kept by a pin, times the hours it was bought for.
    Raises InvalidUsage when a count is negative or beyond MAX_TOKENS.
    """

    uncached: int = 0
    read: int = 0
    read_host: int = 0
    read_disk: int = 0
    read_remote: int = 0
    write_auto: int = 0
    write_5m: int = 0
    write_1h: int = 0
    output: int = 0
    pin_hours: int = 0

    def __post_init__(self) -> None:
        for token_class, quantity in self.by_class():
            _require_count(token_class, quantity)

    @property
    def written(self) -> int:
        return self.write_auto + self.write_5m + self.write_1h

    @property
    def cached(self) -> int:
        """Read from any tier."""
        return self.read + self.read_host + self.read_disk + self.read_remote

    @property
    def prompt(self) -> int:
        return self.uncached + self.cached + self.written

    def by_class(self) -> tuple[tuple[TokenClass, int], ...]:
        """All classes in a fixed order, zeros included."""
        return (
            (TokenClass.INPUT, self.uncached),
            (TokenClass.READ, self.read),
            (TokenClass.READ_HOST, self.read_host),
            (TokenClass.READ_DISK, self.read_disk),
            (TokenClass.READ_REMOTE, self.read_remote),
            (TokenClass.WRITE_AUTO, self.write_auto),
            (TokenClass.WRITE_5M, self.write_5m),
            (TokenClass.WRITE_1H, self.write_1h),
            (TokenClass.OUTPUT, self.output),
            (TokenClass.PIN, self.pin_hours),
        )


class Admission(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A request that is about to start. Its price is the one in force at `admitted_at`.

    `model` is the name that is priced. Raises InvalidUsage when it cannot be stored.
    """

    request_id: RequestId
    tenant_id: TenantId
    api_key_id: ApiKeyId
    model: str
    admitted_at: Microseconds
    project_id: ProjectId | None = None

    def __post_init__(self) -> None:
        _require_text("model", self.model, MAX_MODEL_CHARACTERS)
        _require_instant("admitted_at", self.admitted_at)


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a request can use: what is reserved for it before it starts.

    `read` of the `prompt` tokens are known to come from the cache. `output` is over all
    choices. Raises InvalidUsage for what no request can use.
    """

    prompt: int = 0
    read: int = 0
    output: int = 0

    def __post_init__(self) -> None:
        for name in ("prompt", "read", "output"):
            _require_count(name, getattr(self, name))
        if self.read > self.prompt:
            raise InvalidUsage(f"{self.read} of {self.prompt} prompt tokens cannot be read")


class UsageEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a request used until it ended. It says all that billing needs, even if its admission was lost.

    `delivered` is the number of output tokens sent to the client, which a hang-up
    makes smaller than `counts.output`. `first_token_ns` is the time from admission
    to the first token, where there was one. `is_usage_missing` says that whoever computed
    it reported no counts: they are zeros, and no estimate. `worker_epoch` names the run of the worker that
    computed it. New fields need defaults: records of
    older journals are read by newer code, and keep their digest.
    """

    admission: Admission
    kind: UsageKind
    counts: TokenCounts
    finished_at: Microseconds
    delivered: int = 0
    finish_reason: str | None = None
    first_token_ns: int | None = None
    is_usage_missing: bool = False
    worker: str | None = None
    miss_reason: str | None = None
    deepest_block: str | None = None
    worker_epoch: str | None = None

    def __post_init__(self) -> None:
        _require_count("delivered", self.delivered)
        _require_instant("finished_at", self.finished_at)
        for name, text, longest in (
            ("finish_reason", self.finish_reason, MAX_REASON_CHARACTERS),
            ("worker", self.worker, MAX_WORKER_CHARACTERS),
            ("miss_reason", self.miss_reason, MAX_REASON_CHARACTERS),
            ("deepest_block", self.deepest_block, MAX_BLOCK_NAME_CHARACTERS),
            ("worker_epoch", self.worker_epoch, MAX_EPOCH_CHARACTERS),
        ):
            if text is not None:
                _require_text(name, text, longest)
        if self.is_usage_missing and (self.counts.prompt or self.counts.output):
            raise InvalidUsage("counts were reported, so the usage is not missing")
        if self.first_token_ns is not None:
            _require_instant("first_token_ns", self.first_token_ns)

    @property
    def request_id(self) -> RequestId:
        return self.admission.request_id

    def abandoned(self) -> UsageEvent:
        """The same evidence as the end of a request that nobody else will end."""
        return msgspec.structs.replace(self, kind=UsageKind.ABORTED, finish_reason=ABANDONED)


def _require_count(name: str, quantity: int) -> None:
    if not 0 <= quantity <= MAX_TOKENS:
        raise InvalidUsage(f"{name} is {quantity}; a count of tokens is between 0 and {MAX_TOKENS}")


def _require_instant(name: str, instant: int) -> None:
    if not 0 <= instant < 2**63:
        raise InvalidUsage(f"{name} is {instant}, which does not fit a signed 64-bit column")


def _require_text(name: str, text: str, max_characters: int) -> None:
    if not (0 < len(text) <= max_characters and text.isprintable()):
        raise InvalidUsage(f"{name} must be 1 to {max_characters} printable characters")

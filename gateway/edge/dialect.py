"""What the road asks of a dialect: a request read, and the pieces of an answer written.

All functions are pure. What they do not decide (authentication, routing, rendering, metering, sending) is the
same for every dialect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from gateway.edge.canonical import AnswerHead, CanonicalRequest, EndedText, Ending, UsageCounts
from gateway.edge.errors import ApiError

JSON_TYPE: Final = "application/json"
EVENT_STREAM_TYPE: Final = "text/event-stream; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorAnswer:
    """An error as an answer of its own. `headers` have no content type yet."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class StreamEncoder(Protocol):
    """The server-sent events of one streamed answer, in the order of the methods. Each may be empty."""

    def begin(self, num_choices: int, promised: UsageCounts) -> bytes:
        """`promised` has all of the prompt, computed or not, and no output."""

    def progress(self) -> bytes:
        """The prompt is still being computed: something that a client does not mind, against time-outs."""

    def text(self, choice: int, text: str) -> bytes:
        """`text` is not empty."""

    def finish(self, choice: int, ending: Ending) -> bytes: ...

    def end(self, counts: UsageCounts) -> bytes:
        """After the last choice has finished."""


class Dialect(Protocol):
    """One way of asking for texts and of answering, over HTTP and JSON."""

    @property
    def endpoint(self) -> str:
        """The name in metrics and traces."""

    def parse(self, body: bytes, headers: Mapping[str, str]) -> CanonicalRequest:
        """Raises `InvalidRequest` (or a subclass) that names the field at fault."""

    def stream(self, head: AnswerHead, request: CanonicalRequest) -> StreamEncoder: ...

    def whole(self, head: AnswerHead, texts: Sequence[EndedText], counts: UsageCounts) -> bytes: ...

    def headers(self, request_id: str, elapsed_ms: float) -> dict[str, str]:
        """Those of every answer, errors included."""

    def error(self, error: ApiError, request_id: str) -> ErrorAnswer:
        """Headers of the error itself are in it."""

    def error_event(self, error: ApiError, request_id: str) -> bytes:
        """Ends a stream that has begun: official clients raise on it."""

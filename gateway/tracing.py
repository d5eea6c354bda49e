"""What a trace is told of a request, and by whom: nobody, unless traces are wanted.

Knows what there is to tell. Does not know OpenTelemetry, which is an extra: `gateway.otel` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from gateway.edge.canonical import CanonicalRequest
from gateway.metrics import RequestFacts

OTEL_MISSING: Final = (
    "HEADSTART_OTLP_ENDPOINT is set, but what it needs is not installed: pip install 'headstart[otel]'"
)


class TracingUnavailable(Exception):
    """Traces are wanted, and the packages for them are not installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One request that is over, beside what metrics count of it.

    `request` is missing where the body was no request. None of its text is for a trace.
    """

    request_id: str
    facts: RequestFacts
    request: CanonicalRequest | None
    worker: str | None
    finish_reasons: Sequence[str]


class RequestTrace(Protocol):
    """The trace of one request, from its first byte on."""

    @property
    def trace_id(self) -> str | None:
        """In hexadecimal, for log lines."""

    def worker_headers(self) -> Mapping[str, str]:
        """What tells a worker which trace its part belongs to (W3C Trace Context). Called once."""

    def end(self, told: Told) -> None: ...


class Tracer(Protocol):
    def begin(self, headers: Mapping[str, str]) -> RequestTrace:
        """A client's `traceparent`, if there is one, is gone on from."""

    def close(self) -> None:
        """Sends what is left, but not for ever. Blocks."""


class _Untraced:
    trace_id: str | None = None

    def worker_headers(self) -> Mapping[str, str]:
        return {}

    def end(self, told: Told) -> None:
        """Nobody wants to know."""


class NoTracer:
    """Traces nothing, at no cost."""

    def begin(self, headers: Mapping[str, str]) -> RequestTrace:
        return UNTRACED

    def close(self) -> None:
        """Nothing is left."""


UNTRACED: Final[RequestTrace] = _Untraced()


def tracer_for(otlp_endpoint: str | None) -> Tracer:
    """Raises `TracingUnavailable`."""
    if otlp_endpoint is None:
        return NoTracer()
    try:
        from gateway.otel import OtelTracer  # noqa: PLC0415 — an extra
    except ImportError as error:
        raise TracingUnavailable(OTEL_MISSING) from error
    return OtelTracer(otlp_endpoint)

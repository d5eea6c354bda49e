"""An OpenTelemetry collector in this process: takes spans over OTLP/HTTP and keeps them."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

WITHIN_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One span as it came over the wire; ids in hexadecimal, no parent is ''."""

    service: str
    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    began_ns: int
    ended_ns: int
    is_error: bool
    attributes: dict[str, Any]


@dataclass(slots=True)
class Collector:
    url: str
    spans: list[Span] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    arrived: threading.Condition = field(default_factory=threading.Condition)

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self.arrived:
            self.bodies.append(body)
            for resource in request.resource_spans:
                service = _attributes(resource.resource.attributes)["service.name"]
                for scope in resource.scope_spans:
                    self.spans += [_span(service, one) for one in scope.spans]
            self.arrived.notify_all()

    def trace(self, trace_id: str, *, services: set[str]) -> list[Span]:
        """The spans of one trace in order of their beginning, once each service's outermost one came."""

        def is_whole() -> bool:
            found = [span for span in self.spans if span.trace_id == trace_id]
            own = {span.span_id for span in found}
            return services <= {span.service for span in found} and all(
                span.parent_id in own or span.kind == SERVER for span in found
            )

        with self.arrived:
            assert self.arrived.wait_for(is_whole, WITHIN_SECONDS), self.spans
            mine = [span for span in self.spans if span.trace_id == trace_id]
        return sorted(mine, key=lambda span: span.began_ns)


SERVER, CLIENT, INTERNAL = 2, 3, 1
_ERROR = 2


def _span(service: str, span: Any) -> Span:
    return Span(
        service=service,
        name=span.name,
        kind=span.kind,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        began_ns=span.start_time_unix_nano,
        ended_ns=span.end_time_unix_nano,
        is_error=span.status.code == _ERROR,
        attributes=_attributes(span.attributes),
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def running_collector() -> Iterator[Collector]:
    """On a free port, until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            collector.take(body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            """Nobody reads it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, name="collector")
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()

"""A generation's spans, for whoever wants traces: what the gateway's `generate` span waited for.

Knows OpenTelemetry if it is installed and wanted, and what a request's watcher saw. Does not know
HTTP beyond two headers. No attribute holds a token.

    generate        (server)
    ├ queue         until the first step
    ├ prefill       until the first token
    └ decode
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from model_worker.metrics import ObservedRequest

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

SERVICE: Final = "headstart-worker"
EXPORT_SECONDS: Final = 5
CLOSE_SECONDS: Final = 5.0
OTEL_MISSING: Final = (
    "HEADSTART_OTLP_ENDPOINT is set, but what it needs is not installed: pip install 'headstart[otel]'"
)


class TracingUnavailable(Exception):
    """Traces are wanted, and the packages for them are not installed."""


class Tracing:
    """Tells nobody, unless there is an endpoint of a collector (OTLP/HTTP).

    Raises `TracingUnavailable`.
    """

    def __init__(self, endpoint: str | None) -> None:
        self._provider: TracerProvider | None = None
        self._tell: Callable[[ObservedRequest, Mapping[str, str]], None] = lambda _, __: None
        if endpoint:  # compose files pass an empty one for a variable that nobody set
            self._start(endpoint.rstrip("/"))

    def tell(self, request: ObservedRequest, headers: Mapping[str, str]) -> None:
        """A request that has ended; `traceparent` of its headers says whose part it is."""
        self._tell(request, headers)

    def close(self) -> None:
        """Sends what is left, but not for ever."""
        if self._provider is None:
            return
        closing = threading.Thread(target=self._provider.shutdown, name="otel-close", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)

    def _start(self, endpoint: str) -> None:
        try:
            # An extra, and slow to load.
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
                OTLPSpanExporter,
            )
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource  # noqa: PLC0415
            from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
            from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
        except ImportError as error:
            raise TracingUnavailable(OTEL_MISSING) from error
        ours = Resource({"service.name": SERVICE, "service.version": version("headstart")})
        resource = Resource.create().merge(ours).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=f"{endpoint}/v1/traces", timeout=EXPORT_SECONDS)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tell = _teller(self._provider)


def _teller(provider: TracerProvider) -> Callable[[ObservedRequest, Mapping[str, str]], None]:
    from opentelemetry.trace import SpanKind, set_span_in_context  # noqa: PLC0415
    from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
        TraceContextTextMapPropagator,
    )

    tracer, propagator = provider.get_tracer("headstart"), TraceContextTextMapPropagator()

    def tell(request: ObservedRequest, headers: Mapping[str, str]) -> None:
        now = request.now()
        ended_ns = time.time_ns()

        def wall_ns(at: float) -> int:
            return ended_ns - int((now - at) * 1e9)

        known = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        whole = tracer.start_span(
            "generate",
            context=propagator.extract(known),
            kind=SpanKind.SERVER,
            start_time=wall_ns(request.arrived_at),
            attributes=request.span_attributes(),
        )
        for name, began, ended in request.phases(now):
            span = tracer.start_span(name, context=set_span_in_context(whole), start_time=wall_ns(began))
            span.end(wall_ns(ended))
        whole.end(ended_ns)

    return tell

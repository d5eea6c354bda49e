"""A request as OpenTelemetry spans, sent to a collector over OTLP/HTTP.

Knows span names and attributes: OpenTelemetry's semantic conventions for generative AI and HTTP, and
ours under `headstart.`. Does not know how a request is served. No attribute holds a prompt, an answer
or a value that a client made up.

    chat MODEL                    the request (server)
    ├ authenticate, receive, parse, route, render, admit
    ├ generate                    the hop to the worker (client); the worker's own spans hang from it
    │ ├ prefill                   until the first token
    │ └ stream
    └ settle

Spans are made when the request is over, from the times that were taken anyway; only the ids of the
request and of the hop are drawn before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from gateway.metrics import Generated
from gateway.phases import Phase
from gateway.tracing import Told

SERVICE: Final = "headstart-gateway"
EXPORT_SECONDS: Final = 5
CLOSE_SECONDS: Final = 5.0
_PROPAGATOR: Final = TraceContextTextMapPropagator()
_AT_THE_WORKER: Final[frozenset[Phase]] = frozenset({"prefill", "stream"})

Attributes = Iterator[tuple[str, AttributeValue | None]]


class OtelTracer:
    """One per gateway. What concerns sampling, batches, headers and resources is set by the standard
    `OTEL_*` variables.
    """

    def __init__(self, endpoint: str) -> None:
        ours = Resource({"service.name": SERVICE, "service.version": version("headstart")})
        # What OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say goes first.
        resource = Resource.create().merge(ours).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=f"{endpoint}/v1/traces", timeout=EXPORT_SECONDS)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("headstart")

    def begin(self, headers: Mapping[str, str]) -> OtelTrace:
        known = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        span = self._tracer.start_span("chat", context=_PROPAGATOR.extract(known), kind=SpanKind.SERVER)
        return OtelTrace(self, span)

    def start(
        self, name: str, parent: Span, *, began_ns: int | None = None, kind: SpanKind = SpanKind.INTERNAL
    ) -> Span:
        context = set_span_in_context(parent)
        return self._tracer.start_span(name, context=context, kind=kind, start_time=began_ns)

    def close(self) -> None:
        # Its own patience is longer than ours, so it is left behind with a collector that does not answer.
        closing = threading.Thread(target=self._provider.shutdown, name="otel-close", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


class OtelTrace:
    """One request's spans. States: begun → sent to the worker, or not → ended."""

    def __init__(self, tracer: OtelTracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._hop: Span | None = None
        # Phases are timed by another clock than spans.
        self._to_wall_ns = time.time_ns() - time.monotonic_ns()

    @property
    def trace_id(self) -> str | None:
        return format_trace_id(self._span.get_span_context().trace_id)

    def worker_headers(self) -> Mapping[str, str]:
        self._hop = self._tracer.start("generate", self._span, kind=SpanKind.CLIENT)
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, context=set_span_in_context(self._hop))
        return carrier

    def end(self, told: Told) -> None:
        if self._span.is_recording():
            self._tell_phases(told)
            self._tell(self._span, _attributes(told))
            if told.facts.generated is not None:
                self._span.update_name(f"chat {told.facts.generated.model}")
            if told.facts.outcome == "failed":
                self._span.set_status(StatusCode.ERROR)
        if self._hop is not None and self._hop.is_recording():
            self._hop.end()
        self._span.end()

    def _tell_phases(self, told: Told) -> None:
        hop_ended_ns: int | None = None
        for timing in told.facts.timings:
            is_at_worker = timing.phase in _AT_THE_WORKER and self._hop is not None
            parent = self._hop if is_at_worker and self._hop is not None else self._span
            began_ns = timing.began_ns + self._to_wall_ns
            span = self._tracer.start(timing.phase, parent, began_ns=began_ns)
            if timing.error is not None:
                span.set_attribute("error.type", timing.error)
            span.end(timing.ended_ns + self._to_wall_ns)
            if is_at_worker:
                hop_ended_ns = timing.ended_ns + self._to_wall_ns
        if self._hop is not None:
            self._tell(self._hop, iter([("headstart.worker", told.worker)]))
            self._hop.end(hop_ended_ns)

    @staticmethod
    def _tell(span: Span, attributes: Attributes) -> None:
        for name, value in attributes:
            if value is not None:
                span.set_attribute(name, value)


def _attributes(told: Told) -> Attributes:
    facts = told.facts
    yield "gen_ai.operation.name", "chat"
    yield "gen_ai.provider.name", "headstart"
    yield "http.request.method", "POST"
    yield "http.response.status_code", facts.status
    yield "error.type", facts.refusal
    yield "headstart.request_id", told.request_id
    yield "headstart.endpoint", facts.endpoint
    yield "headstart.outcome", facts.outcome
    yield "headstart.worker", told.worker
    yield "headstart.tenant.id", None if facts.principal is None else str(facts.principal.tenant_id)
    yield from _about_request(told)
    if facts.generated is not None:
        yield from _about_answer(told, facts.generated)


def _about_request(told: Told) -> Attributes:
    request = told.request
    if request is None:
        return
    yield "gen_ai.request.max_tokens", None if request.limit is None else request.limit.tokens
    yield "gen_ai.request.temperature", request.sampling.temperature
    yield "gen_ai.request.top_p", request.sampling.top_p
    yield "gen_ai.request.top_k", request.sampling.top_k or None
    yield "gen_ai.request.seed", request.sampling.seed
    yield "gen_ai.request.choice.count", None if request.num_choices == 1 else request.num_choices
    yield "gen_ai.request.stream", request.stream


def _about_answer(told: Told, generated: Generated) -> Attributes:
    counts = generated.counts
    # One of the operator's: a model that nobody serves never comes so far.
    yield "gen_ai.request.model", generated.model
    yield "gen_ai.response.model", generated.model
    yield "gen_ai.response.id", f"chatcmpl-{told.request_id}"
    yield "gen_ai.response.finish_reasons", list(told.finish_reasons) or None
    yield "gen_ai.response.time_to_first_chunk", generated.first_token_seconds
    # Cached ones included, as the conventions want it.
    yield "gen_ai.usage.input_tokens", counts.prompt
    yield "gen_ai.usage.cache_read.input_tokens", counts.read
    yield "gen_ai.usage.cache_creation.input_tokens", counts.written or None
    yield "gen_ai.usage.output_tokens", counts.output
    yield "headstart.cache.status", generated.cache_status
    yield "headstart.cache.miss_reason", generated.miss_reason

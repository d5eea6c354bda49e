"""A conversation to continue, in whichever dialect: one request, one direction.

parse → authenticate → choose → render → admit → generate → relay → settle.
Knows the order and what the client is told when a step refuses. Does not know
how any step does its work, or which dialect it speaks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import structlog
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from billing import instants
from billing.accounts import Principal
from billing.ids import RequestId
from billing.limits import Standing
from billing.meter import Meter
from billing.usage import Admission, Estimate
from gateway.asgi import Answer, ClientGone, Exchange, read_json_body
from gateway.auth import Authenticator, client_key, scope_of
from gateway.drain import Drain
from gateway.edge.canonical import AnswerHead, CanonicalRequest
from gateway.edge.dialect import EVENT_STREAM_TYPE, JSON_TYPE, Dialect
from gateway.edge.errors import (
    ApiError,
    ContextLengthExceeded,
    InternalError,
    InvalidRequest,
    ServiceUnavailable,
    UpstreamBroke,
    UpstreamTimeout,
)
from gateway.limits import rate_headers
from gateway.logs import sanitised_client_id
from gateway.meter import Account, miss_reason
from gateway.metrics import Generated, Metrics, Outcome, RequestFacts
from gateway.phases import Phases
from gateway.relay import ProtocolBroken, Relay, Tally, cache_status, relay_stream, relay_whole
from gateway.rendering import check_limit, output_room, render
from gateway.request_ids import keep_own_line, request_id_of
from gateway.routing import Route, Router
from gateway.secrets import DeploymentSecret
from gateway.settings import Settings
from gateway.tracing import UNTRACED, RequestTrace, Told, Tracer
from gateway.workers import WorkerBroke, WorkerRefused, WorkerSilent, WorkerUnavailable
from model_worker.protocol import CacheMode, GenerateRequest, SamplingParams, Started

CACHE_HEADER: Final = "x-headstart-cache"
REASON_HEADER: Final = "x-headstart-cache-reason"
"""Why this model never finds anything in cache."""
INLINE_BODY_BYTES: Final = 64 * 1024
"""Up to here parsing takes a millisecond or two at most."""
log = structlog.get_logger("gateway.chat")


@dataclass(slots=True, kw_only=True)
class Call:
    """What is known of one request so far; steps fill it in, the log line reads it."""

    request_id: RequestId
    dialect: Dialect
    headers: Headers
    answer: Answer
    trace: RequestTrace
    began_ns: int = field(default_factory=time.monotonic_ns)
    principal: Principal | None = None
    request: CanonicalRequest | None = None
    tally: Tally | None = None
    worker: str | None = None
    cache_mode: CacheMode = "automatic"
    uncached_reason: str | None = None
    standing: Standing | None = None
    model: str | None = None
    refusal: str | None = None
    phases: Phases = field(default_factory=Phases)

    @property
    def elapsed_ms(self) -> float:
        return (time.monotonic_ns() - self.began_ns) / 1e6

    def answer_headers(self) -> dict[str, str]:
        return self.dialect.headers(str(self.request_id), self.elapsed_ms)

    def cache_headers(self, started: Started) -> dict[str, str]:
        headers = self.answer_headers() | rate_headers(self.standing)
        headers |= {
            CACHE_HEADER: cache_status(started, self.cache_mode),
            "x-headstart-cached-tokens": str(started.cached.total),
            "x-headstart-worker": self.worker or "",
        }
        if self.uncached_reason is not None:
            headers[REASON_HEADER] = _header_text(self.uncached_reason)
        return headers


class _CallSink:
    """Sends one call's answer, with the headers that are known from `Started` on."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._answer = call.answer

    async def begin_stream(self, started: Started) -> None:
        headers = {
            "content-type": EVENT_STREAM_TYPE,
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        }
        await self._answer.begin(200, self._call.cache_headers(started) | headers)

    async def send(self, chunk: bytes) -> None:
        await self._answer.send(chunk)

    async def end_stream(self, chunk: bytes) -> None:
        await self._answer.end(chunk)

    async def whole(self, started: Started, body: bytes) -> None:
        await self._answer.whole(200, self._call.cache_headers(started) | {"content-type": JSON_TYPE}, body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """An ASGI application for the one route of a dialect."""

    dialect: Dialect
    settings: Settings
    secret: DeploymentSecret
    authenticator: Authenticator
    router: Router
    meter: Meter
    metrics: Metrics
    tracer: Tracer
    drain: Drain
    prompt_threads: Executor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = Answer(send, stall_seconds=self.settings.client_stall_timeout_seconds)
        headers = Headers(scope=scope)
        call = Call(
            request_id=request_id_of(scope),
            dialect=self.dialect,
            headers=headers,
            answer=answer,
            trace=self.tracer.begin(headers),
        )
        keep_own_line(scope)
        outcome: Outcome = "failed"
        with self.metrics.in_flight(self.dialect.endpoint):
            try:
                outcome = await self._answer(call, receive)
            finally:
                self._record(call, outcome)

    async def _answer(self, call: Call, receive: Receive) -> Outcome:
        try:
            with call.phases.timed("authenticate"):
                call.principal = await self.authenticator.authenticate(client_key(call.headers))
            with call.phases.timed("receive"):
                body = await read_json_body(
                    receive,
                    call.headers,
                    max_bytes=self.settings.max_body_bytes,
                    timeout_seconds=self.settings.body_timeout_seconds,
                )
            exchange = Exchange(receive, call.answer)
            with self.drain.tracking(exchange):
                await exchange.run(self._work(call, call.principal, body))
        except ClientGone:
            return "hung_up"
        except ApiError as error:
            return await self._refuse(call, error)
        return "answered"

    async def _refuse(self, call: Call, error: ApiError) -> Outcome:
        """Before the answer has begun it is the error; afterwards the stream ends with one, and
        without the end of its dialect.
        """
        call.refusal = error.code or error.type
        request_id = str(call.request_id)
        try:
            if call.answer.begun:
                await call.answer.end(self.dialect.error_event(error, request_id))
            else:
                told = self.dialect.error(error, request_id)
                headers = {**call.answer_headers(), **told.headers, "content-type": JSON_TYPE}
                await call.answer.whole(told.status, headers, told.body)
        except ClientGone:
            return "hung_up"
        return "refused" if error.status < InternalError.status else "failed"

    async def _work(self, call: Call, principal: Principal, body: bytes) -> None:
        with call.phases.timed("parse"):
            request = call.request = await self._parse(body, call.headers)
            call.cache_mode = _cache_mode(call.headers)
        with call.phases.timed("route"):
            route = await self.router.choose(request.model)
        call.model, call.worker = route.model, route.worker.name
        call.uncached_reason = route.card.uncached_reason
        window = route.card.context_window_tokens
        check_limit(request, window)
        with call.phases.timed("render"):
            token_ids = await render(request, route, self.prompt_threads)
        max_tokens = output_room(request, prompt_tokens=len(token_ids), window=window)
        tally = call.tally = Tally(
            prompt_tokens=len(token_ids), num_choices=request.num_choices, clock=time.monotonic_ns
        )
        account = Account(
            self.meter,
            Admission(
                request_id=call.request_id,
                tenant_id=principal.tenant_id,
                api_key_id=principal.api_key_id,
                project_id=principal.project_id,
                model=route.model,
                admitted_at=instants.now(),
            ),
            tally,
            estimate=Estimate(prompt=len(token_ids), output=max_tokens * request.num_choices),
            worker=route.worker.name,
            uncached_reason=route.card.uncached_reason,
            started_ns=call.began_ns,
            clock=instants.now,
            phases=call.phases,
        )
        generate = GenerateRequest(
            request_id=str(call.request_id),
            scope=scope_of(self.secret, principal.tenant_id, salt=request.cache_salt),
            token_ids=token_ids,
            sampling=_sampling_params(request, max_tokens),
            cache=call.cache_mode,
            adapter=route.adapter,
            n=request.num_choices,
        )
        async with account.admitted() as call.standing:
            await self._generate(call, route, generate, account)

    async def _parse(self, body: bytes, headers: Headers) -> CanonicalRequest:
        """On a thread when the body is large: a hundred thousand small values take a second, and other
        streams go on meanwhile.
        """
        if len(body) <= INLINE_BODY_BYTES:
            return self.dialect.parse(body, headers)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.prompt_threads, self.dialect.parse, body, headers)

    async def _generate(self, call: Call, route: Route, generate: GenerateRequest, account: Account) -> None:
        assert call.request is not None, "a request is parsed before it is generated"
        assert call.tally is not None, "a tally is opened before its account"
        head = AnswerHead(
            request_id=str(call.request_id),
            created=int(time.time()),
            model=route.model,
            fingerprint=route.fingerprint,
            is_cut_by_window=_is_cut(call.request, generate.sampling.max_tokens),
        )
        relay: Relay = partial(relay_whole, encode=partial(self.dialect.whole, head))
        if call.request.stream:
            relay = partial(relay_stream, encoder=self.dialect.stream(head, call.request))
        try:
            with route.worker.carrying(), call.phases.generating() as generating:
                headers = call.trace.worker_headers()
                async with route.worker.client.generate(generate, headers) as events:
                    account.worker_epoch = events.epoch
                    try:
                        await relay(events, call.tally, _CallSink(call), account)
                    finally:
                        generating.first_token_ns = call.tally.first_token_at
        except WorkerUnavailable as error:
            raise ServiceUnavailable(
                "The model worker is not available.", code="worker_unavailable"
            ) from error
        except WorkerRefused as error:
            raise _refusal_of(error) from error
        except WorkerSilent as error:
            raise UpstreamTimeout("The model worker did not answer in time.") from error
        except (WorkerBroke, ProtocolBroken) as error:
            raise UpstreamBroke("The model worker broke off its answer.") from error

    def _record(self, call: Call, outcome: Outcome) -> None:
        facts = RequestFacts(
            endpoint=self.dialect.endpoint,
            status=call.answer.status,
            outcome=outcome,
            seconds=call.elapsed_ms / 1e3,
            timings=call.phases.timings,
            principal=call.principal,
            refusal=call.refusal,
            generated=_generated(call),
        )
        self.metrics.count_request(facts)
        if call.trace is not UNTRACED:
            call.trace.end(
                Told(
                    request_id=str(call.request_id),
                    facts=facts,
                    request=call.request,
                    worker=call.worker,
                    finish_reasons=[] if call.tally is None else call.tally.finish_reasons,
                )
            )
        log.info("request", outcome=outcome, status=call.answer.status, **_facts(call))


def _generated(call: Call) -> Generated | None:
    """What metrics count of the generation, if one was begun."""
    tally = call.tally
    if tally is None:
        return None
    assert call.model is not None, "a tally is opened for a model"
    started, first_ns = tally.started, tally.first_token_at
    return Generated(
        model=call.model,
        counts=tally.counts,
        cache_status=None if started is None else cache_status(started, call.cache_mode),
        cached_by_tier={} if started is None else {"device": started.cached.device},
        miss_reason=miss_reason(tally, call.uncached_reason),
        first_token_seconds=None if first_ns is None else (first_ns - call.began_ns) / 1e9,
    )


def _facts(call: Call) -> dict[str, object]:
    """What the log line says of a request: ids, counts and times, and never its text."""
    facts: dict[str, object] = {
        "request_id": str(call.request_id),
        "client_request_id": sanitised_client_id(call.headers.get("x-request-id")),
        "tenant_id": str(call.principal.tenant_id) if call.principal else None,
        "worker": call.worker,
        "stream": call.request.stream if call.request else None,
        "elapsed_ms": round(call.elapsed_ms, 3),
    }
    if call.trace.trace_id is not None:
        facts["trace_id"] = call.trace.trace_id
    if call.tally is not None:
        counts = call.tally.counts
        facts |= {
            "uncached_tokens": counts.uncached,
            "read_tokens": counts.read,
            "output_tokens": counts.output,
            "delivered_tokens": call.tally.delivered,
            "finish_reason": call.tally.finish_reason,
        }
    return facts


def _header_text(text: str) -> str:
    """In one line of plain characters: all that every client can read in a header."""
    return " ".join(text.split()).encode("ascii", "replace").decode()


def _cache_mode(headers: Mapping[str, str]) -> CacheMode:
    """A client may ask not to use the cache, to compare. Nothing else can be asked for by this header."""
    asked = headers.get(CACHE_HEADER)
    if asked is None or asked == "automatic":
        return "automatic"
    if asked == "bypass":
        return "bypass"
    raise InvalidRequest(f"The header {CACHE_HEADER} can be 'automatic' or 'bypass'.", param=CACHE_HEADER)


def _is_cut(request: CanonicalRequest, max_tokens: int) -> bool:
    return request.limit is not None and max_tokens < request.limit.tokens


def _sampling_params(request: CanonicalRequest, max_tokens: int) -> SamplingParams:
    sampling = request.sampling
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        stop=sampling.stop,
    )


def _refusal_of(error: WorkerRefused) -> ApiError:
    refusal = error.refusal
    match refusal.code:
        case "invalid_request":
            return InvalidRequest(f"The model worker refused the request: {refusal.message}")
        case "context_length_exceeded":
            return ContextLengthExceeded(refusal.message, param="messages")
        case "queue_full" | "draining":
            return ServiceUnavailable(
                "The model worker takes no more requests now.",
                code=refusal.code,
                headers={"retry-after": "1"},
            )

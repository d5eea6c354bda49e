"""The worker's HTTP face: one engine behind a handful of routes.

Knows HTTP, JSON and the protocol. Does not know tensors or blocks.

A generation's response and the watch for a hang-up are siblings: whichever
ends first ends the other, and the engine hears of a hang-up at once, also
while the prompt still queues.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

import anyio
import msgspec
import structlog
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from model_worker.engine import Engine, EngineStopped, EventSink, RequestRefused
from model_worker.metrics import WorkerMetrics
from model_worker.protocol import (
    EPOCH_HEADER,
    EVENT_STREAM_TYPE,
    CacheStatistics,
    Event,
    Failed,
    Finished,
    GenerateRequest,
    Refusal,
    RefusalCode,
    WorkerCard,
    encode_event,
)
from model_worker.tracing import Tracing

_STATUS: dict[RefusalCode, int] = {
    "invalid_request": 400,
    "context_length_exceeded": 400,
    "queue_full": 503,
    "draining": 503,
}
LOOK_SECONDS = 2.0
"""How long a scrape waits for the cache to tell: a step may be under way."""
log = structlog.get_logger(__name__)

_REQUEST_DECODER = msgspec.json.Decoder(GenerateRequest)


class BodyTooLarge(Exception):
    """The body passed the limit; the rest of it was not read."""


def create_app(
    *,
    engine: Engine,
    card: WorkerCard,
    files: dict[str, Path],
    max_body_bytes: int,
    tracing: Tracing | None = None,
) -> Starlette:
    """Wires the routes to a running engine."""
    metrics = WorkerMetrics(engine, card)
    generations = Generations(engine, card, metrics, tracing or Tracing(None), max_body_bytes)

    async def show_card(request: Request) -> Response:
        return _json(card)

    async def show_stats(request: Request) -> Response:
        return _json(msgspec.structs.replace(engine.stats, epoch=card.epoch))

    async def show_file(request: Request) -> Response:
        path = files.get(request.path_params["name"])
        return FileResponse(path) if path else Response(status_code=404)

    async def show_metrics(request: Request) -> Response:
        seen = await _look(engine)
        text = await anyio.to_thread.run_sync(metrics.exposition, seen)
        return Response(text, headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    async def liveness(request: Request) -> Response:
        return Response(status_code=200 if engine.is_alive else 503)

    async def readiness(request: Request) -> Response:
        return Response(status_code=200 if engine.is_accepting else 503)

    return Starlette(
        routes=[
            Route("/v1/generate", generations, methods=["POST"]),
            Route("/v1/card", show_card),
            Route("/v1/stats", show_stats),
            Route("/v1/statistics", partial(_show_statistics, engine)),
            Route("/v1/files/{name}", show_file),
            Route("/metrics", show_metrics),
            Route("/health/liveness", liveness),
            Route("/health/readiness", readiness),
        ]
    )


class Generations:
    """An ASGI application for the one route that does work."""

    def __init__(
        self,
        engine: Engine,
        card: WorkerCard,
        metrics: WorkerMetrics,
        tracing: Tracing,
        max_body_bytes: int,
    ) -> None:
        self._engine = engine
        self._tracing = tracing
        self._epoch = card.epoch
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._respond(Request(scope, receive))
        await response(scope, receive, send)

    async def _respond(self, request: Request) -> Response:
        try:
            wanted = _REQUEST_DECODER.decode(await _read_body(request, self._max_body_bytes))
        except BodyTooLarge:
            message = f"the body is over {self._max_body_bytes} bytes"
            return _json(Refusal(code="invalid_request", message=message), 413)
        except msgspec.DecodeError as error:
            return _json(Refusal(code="invalid_request", message=str(error)), 400)
        events = EventQueue()
        observed = self._metrics.observe(wanted, events.put)
        try:
            await _submit(self._engine, wanted, observed)
        except RequestRefused as error:
            self._metrics.count_refusal(error.refusal.code)
            log.info("refused", request_id=wanted.request_id, code=error.refusal.code)
            return _json(error.refusal, _STATUS[error.refusal.code])

        def on_end(*, is_whole: bool) -> None:
            if not is_whole:
                self._engine.cancel(wanted.request_id)
                observed.hang_up()
            log.info("generation", **observed.facts())
            self._tracing.tell(observed, request.headers)

        return EventStream(events, n=wanted.n, epoch=self._epoch, on_end=on_end)


async def _show_statistics(engine: Engine, _: Request) -> Response:
    try:
        seen = await asyncio.wrap_future(engine.look())
    except EngineStopped:
        return Response(status_code=503)
    return _json(seen)


async def _look(engine: Engine) -> CacheStatistics | None:
    """What the cache tells; None when it does not in time."""
    try:
        async with asyncio.timeout(LOOK_SECONDS):
            return await asyncio.wrap_future(engine.look())
    except (EngineStopped, TimeoutError):
        return None


class EventQueue:
    """The way of one request's events from the engine's thread to the loop that made this."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        # Bounded by the request itself: one event per token of each choice and a few more.
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    def put(self, event: Event) -> None:
        """From any thread."""
        # A closed loop raises: the server has gone, and with it whoever listened.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def batch(self) -> list[Event]:
        """Waits for one event, and takes all that are there: several can be ready after a busy step."""
        batch = [await self._events.get()]
        while not self._events.empty():
            batch.append(self._events.get_nowait())
        return batch


class OnEnd(Protocol):
    """Told once, when all events are sent (`is_whole`) or their reader is gone. Must not block."""

    def __call__(self, *, is_whole: bool) -> None: ...


class EventStream(Response):
    """Sends events as lines until all `n` choices have ended or the client is gone."""

    media_type = EVENT_STREAM_TYPE

    def __init__(self, events: EventQueue, *, n: int, epoch: str, on_end: OnEnd) -> None:
        super().__init__(status_code=200, headers={EPOCH_HEADER: epoch})
        self._num_open = n
        # No length is known: the server sends chunks.
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        self._events = events
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        finished = False
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_cancel_on_hang_up, receive, tasks.cancel_scope)
                await self._send_events(send)
                finished = True
                tasks.cancel_scope.cancel()
        finally:
            self._on_end(is_whole=finished)  # no await: a cancelled task may not wait

    async def _send_events(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while True:
            batch = await self._events.batch()  # they share a packet
            body = b"".join(map(encode_event, batch))
            self._num_open -= sum(isinstance(event, Finished) for event in batch)
            last = self._num_open == 0 or isinstance(batch[-1], Failed)
            await send({"type": "http.response.body", "body": body, "more_body": not last})
            if last:
                return


async def _cancel_on_hang_up(receive: Receive, scope: anyio.CancelScope) -> None:
    message: Message = {"type": "http.request"}
    while message["type"] != "http.disconnect":
        message = await receive()
    scope.cancel()


async def _submit(engine: Engine, request: GenerateRequest, sink: EventSink) -> None:
    """Hands a request to the engine. Raises `RequestRefused`."""
    if engine.takes_long(request):
        await anyio.to_thread.run_sync(engine.submit, request, sink)
    else:
        engine.submit(request, sink)


async def _read_body(request: Request, limit_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise BodyTooLarge
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit_bytes:
            raise BodyTooLarge
    return bytes(body)


def _json(value: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")

"""The worker's HTTP face: one engine behind a handful of routes.

Knows HTTP, JSON and the protocol. Does not know tensors or blocks.

A generation's response and the watch for a hang-up are siblings: whichever
ends first ends the other, and the engine hears of a hang-up at once, also
while the prompt still queues.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio
import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from model_worker.engine import Engine, EngineStopped, RequestRefused
from model_worker.metrics import EngineCollector
from model_worker.protocol import (
    EPOCH_HEADER,
    EVENT_STREAM_TYPE,
    Event,
    Failed,
    Finished,
    GenerateRequest,
    Refusal,
    RefusalCode,
    WorkerCard,
    encode_event,
)

_STATUS: dict[RefusalCode, int] = {
    "invalid_request": 400,
    "context_length_exceeded": 400,
    "queue_full": 503,
    "draining": 503,
}
_REQUEST_DECODER = msgspec.json.Decoder(GenerateRequest)


class BodyTooLarge(Exception):
    """The body passed the limit; the rest of it was not read."""


def create_app(
    *,
    engine: Engine,
    card: WorkerCard,
    files: dict[str, Path],
    max_body_bytes: int,
) -> Starlette:
    """Wires the routes to a running engine."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine, card))

    async def generate(request: Request) -> Response:
        try:
            wanted = _REQUEST_DECODER.decode(await _read_body(request, max_body_bytes))
            events = await _submit(engine, wanted)
        except BodyTooLarge:
            message = f"the body is over {max_body_bytes} bytes"
            return _json(Refusal(code="invalid_request", message=message), 413)
        except msgspec.DecodeError as error:
            return _json(Refusal(code="invalid_request", message=str(error)), 400)
        except RequestRefused as error:
            return _json(error.refusal, _STATUS[error.refusal.code])
        return EventStream(
            events, n=wanted.n, epoch=card.epoch, on_hang_up=lambda: engine.cancel(wanted.request_id)
        )

    async def show_card(request: Request) -> Response:
        return _json(card)

    async def show_stats(request: Request) -> Response:
        return _json(msgspec.structs.replace(engine.stats, epoch=card.epoch))

    async def show_file(request: Request) -> Response:
        path = files.get(request.path_params["name"])
        return FileResponse(path) if path else Response(status_code=404)

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def liveness(request: Request) -> Response:
        return Response(status_code=200 if engine.is_alive else 503)

    async def readiness(request: Request) -> Response:
        return Response(status_code=200 if engine.is_accepting else 503)

    return Starlette(
        routes=[
            Route("/v1/generate", generate, methods=["POST"]),
            Route("/v1/card", show_card),
            Route("/v1/stats", show_stats),
            Route("/v1/statistics", partial(_show_statistics, engine)),
            Route("/v1/files/{name}", show_file),
            Route("/metrics", metrics),
            Route("/health/liveness", liveness),
            Route("/health/readiness", readiness),
        ]
    )


async def _show_statistics(engine: Engine, _: Request) -> Response:
    try:
        seen = await asyncio.wrap_future(engine.look())
    except EngineStopped:
        return Response(status_code=503)
    return _json(seen)


class EventStream(Response):
    """Sends events as lines until all `n` choices have ended or the client is gone."""

    media_type = EVENT_STREAM_TYPE

    def __init__(
        self, events: asyncio.Queue[Event], *, n: int, epoch: str, on_hang_up: Callable[[], None]
    ) -> None:
        super().__init__(status_code=200, headers={EPOCH_HEADER: epoch})
        self._num_open = n
        # No length is known: the server sends chunks.
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        self._events = events
        self._on_hang_up = on_hang_up

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        finished = False
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_cancel_on_hang_up, receive, tasks.cancel_scope)
                await self._send_events(send)
                finished = True
                tasks.cancel_scope.cancel()
        finally:
            if not finished:
                self._on_hang_up()  # no await: a cancelled task may not wait

    async def _send_events(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while True:
            # Several events can be ready after a busy step: they share a packet.
            batch = [await self._events.get()]
            while not self._events.empty():
                batch.append(self._events.get_nowait())
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


async def _submit(engine: Engine, request: GenerateRequest) -> asyncio.Queue[Event]:
    """Hands a request to the engine; its events arrive on the running loop's queue."""
    loop = asyncio.get_running_loop()
    # Bounded by the request itself: one event per token of each choice and a few more.
    events: asyncio.Queue[Event] = asyncio.Queue()

    def deliver(event: Event) -> None:
        # A closed loop raises: the server has gone, and with it whoever listened.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(events.put_nowait, event)

    if engine.takes_long(request):
        await anyio.to_thread.run_sync(engine.submit, request, deliver)
    else:
        engine.submit(request, deliver)
    return events


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

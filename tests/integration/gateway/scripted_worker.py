"""A model worker without a model: the real protocol over real HTTP, with behaviour that a test writes.

As a program it is what `headstart serve` starts in tests: it knows `--port-file` and `--exit-with-parent`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from model_worker.protocol import (
    EPOCH_HEADER,
    EVENT_STREAM_TYPE,
    Event,
    Finished,
    GenerateRequest,
    Missed,
    Started,
    TierTokens,
    Token,
    WorkerCard,
    WorkerStats,
    encode_event,
)
from tests.unit.gateway.tiny_tokenizer import prompt_files

MODEL = "tiny-chat"
WINDOW = 512
ANSWER = ("Hel", "lo", " wörld")

Step = Event | bytes
Script = Callable[[GenerateRequest], AsyncIterator[Step]]


class BreakOff(Exception):
    """Ends the connection in the middle of a body."""


@dataclass(slots=True)
class Exchange:
    """One generation as the worker saw it. `cancelled` is set when the gateway hung up."""

    request: GenerateRequest
    gateway_port: int
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)


class ScriptedWorker:
    """Remembers prompts by scope, so that hits are what they would be, and answers as its script says."""

    def __init__(self) -> None:
        self.card = WorkerCard(
            model=MODEL,
            fingerprint="fe" * 16,
            dtype="float32",
            device="cpu",
            vocab_size=259,
            context_window_tokens=WINDOW,
            block_size=16,
            num_blocks=64,
            kv_bytes_per_token=1,
            epoch="1",
        )
        self.files = prompt_files()
        self.cards_served = 0
        self.exchanges: list[Exchange] = []
        self.arrived = asyncio.Event()
        self.counted: Counter[str] = Counter()
        self._prompts: dict[str, list[list[int]]] = {}
        self.reset()

    def reset(self) -> None:
        """Forgets every exchange and prompt, and answers as it did at first."""
        self.script: Script = self.answer
        self.refusal: tuple[int, bytes] | None = None
        self.is_ready = True
        self.exchanges.clear()
        self.arrived.clear()
        self._prompts.clear()

    def started(self, request: GenerateRequest) -> Started:
        """The counts for a prompt, which is remembered from now on."""
        known = self._prompts.setdefault(request.scope, [])
        cached = 0
        if request.cache == "automatic":
            limit = len(request.token_ids) - 1
            cached = min(limit, max((_common(prompt, request.token_ids) for prompt in known), default=0))
            known.append(request.token_ids)
        return Started(
            cached=TierTokens(device=cached),
            uncached=len(request.token_ids) - cached,
            missed=None if cached else Missed(reason="no_shared_prefix", token_index=0),
        )

    async def answer(self, request: GenerateRequest) -> AsyncIterator[Step]:
        """The default script: three tokens, the last text held back until the end."""
        yield self.started(request)
        for index, text in enumerate(ANSWER[:-1]):
            yield Token(token_ids=[index], text=text)
        yield Finished(reason="stop", text=ANSWER[-1], output_tokens=len(ANSWER))

    def answering_slowly(self, most: int) -> Script:
        """A script: some number of tokens up to `most`, one in a hundredth of a second."""

        async def answer(request: GenerateRequest) -> AsyncIterator[Step]:
            yield self.started(request)
            count = 1 + sum(request.token_ids) % most
            for index in range(count):
                await asyncio.sleep(0.01)
                yield Token(token_ids=[index], text="x")
            yield Finished(reason="stop", text="", output_tokens=count)

        return answer

    async def next_exchange(self) -> Exchange:
        """The newest exchange, once there is one that was not asked for before."""
        await asyncio.wait_for(self.arrived.wait(), 10)
        self.arrived.clear()
        return self.exchanges[-1]

    def stats(self) -> WorkerStats:
        """What it counted since it was made; all else is left at nothing."""
        names = (name for name in WorkerStats.__struct_fields__ if name not in {"epoch", "step_tokens"})
        return WorkerStats(**{**dict.fromkeys(names, 0), **self.counted}, epoch=self.card.epoch)

    async def _counting(self, steps: AsyncIterator[Step]) -> AsyncIterator[Step]:
        """As an engine counts: the prompt when it is computed, each token when it is chosen."""
        uncached = 0
        async for step in steps:
            if isinstance(step, Started):
                self.counted["prompt_tokens_cached"] += step.cached.total
                uncached = step.uncached
            elif isinstance(step, Token):
                self.counted["prompt_tokens_computed"] += uncached
                self.counted["output_tokens"] += len(step.token_ids)
                uncached = 0
            elif isinstance(step, Finished):
                self.counted["output_tokens"] += 1
            yield step

    def app(self) -> Starlette:
        async def card(_: Request) -> Response:
            self.cards_served += 1
            return Response(msgspec.json.encode(self.card), media_type="application/json")

        async def file(request: Request) -> Response:
            content = self.files.get(request.path_params["name"])
            return Response(content) if content is not None else Response(status_code=404)

        async def stats(_: Request) -> Response:
            return Response(msgspec.json.encode(self.stats()), media_type="application/json")

        async def readiness(_: Request) -> Response:
            return Response(status_code=200 if self.is_ready else 503)

        async def generate(request: Request) -> Response:
            if self.refusal is not None:
                status, body = self.refusal
                return Response(body, status_code=status, media_type="application/json")
            wanted = msgspec.json.decode(await request.body(), type=GenerateRequest)
            assert request.client is not None
            exchange = Exchange(wanted, request.client.port)
            self.exchanges.append(exchange)
            return _EventResponse(
                exchange, self._counting(self.script(wanted)), self.arrived, self.card.epoch
            )

        return Starlette(
            routes=[
                Route("/v1/card", card),
                Route("/v1/files/{name}", file),
                Route("/v1/stats", stats),
                Route("/health/readiness", readiness),
                Route("/v1/generate", generate, methods=["POST"]),
            ]
        )


class _EventResponse(Response):
    def __init__(
        self, exchange: Exchange, steps: AsyncIterator[Step], arrived: asyncio.Event, epoch: str
    ) -> None:
        super().__init__(status_code=200, media_type=EVENT_STREAM_TYPE, headers={EPOCH_HEADER: epoch})
        del self.headers["content-length"]
        self._exchange, self._steps, self._arrived = exchange, steps, arrived

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        self._arrived.set()
        sending = asyncio.create_task(self._send_all(send))
        leaving = asyncio.create_task(_disconnected(receive))
        await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not sending.done():
            self._exchange.cancelled.set()
        for task in (sending, leaving):
            task.cancel()
        with suppress(asyncio.CancelledError):
            await sending

    async def _send_all(self, send: Send) -> None:
        async for step in self._steps:
            line = step if isinstance(step, bytes) else encode_event(step)
            await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class UnannouncedServer(uvicorn.Server):
    """Leaves the process's signals alone."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def served(app: Starlette, listener: socket.socket) -> AsyncIterator[UnannouncedServer]:
    """Serves on the running loop while the block runs; leaving cuts whatever is still open."""
    config = uvicorn.Config(
        app, lifespan="off", log_config=None, log_level="critical", ws="none", timeout_graceful_shutdown=1
    )
    server = UnannouncedServer(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield server
    finally:
        server.should_exit = True
        await task


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _common(one: list[int], other: list[int]) -> int:
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port-file", type=Path, required=True)
    parser.add_argument("--exit-with-parent", action="store_true")
    parser.add_argument("--fail", type=int)
    parser.add_argument("--pid-file", type=Path)
    parser.add_argument("--answer-tokens", type=int, help="up to so many, one by one, with pauses")
    options = parser.parse_args()
    if options.fail is not None:
        sys.exit(options.fail)
    if options.pid_file is not None:
        write_whole(options.pid_file, str(os.getpid()))
    if options.exit_with_parent:
        threading.Thread(target=_exit_when_stdin_closes, daemon=True).start()
    worker = ScriptedWorker()
    if options.answer_tokens is not None:
        worker.script = worker.answering_slowly(options.answer_tokens)
    asyncio.run(_serve(worker, options.port_file))


def write_whole(path: Path, text: str) -> None:
    """Whoever reads the file finds all of the text or no file."""
    temporary = path.with_suffix(".new")
    temporary.write_text(text)
    temporary.rename(path)


def _exit_when_stdin_closes() -> None:
    while sys.stdin.buffer.read(4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


async def _serve(worker: ScriptedWorker, port_file: Path) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with served(worker.app(), listener):
            write_whole(port_file, str(listener.getsockname()[1]))
            await stop.wait()


if __name__ == "__main__":
    main()

"""Running a gateway, with or without a worker of its own, from the first bind to the last flush.

Knows sockets, signals and the order in which things end: streams, then the
server, then the meter, then the worker. Does not know dialects or money.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from gateway.app import Gateway
from gateway.child import POLL_SECONDS, WorkerChild

HANG_UP_GRACE_SECONDS: Final = 5
LISTEN_BACKLOG: Final = 2048


class PortTaken(Exception):
    """Another process listens there."""


def listen(host: str, port: int) -> socket.socket:
    """Binds before anything slow happens. Raises `PortTaken`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=LISTEN_BACKLOG)
    except OSError as error:
        raise PortTaken(f"cannot listen on {host}:{port}: {error.strerror or error}") from error


class Stop:
    """The wish to stop. The first signal drains, every later one interrupts what still runs."""

    def __init__(self) -> None:
        self._wished = asyncio.Event()
        self._on_repeat: Callable[[], None] = lambda: None

    def request(self) -> None:
        if self._wished.is_set():
            self._on_repeat()
        self._wished.set()

    async def wait(self) -> None:
        await self._wished.wait()

    @contextmanager
    def on_signals(self, on_repeat: Callable[[], None]) -> Iterator[None]:
        """SIGINT and SIGTERM are this wish while the block runs."""
        self._on_repeat = on_repeat
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.request)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)


class _Server(uvicorn.Server):
    """Uvicorn without signal handlers of its own: it would stop listening before the streams are told."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serving(
    gateway: Gateway, app: ASGIApp, listener: socket.socket
) -> AsyncIterator[asyncio.Task[None]]:
    """Serves while the block runs; yields the server's task, which ends early only by a fault.

    On leaving: new requests are refused, running ones get the grace period and then an error, the server
    closes, and what was used is written down.
    """
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=HANG_UP_GRACE_SECONDS,
    )
    server = _Server(config)
    async with gateway.running():
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield task
        finally:
            await gateway.drain.drain(gateway.settings.drain_seconds)
            server.should_exit = True
            await task


async def run_gateway(
    gateway: Gateway, app: ASGIApp, listener: socket.socket, stop: Stop, announce: Callable[[], None]
) -> None:
    """A gateway alone, in front of workers that somebody else runs."""
    with stop.on_signals(gateway.drain.interrupt_all):
        async with serving(gateway, app, listener) as server:
            announce()
            await _first_of(server, stop)


async def run_with_worker(
    gateway: Gateway,
    app: ASGIApp,
    listener: socket.socket,
    child: WorkerChild,
    stop: Stop,
    announce: Callable[[], None],
) -> None:
    """A gateway and its own worker. Raises `WorkerEnded` or `WorkerSlow` when the worker does not come up."""
    with stop.on_signals(gateway.drain.interrupt_all):
        try:
            async with serving(gateway, app, listener) as server:
                await _unless_stopped(stop, _with_worker(gateway, child, server, announce))
        finally:
            await child.stop()


async def _with_worker(
    gateway: Gateway, child: WorkerChild, server: asyncio.Task[None], announce: Callable[[], None]
) -> None:
    gateway.roster.point_to(await child.start())
    await _until_ready(gateway, child)
    announce()
    keeping = asyncio.create_task(child.keep_running(gateway.roster.point_to))
    try:
        await asyncio.wait({server, keeping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        keeping.cancel()
        with suppress(asyncio.CancelledError):
            await keeping


async def _until_ready(gateway: Gateway, child: WorkerChild) -> None:
    """Until a request would be served. The worker listens by now, so this is short. Raises `WorkerEnded`."""
    while True:
        child.raise_if_ended()
        await gateway.roster.refresh()
        workers = gateway.roster.workers
        if workers and all(worker.card is not None for worker in workers):
            ready = await asyncio.gather(*(worker.client.is_ready() for worker in workers))
            if all(ready):
                return
        await asyncio.sleep(POLL_SECONDS)


async def _unless_stopped(stop: Stop, work: Coroutine[None, None, None]) -> None:
    """Runs the work until it ends or until it is wished to stop."""
    working = asyncio.create_task(work)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        working.cancel()
    await asyncio.wait({working})
    if not working.cancelled():
        working.result()


async def _first_of(server: asyncio.Task[None], stop: Stop) -> None:
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({server, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()

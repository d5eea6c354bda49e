"""Which exchanges are running, and how they end when the gateway stops.

Knows exchanges alone. States: serving → draining; there is no way back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from gateway.asgi import Exchange
from gateway.edge.errors import ServiceUnavailable

log = structlog.get_logger("gateway.drain")


class Drain:
    """Counts running exchanges, refuses new ones once draining, and interrupts those that outlast
    the grace period.
    """

    def __init__(self) -> None:
        self._running: set[Exchange] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_draining = False

    @property
    def num_running(self) -> int:
        return len(self._running)

    @contextmanager
    def tracking(self, exchange: Exchange) -> Iterator[None]:
        """Raises `ServiceUnavailable` once draining has begun."""
        if self.is_draining:
            raise _stopping()
        self._running.add(exchange)
        self._idle.clear()
        try:
            yield
        finally:
            self._running.discard(exchange)
            if not self._running:
                self._idle.set()

    async def drain(self, grace_seconds: float) -> None:
        """Waits for running exchanges, then interrupts the rest: each ends its stream with an error event."""
        self.is_draining = True
        if self._running:
            log.info("draining", running=self.num_running, grace_seconds=grace_seconds)
        try:
            async with asyncio.timeout(grace_seconds):
                await self._idle.wait()
        except TimeoutError:
            self.interrupt_all()
            await self._idle.wait()

    def interrupt_all(self) -> None:
        for exchange in tuple(self._running):
            exchange.interrupt(_stopping())


def _stopping() -> ServiceUnavailable:
    return ServiceUnavailable("The gateway is stopping.", code="shutting_down", headers={"retry-after": "5"})

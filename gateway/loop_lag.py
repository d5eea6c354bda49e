"""How late the event loop is: what everybody on it waits for somebody else.

Knows one loop and a clock. Does not know who keeps it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final

INTERVAL_SECONDS: Final = 0.25


@asynccontextmanager
async def watched(observe: Callable[[float], None]) -> AsyncIterator[None]:
    """Sleeps again and again while the block runs, and tells how much too late it woke, in seconds."""
    watching = asyncio.create_task(_watch(observe), name="loop-lag")
    try:
        yield
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


async def _watch(observe: Callable[[float], None]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + INTERVAL_SECONDS
        await asyncio.sleep(INTERVAL_SECONDS)
        observe(max(loop.time() - due, 0.0))

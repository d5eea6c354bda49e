"""Which workers there are, and what each of them serves.

Knows URLs, cards, tokenizer files and how many requests are on each worker.
Does not know tenants, keys or dialects, and does not choose.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Final

import aiohttp
import structlog

from gateway.prompt import PromptEncoder, PromptFilesUnusable, load_encoder
from gateway.workers import PhaseTimeouts, WorkerClient, WorkerError, open_session
from model_worker.protocol import TOKENIZER_FILES, WorkerCard

MAX_ENCODERS: Final = 4
log = structlog.get_logger("gateway.roster")


class UnknownWorker(Exception):
    """No worker has the name."""


class Worker:
    """One worker. States: unknown → ready ⇄ away; only its `Roster` moves it.

    An away worker keeps its card: the next request finds out by itself whether it is back. Beside
    that it is open or draining: a draining one gets no new requests, and ends those it has.
    """

    def __init__(self, name: str, client: WorkerClient) -> None:
        self.name = name
        self.client = client
        self.card: WorkerCard | None = None
        self.encoder: PromptEncoder | None = None
        self.away_because: str | None = "it has not been asked yet"
        self.in_flight = 0
        self.is_draining = False

    @property
    def url(self) -> str:
        return self.client.url

    @contextmanager
    def carrying(self) -> Iterator[None]:
        """Counts one request while the block runs."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


class Roster:
    """Keeps every worker's card fresh. `start()` and `close()` it once, on the loop that uses it."""

    def __init__(
        self,
        *,
        timeouts: PhaseTimeouts,
        executor: Executor,
        poll_seconds: float,
        now: Callable[[], datetime] = lambda: datetime.now(UTC).astimezone(),
    ) -> None:
        self._timeouts = timeouts
        self._executor = executor
        self._poll_seconds = poll_seconds
        self._now = now
        self._session: aiohttp.ClientSession | None = None
        self._polling: asyncio.Task[None] | None = None
        self._urls: tuple[str, ...] = ()
        self._encoders: dict[str, PromptEncoder] = {}
        self._refreshing: asyncio.Task[None] | None = None
        self.workers: tuple[Worker, ...] = ()

    def point_to(self, *urls: str) -> None:
        """Replaces the workers. One at an unchanged URL is kept, with what is known of it."""
        self._urls = urls
        if self._session is not None:
            self._build_workers(self._session)

    def drain(self, name: str) -> None:
        """No new requests for it from this gateway. Raises `UnknownWorker`."""
        self._named(name).is_draining = True
        log.info("worker_draining", worker=name)

    def undrain(self, name: str) -> None:
        """It takes requests again. Raises `UnknownWorker`."""
        self._named(name).is_draining = False
        log.info("worker_open", worker=name)

    def _named(self, name: str) -> Worker:
        found = next((worker for worker in self.workers if worker.name == name), None)
        if found is None:
            raise UnknownWorker(f"there is no worker {name!r}")
        return found

    def start(self) -> None:
        self._session = open_session(self._timeouts)
        self._build_workers(self._session)
        self._polling = asyncio.create_task(self._poll(), name="roster-poll")

    async def close(self) -> None:
        for task in (self._polling, self._refreshing):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        if self._session is not None:
            await self._session.close()
        self._session, self._polling, self._refreshing, self.workers = None, None, None, ()

    async def refresh(self) -> None:
        """Asks every worker for its card. Whoever comes while that is going on waits for the same answers."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._refresh_all(), name="roster-refresh")
        # Shielded: one asker that hangs up must not take the answers from the others.
        await asyncio.shield(self._refreshing)

    async def _refresh_all(self) -> None:
        await asyncio.gather(*(self._refresh(worker) for worker in self.workers))

    def _build_workers(self, session: aiohttp.ClientSession) -> None:
        known = {worker.url: worker for worker in self.workers}
        self.workers = tuple(
            known.get(url) or Worker(f"worker-{index}", WorkerClient(url, session, self._timeouts))
            for index, url in enumerate(self._urls)
        )

    async def _poll(self) -> None:
        while True:
            await self.refresh()
            await asyncio.sleep(self._poll_seconds)

    async def _refresh(self, worker: Worker) -> None:
        try:
            card = await worker.client.card()
            if worker.card is None or worker.card.fingerprint != card.fingerprint:
                worker.encoder = await self._encoder(worker.client, card)
        except (WorkerError, PromptFilesUnusable) as error:
            if worker.away_because != str(error):
                log.warning("worker_away", worker=worker.name, url=worker.url, reason=str(error))
            worker.away_because = str(error)
            return
        if worker.away_because is not None:
            log.info("worker_ready", worker=worker.name, url=worker.url, model=card.model, epoch=card.epoch)
        worker.card, worker.away_because = card, None

    async def _encoder(self, client: WorkerClient, card: WorkerCard) -> PromptEncoder:
        """Files are fetched once per model fingerprint, whichever worker has them."""
        encoder = self._encoders.get(card.fingerprint)
        if encoder is not None:
            return encoder
        files: dict[str, bytes] = {}
        for name in TOKENIZER_FILES:
            content = await client.file(name)
            if content is not None:
                files[name] = content
        loop = asyncio.get_running_loop()
        encoder = await loop.run_in_executor(self._executor, lambda: load_encoder(files, now=self._now))
        while len(self._encoders) >= MAX_ENCODERS:
            del self._encoders[next(iter(self._encoders))]
        self._encoders[card.fingerprint] = encoder
        return encoder

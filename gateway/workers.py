"""The hop to a model worker: one HTTP exchange per generation, with typed failures.

Knows the worker's protocol, its time-outs per phase and how a connection can
break. Does not know tenants, dialects or which worker to choose.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

import aiohttp
import msgspec

from model_worker.protocol import (
    EPOCH_HEADER,
    PROTOCOL_VERSION,
    CacheStatistics,
    Event,
    Failed,
    Finished,
    GenerateRequest,
    Refusal,
    WorkerCard,
    WorkerStats,
    decode_event,
)

MAX_EVENT_BYTES: Final = 1024 * 1024
MAX_FILE_BYTES: Final = 256 * 1024 * 1024
MAX_STATISTICS_BYTES: Final = 1024 * 1024
MAX_REFUSAL_BYTES: Final = 64 * 1024
MAX_EPOCH_CHARACTERS: Final = 64
MAX_CONNECTIONS: Final = 4096
END_OF_STREAM_SECONDS: Final = 1.0

_ENCODER: Final = msgspec.json.Encoder()
_STATISTICS_DECODER: Final = msgspec.json.Decoder(CacheStatistics)
_STATS_DECODER: Final = msgspec.json.Decoder(WorkerStats)
_CARD_DECODER: Final = msgspec.json.Decoder(WorkerCard)
_REFUSAL_DECODER: Final = msgspec.json.Decoder(Refusal)


class WorkerError(Exception):
    """A worker did not do what was asked."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"worker {url}: {reason}")
        self.reason = reason


class WorkerUnavailable(WorkerError):
    """It could not be reached, or is not ready: nothing was computed."""


class WorkerRefused(WorkerError):
    """It answered with a refusal: nothing was computed."""

    def __init__(self, url: str, refusal: Refusal) -> None:
        super().__init__(url, f"{refusal.code}: {refusal.message}")
        self.refusal = refusal


class WorkerBroke(WorkerError):
    """It accepted the work and then went away or broke the protocol."""


class WorkerSilent(WorkerBroke):
    """It accepted the work and then said nothing for too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTimeouts:
    """The longest wait in each phase. The first event may wait in the worker's queue; there is no total."""

    connect_seconds: float
    first_event_seconds: float
    between_events_seconds: float
    control_seconds: float = 5.0


class EventStream:
    """The events of one generation, in order. Ends when each of `num_choices` texts has `Finished` or after
    `Failed`, and never before.

    `epoch` names the run of the worker, where it tells. An iterator rather than a generator: whoever
    abandons it leaves nothing behind to be closed.
    """

    def __init__(
        self,
        url: str,
        content: aiohttp.StreamReader,
        *,
        epoch: str | None,
        num_choices: int,
        deadline: float,
        between_events_seconds: float,
    ) -> None:
        self.epoch = epoch
        self._url = url
        self._content = content
        self._deadline = deadline
        self._between_events_seconds = between_events_seconds
        self._lines: deque[bytes] = deque()
        self._partial_line = b""
        self._num_open = num_choices

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> Event:
        """Raises `WorkerBroke` or `WorkerSilent`."""
        if not self._num_open:
            await self._read_to_end()
            raise StopAsyncIteration
        while not self._lines:
            await self._receive()
        event = self._decode(self._lines.popleft())
        if isinstance(event, Finished):
            self._num_open -= 1
        elif isinstance(event, Failed):
            self._num_open = 0
        return event

    async def _receive(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(self._deadline):
                chunk = await self._content.readany()
        except TimeoutError as error:
            raise WorkerSilent(self._url, "no event in time") from error
        except aiohttp.ClientError as error:
            raise WorkerBroke(self._url, "the connection was lost") from error
        if not chunk:
            raise WorkerBroke(self._url, "the stream ended without a last event")
        *lines, self._partial_line = (self._partial_line + chunk).split(b"\n")
        if len(self._partial_line) > MAX_EVENT_BYTES:
            raise WorkerBroke(self._url, "an event is too long")
        self._lines.extend(lines)
        if lines:
            self._deadline = loop.time() + self._between_events_seconds

    async def _read_to_end(self) -> None:
        """A body read to its end gives the connection back to the pool. A worker that dawdles loses
        it instead.
        """
        try:
            async with asyncio.timeout(END_OF_STREAM_SECONDS):
                while await self._content.readany():
                    pass
        except (TimeoutError, aiohttp.ClientError):
            return

    def _decode(self, line: bytes) -> Event:
        try:
            return decode_event(line)
        except msgspec.DecodeError as error:
            raise WorkerBroke(self._url, "an event cannot be read") from error


class WorkerClient:
    """Speaks to the worker at one URL. Share the session; `open_session` makes a fitting one."""

    def __init__(self, url: str, session: aiohttp.ClientSession, timeouts: PhaseTimeouts) -> None:
        self.url = url
        self._session = session
        self._timeouts = timeouts

    async def card(self) -> WorkerCard:
        """Raises `WorkerUnavailable`, or `WorkerBroke` when the answer is no card of this protocol
        version.
        """
        body = await self._get("/v1/card", limit=MAX_EVENT_BYTES, seconds=self._timeouts.control_seconds)
        try:
            card = _CARD_DECODER.decode(body or b"")
        except msgspec.DecodeError as error:
            raise WorkerBroke(self.url, f"its card cannot be read: {error}") from error
        if card.protocol_version != PROTOCOL_VERSION:
            raise WorkerBroke(self.url, f"it speaks protocol {card.protocol_version}, not {PROTOCOL_VERSION}")
        return card

    async def file(self, name: str) -> bytes | None:
        """One of `protocol.TOKENIZER_FILES`, or None when the model has no such file."""
        seconds = self._timeouts.between_events_seconds
        return await self._get(f"/v1/files/{name}", limit=MAX_FILE_BYTES, seconds=seconds)

    async def statistics(self, *, seconds: float) -> CacheStatistics:
        """What its cache did and holds. Raises `WorkerError` for one that does not say so in time."""
        body = await self._get("/v1/statistics", limit=MAX_STATISTICS_BYTES, seconds=seconds)
        try:
            return _STATISTICS_DECODER.decode(body or b"")
        except msgspec.DecodeError as error:
            raise WorkerBroke(self.url, f"its statistics cannot be read: {error}") from error

    async def stats(self) -> WorkerStats:
        """What it counted since it started. Raises `WorkerError` for one that does not say so in time."""
        body = await self._get(
            "/v1/stats", limit=MAX_STATISTICS_BYTES, seconds=self._timeouts.control_seconds
        )
        try:
            return _STATS_DECODER.decode(body or b"")
        except msgspec.DecodeError as error:
            raise WorkerBroke(self.url, f"its counters cannot be read: {error}") from error

    async def is_ready(self) -> bool:
        try:
            answer = await self._get(
                "/health/readiness", limit=MAX_REFUSAL_BYTES, seconds=self._timeouts.control_seconds
            )
        except WorkerError:
            return False
        return answer is not None

    @asynccontextmanager
    async def generate(
        self, request: GenerateRequest, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[EventStream]:
        """Events of one generation. Leaving the block closes the connection at once, which cancels the rest.

        Raises `WorkerUnavailable` or `WorkerRefused` before the first event, `WorkerBroke` or
        `WorkerSilent` at any time. The iterator ends with the last choice or after `Failed`, and never
        before.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeouts.first_event_seconds
        response = await self._post(request, headers or {}, deadline)
        try:
            if response.status != HTTPStatus.OK:
                raise await self._refusal(response)
            yield EventStream(
                self.url,
                response.content,
                epoch=_told_epoch(response.headers.get(EPOCH_HEADER)),
                num_choices=request.n,
                deadline=deadline,
                between_events_seconds=self._timeouts.between_events_seconds,
            )
        finally:
            # Synchronous, and no return to the pool unless the body was read to its end: nothing is
            # awaited on a hang-up.
            response.close()

    async def _post(
        self, request: GenerateRequest, headers: Mapping[str, str], deadline: float
    ) -> aiohttp.ClientResponse:
        body = _ENCODER.encode(request)
        try:
            async with asyncio.timeout_at(deadline):
                return await self._session.post(
                    f"{self.url}/v1/generate",
                    data=body,
                    headers={"content-type": "application/json", **headers},
                )
        except aiohttp.ClientConnectorError as error:
            raise WorkerUnavailable(self.url, "the connection was refused") from error
        except aiohttp.ConnectionTimeoutError as error:
            raise WorkerUnavailable(self.url, "connecting took too long") from error
        except TimeoutError as error:
            raise WorkerSilent(self.url, "no answer in time") from error
        except aiohttp.ClientError as error:
            # No byte of an answer came, so nothing that was billed can be lost by calling it absent.
            raise WorkerUnavailable(self.url, "it went away before it answered") from error

    async def _refusal(self, response: aiohttp.ClientResponse) -> WorkerError:
        body = await self._read(response, limit=MAX_REFUSAL_BYTES)
        try:
            return WorkerRefused(self.url, _REFUSAL_DECODER.decode(body))
        except msgspec.DecodeError:
            status = response.status
            if status == HTTPStatus.SERVICE_UNAVAILABLE:
                return WorkerUnavailable(self.url, "it is not ready")
            return WorkerBroke(self.url, f"status {status} without a refusal")

    async def _get(self, path: str, *, limit: int, seconds: float) -> bytes | None:
        """None for 404."""
        try:
            async with (
                asyncio.timeout(seconds),
                self._session.get(f"{self.url}{path}") as response,
            ):
                if response.status == HTTPStatus.NOT_FOUND:
                    return None
                if response.status != HTTPStatus.OK:
                    raise WorkerUnavailable(self.url, f"{path} answered {response.status}")
                return await self._read(response, limit=limit)
        except TimeoutError as error:
            raise WorkerUnavailable(self.url, f"{path} took too long") from error
        except aiohttp.ClientError as error:
            raise WorkerUnavailable(self.url, f"{path} failed: {type(error).__name__}") from error

    async def _read(self, response: aiohttp.ClientResponse, *, limit: int) -> bytes:
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > limit:
                raise WorkerBroke(self.url, f"an answer is longer than {limit} bytes")
        return bytes(body)


def _told_epoch(written: str | None) -> str | None:
    """None for what no worker of ours would say."""
    is_sound = written is not None and 0 < len(written) <= MAX_EPOCH_CHARACTERS and written.isprintable()
    return written if is_sound else None


def open_session(timeouts: PhaseTimeouts) -> aiohttp.ClientSession:
    """A pool of connections for the worker hop. No total time-out: each phase has its own."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect_seconds),
        trust_env=False,
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
    )

"""One HTTP exchange with a client: its body in, its answer out, and noticing that it left.

Knows the ASGI messages. Does not know dialects, workers or money. A client
that leaves, or reads too slowly, is `ClientGone`; from then on nothing is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import Final

from starlette.types import Message, Receive, Send

from gateway.edge.errors import ApiError, BodyTooLarge, BodyTooSlow, UnsupportedMediaType

_BODY: Final = "body"


class ClientGone(Exception):
    """The client hung up, or let its answer wait for too long."""


class Answer:
    """The response of one exchange. States: open → begun → complete; nothing goes backwards."""

    def __init__(self, send: Send, *, stall_seconds: float) -> None:
        self._send = send
        self._stall_seconds = stall_seconds
        self.status: int | None = None
        self.complete = False

    @property
    def begun(self) -> bool:
        return self.status is not None

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        assert not self.begun, "an answer begins once"
        self.status = status
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._pass({"type": "http.response.start", "status": status, "headers": raw})

    async def send(self, chunk: bytes) -> None:
        await self._pass({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self, chunk: bytes = b"") -> None:
        # Before the send: once the last byte is handed over, a client that leaves has missed nothing.
        self.complete = True
        await self._pass({"type": "http.response.body", "body": chunk, "more_body": False})

    async def whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        await self.begin(status, {**headers, "content-length": str(len(body))})
        await self.end(body)

    async def _pass(self, message: Message) -> None:
        """Waits while the client reads slowly, but not for ever. Raises `ClientGone`."""
        try:
            async with asyncio.timeout(self._stall_seconds):
                await self._send(message)
        except TimeoutError as error:
            raise ClientGone("the client does not read its answer") from error


async def read_json_body(
    receive: Receive, headers: Mapping[str, str], *, max_bytes: int, timeout_seconds: float
) -> bytes:
    """The whole body. Raises `ApiError` for one that is of another type, too large or too slow, or
    `ClientGone`.

    A declared length over the limit is refused before a byte is read, an undeclared one as soon as it
    is passed.
    """
    _check_type(headers)
    declared = headers.get("content-length", "")
    if (
        declared.isascii()
        and declared.isdigit()
        and (len(declared) > len(str(max_bytes)) or int(declared) > max_bytes)
    ):
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(timeout_seconds):
            return await _read(receive, max_bytes)
    except TimeoutError:
        raise BodyTooSlow("The body did not arrive in time.", param=_BODY) from None


def _check_type(headers: Mapping[str, str]) -> None:
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise UnsupportedMediaType("The content type must be application/json.", param="content-type")
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise UnsupportedMediaType(
            "An encoded body is not accepted: send it as it is.", param="content-encoding"
        )


async def _read(receive: Receive, max_bytes: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("the client left while it sent its body")
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return bytes(body)


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than {max_bytes} bytes.", param=_BODY)


class Exchange:
    """Runs the work for one client and ends it early when there is a reason to: `interrupt` it, or the
    client leaves.

    Listening for the hang-up and working are siblings, so neither streaming nor waiting for a whole
    answer delays the other.
    """

    def __init__(self, receive: Receive, answer: Answer) -> None:
        self._receive = receive
        self._answer = answer
        self._working: asyncio.Task[None] | None = None
        self._reason: ClientGone | ApiError | None = None

    async def run(self, work: Coroutine[None, None, None]) -> None:
        """Returns or raises as the work does, or raises the reason of the interruption once the
        work has ended.
        """
        self._working = asyncio.create_task(work)
        listening = asyncio.create_task(self._listen())
        try:
            await self._working
        except asyncio.CancelledError:
            if self._reason is None:
                raise  # the server itself is cancelling us
            raise self._reason from None
        finally:
            listening.cancel()
            with suppress(asyncio.CancelledError):
                await listening

    def interrupt(self, reason: ClientGone | ApiError) -> None:
        """Ends the work at its next await. The first reason stands; a complete answer is left alone."""
        if self._working is None or self._working.done() or self._answer.complete or self._reason is not None:
            return
        self._reason = reason
        self._working.cancel()

    async def _listen(self) -> None:
        """The body has been read, so all that can still come is the end."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.interrupt(ClientGone("the client hung up"))

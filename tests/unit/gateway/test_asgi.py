"""One exchange: reading a body within limits, and ending work when its client leaves."""

import asyncio

import pytest

from gateway.asgi import Answer, ClientGone, Exchange, read_json_body
from gateway.drain import Drain
from gateway.edge.errors import ApiError, ServiceUnavailable

JSON = {"content-type": "application/json"}


class Client:
    """The other end of an ASGI connection: what it sends is scripted, what it gets is kept."""

    def __init__(self, *messages: dict) -> None:
        self._inbox: asyncio.Queue[dict] = asyncio.Queue()
        self.got: list[dict] = []
        self.received = 0
        self.reads = asyncio.Event()
        self.reads.set()
        for message in messages:
            self._inbox.put_nowait(message)

    def leave(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})

    async def receive(self) -> dict:
        self.received += 1
        return await self._inbox.get()

    async def send(self, message: dict) -> None:
        await self.reads.wait()
        self.got.append(message)


def part(body: bytes, *, more: bool = False) -> dict:
    return {"type": "http.request", "body": body, "more_body": more}


async def read(
    client: Client, headers: dict[str, str] = JSON, *, limit: int = 10, seconds: float = 10
) -> bytes:
    return await read_json_body(client.receive, headers, max_bytes=limit, timeout_seconds=seconds)


async def test_a_body_in_parts_is_put_together():
    assert await read(Client(part(b"12345", more=True), part(b"67890"))) == b"1234567890"


@pytest.mark.parametrize("length", ["11", "99999999999999999999"])
async def test_a_declared_length_over_the_limit_is_refused_unread(length):
    client = Client(part(b"12345678901"))
    with pytest.raises(ApiError) as caught:
        await read(client, JSON | {"content-length": length})
    assert caught.value.status == 413
    assert client.received == 0


async def test_an_undeclared_length_is_refused_as_soon_as_it_is_passed():
    client = Client(part(b"123456", more=True), part(b"123456", more=True), part(b"never read"))
    with pytest.raises(ApiError) as caught:
        await read(client)
    assert caught.value.status == 413
    assert client.received == 2


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({}, "content-type"),
        ({"content-type": "text/plain"}, "content-type"),
        ({"content-type": "application/x-www-form-urlencoded"}, "content-type"),
        (JSON | {"content-encoding": "gzip"}, "content-encoding"),
    ],
)
async def test_another_type_or_encoding_is_refused_unread(headers, param):
    client = Client(part(b"{}"))
    with pytest.raises(ApiError) as caught:
        await read(client, headers)
    assert (caught.value.status, caught.value.param) == (415, param)
    assert client.received == 0


async def test_a_charset_is_no_other_type():
    assert await read(Client(part(b"{}")), {"content-type": "Application/JSON; charset=utf-8"}) == b"{}"


async def test_a_body_that_does_not_come_is_not_waited_for():
    with pytest.raises(ApiError) as caught:
        await read(Client(part(b"{", more=True)), seconds=0.01)
    assert caught.value.status == 408


async def test_a_client_that_leaves_within_its_body_is_gone():
    with pytest.raises(ClientGone):
        await read(Client(part(b"{", more=True), {"type": "http.disconnect"}))


async def test_work_ends_at_once_when_the_client_leaves_and_its_cleanup_runs():
    client = Client()
    answer = Answer(client.send, stall_seconds=10)
    steps = []

    async def work() -> None:
        try:
            steps.append("begun")
            client.leave()
            await asyncio.Event().wait()
        finally:
            steps.append("cleaned up")

    with pytest.raises(ClientGone):
        await Exchange(client.receive, answer).run(work())
    assert steps == ["begun", "cleaned up"]


async def test_a_client_that_leaves_after_the_last_byte_interrupts_nothing():
    client = Client()
    answer = Answer(client.send, stall_seconds=10)

    async def work() -> None:
        await answer.whole(200, {}, b"done")
        client.leave()
        for _ in range(5):
            await asyncio.sleep(0)

    await Exchange(client.receive, answer).run(work())
    assert client.got[-1] == {"type": "http.response.body", "body": b"done", "more_body": False}


async def test_a_client_that_does_not_read_is_gone():
    client = Client()
    client.reads.clear()
    with pytest.raises(ClientGone):
        await Answer(client.send, stall_seconds=0.01).begin(200, {})


async def test_a_server_that_is_cancelled_cancels_the_work():
    client, cleaned = Client(), asyncio.Event()
    begun = asyncio.Event()

    async def work() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    running = asyncio.create_task(Exchange(client.receive, Answer(client.send, stall_seconds=10)).run(work()))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert cleaned.is_set()


async def test_draining_waits_for_short_work_and_interrupts_long_work():
    drain, client = Drain(), Client()
    let_go = asyncio.Event()
    ended: dict[str, str] = {}

    async def tracked(name: str, wait_for: asyncio.Event) -> None:
        async def work() -> None:
            await wait_for.wait()

        exchange = Exchange(client.receive, Answer(client.send, stall_seconds=10))
        try:
            with drain.tracking(exchange):
                await exchange.run(work())
        except ServiceUnavailable as error:
            ended[name] = error.code or ""
        else:
            ended[name] = "done"

    short = asyncio.create_task(tracked("short", let_go))
    long = asyncio.create_task(tracked("long", asyncio.Event()))
    await asyncio.sleep(0)
    assert drain.num_running == 2
    draining = asyncio.create_task(drain.drain(0.05))
    let_go.set()
    await asyncio.gather(short, long, draining)
    assert ended == {"short": "done", "long": "shutting_down"}
    assert drain.num_running == 0
    with (
        pytest.raises(ServiceUnavailable),
        drain.tracking(Exchange(client.receive, Answer(client.send, stall_seconds=1))),
    ):
        pytest.fail("no new work is taken while draining")

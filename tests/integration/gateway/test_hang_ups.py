"""A client that leaves stops the worker at once, and its request has one usage event with what was done."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from model_worker.protocol import Finished, GenerateRequest, Prefilled, Started, TierTokens, Token
from tests.integration.gateway.conftest import Stack
from tests.integration.gateway.scripted_worker import MODEL, Step

PREFILLED = 5
POSSIBLE = {"queued": (), "started": (), "prefilling": (PREFILLED,), "generating": (PREFILLED,)}


def request(stack: Stack, *, stream: bool, n: int = 1) -> bytes:
    messages = [{"role": "user", "content": "hi"}]
    body = json.dumps({"model": MODEL, "messages": messages, "stream": stream, "n": n}).encode()
    lines = (
        "POST /v1/chat/completions HTTP/1.1",
        "host: x",
        "content-type: application/json",
        f"authorization: Bearer {stack.key}",
        f"content-length: {len(body)}",
        "",
        "",
    )
    return "\r\n".join(lines).encode() + body


def script_until(stack: Stack, phase: str):
    """Generates up to the phase, says that it is reached, and waits there for ever."""

    async def script(wanted: GenerateRequest) -> AsyncIterator[Step]:
        exchange = stack.worker.exchanges[-1]
        if phase != "queued":
            yield Started(cached=TierTokens(device=0), uncached=len(wanted.token_ids))
        if phase in ("prefilling", "generating"):
            yield Prefilled(computed_tokens=PREFILLED)
        if phase == "generating":
            yield Token(token_ids=[1, 2], text="Hel")
            yield Token(token_ids=[3], text="lo")
        exchange.reached.set()
        await asyncio.Event().wait()

    return script


async def hang_up_when(stack: Stack, phase: str, *, stream: bool) -> None:
    """Sends a request, leaves when the phase is reached, and waits until the worker knows."""
    stack.worker.script = script_until(stack, phase)
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    writer.write(request(stack, stream=stream))
    exchange = await stack.worker.next_exchange()
    await asyncio.wait_for(exchange.reached.wait(), 5)
    if stream and phase == "generating":
        await asyncio.wait_for(reader.readuntil(b'"content":"lo"'), 5)
    writer.transport.abort()
    await asyncio.wait_for(exchange.cancelled.wait(), 1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["queued", "started", "prefilling", "generating"])
async def test_a_hang_up_stops_the_worker_and_is_metered_once(stack, phase, stream):
    await hang_up_when(stack, phase, stream=stream)
    (event,) = await stack.settled(1)
    prompt_tokens = len(stack.worker.exchanges[0].request.token_ids)
    assert event.kind == "aborted"
    assert event.read_tokens == 0
    if stream and phase == "generating":
        # Seen by the client, so seen by the gateway before it.
        assert (event.uncached_tokens, event.output_tokens, event.delivered_tokens) == (prompt_tokens, 3, 3)
    else:
        # The last events may still have been on their way; what came is counted, and nothing else.
        assert event.uncached_tokens in (
            0,
            *POSSIBLE[phase],
            *([prompt_tokens] if phase == "generating" else []),
        )
        assert event.output_tokens in ((0, 2, 3) if phase == "generating" else (0,))
        assert event.delivered_tokens == 0


async def test_many_hang_ups_leave_every_counter_at_zero(stack):
    for number in range(20):
        await hang_up_when(stack, ("queued", "generating")[number % 2], stream=number % 4 < 2)
    assert len(await stack.settled(20)) == 20
    assert stack.in_flight() == 0


async def test_a_client_that_leaves_does_not_disturb_another(stack):
    stack.worker.script = script_until(stack, "generating")
    _, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    writer.write(request(stack, stream=True))
    leaving = await stack.worker.next_exchange()
    await asyncio.wait_for(leaving.reached.wait(), 5)
    stack.worker.script = stack.worker.answer
    async with stack.client() as client:
        staying = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "stay"}], stream=True
        )
        writer.transport.abort()
        await asyncio.wait_for(leaving.cancelled.wait(), 1)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in staying])
    assert text == "Hello wörld"
    assert sorted(event.kind for event in await stack.settled(2)) == ["aborted", "final"]


async def test_a_client_that_leaves_within_its_body_costs_nothing(stack):
    _, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    writer.write(request(stack, stream=False)[:-10])
    await writer.drain()
    writer.transport.abort()
    async with stack.client() as client:
        await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
    assert len(await stack.usage_events()) == 1
    assert len(stack.worker.exchanges) == 1


async def test_a_client_that_closes_after_its_answer_is_no_hang_up(stack):
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    writer.write(request(stack, stream=True))
    await asyncio.wait_for(reader.readuntil(b"[DONE]"), 5)
    writer.transport.abort()
    (event,) = await stack.settled(1)
    assert event.kind == "final"
    assert not stack.worker.exchanges[0].cancelled.is_set()


async def test_a_hang_up_when_one_choice_has_ended_is_metered_with_what_both_have(stack):
    async def script(wanted: GenerateRequest) -> AsyncIterator[Step]:
        yield Started(cached=TierTokens(device=0), uncached=len(wanted.token_ids))
        yield Token(token_ids=[1, 2], text="Hel")
        yield Finished(reason="stop", text="", output_tokens=2)
        yield Token(token_ids=[3, 4, 5], text="lo", choice=1)
        await asyncio.Event().wait()

    stack.worker.script = script
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    writer.write(request(stack, stream=True, n=2))
    exchange = await stack.worker.next_exchange()
    await asyncio.wait_for(reader.readuntil(b'"content":"lo"'), 5)
    writer.transport.abort()
    await asyncio.wait_for(exchange.cancelled.wait(), 1)
    (event,) = await stack.settled(1)
    assert (event.kind, event.output_tokens, event.delivered_tokens) == ("aborted", 5, 5)
    assert event.uncached_tokens == len(exchange.request.token_ids)

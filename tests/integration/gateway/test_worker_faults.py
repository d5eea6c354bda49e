"""A worker that is absent, refuses, breaks off, lies or falls silent: what the client and the
ledger are told.
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import msgspec
import openai
import pytest

from model_worker.protocol import (
    Failed,
    Finished,
    GenerateRequest,
    Prefilled,
    Refusal,
    Started,
    TierTokens,
    Token,
)
from tests.integration.gateway.conftest import Stack
from tests.integration.gateway.scripted_worker import MODEL, BreakOff, Step

pytestmark = pytest.mark.asyncio(loop_scope="module")
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"


def absent_url() -> str:
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


async def post(stack: Stack, *, stream: bool = False):
    async with stack.http() as http:
        return await http.post(PATH, json={**BODY, "stream": stream}, timeout=10)


def script_of(stack: Stack, *steps: Step | type[BaseException] | str):
    """Plays steps in order: events, raw bytes, `BreakOff`, or "for ever" for a worker that falls silent."""

    async def script(request: GenerateRequest) -> AsyncIterator[Step]:
        for step in steps:
            if step is BreakOff:
                raise BreakOff
            if step == "for ever":
                await asyncio.Event().wait()
            yield stack.worker.started(request) if step == "started" else step

    return script


@pytest.mark.parametrize("stream", [False, True])
async def test_no_worker_is_503_at_once(start_stack, stream):
    async with start_stack(worker_url=absent_url()) as stack:
        answer = await asyncio.wait_for(post(stack, stream=stream), 1)
        assert answer.status_code == 503
        assert answer.json()["error"]["type"] == "server_error"
        assert answer.json()["error"]["code"] == "worker_unavailable"
        async with stack.http() as http:
            assert (await http.get("/v1/models")).status_code == 503
            assert (await http.get("/health/liveness")).status_code == 200
            readiness = await http.get("/health/readiness")
            assert readiness.status_code == 503
            assert readiness.json()["workers"][0]["ready"] is False
            assert readiness.json()["database"] == "reachable"
        assert await stack.usage_events() == []


async def test_a_worker_that_went_away_is_503_at_once_and_a_free_request(start_stack):
    async with start_stack() as stack:
        assert (await post(stack)).status_code == 200
        stack.gateway.roster.workers[0].client.url = absent_url()
        answer = await asyncio.wait_for(post(stack), 1)
        assert answer.status_code == 503
        _, event = await stack.usage_events()
        counts = (event.uncached_tokens, event.read_tokens, event.output_tokens)
        assert (event.kind, counts) == ("aborted", (0, 0, 0))


async def test_the_official_client_sees_an_internal_server_error(start_stack):
    async with start_stack(worker_url=absent_url()) as stack, stack.client() as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(**BODY)
        assert caught.value.status_code == 503


@pytest.mark.parametrize(
    ("status", "refusal", "told", "code"),
    [
        (503, Refusal(code="queue_full", message="no"), 503, "queue_full"),
        (503, Refusal(code="draining", message="no"), 503, "draining"),
        (400, Refusal(code="context_length_exceeded", message="no"), 400, "context_length_exceeded"),
        (400, Refusal(code="invalid_request", message="no"), 400, None),
        (503, None, 503, "worker_unavailable"),
        (500, None, 502, "worker_failed"),
        (200, None, 502, "worker_failed"),
    ],
)
async def test_a_refusal_costs_nothing_and_is_told_for_what_it_is(shared_stack, status, refusal, told, code):
    shared_stack.worker.refusal = (status, msgspec.json.encode(refusal) if refusal else b"<html>")
    answer = await post(shared_stack)
    assert (answer.status_code, answer.json()["error"]["code"]) == (told, code)
    (event,) = await shared_stack.usage_events()
    assert (event.kind, event.uncached_tokens, event.output_tokens) == ("aborted", 0, 0)


async def test_a_full_queue_says_when_to_come_back(shared_stack):
    shared_stack.worker.refusal = (503, msgspec.json.encode(Refusal(code="queue_full", message="no")))
    assert (await post(shared_stack)).headers["retry-after"] == "1"


BROKEN = [
    pytest.param((BreakOff,), id="before the start"),
    pytest.param(("started", BreakOff), id="after the start"),
    pytest.param(("started", Token(token_ids=[1], text="a"), BreakOff), id="after a token"),
    pytest.param(("started", Token(token_ids=[1], text="a")), id="an early end"),
    pytest.param(("started", b"garbage\n"), id="garbage"),
    pytest.param(("started", b'{"type":"token"}\n'), id="half an event"),
    pytest.param(("started", b"\n"), id="an empty line"),
    pytest.param(("started", b"x" * (2 * 1024 * 1024)), id="an endless line"),
    pytest.param(("started", "started"), id="two starts"),
    pytest.param((Started(cached=TierTokens(device=0), uncached=1),), id="a prompt of another length"),
    pytest.param((Token(token_ids=[1], text="a"),), id="a token before the start"),
    pytest.param(("started", Prefilled(computed_tokens=10**6)), id="more prefill than prompt"),
]


@pytest.mark.parametrize("steps", BROKEN)
async def test_a_broken_generation_is_502_for_a_whole_answer(shared_stack, steps):
    shared_stack.worker.script = script_of(shared_stack, *steps)
    answer = await post(shared_stack)
    assert answer.status_code == 502
    assert answer.json()["error"] == {
        "message": "The model worker broke off its answer.",
        "type": "server_error",
        "param": None,
        "code": "worker_failed",
    }
    (event,) = await shared_stack.usage_events()
    assert (event.kind, event.delivered_tokens) == ("aborted", 0)


@pytest.mark.parametrize("steps", BROKEN)
async def test_a_broken_generation_never_ends_a_stream_with_done(shared_stack, steps):
    shared_stack.worker.script = script_of(shared_stack, *steps)
    answer = await post(shared_stack, stream=True)
    assert "[DONE]" not in answer.text
    assert len(await shared_stack.usage_events()) == 1
    if answer.status_code == 200:
        last = answer.text.removesuffix("\n\n").rpartition("\n\n")[2]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "worker_failed"
    else:
        assert answer.status_code == 502


async def test_the_official_client_raises_when_a_stream_breaks(shared_stack):
    shared_stack.worker.script = script_of(shared_stack, "started", Token(token_ids=[1], text="a"), BreakOff)
    async with shared_stack.client() as client:
        stream = await client.chat.completions.create(**BODY, stream=True)
        with pytest.raises(openai.APIError):
            [chunk async for chunk in stream]
    (event,) = await shared_stack.usage_events()
    assert (event.kind, event.output_tokens, event.delivered_tokens) == ("aborted", 1, 1)


@pytest.mark.parametrize(
    ("code", "status"), [("engine_failed", 502), ("out_of_blocks", 503), ("shutting_down", 503)]
)
async def test_a_worker_that_gives_up_is_told_by_its_code(shared_stack, code, status):
    shared_stack.worker.script = script_of(shared_stack, "started", Failed(code=code, message="inner detail"))
    answer = await post(shared_stack)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert "inner detail" not in answer.text
    (event,) = await shared_stack.usage_events()
    assert event.finish_reason == code


async def test_a_worker_that_never_begins_is_given_up(start_stack):
    async with start_stack(first_event_timeout_seconds=0.05) as stack:
        stack.worker.script = script_of(stack, "for ever")
        answer = await post(stack)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "worker_timeout")
        await asyncio.wait_for(stack.worker.exchanges[0].cancelled.wait(), 5)


async def test_a_worker_that_falls_silent_is_given_up(start_stack):
    async with start_stack(between_events_timeout_seconds=0.2) as stack:
        stack.worker.script = script_of(stack, "started", Token(token_ids=[1], text="a"), "for ever")
        answer = await post(stack, stream=True)
        assert '"code":"worker_timeout"' in answer.text
        assert "[DONE]" not in answer.text
        await asyncio.wait_for(stack.worker.exchanges[0].cancelled.wait(), 5)


async def test_a_worker_that_does_not_close_its_stream_delays_nobody(shared_stack):
    finished = Finished(reason="stop", text="", output_tokens=0)
    shared_stack.worker.script = script_of(shared_stack, "started", finished, "for ever")
    answer = await asyncio.wait_for(post(shared_stack, stream=True), 5)
    assert answer.text.endswith("data: [DONE]\n\n")
    (event,) = await shared_stack.settled(1)
    assert event.kind == "final"


async def test_connections_to_the_worker_are_used_again(shared_stack):
    for _ in range(6):
        assert (await post(shared_stack, stream=True)).status_code == 200
    ports = {exchange.gateway_port for exchange in shared_stack.worker.exchanges}
    assert len(ports) <= 2, "one for generations, and perhaps the one that asks for the card"


async def test_a_worker_with_another_model_is_noticed_and_its_files_are_used(start_stack):
    async with start_stack(card_poll_seconds=0.01) as stack:
        stack.worker.files["chat_template.jinja"] = b"{{ messages[0].content }}"
        card = msgspec.structs.replace(stack.worker.card, model="other", fingerprint="0f" * 16, epoch="2")
        stack.worker.card = card
        async with stack.client() as client:
            answer = await client.chat.completions.create(**BODY | {"model": "other"})
        assert answer.model == "other"
        assert answer.usage.prompt_tokens == len("hi")


async def test_unusable_tokenizer_files_are_a_reason_not_to_be_ready(start_stack):
    async with start_stack(card_poll_seconds=0.01) as stack:
        del stack.worker.files["tokenizer.json"]
        stack.worker.card = msgspec.structs.replace(stack.worker.card, fingerprint="0f" * 16)
        await stack.gateway.roster.refresh()
        (worker,) = stack.gateway.roster.workers
        assert worker.away_because is not None
        assert "tokenizer.json" in worker.away_because


async def test_requests_for_an_unknown_model_ask_the_worker_once_together(start_stack):
    async with start_stack(card_poll_seconds=60) as stack:
        await post(stack)
        asked = stack.worker.cards_served
        async with stack.http() as http:
            answers = await asyncio.gather(
                *(http.post(PATH, json=BODY | {"model": f"unknown-{number}"}) for number in range(20))
            )
        assert {answer.status_code for answer in answers} == {404}
        assert stack.worker.cards_served - asked < 20

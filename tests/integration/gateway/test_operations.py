"""What an operator relies on: readiness, quick revocation, and an orderly end."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import openai
import pytest
import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing import instants
from billing.accounts import list_keys, revoke_key
from gateway.app import build_app
from model_worker.protocol import GenerateRequest, Token
from tests.integration.gateway.scripted_worker import MODEL, Step

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


async def test_readiness_is_the_workers_and_the_databases(stack):
    async with stack.http() as http:
        await stack.gateway.roster.refresh()
        ready = await http.get("/health/readiness")
        assert ready.status_code == 200
        assert ready.json()["workers"] == [
            {"worker": "worker-0", "ready": True, "model": MODEL, "away_because": None}
        ]
        stack.worker.is_ready = False
        assert (await http.get("/health/readiness")).status_code == 503
        assert (await http.get("/health/liveness")).json() == {"status": "alive"}


async def test_a_revoked_key_stops_working_within_a_second(start_stack):
    async with start_stack(key_cache_seconds=1.0) as stack, stack.client() as client:
        await client.chat.completions.create(**BODY)
        (key,) = list_keys(stack.gateway.database, tenant_id=stack.tenant.id)
        revoke_key(stack.gateway.database, key_id=key.id, now=instants.now())
        loop = asyncio.get_running_loop()
        deadline = loop.time() + 1.0
        while loop.time() < deadline:
            try:
                await client.models.list()
            except openai.AuthenticationError:
                break
            await asyncio.sleep(0.02)
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(**BODY)


async def test_a_stream_that_outlasts_the_grace_period_ends_with_an_error_and_is_metered(stack):
    async def endless(request: GenerateRequest) -> AsyncIterator[Step]:
        yield stack.worker.started(request)
        yield Token(token_ids=[1], text="a")
        await asyncio.Event().wait()

    stack.worker.script = endless
    async with stack.http() as http:
        async with http.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as streaming:
            pieces = streaming.aiter_text()
            text = ""
            while '"content":"a"' not in text:
                text += await anext(pieces)
            await stack.gateway.drain.drain(0)
            text += "".join([piece async for piece in pieces])
        assert '"code":"shutting_down"' in text
        assert "[DONE]" not in text
        refused = await http.post("/v1/chat/completions", json=BODY)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "5"
        assert (await http.get("/health/readiness")).status_code == 503
    (event,) = await stack.usage_events()
    assert (event.kind, event.output_tokens, event.delivered_tokens) == ("aborted", 1, 1)


async def test_fifty_requests_at_once_are_fifty_events(stack):
    async with stack.http() as http:
        answers = await asyncio.gather(*(http.post("/v1/chat/completions", json=BODY) for _ in range(50)))
    assert {answer.status_code for answer in answers} == {200}
    events = await stack.usage_events()
    assert len({event.request_id for event in events}) == 50
    assert {event.kind for event in events} == {"final"}


@pytest.mark.parametrize("path", ["/v1/models", "/v1/usage", "/nothing", "/health/liveness", "/metrics"])
async def test_every_answer_has_an_id_of_its_own(stack, path):
    async with stack.http() as http:
        ids = {(await http.get(path)).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3


async def test_our_own_mistake_is_told_and_logged_under_one_id(stack):
    async def fail(_: Request) -> Response:
        raise KeyError("a client's words")

    app = build_app(stack.gateway, extra_routes=[Route("/mistake", fail)])
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    with structlog.testing.capture_logs() as lines:
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            answer = await http.get("/mistake")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "words" not in answer.text
    [line] = [line for line in lines if line["event"] == "unexpected"]
    assert (line["request_id"], line["route"]) == (answer.headers["x-request-id"], "/mistake")

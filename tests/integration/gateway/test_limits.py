"""Budgets and limits as the official client meets them: what it is told, and what it does then."""

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest

from billing import instants
from billing.budgets import Period, Scope, list_budgets, set_budget
from billing.limits import Limits, set_limits
from model_worker.protocol import GenerateRequest
from tests.integration.gateway.conftest import Stack, eventually
from tests.integration.gateway.scripted_worker import MODEL, Step

MESSAGES = [{"role": "user", "content": "Say hello. " * 10}]
DOLLAR = 10**12
UNITS_PER_MINUTE = 60


def limit(stack: Stack, **limits: int) -> None:
    set_limits(
        stack.gateway.database,
        Limits(**limits),
        tenant_id=stack.tenant.id,
        api_key_id=None,
        now=instants.now(),
    )


def budget(stack: Stack, limit_pusd: int) -> None:
    scope = Scope(tenant_id=stack.tenant.id)
    set_budget(stack.gateway.database, scope, period=Period.MONTH, limit_pusd=limit_pusd, now=instants.now())


async def ask(client: openai.AsyncOpenAI, **fields: object):
    return await client.chat.completions.with_raw_response.create(
        model=MODEL, messages=MESSAGES, **{"max_tokens": 8, **fields}
    )


class Requests:
    """Counts what a client sends."""

    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self.sent_at: list[int] = []
        client._client.event_hooks["request"].append(self._note)

    async def _note(self, _: object) -> None:
        self.sent_at.append(instants.now())


async def test_over_budget_is_told_once_and_not_retried(stack):
    budget(stack, 0)
    async with stack.client() as client:
        retrying = client.with_options(max_retries=2)
        requests = Requests(client)
        with pytest.raises(openai.RateLimitError) as refused:
            await ask(retrying)
    assert len(requests.sent_at) == 1
    assert (refused.value.code, refused.value.type) == ("insufficient_quota", "insufficient_quota")
    assert refused.value.response.headers["x-should-retry"] == "false"
    assert "tenant's monthly budget" in refused.value.message
    assert await stack.usage_events() == []


async def test_a_rate_limit_is_retried_after_the_time_told(stack):
    """60 a minute is one a second: the 61st of a burst is let in a second after the first, no sooner."""
    limit(stack, requests_per_minute=UNITS_PER_MINUTE)
    async with stack.client() as client:
        await asyncio.gather(*(ask(client) for _ in range(UNITS_PER_MINUTE)))
        with pytest.raises(openai.RateLimitError) as refused:
            await ask(client)
        headers = refused.value.response.headers
        assert refused.value.code == "rate_limit_exceeded"
        assert headers["retry-after"] == "1"
        assert 0 < int(headers["retry-after-ms"]) <= 1_000
        assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == (
            "60",
            "0",
        )
        requests = Requests(client)
        answered = await ask(client.with_options(max_retries=1))
    assert answered.status_code == 200
    assert len(requests.sent_at) == 2
    assert len(await stack.settled(UNITS_PER_MINUTE + 1)) == UNITS_PER_MINUTE + 1


async def test_an_answer_says_how_the_limits_stand(stack):
    limit(stack, requests_per_minute=600, tokens_per_minute=6_000)
    async with stack.client() as client:
        answer = await ask(client)
        streamed = await ask(client, stream=True)
        async for _ in streamed.parse():
            pass
    assert answer.headers["x-ratelimit-limit-requests"] == "600"
    assert answer.headers["x-ratelimit-remaining-requests"] == "599"
    assert answer.headers["x-ratelimit-reset-requests"] == "100ms"
    assert answer.headers["x-ratelimit-limit-tokens"] == "6000"
    prompt_tokens = answer.parse().usage.prompt_tokens
    assert answer.headers["x-ratelimit-remaining-tokens"] == str(6_000 - prompt_tokens - 8)
    assert int(streamed.headers["x-ratelimit-remaining-tokens"]) < 6_000


async def test_without_limits_nothing_is_said_of_them(stack):
    async with stack.client() as client:
        answer = await ask(client)
    assert not any(name.startswith("x-ratelimit") for name in answer.headers)


async def test_a_request_larger_than_its_whole_limit_is_not_retried(stack):
    limit(stack, tokens_per_minute=20)
    async with stack.client() as client:
        requests = Requests(client)
        with pytest.raises(openai.RateLimitError, match="larger than the limit of 20 tokens per minute"):
            await ask(client.with_options(max_retries=2))
    assert len(requests.sent_at) == 1


async def test_a_hang_up_makes_room_for_the_next(stack):
    """Among concurrent requests, and of money."""
    limit(stack, concurrent_requests=1)
    budget(stack, DOLLAR)

    async def wait_for_ever(wanted: GenerateRequest) -> AsyncIterator[Step]:
        stack.worker.exchanges[-1].reached.set()
        await asyncio.Event().wait()
        yield stack.worker.started(wanted)

    stack.worker.script = wait_for_ever
    async with stack.client() as client:
        first = asyncio.create_task(ask(client))
        exchange = await stack.worker.next_exchange()
        await asyncio.wait_for(exchange.reached.wait(), 5)
        with pytest.raises(openai.RateLimitError, match="1 requests at a time") as refused:
            await ask(client)
        assert "retry-after" not in refused.value.response.headers
        assert reserved(stack) > 0
        await hung_up(first)
        await stack.settled(1)
        assert reserved(stack) == 0
        stack.worker.script = stack.worker.answer
        assert (await ask(client)).status_code == 200


async def test_what_the_cache_holds_is_not_reserved_for_long(stack):
    """As if nothing were cached at first; with the next admission by what the worker has told."""
    budget(stack, DOLLAR)
    async with stack.client() as client:
        await ask(client)
        await stack.settled(1)
        stack.worker.script = script_that_stays_open(stack)
        opened = [asyncio.create_task(ask(client))]
        await eventually(lambda: sum(one.reached.is_set() for one in stack.worker.exchanges) == 1)
        alone = reserved(stack)
        await eventually(lambda: len(stack.gateway.meter._narrowed) == 1)
        opened.append(asyncio.create_task(ask(client)))
        await eventually(lambda: sum(one.reached.is_set() for one in stack.worker.exchanges) == 2)
        assert reserved(stack) < 2 * alone
        await hung_up(*opened)
        await stack.settled(3)
    assert reserved(stack) == 0


async def hung_up(*asking: asyncio.Task) -> None:
    for one in asking:
        one.cancel()
    await asyncio.gather(*asking, return_exceptions=True)


def script_that_stays_open(stack: Stack):
    async def script(wanted: GenerateRequest) -> AsyncIterator[Step]:
        exchange = next(one for one in stack.worker.exchanges if one.request == wanted)
        yield stack.worker.started(wanted)
        exchange.reached.set()
        await asyncio.Event().wait()

    return script


def reserved(stack: Stack) -> int:
    (one,) = list_budgets(stack.gateway.database, tenant_id=stack.tenant.id, now=instants.now())
    return one.reserved_pusd

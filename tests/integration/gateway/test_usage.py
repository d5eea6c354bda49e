"""A tenant's own usage over HTTP: what its requests left in the ledger, and nobody else's."""

from __future__ import annotations

import pytest

from tests.integration.gateway.conftest import Stack
from tests.integration.gateway.scripted_worker import MODEL


async def ask(stack: Stack, key: str | None = None) -> None:
    async with stack.client(key) as client:
        await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Say hello."}]
        )


async def test_usage_is_what_the_events_add_up_to(stack):
    await ask(stack)
    await ask(stack)
    events = await stack.usage_events()
    async with stack.http() as http:
        usage = (await http.get("/v1/usage")).json()
    assert usage["requests"] == len(events) == 2
    assert usage["input_uncached_tokens"] == sum(event.uncached_tokens for event in events)
    assert usage["input_cached_tokens"] == sum(event.read_tokens for event in events) > 0
    assert usage["output_tokens"] == sum(event.output_tokens for event in events)
    assert usage["input_tokens"] == usage["input_uncached_tokens"] + usage["input_cached_tokens"]
    assert usage["saved_pusd"] == usage["amount_without_cache_pusd"] - usage["amount_pusd"] > 0
    assert usage["amount"].startswith("0.0")


async def test_a_tenant_sees_its_own_usage_alone(stack):
    key = stack.new_key("somebody else")
    await ask(stack)
    async with stack.http() as http:
        other = (await http.get("/v1/usage", headers={"authorization": f"Bearer {key}"})).json()
        own = (await http.get("/v1/usage")).json()
    assert other["requests"] == other["amount_pusd"] == 0
    assert own["requests"] == 1


async def test_a_period_is_start_included_and_end_excluded(stack):
    await ask(stack)
    [event] = await stack.usage_events()
    second = event.admitted_at_us // 1_000_000
    async with stack.http() as http:
        counted = [
            (await http.get("/v1/usage", params={"start_time": start, "end_time": end})).json()["requests"]
            for start, end in [(second, second + 1), (second - 1, second), (second + 1, second + 2)]
        ]
    assert counted == [1, 0, 0]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"start_time": "yesterday"}, "start_time"),
        ({"start_time": "-1"}, "start_time"),
        ({"end_time": "1e9"}, "end_time"),
        ({"end_time": "9" * 4000}, "end_time"),
        ({"start_time": "20", "end_time": "10"}, "end_time"),
    ],
)
async def test_a_bad_period_is_refused_by_name(stack, query, param):
    async with stack.http() as http:
        answer = await http.get("/v1/usage", params=query)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_usage_needs_a_key(stack):
    async with stack.http() as http:
        answer = await http.get("/v1/usage", headers={"authorization": "Bearer hs-none"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")

"""A tenant's own usage over HTTP: what its requests left in the ledger, and nobody else's."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import update

from billing import schema
from billing.accounts import list_keys
from billing.ids import new_request_id
from billing.instants import Microseconds
from billing.usage import Admission, TokenClass, TokenCounts, UsageEvent, UsageKind
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


async def usage(stack: Stack, **query) -> dict:
    async with stack.http() as http:
        answer = await http.get("/v1/usage", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_every_token_class_is_told_also_those_without_tokens(stack):
    await ask(stack)
    body = await usage(stack)
    classes = body["token_classes"]
    assert list(classes) == [token_class.value for token_class in TokenClass]
    assert classes["read_host"] == {"quantity": 0, "amount": "0.00", "amount_pusd": 0}
    assert classes["input"]["quantity"] == body["input_uncached_tokens"] > 0
    assert sum(figures["amount_pusd"] for figures in classes.values()) == body["amount_pusd"]
    assert body["list_amount_pusd"] == body["amount_pusd"] + body["discount_pusd"]
    assert body["statements"] == "/v1/statements"


async def test_groups_add_up_to_the_whole(stack):
    await asyncio.to_thread(settle_days, stack)
    [key] = list_keys(stack.gateway.database, tenant_id=stack.tenant.id)
    for zone, day_labels in (
        ("UTC", ["2026-03-28", "2026-03-29"]),
        ("Asia/Kathmandu", ["2026-03-28", "2026-03-29", "2026-03-30"]),
    ):
        query = {"start_time": FIRST, "end_time": FIRST + 3 * 86_400, "time_zone": zone}
        body = await usage(stack, **query, group_by=["api_key", "model", "day"])
        assert body["time_zone"] == zone
        assert body["requests"] == 48
        groups = body["groups"]
        assert sorted({group["day"] for group in groups}) == day_labels
        assert {group["model"] for group in groups} == {"odd", "even"}
        assert {group["api_key_id"] for group in groups} == {str(key.id)}
        assert {group["api_key"] for group in groups} == {f"test ({key.prefix}…)"}
        for field in ("requests", "input_tokens", "output_tokens", "amount_pusd", "saved_pusd"):
            assert sum(group[field] for group in groups) == body[field]


async def test_groups_beyond_the_limit_are_one_other_row(stack, monkeypatch):
    monkeypatch.setattr("gateway.usage.MAX_GROUPS", 5)
    await asyncio.to_thread(settle_days, stack)
    query = {"start_time": FIRST, "end_time": FIRST + 3 * 86_400, "group_by[]": ["hour", "project"]}
    body = await usage(stack, **query)
    assert len(body["groups"]) == 6
    assert body["groups"][0]["project"] is None
    assert body["groups"][-1]["hour"] == body["groups"][-1]["project"] == "other"
    assert sum(group["amount_pusd"] for group in body["groups"]) == body["amount_pusd"] > 0


async def test_the_day_so_far_is_that_of_the_tenants_zone(stack):
    with stack.gateway.database.write() as connection:
        connection.execute(update(schema.tenants).values(time_zone="Pacific/Chatham"))
    body = await usage(stack)
    assert body["time_zone"] == "Pacific/Chatham"
    start = datetime.fromtimestamp(body["start_time"], ZoneInfo("Pacific/Chatham"))
    assert (start.hour, start.minute) == (0, 0)
    assert body["end_time"] - body["start_time"] <= 25 * 3_600


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"time_zone": "Mars/Olympus"}, "time_zone"),
        ({"group_by": "colour"}, "group_by"),
        ({"group_by": ["day", "hour"]}, "group_by"),
        ({"group_by": "day", "start_time": "0"}, "start_time"),
        ({"group_by": "hour", "start_time": "1772323200", "end_time": "1782323200"}, "start_time"),
        ({"tenant": "other"}, "tenant"),
    ],
)
async def test_a_bad_question_is_refused_by_name(stack, query, param):
    async with stack.http() as http:
        answer = await http.get("/v1/usage", params=query)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


FIRST = int(datetime(2026, 3, 28, tzinfo=UTC).timestamp())


def settle_days(stack: Stack) -> None:
    """A request in each of 48 hours, by turns for two models."""
    [key] = list_keys(stack.gateway.database, tenant_id=stack.tenant.id)
    for hour in range(48):
        admission = Admission(
            request_id=new_request_id(),
            tenant_id=key.tenant_id,
            api_key_id=key.id,
            model=("even", "odd")[hour % 2],
            admitted_at=Microseconds((FIRST + hour * 3_600 + 61) * 1_000_000),
        )
        stack.gateway.meter.settle(
            UsageEvent(
                admission=admission,
                kind=UsageKind.FINAL,
                counts=TokenCounts(uncached=10 + hour, read=hour, output=1),
                finished_at=admission.admitted_at,
            )
        )
    stack.gateway.meter.flush()

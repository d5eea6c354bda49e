"""Everybody's usage and costs, read by OpenAI's own admin client from a real gateway."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from uuid import uuid4

import httpx
import httpx2
import openai
import pytest
import pytest_asyncio

from billing import instants
from billing.accounts import Role, create_key, create_tenant, list_keys
from billing.ids import new_request_id
from billing.instants import Microseconds
from billing.usage import Admission, TokenCounts, UsageEvent, UsageKind
from gateway import organization
from gateway.auth import key_hasher
from tests.integration.gateway.conftest import Stack, StartStack

FIRST_DAY = datetime(2026, 3, 27, tzinfo=UTC)
LAST_DAY = datetime(2026, 4, 6, tzinfo=UTC)
START, END = int(FIRST_DAY.timestamp()), int(LAST_DAY.timestamp())
USAGE, COSTS = "/v1/organization/usage/completions", "/v1/organization/costs"
MODELS = ("small", "large", "huge")


@dataclass(frozen=True, kw_only=True)
class Books:
    """A gateway with ten days of two tenants' usage, and an admin's key."""

    stack: Stack
    admin_key: str
    events: list[UsageEvent]

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.stack.address}/v1",
            admin_api_key=self.admin_key,
            max_retries=0,
            http_client=httpx2.AsyncClient(verify=False),
            _strict_response_validation=True,
        )

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.stack.address,
            headers={"authorization": f"Bearer {self.admin_key}"},
            verify=False,
        )

    async def get(self, path: str, query) -> dict:
        async with self.http() as http:
            answer = await http.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def prompt_tokens(self) -> int:
        return sum(event.counts.prompt for event in self.events)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_books(start_stack: StartStack) -> AsyncIterator[Books]:
    async with start_stack() as stack:
        yield await asyncio.to_thread(filled, stack)


@pytest_asyncio.fixture(loop_scope="module")
async def books(module_books: Books) -> Books:
    return module_books


pytestmark = pytest.mark.asyncio(loop_scope="module")


def filled(stack: Stack) -> Books:
    gateway, rng = stack.gateway, random.Random(3)
    other = create_tenant(gateway.database, name="other", now=instants.now())
    hasher = key_hasher(gateway.secret)
    made = create_key(
        gateway.database,
        tenant_id=other.id,
        label="admin",
        hasher=hasher,
        now=instants.now(),
        role=Role.ADMIN,
    )
    [own] = list_keys(gateway.database, tenant_id=stack.tenant.id)
    events = [event_of(rng, rng.choice((own, made[0]))) for _ in range(200)]
    for event in events:
        gateway.meter.settle(event)
    gateway.meter.flush()
    return Books(stack=stack, admin_key=made[1], events=events)


def event_of(rng: random.Random, key) -> UsageEvent:
    admitted_at = instants.from_datetime(FIRST_DAY + rng.random() * (LAST_DAY - FIRST_DAY))
    counts = TokenCounts(
        uncached=rng.randrange(900),
        read=rng.randrange(900),
        write_5m=rng.randrange(90),
        output=rng.randrange(90),
    )
    return UsageEvent(
        admission=Admission(
            request_id=new_request_id(),
            tenant_id=key.tenant_id,
            api_key_id=key.id,
            model=rng.choice(MODELS),
            admitted_at=admitted_at,
        ),
        kind=UsageKind.FINAL,
        counts=counts,
        finished_at=instants.later(admitted_at, timedelta(seconds=1)),
        delivered=counts.output,
    )


async def test_the_official_client_parses_usage_page_by_page(books):
    async with books.client() as client:
        pages, page = [], None
        while not pages or pages[-1].has_more:
            chosen = {"page": page} if page else {}
            pages.append(
                await client.admin.organization.usage.completions(
                    start_time=START,
                    end_time=END,
                    bucket_width="1d",
                    group_by=["model", "api_key_id"],
                    limit=4,
                    **chosen,
                )
            )
            page = pages[-1].next_page
    assert [len(one.data) for one in pages] == [4, 4, 2]
    buckets = [bucket for one in pages for bucket in one.data]
    assert [bucket.start_time for bucket in buckets] == list(range(START, END, 86_400))
    rows = [row for bucket in buckets for row in bucket.results]
    for row in rows:
        assert row.object == "organization.usage.completions.result"
        assert row.model in MODELS
        assert row.project_id is None
        parts = row.input_uncached_tokens + row.input_cached_tokens + row.input_cache_write_tokens
        assert row.input_tokens == parts
    assert sum(row.input_tokens for row in rows) == books.prompt_tokens()
    assert sum(row.num_model_requests for row in rows) == len(books.events)


async def test_the_official_client_parses_costs(books):
    async with books.client() as client:
        page = await client.admin.organization.usage.costs(
            start_time=START, end_time=END, group_by=["line_item", "api_key_id"], limit=180
        )
        whole = await client.admin.organization.usage.costs(start_time=START, end_time=END, limit=180)
    rows = [row for bucket in page.data for row in bucket.results]
    assert {row.line_item for row in rows} >= {"small, input", "large, read", "huge, output"}
    assert all(row.quantity_unit == "tokens" and row.amount.currency == "usd" for row in rows)
    assert sum(row.quantity for row in rows if row.line_item == "small, output") == sum(
        event.counts.output for event in books.events if event.admission.model == "small"
    )
    exact = [Decimal(row.amount.model_extra["decimal"]) for row in rows]
    for row, amount in zip(rows, exact, strict=True):
        assert row.amount.value == float(amount)
        assert row.model_extra["amount_pusd"] == amount.scaleb(12)
    every = [row for bucket in whole.data for row in bucket.results]
    assert len(every) == 10
    assert sum(exact) == sum(Decimal(row.amount.model_extra["decimal"]) for row in every)


@pytest.mark.parametrize(("width", "seconds"), [("1m", 60), ("1h", 3_600)])
async def test_narrow_buckets_add_up_too(books, width, seconds):
    first = min(event.admission.admitted_at for event in books.events) // 1_000_000
    query = {"start_time": first - 30, "end_time": first + 7_000, "bucket_width": width, "limit": 168}
    page = await books.get(USAGE, query)
    assert page["data"][0]["start_time"] == first - 30
    assert page["data"][1]["start_time"] % seconds == 0
    assert page["data"][-1]["end_time"] == first + 7_000
    found = [row for bucket in page["data"] for row in bucket["results"]]
    inside = [event for event in books.events if event.admission.admitted_at < (first + 7_000) * 1_000_000]
    assert sum(row["num_model_requests"] for row in found) == len(inside) > 0


async def test_days_can_be_those_of_a_zone(books):
    query = {"start_time": START, "end_time": END, "limit": 31, "time_zone": "Europe/Berlin"}
    page = await books.get(USAGE, query)
    lengths = [bucket["end_time"] - bucket["start_time"] for bucket in page["data"]]
    # 29 March has 23 hours there; what the period cuts off are an hour less and two hours of a day.
    assert [length // 3_600 for length in lengths] == [23, 24, 23, *[24] * 7, 2]
    rows = [row for bucket in page["data"] for row in bucket["results"]]
    assert sum(row["input_tokens"] for row in rows) == books.prompt_tokens()


async def test_groups_that_are_cut_are_one_other_row_and_add_up(books, monkeypatch):
    monkeypatch.setattr(organization, "MAX_GROUPS", 2)
    query = {"start_time": START, "end_time": END, "limit": 31}
    for path, group, field in (
        (USAGE, "model", "input_tokens"),
        (USAGE, "tenant_id", "input_tokens"),
        (COSTS, "line_item", "amount_pusd"),
    ):
        whole = await books.get(path, query)
        cut = await books.get(path, {**query, "group_by[]": group})
        for all_of_it, parts in zip(whole["data"], cut["data"], strict=True):
            assert len(parts["results"]) <= 3
            assert sum(row[field] for row in parts["results"]) == sum(
                row[field] for row in all_of_it["results"]
            )
            assert [row[group] for row in parts["results"]][2:] in ([], ["other"])
        others = [row for bucket in cut["data"] for row in bucket["results"] if row[group] == "other"]
        assert bool(others) is (group != "tenant_id")


async def test_filters_choose_keys_models_and_projects(books):
    query = {"start_time": START, "end_time": END, "limit": 31, "models[]": ["small", "huge"]}
    key = books.events[0].admission.api_key_id
    page = await books.get(USAGE, {**query, "api_key_ids": str(key), "group_by": "api_key_id"})
    rows = [row for bucket in page["data"] for row in bucket["results"]]
    assert {row["api_key_id"] for row in rows} == {str(key)}
    assert sum(row["num_model_requests"] for row in rows) == sum(
        event.admission.api_key_id == key and event.admission.model != "large" for event in books.events
    )
    none = await books.get(USAGE, {**query, "project_ids[]": str(uuid4())})
    assert all(bucket["results"] == [] for bucket in none["data"])


async def test_without_an_end_the_last_page_is_the_one_of_now(books):
    now = int(datetime.now(UTC).timestamp())
    page = await books.get(USAGE, {"start_time": now - 90_000, "bucket_width": "1h", "limit": 20})
    rest = await books.get(
        USAGE, {"start_time": now - 90_000, "bucket_width": "1h", "limit": 20, "page": page["next_page"]}
    )
    assert rest["has_more"] is False
    assert rest["next_page"] is None
    assert rest["data"][0]["start_time"] == page["data"][-1]["end_time"]
    assert rest["data"][-1]["end_time"] >= now


@pytest.mark.parametrize(
    ("path", "query", "param"),
    [
        (USAGE, {}, "start_time"),
        (USAGE, {"start_time": "soon"}, "start_time"),
        (USAGE, {"start_time": 20, "end_time": 10}, "end_time"),
        (USAGE, {"start_time": 0, "end_time": "9" * 12}, "end_time"),
        (USAGE, {"start_time": 0, "bucket_width": "1w"}, "bucket_width"),
        (COSTS, {"start_time": 0, "bucket_width": "1h"}, "bucket_width"),
        (USAGE, {"start_time": 0, "group_by[]": ["model", "colour"]}, "group_by"),
        (USAGE, {"start_time": 0, "group_by[]": "user_id"}, "group_by"),
        (COSTS, {"start_time": 0, "group_by[]": "model"}, "group_by"),
        (USAGE, {"start_time": 0, "limit": 0}, "limit"),
        (USAGE, {"start_time": 0, "limit": 32}, "limit"),
        (USAGE, {"start_time": 0, "limit": 1441, "bucket_width": "1m"}, "limit"),
        (COSTS, {"start_time": 0, "limit": 181}, "limit"),
        (USAGE, {"start_time": 0, "limit": "3.5"}, "limit"),
        (USAGE, {"start_time": 0, "time_zone": "Mars/Olympus"}, "time_zone"),
        (USAGE, {"start_time": 0, "project_ids[]": "mine"}, "project_ids"),
        (USAGE, {"start_time": 0, "models": ["m" * 300]}, "models"),
        (USAGE, {"start_time": 0, "models": [str(number) for number in range(101)]}, "models"),
        (USAGE, {"start_time": [0, 1]}, "start_time"),
        (USAGE, {"start_time": 0, "user_ids[]": "u"}, "user_ids[]"),
        (USAGE, {"start_time": 0, "batch": "true"}, "batch"),
        (USAGE, {"start_time": 0, "colour": "red"}, "colour"),
        (USAGE, {"start_time": 0, "page": "page_"}, "page"),
        (USAGE, {"start_time": 0, "page": "nonsense"}, "page"),
        (USAGE, {"start_time": 0, "page": "page_" + "A" * 200}, "page"),
    ],
)
async def test_what_is_not_understood_is_refused_by_name(books, path, query, param):
    async with books.http() as http:
        answer = await http.get(path, params=query)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_a_cursor_of_another_question_is_refused(books):
    query = {"start_time": START, "end_time": END, "limit": 2}
    cursor = (await books.get(USAGE, query))["next_page"]
    assert (await books.get(USAGE, {**query, "page": cursor}))["data"]
    async with books.http() as http:
        for changed in ({"group_by": "model"}, {"start_time": START + 60}, {"time_zone": "Asia/Tokyo"}):
            answer = await http.get(USAGE, params={**query, **changed, "page": cursor})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "page")


@pytest.mark.parametrize("path", [USAGE, COSTS])
async def test_a_tenants_own_key_may_not_see_everybody(books, path):
    async with books.stack.http() as http:
        refused = await http.get(path, params={"start_time": 0})
        anonymous = await http.get(path, params={"start_time": 0}, headers={"authorization": "Bearer hs-x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "insufficient_permissions")
    assert anonymous.status_code == 401


async def test_instants_are_cut_to_the_microsecond(books):
    """A bucket ends where the next begins, wherever the period is cut."""
    event = books.events[7]
    second = event.admission.admitted_at // 1_000_000
    counted = []
    for start, end in ((second, second + 1), (START, second), (second + 1, END)):
        page = await books.get(USAGE, {"start_time": start, "end_time": end, "limit": 31})
        counted.append(sum(row["num_model_requests"] for bucket in page["data"] for row in bucket["results"]))
    assert counted[0] >= 1
    assert sum(counted) == len(books.events)
    assert Microseconds(event.admission.admitted_at) < (second + 1) * 1_000_000

"""Broken promises over HTTP."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from billing import instants
from billing.accounts import Role, create_key, list_keys
from billing.ids import new_request_id
from billing.usage import Admission, TokenCounts, UsageEvent, UsageKind
from gateway.auth import key_hasher
from tests.integration.gateway.conftest import Stack

URL = "/v1/organization/broken_promises"
HOUR = 3_600_000_000


@pytest.fixture
async def admin(stack):
    gateway = stack.gateway
    _, key = create_key(
        gateway.database,
        tenant_id=stack.tenant.id,
        label="admin",
        hasher=key_hasher(gateway.secret),
        now=instants.now(),
        role=Role.ADMIN,
    )
    async with httpx.AsyncClient(
        base_url=stack.address, headers={"authorization": f"Bearer {key}"}, verify=False
    ) as http:
        yield http


async def written(stack: Stack) -> dict[str, object]:
    """A request that wrote 64 tokens for an hour, and the report that 16 of them are gone."""
    now, request_id = instants.now(), new_request_id()
    [key] = [
        one for one in list_keys(stack.gateway.database, tenant_id=stack.tenant.id) if one.label == "test"
    ]
    event = UsageEvent(
        admission=Admission(
            request_id=request_id, tenant_id=key.tenant_id, api_key_id=key.id, model="any", admitted_at=now
        ),
        kind=UsageKind.FINAL,
        counts=TokenCounts(write_1h=64),
        finished_at=now,
    )
    await asyncio.to_thread(stack.gateway.meter.settle, event)
    return {
        "request_id": str(request_id),
        "promise": "block 1",
        "token_class": "write_1h",
        "tokens": 16,
        "promised_until": now + HOUR,
        "broken_at": now + 1,
    }


async def test_a_report_is_credited_once_and_its_receipt_is_the_tenants(stack, admin):
    report = await written(stack)
    first, again = await admin.post(URL, json=report), await admin.post(URL, json=report)
    assert first.status_code == again.status_code == 200
    # Twice the input price was paid for tokens of the default book.
    assert first.json()["amount"] == "-0.0000024"
    assert (first.json()["is_new"], again.json()["is_new"]) == (True, False)
    assert first.json()["id"] == again.json()["id"]
    counted = stack.gateway.metrics.registry.get_sample_value
    assert counted("headstart_credits_total") == 1
    assert counted("headstart_credited_dollars_total") == 0.0000024
    async with stack.http() as http:
        receipts = (await http.get(f"/v1/receipts/{report['request_id']}")).json()["data"]
    assert [one["kind"] for one in receipts] == ["final", "credit"]
    assert receipts[1]["event_id"] == first.json()["id"]


async def test_a_tenants_own_key_credits_nothing(stack):
    report = await written(stack)
    async with stack.http() as http:
        answer = await http.post(URL, json=report)
    assert answer.status_code == 403


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tokens": 65}, "tokens"),
        ({"tokens": 0}, "tokens"),
        ({"tokens": "many"}, "tokens"),
        ({"token_class": "read"}, "token_class"),
        ({"token_class": "none"}, "token_class"),
        ({"promised_until": 1}, "broken_at"),
        ({"request_id": "nonsense"}, "request_id"),
        ({"tenant": "acme"}, "tenant"),
    ],
)
async def test_a_report_that_cannot_be_is_refused_by_its_field(stack, admin, changes, param):
    answer = await admin.post(URL, json=await written(stack) | changes)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff"])
async def test_a_body_that_is_no_report_is_refused(admin, body):
    answer = await admin.post(URL, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400


async def test_a_request_that_is_not_known_is_not_found(stack, admin):
    answer = await admin.post(URL, json=await written(stack) | {"request_id": str(new_request_id())})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "request_not_found")

"""A tenant's own statements over HTTP."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from datetime import UTC, datetime
from hashlib import sha256

import pytest

from billing import instants
from billing.accounts import list_keys
from billing.calendar import UTC_ZONE, month_of
from billing.ids import new_request_id
from billing.issuing import issue_statement
from billing.usage import Admission, TokenCounts, UsageEvent, UsageKind
from tests.integration.gateway.conftest import Stack

MONTH = "2026-03"


async def issued(stack: Stack):
    """A month's usage, and its statement."""

    def settle_and_issue():
        [key] = list_keys(stack.gateway.database, tenant_id=stack.tenant.id)
        for day in (1, 2, 31):
            at = instants.from_datetime(datetime(2026, 3, day, 12, tzinfo=UTC))
            admission = Admission(
                request_id=new_request_id(),
                tenant_id=key.tenant_id,
                api_key_id=key.id,
                model="=odd()",
                admitted_at=at,
            )
            counts = TokenCounts(uncached=day, read=10 * day, output=1)
            stack.gateway.meter.settle(
                UsageEvent(admission=admission, kind=UsageKind.FINAL, counts=counts, finished_at=at)
            )
        stack.gateway.meter.flush()
        return issue_statement(
            stack.gateway.database, tenant_id=stack.tenant.id, period=MONTH, now=instants.now()
        )

    return await asyncio.to_thread(settle_and_issue)


async def test_statements_are_listed_and_shown_in_every_format(stack):
    one = await issued(stack)
    async with stack.http() as http:
        [listed] = (await http.get("/v1/statements")).json()["data"]
        assert listed["number"] == one.statement.number
        assert listed["digest"] == one.digest.hex()
        answers = {
            form: await http.get(listed["url"], params={"format": form})
            for form in ("json", "csv", "html", "text")
        }
        assert (await http.get(listed["url"])).content == answers["json"].content
    types = {form: answer.headers["content-type"].partition(";")[0] for form, answer in answers.items()}
    assert types == {"json": "application/json", "csv": "text/csv", "html": "text/html", "text": "text/plain"}
    body = answers["json"].json()
    canonical = json.dumps(body["document"], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert sha256(canonical.encode()).hexdigest() == body["digest"] == one.digest.hex()
    expected_pusd = 34 * 150_000 + 340 * 15_000 + 3 * 600_000
    assert body["summary"]["amount_pusd"] == one.statement.amount_pusd == expected_pusd
    *_, trailer = csv.DictReader(io.StringIO(answers["csv"].text, newline=""))
    assert trailer["amount"] == body["summary"]["amount"]
    assert "'=odd()" in answers["csv"].text
    attached = f'attachment; filename="{one.statement.number}.csv"'
    assert answers["csv"].headers["content-disposition"] == attached
    for form in ("html", "text"):
        assert one.statement.number in answers[form].text
        assert one.digest.hex() in answers[form].text


async def test_another_tenant_has_other_statements(stack):
    await issued(stack)
    headers = {"authorization": f"Bearer {stack.new_key('somebody else')}"}
    async with stack.http() as http:
        assert (await http.get("/v1/statements", headers=headers)).json()["data"] == []
        answer = await http.get(f"/v1/statements/{MONTH}", headers=headers)
        anonymous = await http.get(f"/v1/statements/{MONTH}", headers={"authorization": "Bearer hs-none"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "statement_not_found")
    assert anonymous.status_code == 401


async def test_an_open_month_is_refused_and_previewed(stack):
    month = month_of(instants.now(), UTC_ZONE)
    async with stack.http() as http:
        refused = await http.get(f"/v1/statements/{month}")
        preview = await http.get(f"/v1/statements/{month}", params={"preview": "true"})
        page = await http.get(f"/v1/statements/{month}", params={"preview": "true", "format": "html"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "period_open")
    assert refused.json()["error"]["param"] == "period"
    assert preview.json()["summary"]["status"] == "preview"
    assert preview.json()["digest"] is None
    assert "PREVIEW" in page.text


@pytest.mark.parametrize(
    ("path", "query", "param"),
    [
        ("/v1/statements/november", {}, "period"),
        ("/v1/statements/2026-13", {}, "period"),
        ("/v1/statements/2026-03", {"format": "pdf"}, "format"),
        ("/v1/statements/2026-03", {"preview": "yes"}, "preview"),
        ("/v1/statements/2026-03", {"tenant": "acme"}, "tenant"),
        ("/v1/statements", {"limit": "1"}, "limit"),
    ],
)
async def test_what_is_not_understood_is_refused_by_name(stack, path, query, param):
    async with stack.http() as http:
        answer = await http.get(path, params=query)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param

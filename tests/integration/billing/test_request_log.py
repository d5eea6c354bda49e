"""Requests one by one."""

import pytest

from billing.errors import UnknownRequest
from billing.ids import RequestId, new_id
from billing.reports import Selection
from billing.request_log import RequestFilter, find_request, list_requests
from billing.usage import TokenClass, UsageKind
from tests.integration.billing.conftest import new_account
from tests.integration.billing.test_cache_outcomes import DAY, settle
from tests.unit.billing.builders import T0, admission, final


def wanted(*accounts, start=T0, end=T0 + DAY, **more):
    tenant_ids = [one.tenant.id for one in accounts] or None
    return RequestFilter(selection=Selection(tenant_ids=tenant_ids), start=start, end=end, **more)


def pages(db, asked, limit):
    rows, after = list_requests(db, asked, limit=limit)
    found = [rows]
    while after is not None:
        rows, after = list_requests(db, asked, after=after, limit=limit)
        found.append(rows)
    return found


def test_pages_hold_every_request_once_newest_first_also_within_an_instant(db, account, new_meter):
    meter = new_meter()
    for number in range(7):
        settle(meter, account, at=T0 + number // 3, uncached=number + 1)
    meter.flush()
    found = pages(db, wanted(account), limit=2)
    assert [len(page) for page in found] == [2, 2, 2, 1]
    rows = [row for page in found for row in page]
    assert [row.place for row in rows] == sorted((row.place for row in rows), reverse=True)
    assert {row.prompt_tokens for row in rows} == set(range(1, 8))


def test_what_comes_meanwhile_moves_no_row(db, account, new_meter):
    meter = new_meter()
    for number in range(3):
        settle(meter, account, at=T0 + number, uncached=1)
    meter.flush()
    first, after = list_requests(db, wanted(account), limit=2)
    settle(meter, account, at=T0 + 9, uncached=1)
    meter.flush()
    second, _ = list_requests(db, wanted(account), after=after, limit=2)
    assert [row.place.accounted_at for row in (*first, *second)] == [T0 + 2, T0 + 1, T0]


def test_filters_by_tenant_time_outcome_reason_and_kind(db, account, new_meter):
    other, meter = new_account(db, "other"), new_meter()
    settle(meter, account, uncached=1, miss_reason="evicted")
    settle(meter, account, read=5, at=T0 + DAY)
    settle(meter, other, read=7)
    aborted = final(
        admission(tenant_id=account.tenant.id, api_key_id=account.key.id),
        kind=UsageKind.ABORTED,
        uncached=3,
    )
    meter.settle(aborted)
    meter.flush()

    def prompts(asked):
        return sorted(row.prompt_tokens for row in list_requests(db, asked, limit=10)[0])

    assert prompts(wanted(end=T0 + 2 * DAY)) == [1, 3, 5, 7]
    assert prompts(wanted(account)) == [1, 3]
    assert prompts(wanted(is_hit=True)) == [7]
    assert prompts(wanted(account, is_hit=False)) == [1, 3]
    assert prompts(wanted(miss_reasons=["evicted"])) == [1]
    assert prompts(wanted(kinds=["aborted"])) == [3]
    assert prompts(wanted(account, start=T0 + 1, end=T0 + DAY)) == []


def test_one_request_has_its_lines_and_is_its_tenants_alone(db, account, new_meter):
    other, meter = new_account(db, "other"), new_meter()
    settle(meter, account, uncached=100, read=900, output=10, miss_reason="diverged")
    meter.flush()
    [row] = list_requests(db, wanted(account), limit=10)[0]
    record = find_request(db, row.request_id, tenant_ids=[account.tenant.id])
    assert record.events == [row]
    assert [line.token_class for line in record.lines] == [
        TokenClass.INPUT,
        TokenClass.READ,
        TokenClass.OUTPUT,
    ]
    assert sum(line.amount_pusd for line in record.lines) == row.amount_pusd
    assert row.amount_without_cache_pusd > row.amount_pusd
    assert find_request(db, row.request_id, tenant_ids=None) == record
    for request_id, tenant_ids in (
        (row.request_id, [other.tenant.id]),
        (RequestId(new_id()), None),
    ):
        with pytest.raises(UnknownRequest):
            find_request(db, request_id, tenant_ids=tenant_ids)

"""Every figure of every page is the API's own, cell by cell."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from zoneinfo import ZoneInfo

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from billing.receipt_keys import decode_key_set
from billing.receipts import verify
from tests.browser.conftest import DESKTOP, Visitor
from tests.browser.site import NOW, Customer
from tests.browser.town import Town, running_town

TODAY = NOW.replace(hour=0, minute=0, second=0, microsecond=0)
MONTH = TODAY.replace(day=1)
NEXT_MONTH = TODAY.replace(month=4, day=1)


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    with running_town(tmp_path_factory.mktemp("town") / "home") as town:
        yield town


@pytest.fixture
def visitor(chromium: Browser, town: Town) -> Iterator[Visitor]:
    """At the end no page has complained, and nobody but the site was called."""
    context = chromium.new_context(viewport=DESKTOP)
    visitor = Visitor(page=context.new_page(), site=town.site)
    visitor.listen()
    yield visitor
    context.close()
    assert visitor.complaints == []
    assert [one for one in visitor.addresses if not one.startswith(f"{town.site.url}/")] == []


def open_page(visitor: Visitor, customer: Customer, path: str) -> Page:
    visitor.sign_in_as(customer)
    visitor.page.goto(visitor.site.url + path)
    return visitor.page


def rows(page: Page, key: str) -> list[dict[str, str]]:
    """The exact values of a table's cells, by the names of its columns."""
    return page.locator(f"#{key}-table").evaluate(
        """table => {
            const exact = cell => cell.querySelector('data')?.value ?? '';
            const names = [...table.tHead.rows[0].cells].map(cell => cell.textContent);
            return [...table.tBodies[0].rows].map(row => Object.fromEntries(
                [...row.cells].map((cell, place) => [names[place], exact(cell)])));
        }"""
    )


def total(page: Page, key: str) -> list[str]:
    return page.locator(f"#{key}-table tfoot data").evaluate_all("all => all.map(one => one.value)")


def tile(page: Page, key: str) -> str:
    return page.locator(f"[data-tile={key}] data").get_attribute("value") or ""


def hours_of(told: dict) -> dict[str, dict]:
    return {group["hour"]: group for group in told["groups"]}


def test_hit_shares_by_hour_are_the_apis(visitor: Visitor, town: Town) -> None:
    page = open_page(visitor, town.acme, "/dashboard/cache?period=today")
    told = town.usage(town.acme, TODAY, TODAY + timedelta(days=1), group_by="hour")
    shown = {row["Time"]: row for row in rows(page, "hit-share")}
    assert shown.keys() == hours_of(told).keys()
    assert len(shown) > 3
    for hour, group in hours_of(told).items():
        row = shown[hour]
        assert row["Requests"] == str(group["requests"])
        assert row["Input tokens"] == str(group["input_tokens"])
        assert row["Read"] == str(group["input_cached_tokens"])
        assert row["Share of tokens"] == group["hit_percent"]
    assert tile(page, "hit_tokens") == told["hit_percent"]
    assert tile(page, "tokens_saved") == str(told["input_cached_tokens"])
    assert tile(page, "money_saved") == told["saved"]


def test_the_composition_adds_up_to_the_input(visitor: Visitor, town: Town) -> None:
    page = open_page(visitor, town.acme, "/dashboard/cache?period=week")
    told = town.usage(town.acme, TODAY - timedelta(days=6), TODAY + timedelta(days=1))
    classes = told["token_classes"]
    assert total(page, "composition") == [
        "Total",
        str(classes["input"]["quantity"]),
        str(classes["read"]["quantity"]),
        str(told["input_tokens"]),
    ]


def test_everybodys_cache_is_the_sum_of_the_tenants(visitor: Visitor, town: Town) -> None:
    page = open_page(visitor, town.operator, "/dashboard/cache?period=week")
    told = [
        town.usage(one, TODAY - timedelta(days=6), TODAY + timedelta(days=1))
        for one in (town.acme, town.beta)
    ]
    assert tile(page, "tokens_saved") == str(sum(one["input_cached_tokens"] for one in told))
    [worker] = rows(page, "workers")
    assert worker["Worker"] == "worker-0"
    assert worker["Requests"] == str(sum(one["requests"] for one in told))
    reasons = {row["Reason"]: int(row["Requests"]) for row in rows(page, "reasons")}
    assert sum(reasons.values()) == int(worker["Requests"])
    assert {"no_shared_prefix", "diverged", "below_minimum"} <= reasons.keys()
    hit, miss = rows(page, "first-token")
    assert int(hit["Requests"]) + int(miss["Requests"]) == int(worker["Requests"])
    assert float(hit["Mean per 1,000 tokens"]) < float(miss["Mean per 1,000 tokens"])


def test_what_a_worker_holds_is_what_it_says(visitor: Visitor, town: Town) -> None:
    page = open_page(visitor, town.operator, "/dashboard/cache")
    told = town.traffic.statistics()
    memory = {row["Tenant"]: row for row in rows(page, "memory")}
    assert memory.keys() == {row.scope for row in told.scopes}
    for row in told.scopes:
        assert memory[row.scope]["Tokens"] == str(row.resident_blocks * told.block_size)
    [tier] = rows(page, "tiers")
    assert tier["Tokens"] == str(told.resident_blocks_by_tier["device"] * told.block_size)
    times = rows(page, "times-worker-0")
    assert sum(int(row["Read again"]) for row in times) == told.reuse_gap.total
    assert sum(int(row["Evicted"]) for row in times) == told.idle_before_eviction.total > 0
    writes = {row["Tenant"]: row for row in rows(page, "writes")}
    for row in told.scopes:
        assert writes[row.scope]["Wasted"] == str(row.wasted_blocks * told.block_size)


def test_a_tenant_sees_its_own_rows_of_a_worker_alone(visitor: Visitor, town: Town) -> None:
    page = open_page(visitor, town.acme, "/dashboard/cache")
    assert len(rows(page, "memory")) == 1
    expect(page.locator("#memory")).to_contain_text("Acme Chat")
    assert page.locator("#times-worker-0").count() == 0
    assert "Beta Research" not in page.content()


def test_a_worker_that_is_away_is_said_to_be(visitor: Visitor, town: Town) -> None:
    page = open_page(visitor, town.operator, "/dashboard/cache")
    town.site.point_to("http://127.0.0.1:9")
    try:
        page.reload()
        expect(page.locator("#memory")).to_contain_text("away: /v1/statistics failed")
        expect(page.locator("#times-worker-0")).to_contain_text("worker-0 is away")
        page.goto(f"{town.site.url}/dashboard/prefixes")
        expect(page.locator("#hottest-worker-0")).to_contain_text("worker-0 is away")
    finally:
        town.site.point_to(town.worker_url)


@pytest.mark.parametrize(
    ("by", "table", "name"), [("api_key", "by-api-key", "api_key_id"), ("model", "by-model", "model")]
)
def test_usage_by_key_and_model_is_the_apis(
    visitor: Visitor, town: Town, by: str, table: str, name: str
) -> None:
    page = open_page(visitor, town.acme, "/dashboard/usage")
    told = town.usage(town.acme, MONTH, NEXT_MONTH, group_by=by)
    shown = rows(page, table)
    assert len(shown) == len(told["groups"]) > 0
    heading = next(iter(shown[0]))
    by_id = {row[heading]: row for row in shown}
    for group in told["groups"]:
        assert_usage(by_id[group[name]], group)
    assert total(page, table)[-2] == told["amount"]


def assert_usage(row: dict[str, str], group: dict) -> None:
    assert row["Requests"] == str(group["requests"])
    assert row["Input"] == str(group["input_tokens"])
    assert row["Cached"] == str(group["input_cached_tokens"])
    assert row["Hit share"] == group["hit_percent"]
    assert row["Output"] == str(group["output_tokens"])
    assert row["List, USD"] == group["list_amount"]
    assert row["Discount, USD"] == group["discount"]
    assert row["Amount, USD"] == group["amount"]
    assert row["Saved, USD"] == group["saved"]


def test_usage_by_class_is_the_apis(visitor: Visitor, town: Town) -> None:
    page = open_page(visitor, town.acme, "/dashboard/usage")
    told = town.usage(town.acme, MONTH, NEXT_MONTH)["token_classes"]
    shown = {row["Class"]: row for row in rows(page, "by-class")}
    assert shown.keys() == {name for name, figures in told.items() if figures["quantity"]}
    for name, row in shown.items():
        assert (row["Quantity"], row["Amount, USD"]) == (str(told[name]["quantity"]), told[name]["amount"])


def test_another_zone_cuts_other_days(visitor: Visitor, town: Town) -> None:
    zone = ZoneInfo("America/Los_Angeles")
    page = open_page(visitor, town.acme, "/dashboard/usage")
    in_utc = rows(page, "by-time")
    page.get_by_label("Time zone").fill(zone.key)
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_text(f"times in {zone.key}")).to_be_visible()
    told = town.usage(
        town.acme,
        datetime(2026, 3, 1, tzinfo=zone),
        datetime(2026, 4, 1, tzinfo=zone),
        group_by="day",
        time_zone=zone.key,
    )
    shown = rows(page, "by-time")
    assert [row["Over time"] for row in shown] == [group["day"] for group in told["groups"]]
    for row, group in zip(shown, told["groups"], strict=True):
        assert_usage(row, group)
    assert shown != in_utc


def test_the_filters_leave_what_fits(visitor: Visitor, town: Town) -> None:
    page = open_page(visitor, town.operator, "/dashboard/usage")
    everybodys = tile(page, "amount")
    page.get_by_label("Tenant", exact=True).select_option(label="Beta Research")
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_text("Beta Research · ")).to_be_visible()
    told = town.usage(town.beta, MONTH, NEXT_MONTH)
    assert tile(page, "amount") == told["amount"] != everybodys
    page.get_by_label("Model", exact=True).fill("another-model")
    page.get_by_role("button", name="Show").click()
    expect(page.locator("#by-model")).to_contain_text("Nothing was used in this period.")


def test_the_month_so_far_is_carried_on_to_its_end(visitor: Visitor, town: Town) -> None:
    page = open_page(visitor, town.acme, "/dashboard/usage")
    told = town.usage(town.acme, MONTH, NEXT_MONTH)
    [month] = rows(page, "budgets")
    assert month["Posted, USD"] == told["amount"]
    elapsed = (NOW - MONTH) // timedelta(microseconds=1)
    whole = (NEXT_MONTH - MONTH) // timedelta(microseconds=1)
    assert pusd(month["Forecast, USD"]) == told["amount_pusd"] * whole // elapsed


def pusd(dollars: str) -> int:
    whole, _, fraction = dollars.partition(".")
    return int(whole + fraction.ljust(12, "0"))


@pytest.mark.parametrize("form", ["CSV", "JSONL"])
def test_a_table_can_be_taken_along(visitor: Visitor, town: Town, form: str) -> None:
    page = open_page(visitor, town.acme, "/dashboard/usage")
    shown = rows(page, "by-model")
    with page.expect_download() as download:
        page.locator("#by-model").get_by_role("link", name=form, exact=True).click()
    text = Path(download.value.path()).read_text("utf-8")
    if form == "CSV":
        lines = list(csv.DictReader(text.splitlines()))
    else:
        lines = [json.loads(line) for line in text.splitlines()]
    *body, trailer = lines
    assert [line["name"] for line in body] == [row["Model"] for row in shown]
    assert [line["amount"] for line in body] == [row["Amount, USD"] for row in shown]
    assert (trailer["record"], trailer["amount"]) == ("total", total(page, "by-model")[-2])


def test_the_statement_to_print_is_the_tenants(visitor: Visitor, town: Town) -> None:
    page = open_page(visitor, town.acme, "/dashboard/usage")
    page.locator("#by-model").get_by_role("link", name="Print this month's statement").click()
    expect(page.get_by_role("note")).to_contain_text("PREVIEW")
    expect(page.get_by_text("Acme Chat")).to_be_visible()


def all_requests(page: Page) -> list[dict[str, str]]:
    """Of every page of the list, from the newest to the oldest."""
    found = rows(page, "list")
    while page.get_by_role("link", name="Older requests").count():
        page.get_by_role("link", name="Older requests").click()
        found += rows(page, "list")
    return found


def test_every_request_is_listed_once_and_together_they_are_the_report(visitor: Visitor, town: Town) -> None:
    page = open_page(visitor, town.acme, "/dashboard/requests?period=week")
    found = all_requests(page)
    told = town.usage(town.acme, TODAY - timedelta(days=6), TODAY + timedelta(days=1))
    assert len({row["Admitted"] for row in found}) == len(found) == told["requests"] > 100
    assert sum(int(row["Input"]) for row in found) == told["input_tokens"]
    assert sum(int(row["Read"]) for row in found) == told["input_cached_tokens"]
    assert sum(pusd(row["Amount, USD"]) for row in found) == told["amount_pusd"]
    assert sum(pusd(row["Saved, USD"]) for row in found) == told["saved_pusd"]


def test_requests_are_filtered_by_outcome_and_reason(visitor: Visitor, town: Town) -> None:
    page = open_page(visitor, town.acme, "/dashboard/requests")
    every = all_requests(page)
    for outcome, is_hit in (("Hit", True), ("Miss", False)):
        page.get_by_label("Cache").select_option(label=outcome)
        page.get_by_role("button", name="Show").click()
        fitting = [row for row in every if (row["Read"] != "0") == is_hit]
        assert all_requests(page) == fitting != []
    page.get_by_label("Cache").select_option(label="All")
    page.get_by_label("Reason").select_option(label="no_shared_prefix")
    page.get_by_role("button", name="Show").click()
    assert all_requests(page) == [row for row in every if row["Reason"] == "no_shared_prefix"] != []
    page.get_by_label("Kind").select_option(label="credit")
    page.get_by_role("button", name="Show").click()
    expect(page.locator("#list")).to_contain_text("No request fits these filters.")


def test_one_request_is_split_priced_and_explained(visitor: Visitor, town: Town) -> None:
    page = open_page(visitor, town.acme, "/dashboard/requests?outcome=hit")
    row = rows(page, "list")[0]
    page.locator("#list-table tbody a").first.click()
    expect(page.get_by_role("heading", name="Request", exact=True)).to_be_visible()
    expect(page.get_by_text(row["Admitted"])).to_be_visible()
    facts = {one["Fact"]: one["Value"] for one in rows(page, "facts")}
    assert (facts["Input tokens"], facts["Read from the cache"]) == (row["Input"], row["Read"])
    assert facts["Why not more was read"] == row["Reason"]
    assert facts["First token not read"] == row["Read"]
    parts = page.locator("[data-part]").evaluate_all("all => all.map(one => [one.dataset.part, one.value])")
    computed = str(int(row["Input"]) - int(row["Read"]))
    assert parts == [["read", row["Read"]], ["uncached", computed]]
    amounts = total(page, "cost")[-3:]
    assert amounts[0] == row["Amount, USD"]
    assert pusd(amounts[1]) - pusd(amounts[0]) == pusd(amounts[2]) == pusd(row["Saved, USD"]) > 0


def test_the_receipt_of_a_request_is_the_apis_and_checked_offline(
    visitor: Visitor, town: Town, tmp_path: Path
) -> None:
    page = open_page(visitor, town.acme, "/dashboard/requests?outcome=hit")
    request_id = rows(page, "list")[0]["Admitted"]
    page.locator("#list-table tbody a").first.click()
    [told] = town.ask(town.acme, f"/v1/receipts/{request_id}")["data"]
    [shown] = rows(page, "receipts")
    assert (shown["Number"], shown["Amount, USD"]) == (str(told["sequence"]), told["amount"])
    with page.expect_download() as download:
        page.get_by_role("link", name=f"Download receipt {told['sequence']}").click()
    assert download.value.suggested_filename == f"headstart-receipt-{told['sequence']}.jsonl"
    lines = Path(download.value.path()).read_bytes().splitlines(keepends=True)
    assert [json.loads(line) for line in lines] == [told]
    assert sha256(lines[0].removesuffix(b"\n")).hexdigest() == shown["SHA-256"]
    published = httpx.get(f"{town.site.url}/v1/receipts/keys", timeout=30).content
    assert verify(lines, decode_key_set(published)).flaws == []
    forged = lines[0].replace(told["amount"].encode(), b"0.5")
    assert verify([forged], decode_key_set(published)).flaws


def test_today_is_everybodys_for_an_operator_and_a_tenants_by_the_filter(
    visitor: Visitor, town: Town
) -> None:
    page = open_page(visitor, town.operator, "/dashboard")
    tomorrow = TODAY + timedelta(days=1)
    acme, beta = (town.usage(one, TODAY, tomorrow) for one in (town.acme, town.beta))
    assert figure_of(page, "read_tokens") == str(acme["input_cached_tokens"] + beta["input_cached_tokens"])
    assert pusd(figure_of(page, "amount")) == acme["amount_pusd"] + beta["amount_pusd"]
    page.get_by_label("Tenant", exact=True).select_option(label="Beta Research")
    page.get_by_role("button", name="Show").click()
    expect(page.locator(".heading")).to_contain_text("Beta Research")
    assert figure_of(page, "amount") == beta["amount"]
    zone = ZoneInfo("America/Los_Angeles")
    page.get_by_label("Time zone").fill(zone.key)
    page.get_by_role("button", name="Show").click()
    expect(page.locator(".heading")).to_contain_text(f"times in {zone.key}")
    start = NOW.astimezone(zone).replace(hour=0, minute=0, second=0, microsecond=0)
    told = town.usage(town.beta, start, start + timedelta(days=1))
    assert figure_of(page, "amount") == told["amount"] != beta["amount"]


def figure_of(page: Page, key: str) -> str:
    return page.locator(f"#usage [data-row={key}] data").get_attribute("value") or ""


def test_no_address_shows_a_tenant_anothers_rows(visitor: Visitor, town: Town) -> None:
    page = open_page(visitor, town.beta, "/dashboard/requests")
    theirs = {row["Admitted"] for row in all_requests(page)}
    page.get_by_role("button", name="Sign out").click()
    visitor.sign_in_as(town.acme)
    acme, beta = town.acme.tenant.id, town.beta.tenant.id
    addresses = [
        *(f"/dashboard/requests/{request_id}" for request_id in sorted(theirs)[:3]),
        *(f"/dashboard{path}?tenant={beta}" for path in ("", "/cache", "/usage", "/requests", "/statements")),
        *(f"/dashboard/requests/{request_id}/receipts/1" for request_id in sorted(theirs)[:3]),
        f"/dashboard/usage/file?tenant={beta}",
        f"/dashboard/requests/{sorted(theirs)[0]}?tenant={acme}",
        f"/dashboard/statements/2026-03?preview=true&tenant={beta}",
        "/dashboard/prefixes",
        f"/dashboard/prefixes?tenant={acme}",
    ]
    for address in addresses:
        answer = page.goto(town.site.url + address)
        assert answer is not None
        assert answer.status in {403, 404}, address
        assert "Beta Research" not in page.content()
    page.goto(f"{town.site.url}/dashboard/requests?api_key={town.beta.key.id}")
    expect(page.locator("#list")).to_contain_text("No request fits these filters.")
    assert len(visitor.complaints) == len(addresses), "the browser's own notes of these statuses"
    visitor.complaints.clear()
    page.goto(f"{town.site.url}/dashboard/requests?tenant={acme}")
    assert rows(page, "list"), "the same address with the tenant's own id"


def test_the_hottest_prefixes_are_the_workers(visitor: Visitor, town: Town) -> None:
    prompt = [11] * 64
    for minute in range(2):
        town.traffic.serve(town.acme, prompt, NOW + timedelta(minutes=minute), num_output=1)
    town.traffic.pin(town.acme, prompt, ttl_seconds=3_600.0)
    page = open_page(visitor, town.operator, "/dashboard/prefixes")
    told = town.traffic.statistics()
    shown = rows(page, "hottest-worker-0")
    assert [(row["Name"], row["Tokens"], row["Hits"]) for row in shown] == [
        (one.name, str(one.num_tokens), str(one.hits)) for one in told.prefixes
    ]
    hits = [int(row["Hits"]) for row in shown]
    assert hits == sorted(hits, reverse=True)
    [pin] = rows(page, "pins-worker-0")
    assert (pin["Tokens"], float(pin["Promised for"])) == ("64", 3_600.0)
    page.get_by_label("Tenant", exact=True).select_option(label="Beta Research")
    page.get_by_role("button", name="Show").click()
    expect(page.locator("#pins-worker-0")).to_contain_text("Nothing is pinned.")


def test_an_instant_is_shown_in_the_zone_asked_for(visitor: Visitor, town: Town) -> None:
    page = open_page(visitor, town.acme, "/dashboard/requests?period=week")
    in_utc = page.locator("#list-table tbody a").first.inner_text()
    page.get_by_label("Time zone").fill("Asia/Tokyo")
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_text("times in Asia/Tokyo").first).to_be_visible()
    in_tokyo = page.locator("#list-table tbody a").first.inner_text()
    first = datetime.fromisoformat(in_utc).replace(tzinfo=UTC)
    assert datetime.fromisoformat(in_tokyo).replace(tzinfo=ZoneInfo("Asia/Tokyo")) == first
    assert in_tokyo != in_utc
    page.goto(f"{town.site.url}/dashboard/requests?zone=Mars/Olympus")
    expect(page.get_by_text("must be an IANA time zone")).to_be_visible()
    visitor.complaints.clear()

"""What an operator does on the dashboard, and that nobody else can."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, expect

from billing.accounts import Role
from tests.browser.conftest import Visitor
from tests.browser.site import NOW, Customer, Site
from tests.browser.test_figures import rows
from tests.browser.traffic import Traffic, running_worker
from tests.unit.gateway_web.test_pages import form_token, sign_in

BOOK = """
book: autumn
currency: USD
models:
  smollm2-135m-instruct:
    input: 200000
    output: 600000
    read: 20000
    write_auto: 200000
    write_5m: 250000
    write_1h: 400000
"""


@pytest.fixture
def operator(site: Site) -> Customer:
    return site.add_customer("Operations", role=Role.ADMIN)


@pytest.fixture
def acme(site: Site) -> Customer:
    customer = site.add_customer("Acme Chat")
    site.record_day(customer)
    return customer


def works(site: Site, secret: str) -> bool:
    answer = httpx.get(f"{site.url}/v1/usage", headers={"authorization": f"Bearer {secret}"}, timeout=30)
    return answer.status_code == 200


def open_admin(visitor: Visitor, operator: Customer, path: str) -> Page:
    visitor.sign_in_as(operator)
    visitor.page.goto(visitor.site.url + path)
    return visitor.page


def test_a_tenant_gets_a_key_that_is_shown_once_works_and_is_revoked(
    visitor: Visitor, site: Site, operator: Customer
) -> None:
    page = open_admin(visitor, operator, "/dashboard/tenants")
    page.get_by_label("Name", exact=True).fill("Gamma & <i>Daughters</i>")
    page.get_by_role("button", name="Create tenant").click()
    expect(page.get_by_role("heading", name="Gamma & <i>Daughters</i>")).to_be_visible()
    page.get_by_label("Label").fill("ci")
    page.get_by_label("Expires after days").fill("3650")
    page.get_by_role("button", name="Create key").click()
    secret = page.locator("#secret").inner_text()
    assert re.fullmatch(r"hs-\w{8}-\w{43}", secret)
    assert works(site, secret)
    page.get_by_role("link", name="Tenants").click()
    page.get_by_role("link", name="Gamma & <i>Daughters</i>").click()
    assert secret not in page.content()
    [key] = rows(page, "keys")
    assert (key["Key"], key["State"], key["Role"]) == (secret[:11], "works", "tenant")
    assert key["Expires"].startswith(f"{NOW + timedelta(days=3650):%Y-%m-%d}")
    page.locator("summary", has_text="Revoke").click()
    page.get_by_role("button", name=f"Revoke ci ({secret[:11]}…)").click()
    expect(page.locator("#keys-table")).to_contain_text("revoked")
    assert rows(page, "keys")[0]["State"] == "revoked"


def test_a_name_that_is_taken_is_refused_in_words(
    visitor: Visitor, operator: Customer, acme: Customer
) -> None:
    page = open_admin(visitor, operator, "/dashboard/tenants")
    page.get_by_label("Name", exact=True).fill(acme.tenant.name)
    page.get_by_role("button", name="Create tenant").click()
    expect(page.get_by_role("alert")).to_have_text("There is a tenant named 'Acme Chat'.")
    visitor.complaints.clear()


def test_tenants_are_found_by_name(visitor: Visitor, operator: Customer, acme: Customer) -> None:
    page = open_admin(visitor, operator, "/dashboard/tenants")
    assert {row["Name"] for row in rows(page, "tenants")} >= {str(acme.tenant.id), str(operator.tenant.id)}
    page.get_by_label("Name contains").fill("aCmE")
    page.get_by_role("button", name="Show").click()
    [found] = rows(page, "tenants")
    assert (found["Name"], found["Requests"]) == (str(acme.tenant.id), "47")


def test_a_budget_is_set_seen_by_its_tenant_and_removed(
    visitor: Visitor, site: Site, operator: Customer, acme: Customer
) -> None:
    page = open_admin(visitor, operator, f"/dashboard/tenants/{acme.tenant.id}")
    page.get_by_label("Limit in USD").fill("0.25")
    page.get_by_role("button", name="Set budget").click()
    [budget] = rows(page, "budgets")
    told = site.report(acme).totals
    assert (budget["Limit, USD"], budget["For"]) == ("0.25", "month")
    page.get_by_role("button", name="Sign out").click()
    visitor.sign_in_as(acme)
    page.goto(f"{site.url}/dashboard/usage")
    shown = {row["Budget"]: row for row in rows(page, "budgets")}
    mine = shown["Whole tenant, a month"]
    assert mine["Limit, USD"] == "0.25"
    assert mine["Posted, USD"] == budget["Posted, USD"] == shown["All usage"]["Posted, USD"]
    assert int(mine["Posted, USD"].partition(".")[2].ljust(12, "0")) == told.amount_pusd
    page.get_by_role("button", name="Sign out").click()
    page = open_admin(visitor, operator, f"/dashboard/tenants/{acme.tenant.id}")
    page.locator("summary", has_text="Remove").click()
    page.get_by_role("button", name="Remove the budget of whole tenant").click()
    expect(page.locator("#budgets")).to_contain_text("No budget limits this tenant.")
    page.get_by_label("Limit in USD").fill("a lot")
    page.get_by_role("button", name="Set budget").click()
    expect(page.get_by_role("alert")).to_contain_text("is no amount of dollars")
    visitor.complaints.clear()


def test_prices_are_compared_before_they_are_loaded(
    visitor: Visitor, site: Site, operator: Customer, acme: Customer, tmp_path: Path
) -> None:
    book = tmp_path / "autumn.yaml"
    book.write_text(BOOK)
    page = open_admin(visitor, operator, "/dashboard/prices")
    [before] = rows(page, "in-force")
    assert (before["Model"], before["Input, USD"], before["Cached, USD"]) == ("*", "0.15", "0.015")
    page.get_by_label("Or from a file").set_input_files(book)
    expect(page.get_by_label("Price book")).to_have_value(BOOK)
    page.get_by_role("button", name="Show the differences").click()
    changes = {row["Class"]: row for row in rows(page, "changes")}
    assert (changes["input"]["In force"], changes["input"]["New, USD"]) == ("", "0.20")
    told = site.report(acme).totals
    [effect] = rows(page, "effect")
    new = told.uncached_tokens * 200_000 + told.read_tokens * 20_000 + told.output_tokens * 600_000
    assert pusd(effect["New, USD"]) == new
    assert pusd(effect["In force, USD"]) == told.list_amount_pusd
    page.get_by_role("link", name="Prices").click()
    assert rows(page, "in-force") == [before], "looking changed nothing"
    page.get_by_label("Price book").fill(BOOK)
    page.get_by_role("button", name="Show the differences").click()
    page.get_by_role("button", name="Load these prices").click()
    after = {row["Model"]: row for row in rows(page, "in-force")}
    assert after["smollm2-135m-instruct"]["Input, USD"] == "0.20"
    assert after["*"] == before


def pusd(dollars: str) -> int:
    whole, _, fraction = dollars.partition(".")
    return int(whole + fraction.ljust(12, "0"))


def test_a_book_with_a_fault_is_refused_by_its_place(visitor: Visitor, operator: Customer) -> None:
    page = open_admin(visitor, operator, "/dashboard/prices")
    page.get_by_label("Price book").fill(BOOK.replace("read: 20000", "read: 200001"))
    page.get_by_role("button", name="Show the differences").click()
    expect(page.get_by_role("alert")).to_contain_text("read")
    visitor.complaints.clear()


@pytest.fixture
def worker_url(site: Site) -> Iterator[str]:
    with running_worker(Traffic(site).statistics) as url:
        site.point_to(url)
        yield url


def test_a_worker_is_drained_and_opened_again(
    visitor: Visitor, site: Site, operator: Customer, worker_url: str
) -> None:
    page = open_admin(visitor, operator, "/dashboard/workers")
    [worker] = rows(page, "workers")[:1]
    assert (worker["Worker"], worker["Address"], worker["State"]) == ("worker-0", worker_url, "ready")
    page.get_by_role("button", name="Drain worker-0").click()
    expect(page.get_by_role("button", name="Undrain worker-0")).to_be_visible()
    assert rows(page, "workers")[0]["State"] == "draining"
    body = {"model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": "hi"}]}
    answer = httpx.post(
        f"{site.url}/v1/chat/completions",
        json=body,
        headers={"authorization": f"Bearer {operator.secret}"},
        timeout=30,
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_draining")
    page.get_by_role("button", name="Undrain worker-0").click()
    expect(page.get_by_role("button", name="Drain worker-0")).to_be_visible()
    assert rows(page, "workers")[0]["State"] == "ready"
    health = {row["Check"]: row["Value"] for row in rows(page, "health")}
    assert health["Database"] == "reachable"


def test_no_tenant_reads_or_changes_what_is_an_admins(
    site: Site, acme: Customer, operator: Customer, worker_url: str
) -> None:
    """By every address, with a proof of the tenant's own session."""
    tenants = f"/dashboard/tenants/{acme.tenant.id}"
    reads = ("/dashboard/tenants", tenants, "/dashboard/prices", "/dashboard/workers", "/dashboard/prefixes")
    changes = (
        "/dashboard/tenants",
        f"{tenants}/keys",
        f"{tenants}/keys/{operator.key.id}/revoke",
        f"{tenants}/budgets",
        f"{tenants}/budgets/{acme.tenant.id}/remove",
        "/dashboard/prices/what-if",
        "/dashboard/prices/load",
        "/dashboard/workers/worker-0/drain",
        "/dashboard/workers/worker-0/undrain",
    )
    with httpx.Client(base_url=site.url, timeout=30) as client:
        sign_in(client, acme.secret)
        fields = {"form_token": form_token(client.get("/dashboard")), "name": "x", "label": "x", "book": BOOK}
        assert [client.get(path).status_code for path in reads] == [403] * len(reads)
        assert [client.post(path, data=fields).status_code for path in changes] == [403] * len(changes)
    assert works(site, operator.secret)
    assert not any(worker.is_draining for worker in site.gateway.roster.workers)


def test_no_form_is_taken_without_its_proof(site: Site, operator: Customer, acme: Customer) -> None:
    path = f"/dashboard/tenants/{acme.tenant.id}/keys/{acme.key.id}/revoke"
    with httpx.Client(base_url=site.url, timeout=30) as client:
        sign_in(client, operator.secret)
        for fields in ({"other": "field"}, {"form_token": "made up"}):
            assert client.post(path, data=fields).status_code == 403
        assert client.post(path, json={"form_token": "x"}).status_code == 400
        assert works(site, acme.secret)
        token = form_token(client.get("/dashboard"))
        other = f"/dashboard/tenants/{operator.tenant.id}/keys/{acme.key.id}/revoke"
        assert client.post(other, data={"form_token": token}).status_code == 404
        assert client.post(path, data={"form_token": token}).status_code == 303

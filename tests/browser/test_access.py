"""Every page is for everybody: nothing serious for axe-core, in both themes, on a phone, by keyboard."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page

from billing.ids import new_id
from tests.browser.conftest import DESKTOP, Visitor
from tests.browser.test_admin import BOOK
from tests.browser.town import Town, running_town

PAGES = (
    "",
    "/cache?period=week",
    "/usage",
    "/requests?period=week",
    "/statements",
    "/prefixes",
    "/tenants",
    "/prices",
    "/workers",
)
GRAVE = ("serious", "critical")


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    with running_town(tmp_path_factory.mktemp("town") / "home") as town:
        yield town


@pytest.fixture(params=["light", "dark"])
def visitor(chromium: Browser, town: Town, request: pytest.FixtureRequest) -> Iterator[Visitor]:
    context = chromium.new_context(viewport=DESKTOP, color_scheme=request.param)
    visitor = Visitor(page=context.new_page(), site=town.site)
    visitor.listen()
    yield visitor
    context.close()
    assert visitor.complaints == []
    assert [one for one in visitor.addresses if not one.startswith(f"{town.site.url}/")] == []


def grave_faults(page: Page) -> list[str]:
    """Impact, rule, and the elements concerned."""
    found = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    return [
        f"{fault['impact']} {fault['id']}: {[node['html'][:160] for node in fault['nodes']]}"
        for fault in found
        if fault["impact"] in GRAVE
    ]


def addresses(town: Town) -> list[str]:
    return [f"{town.site.dashboard}{path}" for path in PAGES]


def test_axe_finds_nothing_serious_on_any_page_of_an_operator(visitor: Visitor, town: Town) -> None:
    page = visitor.page
    page.goto(town.site.dashboard)
    assert grave_faults(page) == [], "the sign-in"
    visitor.sign_in_as(town.operator)
    for address in (*addresses(town), f"{town.site.dashboard}/tenants/{town.acme.tenant.id}"):
        page.goto(address)
        open_all(page)
        assert grave_faults(page) == [], address


def test_axe_finds_nothing_serious_in_the_answers_to_forms(visitor: Visitor, town: Town) -> None:
    page = visitor.page
    visitor.sign_in_as(town.operator)
    page.goto(f"{town.site.dashboard}/prices")
    page.get_by_label("Price book").fill(BOOK)
    page.get_by_role("button", name="Show the differences").click()
    page.locator("#changes").wait_for()
    assert grave_faults(page) == []
    page.goto(f"{town.site.dashboard}/tenants/{town.beta.tenant.id}")
    page.get_by_label("Label").fill(f"shown-{new_id()}")
    page.get_by_role("button", name="Create key").click()
    page.locator("#secret").wait_for()
    assert grave_faults(page) == []
    page.goto(f"{town.site.dashboard}/tenants/{town.beta.tenant.id}?tenant=nobody")
    page.get_by_role("alert").wait_for()
    assert grave_faults(page) == []
    visitor.complaints.clear()


def test_axe_finds_nothing_serious_on_any_page_of_a_tenant(visitor: Visitor, town: Town) -> None:
    page = visitor.page
    visitor.sign_in_as(town.acme)
    for address in addresses(town)[:5]:
        page.goto(address)
        open_all(page)
        assert grave_faults(page) == [], address
    page.goto(f"{town.site.dashboard}/requests?period=week")
    page.locator("#list-table tbody a").first.click()
    page.locator("#facts").wait_for()
    assert grave_faults(page) == [], "one request"


def open_all(page: Page) -> None:
    """Charts are drawn, and what is folded is open: what nobody sees has no faults."""
    for figure in page.locator("[data-figure]").all():
        figure.and_(page.locator("[data-drawn]")).wait_for()
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")


@pytest.mark.parametrize("width", [360])
def test_no_page_is_wider_than_a_phone(visitor: Visitor, town: Town, width: int) -> None:
    page = visitor.page
    page.set_viewport_size({"width": width, "height": 740})
    visitor.sign_in_as(town.operator)
    for address in (*addresses(town), f"{town.site.dashboard}/tenants/{town.acme.tenant.id}"):
        page.goto(address)
        open_all(page)
        assert page.evaluate("document.scrollingElement.scrollWidth") <= width, address


def test_a_keyboard_filters_and_opens_a_request(visitor: Visitor, town: Town) -> None:
    page = visitor.page
    visitor.sign_in_as(town.acme)
    page.goto(f"{town.site.dashboard}/requests?period=week")
    page.get_by_label("Cache").focus()
    page.keyboard.press("ArrowDown")
    page.get_by_role("button", name="Show").focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**outcome=hit**")
    page.locator("#list-table tbody a").first.focus()
    page.keyboard.press("Enter")
    page.locator("#facts").wait_for()

"""The dashboard in a real browser, on a real gateway, over a real ledger."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
from playwright.sync_api import Browser, Page, expect

from billing.issuing import issue_statement
from billing.money import format_basis_points, format_dollars
from billing.totals import UsageTotals
from billing.usage import TokenCounts
from gateway.web.sessions import IDLE_LIFETIME
from gateway.web.sign_in import SIGN_OUT
from tests.browser.conftest import Visitor
from tests.browser.site import NOW, Customer, Site

REFUSED = "Failed to load resource: the server responded with a status of 403 (Forbidden)"
"""What Chromium itself notes of any page with that status."""


@pytest.fixture
def acme(site: Site) -> Customer:
    customer = site.add_customer("Acme Chat")
    site.record_day(customer)
    return customer


def expected_cells(totals: UsageTotals) -> dict[str, str]:
    """The table, from billing's report alone."""
    return {
        "requests": str(totals.requests),
        "uncached_tokens": str(totals.uncached_tokens),
        "read_tokens": str(totals.read_tokens),
        "written_tokens": str(totals.written_tokens),
        "output_tokens": str(totals.output_tokens),
        "hit_share": format_basis_points(totals.hit_basis_points),
        "amount": format_dollars(totals.amount_pusd),
        "amount_without_cache": format_dollars(totals.amount_without_cache_pusd),
        "saved": format_dollars(totals.saved_pusd),
    }


def shown_cells(page: Page) -> dict[str, str]:
    """Every row of the table: its name, and its cell's exact value."""
    return page.locator("#usage tbody tr").evaluate_all(
        "rows => Object.fromEntries(rows.map(row => [row.dataset.row, row.querySelector('td data').value]))"
    )


def shown_hours(page: Page) -> list[list[str]]:
    return page.locator("#hours tbody tr").evaluate_all(
        "rows => rows.map(row => [...row.cells].map(cell => cell.textContent.trim().replace(/\\s+/g, ' ')))"
    )


def test_the_table_shows_the_report_cell_by_cell(visitor: Visitor, site: Site, acme: Customer) -> None:
    visitor.sign_in_as(acme)
    totals = site.report(acme).totals
    assert totals.requests == 47
    assert totals.saved_pusd > 0
    assert shown_cells(visitor.page) == expected_cells(totals)


def test_people_read_the_same_numbers_with_separators_and_units(
    visitor: Visitor, site: Site, acme: Customer
) -> None:
    visitor.sign_in_as(acme)
    totals = site.report(acme).totals
    row = visitor.page.locator("#usage [data-row=read_tokens] td")
    assert row.inner_text() == f"{totals.read_tokens:,}"
    saved = visitor.page.locator("#usage [data-row=saved] td")
    assert saved.inner_text() == f"{format_dollars(totals.saved_pusd)} USD"


def test_the_hours_add_up_to_the_day_and_are_what_the_chart_draws(
    visitor: Visitor, site: Site, acme: Customer
) -> None:
    visitor.sign_in_as(acme)
    visitor.wait_for_chart()
    drawn = visitor.page.evaluate(
        "document.getElementById('figure').data.map(({name, y}) => ({name, y: [...y]}))"
    )
    hours = {row[0]: row[1:] for row in shown_hours(visitor.page)}
    totals = site.report(acme).totals
    assert [trace["name"] for trace in drawn] == ["Cached", "Uncached", "Hit share"]
    cached, uncached, share = (trace["y"] for trace in drawn)
    assert sum(cached) == totals.read_tokens
    assert sum(uncached) == totals.uncached_tokens
    for hour in range(24):
        requests, *numbers = hours.get(f"{hour:02d}:00", ["0", "0", "0", None])
        expected_share = None if share[hour] is None else f"{share[hour]:.2f} %"
        assert numbers == [f"{uncached[hour]:,}", f"{cached[hour]:,}", expected_share]
        assert (requests == "0") == (share[hour] is None)


def test_a_new_request_is_there_after_a_refresh(visitor: Visitor, site: Site, acme: Customer) -> None:
    visitor.sign_in_as(acme)
    before = site.report(acme).totals.requests
    site.record(acme, NOW, TokenCounts(uncached=16, read=1600, output=9))
    visitor.page.get_by_role("link", name="Refresh").click()
    expect(visitor.page.locator("#usage [data-row=requests] td")).to_have_text(str(before + 1))
    assert shown_cells(visitor.page) == expected_cells(site.report(acme).totals)


def test_yesterday_is_not_today(visitor: Visitor, site: Site, acme: Customer) -> None:
    site.record(acme, NOW - timedelta(days=1), TokenCounts(uncached=1_000_000, output=1))
    visitor.sign_in_as(acme)
    assert shown_cells(visitor.page)["requests"] == "47"
    site.clock.forward(timedelta(hours=9))
    visitor.sign_in_as(acme)
    expect(visitor.page.get_by_role("heading", name="No requests yet today")).to_be_visible()


def test_a_wrong_key_is_told_and_opens_nothing(visitor: Visitor, site: Site, acme: Customer) -> None:
    almost = acme.secret[:-1] + ("a" if acme.secret[-1] != "a" else "b")
    for wrong in (almost, "not a key", "hs-ключ"):
        visitor.sign_in(wrong)
        expect(visitor.page.get_by_role("alert")).to_have_text(
            "This key does not work. It may be mistyped, revoked or expired."
        )
        field = visitor.page.get_by_label("API key")
        expect(field).to_have_attribute("aria-invalid", "true")
        expect(field).to_have_value("")
        assert wrong not in visitor.page.content()
    assert "headstart_session" not in {cookie["name"] for cookie in visitor.page.context.cookies()}
    visitor.sign_in_as(acme)
    assert visitor.complaints == [REFUSED] * 3
    visitor.complaints.clear()


def test_the_key_is_in_no_page_no_cookie_and_no_address(visitor: Visitor, acme: Customer) -> None:
    visitor.sign_in_as(acme)
    cookies = {cookie["name"]: cookie for cookie in visitor.page.context.cookies()}
    session = cookies["headstart_session"]
    assert (session["httpOnly"], session["sameSite"], session["path"]) == (True, "Strict", "/dashboard")
    kept = json.dumps(list(cookies.values())) + visitor.page.content() + "".join(visitor.addresses)
    assert acme.secret not in kept
    assert acme.secret.rpartition("-")[2] not in kept


def test_signing_out_ends_the_session_also_for_a_copied_cookie(visitor: Visitor, acme: Customer) -> None:
    visitor.sign_in_as(acme)
    copied = visitor.page.context.cookies()
    visitor.page.get_by_role("button", name="Sign out").click()
    expect(visitor.page.get_by_role("heading", name="Sign in")).to_be_visible()
    visitor.page.context.add_cookies(copied)
    visitor.page.goto(visitor.site.dashboard)
    expect(visitor.page.get_by_role("heading", name="Sign in")).to_be_visible()
    expect(visitor.page.locator("#usage")).to_have_count(0)


def test_a_revoked_key_ends_its_session_at_once(visitor: Visitor, site: Site, acme: Customer) -> None:
    visitor.sign_in_as(acme)
    site.revoke(acme)
    visitor.page.reload()
    expect(visitor.page.get_by_role("status")).to_have_text(
        "The key you signed in with no longer works. Sign in with another."
    )
    expect(visitor.page.locator("#usage")).to_have_count(0)


def test_a_session_left_alone_expires(visitor: Visitor, site: Site, acme: Customer) -> None:
    visitor.sign_in_as(acme)
    site.clock.forward(IDLE_LIFETIME - timedelta(microseconds=1))
    visitor.page.reload()
    expect(visitor.page.get_by_role("heading", name="Today", exact=True)).to_be_visible()
    site.clock.forward(IDLE_LIFETIME)
    visitor.page.reload()
    expect(visitor.page.get_by_role("status")).to_have_text("Your session has ended. Please sign in again.")
    visitor.sign_in_as(acme)


def test_a_tenant_sees_its_own_rows_and_never_anothers(
    chromium: Browser, visitor: Visitor, site: Site, acme: Customer
) -> None:
    other = site.add_customer("Other & <b>Sons</b>")
    site.record_day(other, scale=1000)
    visitor.sign_in_as(acme)
    assert shown_cells(visitor.page) == expected_cells(site.report(acme).totals)
    mine = visitor.page.content()
    theirs = site.report(other).totals
    assert f"{theirs.read_tokens:,}" not in mine
    assert "Sons" not in mine
    context = chromium.new_context()
    try:  # the other half: the same moment, another browser
        neighbour = Visitor(page=context.new_page(), site=site)
        neighbour.sign_in_as(other)
        assert shown_cells(neighbour.page) == expected_cells(theirs)
        expect(neighbour.page.locator(".tenant")).to_contain_text("Other & <b>Sons</b>")
        for query in (
            f"tenant={acme.tenant.id}",
            f"tenant={acme.tenant.name}",
            f"tenant_id={acme.tenant.id}",
        ):
            neighbour.page.goto(f"{site.dashboard}?{query}")
            expect(neighbour.page.get_by_role("heading", name="Not shown")).to_be_visible()
            assert shown_cells(neighbour.page) == {}
    finally:
        context.close()


def test_a_newcomer_is_told_what_to_do(visitor: Visitor, site: Site) -> None:
    newcomer = site.add_customer("newcomer")
    visitor.sign_in_as(newcomer)
    expect(visitor.page.get_by_role("heading", name="No requests yet today")).to_be_visible()
    command = visitor.page.locator("#curl").inner_text()
    assert command.startswith(f"curl {site.url}/v1/chat/completions \\\n")
    assert "$OPENAI_API_KEY" in command
    assert newcomer.secret not in visitor.page.content()
    visitor.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    visitor.page.get_by_role("button", name="Copy").click()
    expect(visitor.page.get_by_role("button", name="Copied")).to_be_visible()
    assert visitor.page.evaluate("navigator.clipboard.readText()") == command


def test_the_chart_follows_the_colour_scheme(visitor: Visitor, acme: Customer) -> None:
    colours = {}
    visitor.page.emulate_media(color_scheme="light")
    visitor.sign_in_as(acme)
    visitor.wait_for_chart()
    bar = visitor.page.locator("#figure .bars path").first
    read = "element => [getComputedStyle(element).fill, getComputedStyle(document.body).backgroundColor]"
    colours["light"] = bar.evaluate(read)
    visitor.page.emulate_media(color_scheme="dark")
    expect(bar).not_to_have_css("fill", colours["light"][0])
    colours["dark"] = bar.evaluate(read)
    assert colours["light"][1] != colours["dark"][1]


@pytest.mark.parametrize("width", [320, 390])
def test_nothing_is_wider_than_a_phone(visitor: Visitor, acme: Customer, width: int) -> None:
    visitor.page.set_viewport_size({"width": width, "height": 700})
    visitor.page.goto(visitor.site.dashboard)
    assert page_width(visitor.page) <= width
    visitor.sign_in_as(acme)
    visitor.wait_for_chart()
    visitor.page.get_by_text("Numbers of the chart").click()
    assert page_width(visitor.page) <= width


def page_width(page: Page) -> int:
    return int(page.evaluate("document.scrollingElement.scrollWidth"))


def test_a_keyboard_is_enough(visitor: Visitor, acme: Customer) -> None:
    page = visitor.page
    page.goto(visitor.site.dashboard)
    expect(page.get_by_label("API key")).to_be_focused()
    page.keyboard.insert_text(acme.secret)
    page.keyboard.press("Enter")
    visitor.wait_for_chart()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    expect(page.get_by_role("link", name="Skip to content")).to_be_in_viewport()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Refresh")).to_be_focused()
    for control in (page.get_by_label("Time zone"), page.get_by_role("button", name="Show")):
        page.keyboard.press("Tab")
        expect(control).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.locator("summary")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#hours")).to_be_visible()
    page.get_by_role("button", name="Sign out").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()


def test_pointing_at_a_bar_tells_its_numbers(visitor: Visitor, acme: Customer) -> None:
    visitor.sign_in_as(acme)
    visitor.wait_for_chart()
    visitor.page.locator("#figure .bars .point path").nth(14).hover(force=True)
    expect(visitor.page.locator("#figure .hovertext").first).to_contain_text("14:00–15:00")


def test_every_number_is_there_without_javascript(chromium: Browser, site: Site, acme: Customer) -> None:
    context = chromium.new_context(java_script_enabled=False)
    try:
        page = context.new_page()
        Visitor(page=page, site=site).sign_in_as(acme)
        expect(page.locator("#usage [data-row=requests] td")).to_have_text("47")
        expect(page.get_by_text("This chart is drawn by a script.")).to_be_visible()
        page.get_by_text("Numbers of the chart").click()
        expect(page.locator("#hours")).to_be_visible()
    finally:
        context.close()


def test_a_form_that_another_site_sends_is_refused(visitor: Visitor, site: Site, acme: Customer) -> None:
    visitor.sign_in_as(acme)
    # Another origin on the same host: the strictest case that a browser lets through to cookies of a site.
    foreign = visitor.page.context.new_page()
    foreign.goto("about:blank")
    foreign.set_content(f'<form method="post" action="{site.url}{SIGN_OUT}"><button>Go</button></form>')
    foreign.get_by_role("button", name="Go").click()
    foreign.wait_for_url(f"{site.url}/**")
    foreign.close()
    visitor.page.reload()
    expect(visitor.page.get_by_role("heading", name="Today", exact=True)).to_be_visible()


def test_a_statement_is_reached_from_today_and_prints_without_a_complaint(
    visitor: Visitor, site: Site, acme: Customer
) -> None:
    page = visitor.page
    site.record(acme, datetime(2026, 2, 3, 12, tzinfo=UTC), TokenCounts(uncached=700, read=300, output=9))
    site.gateway.meter.flush()
    issue_statement(site.gateway.database, tenant_id=acme.tenant.id, period="2026-02", now=site.clock())
    visitor.sign_in_as(acme)
    page.get_by_role("link", name="Statements").click()
    expect(page.get_by_role("heading", name="Statements")).to_be_visible()
    page.get_by_role("link", name="2026-02", exact=True).click()
    expect(page.get_by_role("heading", name="Statement", exact=True)).to_be_visible()
    expect(page.get_by_text("Books agree")).to_be_visible()
    page.emulate_media(media="print")
    expect(page.get_by_text("HS-2026-02-")).to_be_visible()
    assert page.evaluate("getComputedStyle(document.querySelector('h1')).marginTop") == "0px"
    page.go_back()
    page.get_by_role("link", name="Preview of 2026-03").click()
    expect(page.get_by_role("note")).to_contain_text("PREVIEW: this period is still open")

"""Draws the pictures that docs/dashboard.md shows: every page over seeded traffic, light and dark.

    python -m docs.dashboard_pictures

The traffic is that of the browser tests: some days of two tenants' conversations, through the meter and a
real prefix store. The clock stands still, so the same code draws the same figures.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from playwright.sync_api import Browser, Page

from billing.budgets import Period, Scope, set_budget
from tests.browser.site import NOW, Customer
from tests.browser.town import Town, running_town
from tests.browsers import running_chromium

IMAGES: Final = Path(__file__).parent / "images"
THEMES: Final = ("light", "dark")
SIZE: Final = {"width": 1280, "height": 860}
PHONE: Final = {"width": 390, "height": 844}
OF_A_TENANT: Final = {
    "": "",
    "-cache": "/cache?period=week",
    "-usage": "/usage",
    "-requests": "/requests",
}
OF_AN_OPERATOR: Final = {
    "-prefixes": "/prefixes",
    "-tenants": "/tenants",
    "-prices": "/prices",
    "-workers": "/workers",
    "-cache-everybody": "/cache?period=week",
}


def main() -> None:
    with tempfile.TemporaryDirectory() as home, running_town(Path(home) / "home") as town:
        prepare(town)
        with running_chromium() as browser:
            for theme in THEMES:
                draw(browser, town, theme)


def prepare(town: Town) -> None:
    """What pages would show an operator who has begun to use them."""
    now = town.site.clock()
    scope = Scope(tenant_id=town.acme.tenant.id)
    set_budget(town.site.gateway.database, scope, period=Period.MONTH, limit_pusd=50_000_000_000, now=now)
    prompt = list(range(1, 97))
    for _ in range(2):
        town.traffic.serve(town.acme, prompt, NOW, num_output=40)
    town.traffic.pin(town.acme, prompt, ttl_seconds=3_600.0)
    town.site.gateway.meter.flush()


def draw(browser: Browser, town: Town, theme: str) -> None:
    with visiting(browser, town, town.acme, theme, SIZE) as page:
        for name, path in OF_A_TENANT.items():
            take(page, f"{town.site.dashboard}{path}", f"dashboard{name}-{theme}")
        page.goto(f"{town.site.dashboard}/requests?outcome=hit&reason=diverged")
        page.locator("#list-table tbody a").first.click()
        page.locator("#facts").wait_for()
        save(page, f"dashboard-request-{theme}")
    with visiting(browser, town, town.operator, theme, SIZE) as page:
        for name, path in OF_AN_OPERATOR.items():
            take(page, f"{town.site.dashboard}{path}", f"dashboard{name}-{theme}")
        take(page, f"{town.site.dashboard}/tenants/{town.acme.tenant.id}", f"dashboard-tenant-{theme}")
    with visiting(browser, town, town.acme, theme, PHONE) as page:
        take(page, f"{town.site.dashboard}/cache?period=week", f"dashboard-phone-{theme}")


@contextmanager
def visiting(
    browser: Browser, town: Town, customer: Customer, theme: str, size: dict[str, int]
) -> Iterator[Page]:
    """A signed-in page in a colour scheme."""
    context = browser.new_context(viewport=size, color_scheme=theme, reduced_motion="reduce")  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(town.site.dashboard)
    page.get_by_label("API key").fill(customer.secret)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(town.site.dashboard)
    try:
        yield page
    finally:
        context.close()


def take(page: Page, address: str, name: str) -> None:
    page.goto(address)
    for figure in page.locator("[data-figure]").all():
        figure.and_(page.locator("[data-drawn]")).wait_for()
    save(page, name)


def save(page: Page, name: str) -> None:
    page.screenshot(path=IMAGES / f"{name}.png", full_page="phone" not in name)


if __name__ == "__main__":
    main()

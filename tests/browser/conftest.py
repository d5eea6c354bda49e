"""A browser, a site, and a visitor who notes what the browser complains about and whom it calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.site import Customer, Site, running_site
from tests.browsers import running_chromium

DESKTOP = {"width": 1280, "height": 900}
PATIENCE_MS = 30_000
"""For whatever a page is waited for: how fast it comes is no claim of these tests."""

expect.set_options(timeout=PATIENCE_MS)


@dataclass(slots=True)
class Visitor:
    """One person's browser window on the site."""

    page: Page
    site: Site
    complaints: list[str] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)

    def listen(self) -> None:
        self.page.on("console", lambda line: self._complain(line.type, line.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.context.on("request", lambda request: self.addresses.append(request.url))

    def _complain(self, kind: str, text: str) -> None:
        if kind in {"error", "warning"}:
            self.complaints.append(text)

    def sign_in(self, secret: str) -> None:
        self.page.goto(self.site.dashboard)
        self.page.get_by_label("API key").fill(secret)
        self.page.get_by_role("button", name="Sign in").click()

    def sign_in_as(self, customer: Customer) -> None:
        self.sign_in(customer.secret)
        self.page.get_by_role("heading", name="Today", exact=True).wait_for()

    def wait_for_chart(self) -> None:
        self.page.locator("#figure[data-drawn]").wait_for()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Not for the whole session: while it runs, Playwright's event loop is the thread's running one."""
    with running_chromium() as browser:
        yield browser


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with running_site(tmp_path / "home") as site:
        yield site


@pytest.fixture
def visitor(chromium: Browser, site: Site) -> Iterator[Visitor]:
    """At the end no page has complained, and nobody but the site was called."""
    context = chromium.new_context(viewport=DESKTOP)
    visitor = Visitor(page=context.new_page(), site=site)
    visitor.listen()
    yield visitor
    context.close()
    assert visitor.complaints == []
    assert visitor.addresses
    assert [address for address in visitor.addresses if not address.startswith(f"{site.url}/")] == []

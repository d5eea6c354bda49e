"""A real Chromium for tests: found, or installed where that is possible.

Knows where browsers lie and how to start one. Does not know pages.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

from tests.debian import find_or_install

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--no-sandbox",  # its sandbox refuses root, which containers often are
    "--disable-gpu",
    "--disable-dev-shm-usage",
    # The browser's own calls home: what is left over the wire is what pages ask for.
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
)


class BrowserMissingError(RuntimeError):
    """No Chromium is installed; the message says what to install."""


def chromium_path() -> str:
    """The program's path. Installs Debian's package where that is possible; raises BrowserMissingError."""
    found = find_or_install(find_chromium, "chromium")
    if found is None:
        raise BrowserMissingError(
            "these tests drive a real Chromium and found none: install Debian's `chromium` package, "
            "or put `chromium` on PATH"
        )
    return found


@contextmanager
def running_chromium() -> Iterator[Browser]:
    """A headless browser until the block ends."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)

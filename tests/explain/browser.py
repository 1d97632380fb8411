"""A real browser for the tests of pages: the machine's Chromium, headless, without a network."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PATIENCE = 600_000  # milliseconds: on a machine that has much else to do everything may take long


@contextmanager
def chromium() -> Iterator[Browser]:
    """Skips the test where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install 'tercel[browser]'")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("there is no Chromium (Debian's package: chromium)")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"], timeout=PATIENCE)
        yield browser
        browser.close()


@contextmanager
def page_of(browser: Browser, address: str, width: int = 1440, expected: str = "", **how: Any) -> Iterator[Page]:
    """A page that is open at the address; at the end it must have had nothing to complain of (but what has the
    `expected` words), nor have asked for anything elsewhere."""
    page = browser.new_page(viewport={"width": width, "height": 800}, **how)
    page.set_default_timeout(PATIENCE)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    origin = address.split("#")[0].rsplit("/", 1)[0]
    page.on(
        "request",
        lambda request: complaints.append(request.url) if not request.url.startswith((origin, "data:")) else None,
    )
    page.goto(address)
    yield page
    page.close()
    assert [complaint for complaint in complaints if not expected or expected not in complaint] == []

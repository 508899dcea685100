"""A browser for tests: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

    from tests.support.viewing import Viewer

_NAMES = ("/usr/lib/chromium/chromium", "chromium", "chromium-browser", "google-chrome")
"""Debian's `chromium` is a script that adds options: it would draw with a simulated graphics card"""
CHROMIUM = next(filter(None, map(shutil.which, _NAMES)), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start a browser for the tests of a module."""
    playwright = pytest.importorskip("playwright.sync_api", reason="there is no Playwright")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium; scripts/lab/install gets it on Debian and Ubuntu")
    with playwright.sync_playwright() as driver:
        # One process for all pages of a site: to start one takes longer than most pages.
        options = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--process-per-site"]
        started = driver.chromium.launch(executable_path=CHROMIUM, args=options)
        yield started
        started.close()


@contextmanager
def opened(browser: Browser, viewer: Viewer, path: str = "/", *, expected: str | None = None) -> Iterator[Page]:
    """Open a page as the printed address does, and refuse anything that a page must not do.

    No script may fail, nothing may be refused by the page's own policy, no dialog may open, and no request may go
    elsewhere. The browser may report in its console only what has the expected text.
    """
    contexts = browser.contexts  # one for all pages: it takes longer to make than most of them
    context = contexts[0] if contexts else browser.new_context(viewport={"width": 1280, "height": 800})
    if not contexts:
        context.new_page().goto(f"{viewer.base}/static/icon.svg")  # stays, and with it the process of the site
    page = context.new_page()
    page.set_default_timeout(300_000)  # a loaded machine is slow, not wrong
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(f"script: {error}"))
    page.on("console", lambda line: complaints.append(f"console: {line.text}") if line.type == "error" else None)

    def refuse(dialog: Any) -> None:
        complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    page.on("dialog", refuse)
    page.on(
        "request",
        lambda request: (
            None if request.url.startswith((viewer.base, "data:")) else complaints.append(f"request: {request.url}")
        ),
    )
    viewer.get(path)  # until its content is there, so that the page does not load again meanwhile
    try:
        page.goto(f"{viewer.base}/open?key={viewer.key}&to={quote(path)}")
        yield page
        assert [each for each in complaints if expected is None or expected not in each] == []
    finally:
        page.close()

"""Start `holdfast view`, ask it, and look at it with a browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import pytest

from tests.support.running import HOME, start, wait_for

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, Page

_NAMES = ("/usr/lib/chromium/chromium", "chromium", "chromium-browser", "google-chrome")
"""Debian's `chromium` is a script that adds options: it would draw with a simulated graphics card"""
CHROMIUM = next(filter(None, map(shutil.which, _NAMES)), None)


class Answer(NamedTuple):
    """An answer of the server."""

    status: int
    headers: http.client.HTTPMessage
    text: str


class Viewer:
    """A running `holdfast view`."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process = process
        self.address = address
        """as printed, with the key"""
        match = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/open\?key=([\w-]+)(?:&to=(.*))?", address)
        assert match is not None, address
        self.port, self.key, self.page = int(match[1]), match[2], match[3]
        self.base = f"http://127.0.0.1:{self.port}"

    def get(self, path: str, method: str = "GET", *, key: str | None = None, **headers: str) -> Answer:
        """Ask for a path, with the key unless another one is given; `None` for a header leaves it out.

        A page whose content is still being made, as it is sooner or later on a loaded machine, is loaded again.
        """

        def load() -> Answer | None:
            answer = self._ask(path, method, key, headers)
            return None if 'src="/static/wait.js"' in answer.text else answer

        loaded: Answer = wait_for(load, f"the content of {path}")
        return loaded

    def _ask(self, path: str, method: str, key: str | None, headers: dict[str, str]) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        bearer = {"Authorization": f"Bearer {self.key if key is None else key}"} if key != "" else {}
        try:
            connection.request(method, quote(path, safe="/%?&=:;,.~+@!$'()*-_\""), headers={**bearer, **named})
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read().decode(errors="surrogateescape"))
        finally:
            connection.close()

    def json(self, path: str) -> Any:
        """Return what a `.json` address answers."""
        answer = self.get(path)
        assert answer.status == 200, answer.text
        return json.loads(answer.text)


@contextmanager
def viewer(cwd: Path, *arguments: str | Path, home: Path = HOME, **variables: str) -> Iterator[Viewer]:
    """Start `holdfast view` and stop it at the end, as Ctrl-C does."""
    process = start("view", "--no-open", *arguments, cwd=cwd, env={"HOLDFAST_HOME": str(home), **variables})
    try:
        yield Viewer(process, read_address(process))
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=300) == 0, process.stderr.read()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def read_address(process: subprocess.Popen[str]) -> str:
    """Return the address that `holdfast view` prints."""
    assert process.stdout is not None and process.stderr is not None
    for line in process.stdout:
        if line.startswith("  http://"):
            return line.strip()
    raise AssertionError(process.stderr.read())


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

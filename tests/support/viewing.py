"""Start `holdfast view` and ask it."""

from __future__ import annotations

import http.client
import json
import re
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from tests.support.running import HOME, start, wait_for

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path


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

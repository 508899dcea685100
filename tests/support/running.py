"""Run the real command and the real server in tests."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.spec.schema import SCHEMA_VERSION
from holdfast.store.index import unpack
from tests.support.forking import Forked, can_fork, start_cold

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.store.heads import OutputRef, VerdictRef
    from holdfast.store.index import RunIndex

ROOT = Path(__file__).resolve().parents[2]
HOLDFAST = [sys.executable, "-m", "holdfast"]
PATIENCE = 300.0
"""Seconds that a test waits for a condition before it fails: a loaded machine is slow, not wrong."""
HOME = Path(tempfile.gettempdir()) / f"holdfast-tests-{os.getuid()}-{os.getpid()}"
"""HOLDFAST_HOME of commands that tests start"""


class Server:
    """A running test server."""

    def __init__(self, base_url: str, process: subprocess.Popen[bytes]) -> None:
        self.base_url = base_url
        self.process = process

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        request = urllib.request.Request(
            self.base_url.removesuffix("/v1") + path, None if body is None else json.dumps(body).encode()
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            return json.load(response)

    def control(self, **settings: Any) -> None:
        """Change the server's settings."""
        self._call("/control", settings)

    @contextmanager
    def controlled(self, **settings: Any) -> Iterator[None]:
        """Change the server's settings for a while."""
        before = self._call("/control", {})
        self.control(**settings)
        try:
            yield
        finally:
            self.control(**{name: before[name] for name in settings})

    def reset(self) -> None:
        """Forget the counts."""
        self._call("/reset", {})

    def stats(self) -> dict[str, Any]:
        """Return statistics of the requests so far."""
        return self._call("/stats")

    @property
    def requests(self) -> int:
        """Number of requests for completions."""
        return self.stats()["requests"]


@contextmanager
def server(**settings: Any) -> Iterator[Server]:
    """Start a server on loopback, and stop it at the end."""
    arguments = [
        f"{key}={value if key in ('answer', 'engine', 'stop') else json.dumps(value)}"
        for key, value in settings.items()
    ]
    process = Forked(
        [sys.executable, "-m", "tests.support.server", *arguments],
        cwd=ROOT,
        env=dict(os.environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        line = process.stdout.readline().decode()
        assert line.startswith("listening "), line
        yield Server(line.split()[1], process)
    finally:
        process.stdin.close()
        process.stdout.close()
        process.kill()
        process.wait()


def module_server(**settings: Any) -> Any:
    """Return a fixture for a server that the tests of a module share: `provider = module_server()`."""

    @pytest.fixture(scope="module")
    def shared() -> Iterator[Server]:
        with server(**settings) as running:
            yield running

    return shared


def wait_for(condition: Callable[[], Any], what: str, patience: float = PATIENCE, pause: float = 0.005) -> Any:
    """Return the condition's value once it is true.

    What takes longer to find out is asked less often, and so is what has taken long to come true.
    """
    first = time.monotonic()
    while (began := time.monotonic()) < first + patience:
        if value := condition():
            return value
        time.sleep(max(pause, min(1.0, 2 * (time.monotonic() - began)), min(0.2, (began - first) / 20)))
    raise AssertionError(f"waited {patience} s in vain for {what}")


def environment(**more: str) -> dict[str, str]:
    """Return an environment without variables of the user that could matter.

    `HOLDFAST_INDEX_BYTES` stays, so that any test can be run with cached indexes of small runs.
    """
    prefixes = ("HOLDFAST_", "OPENAI_", "WANDB_", "MLFLOW_")
    inherited = {
        key: value for key, value in os.environ.items() if not key.startswith(prefixes) or key == "HOLDFAST_INDEX_BYTES"
    }
    return {**inherited, "HOLDFAST_HOME": str(HOME), **more}


def holdfast(*arguments: str | Path, cwd: Path, env: dict[str, str] | None = None, check: int | None = 0) -> Any:
    """Run the command to its end; `check` is the exit code it must have (None: any)."""
    with start(*arguments, cwd=cwd, env=env) as process:
        try:
            stdout, stderr = process.communicate(timeout=1800)
        except BaseException:
            process.kill()
            raise
    if check is not None:
        assert process.returncode == check, f"exit {process.returncode}\n{stdout}\n{stderr}"
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def start(*arguments: str | Path, cwd: Path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start the command and return at once."""
    return spawn("holdfast", *arguments, cwd=cwd, env=env)


def spawn(module: str, *arguments: str | Path, cwd: Path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start `python -m MODULE`, or an equivalent forked process."""
    variables = environment(**(env or {}))
    return (Forked if can_fork(variables) else start_cold)(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=cwd,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ask_to_stop(process: subprocess.Popen[str]) -> str:
    """Press Ctrl-C once; return the line that says what the run waits for."""
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while not (line := process.stderr.readline()).startswith("note: stopping"):
        assert line, "the process has ended"
    return line.removeprefix("note: ").strip()


def on_a_terminal(*arguments: str | Path, cwd: Path, columns: int, code: int = 0, **env: str) -> str:
    """Return the output of the real command on a real terminal."""
    ours, theirs = pty.openpty()
    process = Forked(
        [*HOLDFAST, *map(str, arguments)],
        cwd=cwd,
        env=environment(TERM="xterm-256color", COLUMNS=str(columns), **env),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    screen = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        screen += chunk
    os.close(ours)
    assert process.wait() == code, screen.decode()
    return screen.decode()


def write_eval(folder: Path, base_url: str, *, rows: int = 20, name: str = "e", **keys: Any) -> Path:
    """Write an eval of `rows` questions against a test server that echoes; the answers of even rows are right."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "data.jsonl").open("w") as file:
        for number in range(rows):
            expected = f"question {number}" if number % 2 == 0 else "something else"
            file.write(json.dumps({"id": f"s{number}", "question": f"question {number}", "expected": expected}) + "\n")
    spec: dict[str, Any] = {
        "schemaVersion": SCHEMA_VERSION,
        "name": name,
        "dataset": {"path": "data.jsonl"},
        "target": {"model": "test-model", "base_url": base_url},
        "prompt": "{{ question }}",
        "graders": [{"type": "exact"}],
        **keys,
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(spec))  # JSON is YAML
    return path


def run_dir(cwd: Path, name: str = "e") -> Path:
    """Return the only run directory of an eval."""
    runs = [path for path in (cwd / "runs" / name).iterdir() if (path / "manifest.json").exists()]
    assert len(runs) == 1, runs
    return runs[0]


def lines(path: Path) -> list[dict[str, Any]]:
    """Read the records of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def metrics(run: Path, *, timing: bool = False) -> dict[str, Any]:
    """Read `metrics.json`; values that depend on the clock only with `timing`."""
    data = json.loads((run / "metrics.json").read_text())
    if not timing:
        del data["timing"]
    return data


def outputs_in(index: RunIndex) -> dict[str, OutputRef]:
    """Return the outputs of an index by key."""
    return dict(index.all_outputs())


def verdicts_in(index: RunIndex) -> dict[tuple[str, str, int | None, str], VerdictRef]:
    """Return the verdicts of an index, by key and what they are found by."""
    found = (index.find_verdicts(keys) for keys in index._all_keys("verdicts"))
    return {(unpack(key), *name): ref for some in found for key, refs in some.items() for name, ref in refs.items()}

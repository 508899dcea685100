"""Measure runs of long conversations: the memory and CPU of each command, at one size after the other.

    python bench/long.py [--conversations 50 200] [--turns 200] [--size 20000] [--folder FOLDER]

One conversation takes place, with a server here that calls a tool in each turn. Its records are then copied for all
other rows, of which the last four are cut off in the middle. The command that resumes them is killed after a quarter of
the requests and run again. `--folder` keeps the runs there, without their exports. A conversation takes 13 MB, and as
much again while it is exported.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from run import HERE, PYTHON, Spent, compile_first, spend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

UNFINISHED = 4
FORMATS = ("csv", "parquet", "samples", "junit", "html", "nat", "flexeval", "waza")


def _http(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data)


def _reply(message: dict[str, Any], stop: str) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": stop}
    usage = {"prompt_tokens": 12, "completion_tokens": 6, "total_tokens": 18}
    return _http({"id": "r", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage})


class _Connection(asyncio.Protocol):
    """Answers a user's message with a call of a tool, and the tool's result with a text, without reading JSON."""

    requests = 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._received = bytearray()
        self._head = self._length = 0

    def data_received(self, data: bytes) -> None:
        self._received += data
        while self._next():
            pass

    def _next(self) -> bool:
        if not self._head:
            self._head = self._received.find(b"\r\n\r\n") + 4
            if self._head == 3:
                self._head = 0
                return False
            _, _, rest = bytes(self._received[: self._head]).lower().partition(b"content-length:")
            self._length = int(rest.partition(b"\r\n")[0] or 0)
        end = self._head + self._length
        if len(self._received) < end:
            return False
        body = bytes(self._received[self._head : end])
        del self._received[:end]
        self._head = 0
        self._transport.write(self._answer(body))
        return True

    def _answer(self, body: bytes) -> bytes:
        if not body:
            return _http({"requests": _Connection.requests})
        _Connection.requests += 1
        users = body.count(b'"role":"user"')
        if body.rfind(b'"role":"tool"') > body.rfind(b'"role":"user"'):
            return _reply({"content": f"That was part {users}."}, "stop")
        function = {"name": "search", "arguments": json.dumps({"place": f"part {users}"})}
        call = {"id": f"call-{users}", "type": "function", "function": function}
        return _reply({"content": None, "tool_calls": [call]}, "tool_calls")


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(_Connection, "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await loop.run_in_executor(None, sys.stdin.buffer.read)


@contextmanager
def _serving() -> Iterator[str]:
    process = subprocess.Popen([PYTHON, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process.stdout.readline().decode().strip()
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait()


def _requests(url: str) -> int:
    with urllib.request.urlopen(url, timeout=60) as response:
        return json.load(response)["requests"]


def apart(work: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a process of its own: the memory of this one counts as that of each command it starts."""
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        return pool.submit(work, *arguments).result()


def _write(folder: Path, url: str, rows: int, options: argparse.Namespace, record: Path | None = None) -> Path:
    """Write an eval, and a run of it from the run `record`; return the run, or the eval if there is no record."""
    sys.path.insert(0, str(HERE.parent))
    from tests.support.transcripts import copy_conversations, write_conversations

    from holdfast.store.rundir import RunDir

    path = write_conversations(folder, f"{url}/v1", rows, turns=options.turns, size=options.size)
    return path if record is None else copy_conversations(RunDir(record), path, unfinished=UNFINISHED).path


def _view(run: Path, home: Path) -> Spent:
    """Open a run in the viewer for the first time: its pages, until the filters are ready."""
    from holdfast.store.rundir import RunDir
    from view import viewing

    began, most = time.monotonic(), 0.0
    key = run.name.rpartition("-")[2]
    with viewing(RunDir(run), home) as viewer:
        for page in (f"/run/{key}", f"/run/{key}/trials"):
            viewer.get(page)
        while json.loads(viewer.get(f"/run/{key}/trials.json"))["building"] is not None:
            most = max(most, _most_memory(viewer.process.pid))
            time.sleep(0.05)
        most = max(most, _most_memory(viewer.process.pid))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Spent(began, time.monotonic() - began, used.ru_utime + used.ru_stime, most, 0, 0)


def _most_memory(pid: int) -> float:
    """Return the most memory that a process or one of its helpers has held, in MB."""
    most = 0.0
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if match := re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text()):
            most = int(match[1]) / 1024
    except (FileNotFoundError, ProcessLookupError):  # a helper has ended
        return most
    return max([most, *[_most_memory(int(child)) for child in children]])


class Long:
    """A run of long conversations."""

    def __init__(self, folder: Path, record: Path, url: str, options: argparse.Namespace, count: int) -> None:
        self._folder, self._url = folder, url
        self._left = UNFINISHED * options.turns
        self._variables = {"HOLDFAST_HOME": str(folder / "home"), "OPENAI_API_KEY": "none"}
        self.run = apart(_write, folder, url, count, options, record)

    def command(self, *words: str | Path) -> Spent:
        """Run a command of Holdfast on the run."""
        return spend(PYTHON, "-m", "holdfast", *words, cwd=self._folder, **self._variables)

    def measure(self) -> Iterator[tuple[str, Spent]]:
        """Run all commands."""
        before = _requests(self._url)
        self._kill_eval(before + self._left // 4)
        yield "resume: four conversations are half done", self._eval()
        asked = _requests(self._url) - before
        if not self._left <= asked <= self._left + UNFINISHED:
            raise SystemExit(f"{asked} requests instead of {self._left}, and those in flight at the kill")
        yield "the same command again", self._eval()
        self._add_grader()
        yield "plan of one more grader", self._eval("--dry-run")
        yield "one more grader", self._eval()
        yield "show RUN", self.command("show", self.run)
        yield "show RUN SAMPLE", self.command("show", self.run, "s1")
        for name in FORMATS:
            yield f"export --to {name}", self.command("export", self.run, "--to", name)
            shutil.rmtree(self.run / "export")
        yield "compare with itself", self.command("compare", self.run, self.run)
        yield "view: first opening", apart(_view, self.run, self._folder / "home")
        yield "repair", self.command("repair", self.run)

    def _kill_eval(self, requests: int) -> None:
        """Resume the run, and kill the process once the server has seen so many requests."""
        command = [PYTHON, "-m", "holdfast", "eval", "long.yaml", "--display", "none"]
        process = subprocess.Popen(command, cwd=self._folder, env=os.environ | self._variables)
        while _requests(self._url) < requests and process.poll() is None:
            time.sleep(0.05)
        process.kill()
        process.wait()

    def _eval(self, *options: str) -> Spent:
        return self.command("eval", "long.yaml", "--display", "none", *options)

    def _add_grader(self) -> None:
        path = self._folder / "long.yaml"
        spec = json.loads(path.read_text())
        spec["graders"].append({"type": "text", "name": "everything", "contains": "nothing", "transcript": "all"})
        path.write_text(json.dumps(spec))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure runs of long conversations.")
    parser.add_argument("--conversations", type=int, nargs="+", default=(50, 200))
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--size", type=int, default=20_000, help="bytes of a tool's result")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        import uvloop

        uvloop.run(_serve())
        return
    compile_first()
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name, _serving() as url:
        folder = (options.folder or Path(name)).resolve()
        path = apart(_write, folder / "one", url, 1, options)
        variables = {"HOLDFAST_HOME": str(folder / "home"), "OPENAI_API_KEY": "none"}
        one = spend(PYTHON, "-m", "holdfast", "eval", path.name, "--display", "none", cwd=path.parent, **variables)
        print(f"one conversation of {options.turns} turns: {one.cpu:.1f} s of CPU, {one.megabytes:.0f} MB", flush=True)
        record = next(path.parent.glob("runs/long/*/manifest.json")).parent
        for count in options.conversations:
            large = Long(folder / str(count), record, url, options, count)
            size = sum(file.stat().st_size for file in large.run.iterdir())
            print(f"{count:,} conversations, {size / 1e9:.2f} GB", flush=True)
            for what, spent in large.measure():
                figures = f"{spent.megabytes:>6.0f} MB  {spent.cpu:>7.1f} s of CPU  {spent.wall:>7.1f} s"
                print(f"{what:>45}: {figures}", flush=True)


if __name__ == "__main__":
    main()

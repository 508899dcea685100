"""Measure runs of long conversations: the memory and CPU of each command, at one size after the other.

    python bench/long.py [--conversations 50 200] [--turns 200] [--size 20000] [--folder FOLDER]

One conversation takes place, with a server here that calls a tool in each turn. Its records are then copied for all
other rows, of which the last four are cut off in the middle. `--folder` keeps the runs there, without their exports.
A conversation takes 13 MB, and as much again while it is exported.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.store.rundir import RunDir
from run import HERE, PYTHON, Spent, compile_first, spend

sys.path.insert(0, str(HERE.parent))
from tests.support.transcripts import copy_conversations, write_conversations

if TYPE_CHECKING:
    from collections.abc import Iterator

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


class Long:
    """A run of long conversations."""

    def __init__(self, folder: Path, record: RunDir, url: str, options: argparse.Namespace, count: int) -> None:
        self._folder, self._url, self.count = folder, url, count
        self._turns = options.turns
        path = write_conversations(folder, f"{url}/v1", count, turns=options.turns, size=options.size)
        self.run = copy_conversations(record, path, unfinished=UNFINISHED)

    def command(self, *words: str | Path) -> Spent:
        """Run a command of Holdfast on the run."""
        variables = {"HOLDFAST_HOME": str(self._folder / "home"), "OPENAI_API_KEY": "none"}
        return spend(PYTHON, "-m", "holdfast", *words, cwd=self._folder, **variables)

    def measure(self) -> Iterator[tuple[str, Spent]]:
        """Run all commands."""
        before = _requests(self._url)
        yield "resume: four conversations are half done", self._eval()
        left = UNFINISHED * self._turns
        if (asked := _requests(self._url) - before) != left:
            raise SystemExit(f"{asked} requests instead of {left}")
        yield "the same command again", self._eval()
        self._add_grader()
        yield "one more grader", self._eval()
        yield "show RUN", self.command("show", self.run.path)
        yield "show RUN SAMPLE", self.command("show", self.run.path, "s1")
        for name in FORMATS:
            yield f"export --to {name}", self.command("export", self.run.path, "--to", name)
            shutil.rmtree(self.run.path / "export")
        yield "compare with itself", self.command("compare", self.run.path, self.run.path)
        yield "repair", self.command("repair", self.run.path)

    def _eval(self) -> Spent:
        return self.command("eval", "long.yaml", "--display", "none")

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
        path = write_conversations(folder / "one", f"{url}/v1", 1, turns=options.turns, size=options.size)
        variables = {"HOLDFAST_HOME": str(folder / "home"), "OPENAI_API_KEY": "none"}
        one = spend(PYTHON, "-m", "holdfast", "eval", path.name, "--display", "none", cwd=path.parent, **variables)
        print(f"one conversation of {options.turns} turns: {one.cpu:.1f} s of CPU, {one.megabytes:.0f} MB", flush=True)
        record = RunDir(next(path.parent.glob("runs/long/*/manifest.json")).parent)
        for count in options.conversations:
            large = Long(folder / str(count), record, url, options, count)
            size = sum(file.stat().st_size for file in large.run.path.iterdir())
            print(f"{count:,} conversations, {size / 1e9:.2f} GB", flush=True)
            for what, spent in large.measure():
                print(f"{what:>45}: {spent.megabytes:>6.0f} MB  {spent.cpu:>7.1f} s of CPU", flush=True)


if __name__ == "__main__":
    main()

"""Fail every system call of a command on its run's files, one after the other, as SQLite's tests do.

    scene = Scene.make("new", folder, provider)
    for failure in scene.failures():
        scene.fail(failure)

The calls are those that strace sees in a run without faults. Each is then made to fail in a run of its own: the command
either succeeds or ends with a clear error, and the same command, run again, ends with the numbers of the run without
faults, having asked for nothing that was on disk. `python -m bench.failing_calls` goes through all of them.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.breaking import leftovers, numbers
from tests.support.forking import Forked
from tests.support.running import environment, holdfast, start, wait_for, write_eval

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.running import Server

ROWS = 6
CONCURRENCY = 2
SCENES = ("new", "resumed", "reused", "graded", "workers")
_CALLS = (
    *("openat", "read", "pread64", "write", "pwrite64", "fsync", "fdatasync", "ftruncate", "close", "newfstatat"),
    *("getdents64", "mkdir", "rmdir", "rename", "link", "unlink", "chmod", "fchmod"),
)
_FULL = ("openat", "write", "pwrite64", "fsync", "close", "mkdir", "rename", "link")
"""calls that need room, or a part of the user's quota"""
_CALL = re.compile(r"(\d+) +(\w+)\((.*)")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"|<(/[^>]*)>')


@dataclass(frozen=True)
class Failure:
    """A call that is to fail: the nth one on a file, or of a thread if the file's name is not the same each time."""

    call: str
    error: str
    number: int
    path: str | None

    def __str__(self) -> str:
        return f"{self.call} {self.number} of {self.path or 'a thread'}: {self.error}"


@dataclass(frozen=True)
class Scene:
    """A command, the folder that it begins with, and how it ends without faults."""

    name: str
    folder: Path
    template: Path
    command: tuple[str, ...]
    provider: Server
    expected: tuple[bytes, bytes]
    requests: int

    @classmethod
    def make(cls, name: str, folder: Path, provider: Server) -> Scene:
        """Prepare a scene below a folder."""
        place, template = folder / "place", folder / "template"
        # What a new run shares with another one has to be large.
        large = {"prompt": "{{ question }} " + "x" * 200_000} if name == "reused" else {}
        eval_file = write_eval(place, provider.base_url, rows=ROWS, limits={"concurrency": CONCURRENCY}, **large)
        command = ["eval", eval_file.name, *(["--workers", "2"] if name == "workers" else [])]
        if name == "resumed":
            _kill_at_work(eval_file, provider)
        elif name in ("reused", "graded"):
            holdfast("eval", eval_file, cwd=place)
        if name == "graded":
            command = ["grade", str(_run(place).relative_to(place)), "--again"]
        elif name == "reused":
            with (place / "data.jsonl").open("a") as file:
                file.write('{"id": "new", "question": "new", "expected": "new"}\n')
        shutil.copytree(place, template, symlinks=True)
        provider.reset()
        holdfast(*command, cwd=place)
        scene = cls(name, place, template, tuple(command), provider, numbers(_run(place)), provider.requests)
        assert scene.requests <= ROWS
        return scene

    def _restore(self) -> None:
        shutil.rmtree(self.folder)
        shutil.copytree(self.template, self.folder, symlinks=True)
        self.provider.reset()

    def failures(self) -> Iterator[Failure]:
        """Yield what can fail, as a run without faults shows."""
        self._restore()
        log = self.folder.with_name("calls")
        self._run([*("-y", "-o", str(log), "-e", f"trace={','.join(_CALLS)}")])
        by_path, by_thread, threads = Counter[tuple[str, str]](), Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        nameless: dict[tuple[str, int], None] = {}
        for line in log.read_text(errors="replace").splitlines():
            if (match := _CALL.match(line)) is None:
                continue
            thread, call, arguments = match.groups()
            by_thread[thread, call] += 1
            paths = [path for path in map(self._ours, _STRING.findall(arguments.partition(" = ")[0])) if path]
            named = [path for path in paths if not re.search(r"/\.[^/]*\.tmp$", path)]
            for path in named[-1:]:
                threads[thread, call + path] += 1
                by_path[call, path] = max(by_path[call, path], threads[thread, call + path])
            if paths and not named:
                nameless[call, by_thread[thread, call]] = None
        places = [(call, number, path) for (call, path), count in by_path.items() for number in range(1, count + 1)]
        everything = [*places, *((call, number, None) for call, number in nameless)]
        for call, number, where in everything:
            for error in ("EIO", *(("ENOSPC", "EDQUOT") if call in _FULL else ())):
                yield Failure(call, error, number, where)

    def _ours(self, match: tuple[str, str]) -> str | None:
        path = Path(self.folder, match[0] or match[1])
        return str(path) if path.is_relative_to(self.folder / "runs") else None

    def fail(self, failure: Failure) -> str:
        """Let a call fail, then run the command again; return how it ended. Raises AssertionError for what is wrong."""
        self._restore()
        log = self.folder.with_name("calls")
        filters = []
        if failure.path is not None:
            relative = str(Path(failure.path).relative_to(self.folder))
            filters = ["-P", failure.path, "-P", relative]
        fault = f"inject={failure.call}:error={failure.error}:when={failure.number}"
        code, output = self._run(["-y", "-o", str(log), *filters, "-e", f"trace={failure.call}", "-e", fault])
        hits = [line for line in log.read_text(errors="replace").splitlines() if line.endswith("(INJECTED)")]
        if not hits:
            return "not made this time"
        if failure.path is None and not all(any(map(self._ours, _STRING.findall(hit))) for hit in hits):
            return "hit another file"
        assert code in (0, 3), f"exit {code}\n{output}"
        assert "Traceback" not in output and "bug in Holdfast" not in output, output
        assert code == 0 or "error: " in output or "stopped: " in output, output
        again = holdfast(*self.command, cwd=self.folder)
        assert numbers(_run(self.folder)) == self.expected, again.stdout
        assert self.provider.requests <= self.requests + CONCURRENCY, f"{self.provider.requests} requests\n{output}"
        left = [] if failure.call == "unlink" else list(self.folder.rglob(".*.tmp"))
        assert not left, left
        return "succeeded" if code == 0 else "stopped"

    def _run(self, options: list[str]) -> tuple[int, str]:
        """Run the command under strace, and return its exit code and all that it printed."""
        with _forked(self.command, self.folder) as process:
            tracer = subprocess.Popen(
                ["strace", "-f", "-p", str(process.pid), *options], stderr=subprocess.PIPE, text=True
            )
            with tracer:
                line = ""
                while f"Process {process.pid} attached" not in line:
                    line = tracer.stderr.readline()
                    assert line, "strace has ended"
                stdout, stderr = process.communicate(timeout=200)
                tracer.stderr.read()
        return process.returncode, stdout + stderr


@contextmanager
def _forked(command: tuple[str, ...], cwd: Path) -> Iterator[Any]:
    """A process that waits for its input to be closed, and then runs the command."""
    process = Forked(
        [sys.executable, "-m", "tests.support.waiting", *command],
        cwd=cwd,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def _kill_at_work(eval_file: Path, provider: Server) -> None:
    """Leave a run that was killed when some of its outputs were on disk, and its lease."""
    provider.control(latency=0.3)
    process = start("eval", eval_file, cwd=eval_file.parent)
    wait_for(lambda: any(path.stat().st_size for path in eval_file.parent.rglob("outputs.jsonl")), "an output")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait_for(lambda: not leftovers(eval_file.parent), "it to be dead")
    provider.control(latency=0)


def _run(folder: Path) -> Path:
    """The run directory, or the newest of two."""
    runs = [path.parent for path in folder.glob("runs/*/*/manifest.json")]
    return max(runs, key=lambda run: (run / "manifest.json").stat().st_mtime_ns)

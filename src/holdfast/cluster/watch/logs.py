"""Read and follow the logs of an invocation, across jobs.

Every start of a job writes its own log file, so following a task means following a folder: whatever is appended to
its files is shown, in the order in which the files were last written. A requeued job, or a successor, is the next file.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

from holdfast.cluster.remote import invocation as layout
from holdfast.cluster.remote.executor import active_main_jobs, find_executor
from holdfast.cluster.remote.invocation import TaskFolder
from holdfast.cluster.remote.ledger import Ledger
from holdfast.errors import ClusterError, Unreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from holdfast.cluster.remote.registry import Invocation
    from holdfast.cluster.remote.slurm import JobState
    from holdfast.cluster.remote.transport import Transport


READ_BYTES: Final = 4 << 20
"""read at once"""
_POLL_SECONDS: Final = 1.0
_REASON_SECONDS: Final = 5.0
"""how often the executor is asked why a job is pending"""
_LOST_SECONDS: Final = 60.0
"""how long a task may have no job before this is reported"""
_LAST_LINES: Final = 15


class LogLine(NamedTuple):
    """A line of a log, and the name of its file."""

    file: str
    text: str


class Logs:
    """The log files in a folder whose names match a pattern. Each line is returned once."""

    def __init__(self, transport: Transport, folder: str, pattern: str) -> None:
        """Read files that match a shell pattern such as `main-*.log`."""
        self._transport = transport
        self.folder = folder
        self._pattern = pattern
        self._offsets: dict[str, int] = {}
        self._unfinished: dict[str, bytes] = {}
        """per file, what follows its last line break"""

    def _sizes(self) -> list[tuple[str, int]]:
        return self._transport.list_files(self.folder, self._pattern)

    def skip_earlier_starts(self) -> None:
        """Begin with the newest start. One start may have several logs of a kind: one per instance."""
        sizes = self._sizes()
        newest = self._start_of(sizes[-1][0]) if sizes else []
        self._offsets.update((name, size) for name, size in sizes if self._start_of(name) != newest)

    def _start_of(self, name: str) -> list[str]:
        """Return job and restart of a log: `12` and `0` of `deployment-12-0-1.log`."""
        return name.removeprefix(self._pattern.partition("*")[0]).removesuffix(".log").split("-")[:2]

    def read(self) -> Iterator[LogLine]:
        """Yield the lines that were completed since the last call.

        A job that was killed may leave half a line behind. Once a newer start writes, that half is a line.
        """
        sizes = self._sizes()
        for name, size in sizes:
            offset = self._offsets.get(name, 0)
            if size < offset:  # truncated and written anew
                offset = 0
            while offset < size:
                data = self._transport.read(f"{self.folder}/{name}", offset, min(READ_BYTES, size - offset))
                if not data:
                    break
                offset += len(data)
                self._offsets[name] = offset
                *lines, self._unfinished[name] = (self._unfinished.get(name, b"") + data).split(b"\n")
                yield from (_line(name, line) for line in lines)
            if self._start_of(name) != self._start_of(sizes[-1][0]):
                yield from self._end(name)

    def end(self) -> Iterator[LogLine]:
        """Yield the last lines that have no line break."""
        for name in list(self._unfinished):
            yield from self._end(name)

    def _end(self, name: str) -> Iterator[LogLine]:
        if line := self._unfinished.pop(name, b""):
            yield _line(name, line)


def _line(file: str, data: bytes) -> LogLine:
    return LogLine(file, data.decode(errors="replace"))


def read_end(transport: Transport, folder: str, pattern: str, most: int) -> tuple[str, list[str]]:
    """Return the name of the newest log and its last lines, at most so many bytes; an empty name if there is no log."""
    sizes = transport.list_files(folder, pattern)
    if not sizes:
        return "", []
    name, size = sizes[-1]
    start = max(0, size - most)
    lines = transport.read(f"{folder}/{name}", start, size - start).decode(errors="replace").splitlines()
    return name, lines[1:] if start else lines


def task_prefix(names: Sequence[str], number: int) -> str:
    """Return what the lines of a task begin with: nothing for the only task, `[gsm8k.1] ` if names repeat."""
    name = names[number]
    suffix = f".{names[:number].count(name)}" if names.count(name) > 1 else ""
    return f"[{name}{suffix}] " if len(names) > 1 else ""


def repeat(show: Callable[[], bool], notify: Callable[[str], None]) -> None:
    """Call `show` every second until it returns True. While the cluster is unreachable, wait for it."""
    unreachable = False
    while True:
        try:
            if show():
                return
            if unreachable:
                notify("the cluster answers again")
            unreachable = False
        except Unreachable as error:
            if not unreachable:
                notify(f"{error.message}; jobs are not affected, trying again until it answers")
            unreachable = True
        time.sleep(_POLL_SECONDS)


def follow(transport: Transport, invocation: Invocation, write: Callable[[str], None]) -> int:
    """Show the main logs of all tasks until all tasks are over, and return their worst exit code."""
    tasks = [_FollowedTask(transport, invocation, number, write) for number in range(len(invocation.tasks))]

    def show() -> bool:
        for task in tasks:
            task.show()
        return all(task.over for task in tasks)

    repeat(show, lambda message: write(f"warning: {message}"))
    return max((task.exit_code for task in tasks), default=0)


class _FollowedTask:
    """A task whose log is shown until the task is over."""

    def __init__(self, transport: Transport, invocation: Invocation, number: int, write: Callable[[str], None]) -> None:
        self._transport = transport
        self._invocation = invocation
        self._place = TaskFolder(invocation.directory, number)
        self._logs = Logs(transport, self._place.logs, "main-*.log")
        self._prefix = task_prefix(invocation.tasks, number)
        self._write_line = write
        self._alive = time.monotonic()
        """when the task last showed a sign of life"""
        self._asked = 0.0
        self._reason = ""
        self.over = False
        self.exit_code = 3

    def _write(self, text: str) -> None:
        self._write_line(f"{self._prefix}{text}")

    def show(self) -> None:
        """Show what is new, and note whether the task is over."""
        if self.over:
            return
        state = layout.read_state(self._transport, self._place)  # before the log, whose last lines come before it
        for line in self._logs.read():
            self._write(line.text)
        if state.phase in layout.OVER:
            for line in self._logs.end():
                self._write(line.text)
            self.over, self.exit_code = True, 3 if state.exit_code is None else state.exit_code
            return
        if state.phase == "waiting":
            self._show_pending_reason()
        if state.updated and time.time() - state.updated < _LOST_SECONDS / 2:
            self._alive = time.monotonic()
        elif time.monotonic() - self._alive > _LOST_SECONDS:
            self._alive = time.monotonic()
            if not self._active_jobs():
                self._give_up()

    def _show_pending_reason(self) -> None:
        """Show why the job has not started, whenever the reason changes."""
        if time.monotonic() - self._asked < _REASON_SECONDS:
            return
        self._asked = time.monotonic()
        try:
            live = self._active_jobs()
        except ClusterError as error:
            self._write(f"warning: cannot ask why it is pending: {error.message}")
            self._asked = float("inf")
            return
        pending = bool(live) and all(job.state == "pending" for job in live)
        # Later jobs only wait for the first.
        first = min(live, key=lambda job: int(job.id)) if pending else None
        reason = f"job {first.handle} is pending: {first.why}" if first and first.why else ""
        if reason and reason != self._reason:
            self._write(f"note: {reason}")
        self._reason = reason or self._reason

    def _active_jobs(self) -> list[JobState]:
        executor = find_executor(self._invocation.executor)
        ledger = Ledger(self._transport, self._invocation.directory)
        return active_main_jobs(executor, ledger, self._invocation.id, self._place.number)

    def _give_up(self) -> None:
        """Report that no job is left, with the last output of the batch script: Python may never have started."""
        logs = Logs(self._transport, self._place.logs, "slurm-*.log")
        logs.skip_earlier_starts()
        for line in [*logs.read(), *logs.end()][-_LAST_LINES:]:
            self._write(f"| {line.text}")
        self._write(f"no job of it is left; `holdfast resume {self._invocation.id}` continues it")
        self.over = True

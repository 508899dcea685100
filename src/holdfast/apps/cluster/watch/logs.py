"""Read and follow the logs of an invocation, across jobs.

Every start of a job writes its own log file, so following a task means following a folder: whatever is appended to
its files is shown, in the order in which the files were last written. A requeued job, or a successor, is the next file.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

from holdfast.apps.cluster.remote import invocation as layout
from holdfast.apps.cluster.remote.executor import active_main_jobs, find_executor
from holdfast.apps.cluster.remote.invocation import TaskFolder
from holdfast.apps.cluster.remote.ledger import Ledger
from holdfast.errors import ClusterError, Exit, Unreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from holdfast.apps.cluster.remote.registry import Invocation
    from holdfast.apps.cluster.remote.slurm import JobState
    from holdfast.apps.cluster.remote.transport import Transport


READ_BYTES: Final = 4 << 20
"""read at once"""
_POLL_SECONDS: Final = 1.0
_REASON_SECONDS: Final = 5.0
"""how often the executor is asked why a job is pending"""
_LOST_SECONDS: Final = 60.0
"""how long a task may be without a job before this is reported"""
_LAST_LINES: Final = 15


class LogLine(NamedTuple):
    """A line of a log, and the folder and the name of its file."""

    folder: str
    file: str
    text: str


class Logs:
    """The log files in folders whose names match a pattern. Each line is returned once.

    A look takes two round trips, however many folders and files there are.
    """

    def __init__(self, transport: Transport, folders: Sequence[str], pattern: str) -> None:
        """Read files that match a shell pattern such as `main-*.log`."""
        self._transport = transport
        self.folders = folders
        self._pattern = pattern
        self._offsets: dict[tuple[str, str], int] = {}
        """by folder and name"""
        self._unfinished: dict[tuple[str, str], bytes] = {}
        """per file, what follows its last line break"""

    def skip_earlier_starts(self) -> None:
        """Begin with the newest start. One start may have several logs of a kind: one per instance."""
        for folder, files in self._transport.list_files(self.folders, self._pattern).items():
            self._offsets.update(((folder, name), size) for name, size in files if self._is_earlier(name, files))

    def _is_earlier(self, name: str, files: Sequence[tuple[str, int]]) -> bool:
        return self._start_of(name) != self._start_of(files[-1][0])

    def _start_of(self, name: str) -> list[str]:
        """Return job and restart of a log: `12` and `0` of `deployment-12-0-1.log`."""
        return name.removeprefix(self._pattern.partition("*")[0]).removesuffix(".log").split("-")[:2]

    def read(self) -> Iterator[LogLine]:
        """Yield the lines that were completed since the last call.

        A job that was killed may leave half a line. Once a newer start writes, that half is a line.
        """
        listing = self._transport.list_files(self.folders, self._pattern)
        sizes = {(folder, name): size for folder, files in listing.items() for name, size in files}
        earlier = {(folder, name) for folder, name in sizes if self._is_earlier(name, listing[folder])}
        for file, size in sizes.items():
            if size < self._offsets.get(file, 0):  # truncated and rewritten
                self._offsets[file] = 0
            if file in earlier and size == self._offsets.get(file, 0):
                yield from self._end(file)
        while parts := self._next_parts(sizes):
            contents = self._transport.read_parts({"/".join(file): part for file, part in parts.items()})
            for file, (offset, _) in parts.items():
                data = contents.get("/".join(file), b"")
                self._offsets[file] = offset + len(data)
                if not data:  # it is gone, or was truncated just now
                    sizes[file] = offset
                *lines, self._unfinished[file] = (self._unfinished.get(file, b"") + data).split(b"\n")
                yield from (_line(file, line) for line in lines)
                if file in earlier and self._offsets[file] >= sizes[file]:
                    yield from self._end(file)

    def _next_parts(self, sizes: Mapping[tuple[str, str], int]) -> dict[tuple[str, str], tuple[int, int]]:
        """Return the offsets and lengths to read next, in order."""
        parts: dict[tuple[str, str], tuple[int, int]] = {}
        room = READ_BYTES
        for file, size in sizes.items():
            offset = self._offsets.get(file, 0)
            length = min(size - offset, room)
            if length > 0:
                parts[file] = offset, length
                room -= length
        return parts

    def end(self) -> Iterator[LogLine]:
        """Yield the last lines that have no line break."""
        for file in list(self._unfinished):
            yield from self._end(file)

    def _end(self, file: tuple[str, str]) -> Iterator[LogLine]:
        if line := self._unfinished.pop(file, b""):
            yield _line(file, line)


def _line(file: tuple[str, str], data: bytes) -> LogLine:
    return LogLine(*file, data.decode(errors="replace"))


def read_end(transport: Transport, folder: str, pattern: str, most: int) -> tuple[str, list[str]]:
    """Return the name of the newest log and its last lines, at most so many bytes; an empty name if there is no log."""
    sizes = transport.list_files([folder], pattern)[folder]
    if not sizes:
        return "", []
    name, size = sizes[-1]
    start = max(0, size - most)
    lines = transport.read(f"{folder}/{name}", start, size - start).decode(errors="replace").splitlines()
    return name, lines[1:] if start else lines


def task_prefix(names: Sequence[str], number: int) -> str:
    """Return the prefix of a task's lines: empty for the only task, `[gsm8k.1] ` if names repeat."""
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
    followed = _Followed(transport, invocation, write)
    repeat(followed.show, lambda message: write(f"warning: {message}"))
    return max((task.exit_code for task in followed.tasks), default=0)


class _Followed:
    """The tasks of an invocation. A look takes three round trips, however many tasks there are."""

    def __init__(self, transport: Transport, invocation: Invocation, write: Callable[[str], None]) -> None:
        self._transport = transport
        self._invocation = invocation
        self.tasks = [_FollowedTask(invocation, number, write) for number in range(len(invocation.tasks))]
        self._by_folder = {task.place.logs: task for task in self.tasks}
        self._logs = Logs(transport, list(self._by_folder), "main-*.log")
        self._asked = 0.0

    def show(self) -> bool:
        """Show what is new; True if all tasks are over."""
        # Before the logs, whose last lines come before the state.
        _, files = self._transport.read_tree(self._invocation.directory, ("state.json",))
        for line in self._logs.read():
            self._by_folder[line.folder].write(line.text)
        states = {}
        for task in self.tasks:
            data = files.get(f"{task.place.number}/state.json")
            states[task] = layout.State() if data is None else layout.decode(data, layout.State, task.place.state)
        ended = [task for task, state in states.items() if not task.over and state.phase in layout.OVER]
        if ended:
            for line in self._logs.end():
                self._by_folder[line.folder].write(line.text)
        for task in ended:
            exit_code = states[task].exit_code
            task.over, task.exit_code = True, Exit.UNFINISHED if exit_code is None else exit_code
        rest = {task: state for task, state in states.items() if not task.over}
        if any(task.needs_jobs(state) for task, state in rest.items()):
            self._show_jobs(rest)
        return all(task.over for task in self.tasks)

    def _show_jobs(self, states: Mapping[_FollowedTask, layout.State]) -> None:
        """Show why jobs have not started, and give up tasks without jobs."""
        if time.monotonic() - self._asked < _REASON_SECONDS:
            return
        self._asked = time.monotonic()
        executor = find_executor(self._invocation.executor)
        ledger = Ledger(self._transport, self._invocation.directory)
        try:
            active = active_main_jobs(executor, ledger, self._invocation.id)
        except ClusterError as error:
            waiting = next(iter(states))
            waiting.write(f"warning: cannot ask why it is pending: {error.message}")
            self._asked = float("inf")
            return
        for task, state in states.items():
            live = active.get(task.place.number, [])
            if state.phase == "waiting":
                task.show_pending_reason(live)
            if task.is_lost():
                if live:
                    task.note_alive()
                else:
                    task.give_up(self._transport)


class _FollowedTask:
    """A task whose log is shown until the task is over."""

    def __init__(self, invocation: Invocation, number: int, write: Callable[[str], None]) -> None:
        self.place = TaskFolder(invocation.directory, number)
        self._invocation = invocation.id
        self._prefix = task_prefix(invocation.tasks, number)
        self._write_line = write
        self._alive = time.monotonic()
        """when the task last showed a sign of life"""
        self._reason = ""
        self.over = False
        self.exit_code: int = Exit.UNFINISHED

    def write(self, text: str) -> None:
        """Write a line of this task."""
        self._write_line(f"{self._prefix}{text}")

    def needs_jobs(self, state: layout.State) -> bool:
        """Note a sign of life; return True if the executor has to be asked for the jobs of the task."""
        if state.updated and time.time() - state.updated < _LOST_SECONDS / 2:
            self.note_alive()
        return state.phase == "waiting" or self.is_lost()

    def is_lost(self) -> bool:
        """Return True if there has been no sign of life for long."""
        return time.monotonic() - self._alive > _LOST_SECONDS

    def note_alive(self) -> None:
        """Note a sign of life."""
        self._alive = time.monotonic()

    def show_pending_reason(self, live: Sequence[JobState]) -> None:
        """Show why the job has not started, whenever the reason changes."""
        pending = bool(live) and all(job.state == "pending" for job in live)
        # Later jobs only wait for the first.
        first = min(live, key=lambda job: int(job.id)) if pending else None
        reason = f"job {first.handle} is pending: {first.why}" if first and first.why else ""
        if reason and reason != self._reason:
            self.write(f"note: {reason}")
        self._reason = reason or self._reason

    def give_up(self, transport: Transport) -> None:
        """Report that no main job is left, with the last output of the batch script: Python may never have started."""
        logs = Logs(transport, [self.place.logs], "slurm-*.log")
        logs.skip_earlier_starts()
        for line in [*logs.read(), *logs.end()][-_LAST_LINES:]:
            self.write(f"| {line.text}")
        self.write(f"no main job of it is left; `holdfast resume {self._invocation}` continues it")
        self.over = True

"""Finds and ends processes that an earlier process of Holdfast left in a workspace, before the workspace is restored.

Programs end with Holdfast, see `keeper`. A process may still survive if the user's Python code started it, if its guard
was killed too, or on a system without namespaces and subreapers. It would write into the restored workspace.

A process belongs to a workspace if its environment names the workspace as `HOLDFAST_WORKSPACE`, if its working
directory is inside, or if such a process started it. Somebody may look at a workspace in a terminal, so if nothing but
the working directory speaks for it, a process with a terminal counts only if the process that started it has ended.
This process, its ancestors and its descendants never count.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from holdfast.errors import AttemptError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_END_SECONDS: Final = 10.0


class _Process(NamedTuple):
    pid: int
    name: str
    parent: int
    session: int
    terminal: bool

    def __str__(self) -> str:
        return f"{self.name} ({self.pid})"


def end_survivors(workspace: Path) -> list[str]:
    """Kill the processes that belong to a workspace, wait for their end, and return their names.

    Raise AttemptError if they do not end: the workspace cannot be restored while they may write to it.
    """
    ended: dict[int, str] = {}
    deadline, pause = time.monotonic() + _END_SECONDS, 0.002
    # A search misses a process whose parent starts it and ends during the search, so it is repeated after a find.
    while (survivors := _survivors(str(workspace))) or (ended and (survivors := _survivors(str(workspace)))):
        names = ", ".join(map(str, survivors))
        if time.monotonic() > deadline:
            message = f"processes of an earlier attempt are still running in {workspace}, and do not end: {names}"
            remedy = "End them, then run the same command again."
            raise AttemptError("agent", message, remedy=remedy, retry=False)
        for process in survivors:
            ended[process.pid] = str(process)
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    return list(ended.values())


def _survivors(workspace: str) -> list[_Process]:
    processes = {process.pid: process for process in _processes()}
    own = {*_ancestors(os.getpid(), processes)}
    # As the kernel names it: TMPDIR may be a link. The folder itself is not resolved: an agent may have replaced it by
    # a link to somebody's home.
    parent, name = os.path.split(workspace)
    folder = os.path.join(os.path.realpath(parent), name)  # noqa: PTH118
    marked = [
        process
        for process in processes.values()
        if process.pid not in own
        and (_names(process.pid, workspace) or (_is_in(process.pid, folder) and not _is_seen(process, processes)))
    ]
    roots = {process.pid for process in marked}
    return [
        process
        for process in processes.values()
        if process.pid not in own
        and os.getpid() not in (lineage := [*_ancestors(process.pid, processes)])
        and not roots.isdisjoint(lineage)
    ]


def _ancestors(pid: int, processes: dict[int, _Process]) -> Iterator[int]:
    """Yield a process and its ancestors."""
    while (process := processes.get(pid)) is not None:
        yield pid
        pid = process.parent


def _is_seen(process: _Process, processes: dict[int, _Process]) -> bool:
    """Return True for a process in somebody's terminal: it leads the session, or its parent is part of it."""
    parent = processes.get(process.parent)
    led = process.pid == process.session
    return process.terminal and (led or (parent is not None and parent.session == process.session))


if os.path.isdir("/proc/self"):  # noqa: PTH112 - as below: pathlib would take as long as the rest of the search

    def _processes() -> Iterable[_Process]:
        mine = os.geteuid()
        for entry in os.scandir("/proc"):
            with suppress(OSError, ValueError):
                pid = int(entry.name)
                if mine not in (0, entry.stat().st_uid):
                    continue  # another user's, whose details are hidden
                with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
                    # The name, in parentheses, may contain anything.
                    start, _, rest = file.read().rpartition(b")")
                state, parent, _, session, terminal, *_ = rest.split()
                if state not in (b"Z", b"X"):
                    name = start.partition(b"(")[2].decode("utf-8", "replace")
                    yield _Process(pid, name, int(parent), int(session), terminal != b"0")

    def _names(pid: int, workspace: str) -> bool:
        with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
            return b"\0HOLDFAST_WORKSPACE=" + os.fsencode(workspace) + b"\0" in b"\0" + file.read()
        return False

    def _is_in(pid: int, folder: str) -> bool:
        with suppress(OSError):
            current = os.readlink(f"/proc/{pid}/cwd").removesuffix(" (deleted)")  # noqa: PTH115
            return current == folder or current.startswith(folder + "/")
        return False

else:  # macOS, whose `ps` shows the environment of a user's own processes

    def _processes() -> Iterable[_Process]:
        for pid, parent, command in _ps("-axo", "pid=,ppid=,comm="):
            yield _Process(int(pid), os.path.basename(command), int(parent), 0, terminal=False)  # noqa: PTH119

    def _names(pid: int, workspace: str) -> bool:
        lines = _ps("-p", str(pid), "-Ewwo", "pid=,ppid=,command=")
        return any(f" HOLDFAST_WORKSPACE={workspace} " in f" {command} " for _, _, command in lines)

    def _is_in(pid: int, folder: str) -> bool:  # noqa: ARG001 - `ps` does not show it
        return False

    def _ps(*options: str) -> list[list[str]]:
        listing = subprocess.run(["ps", *options], capture_output=True, text=True, errors="replace", check=False)  # noqa: S607
        return [fields for line in listing.stdout.splitlines() if len(fields := line.split(None, 2)) == 3]

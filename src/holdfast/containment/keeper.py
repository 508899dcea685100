"""Run as a script: start programs, and end every process that a program started when the program ends.

    python -I -S keeper.py serve                            for Holdfast, which sends programs over descriptor 0
    python -I -S keeper.py run KIND PROGRAM [ARGUMENT …]    one program, with the streams of this process

    keeper          one for each process of Holdfast. It stays small, so that forking it is cheap. It adopts and kills
    │               the orphans of a killed guard
    └─ guard        one for each program. It waits for the program, and for the end of Holdfast, which closes a channel.
       │            In both cases it kills all processes of the program, and waits until all have ended
       ├─ init      only with a PID namespace: process 1, which adopts orphans. The kernel kills it with the guard, and
       │            every process of the namespace with it, whatever its session
       └─ program   the leader of its own session

`kind` is the containment: `pid`, a PID namespace; `reaper`: the guard adopts orphans (`PR_SET_CHILD_SUBREAPER`), and
kills descendants until it finds no more; `group`, the process group, on other systems; `auto`, the first of these that
works here.

Over a channel, Holdfast sends one request: its length in 8 bytes, then JSON, see `_start`. The guard answers in lines
of JSON: `{"pid": …, "kind": …}` when the program has begun, or `{"error": …}`; and `{"status": …}` when all processes
of the program have ended. When Holdfast shuts its side of the channel down, the guard ends the program.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 - pathlib takes longer to import
import confine  # type: ignore[import-not-found]  # a file in this folder, without its package

TYPE_CHECKING = False  # `typing` takes long to import
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from typing import Any, NoReturn

_PARENT_DEATH_SIGNAL, _DUMPABLE, _SUBREAPER = 1, 4, 36
"""options of prctl"""
_LINUX = sys.platform.startswith("linux")
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)
"""signals for the program or Holdfast, which the processes between them ignore"""
_GRACE = 1.0
"""seconds between SIGTERM and SIGKILL with `run`; an MCP client kills `keeper` itself after two"""
_PATIENCE = 5.0
"""seconds that the keeper spends on orphans that do not die before it serves Holdfast again"""
_RECEIVED = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


def main() -> NoReturn:
    """Serve Holdfast, or run one program."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    if _LINUX:
        confine.libc.prctl(_SUBREAPER, 1, 0, 0, 0)
    if sys.argv[1] == "serve":
        _serve()
    _run(sys.argv[2], sys.argv[3:])


def _serve() -> NoReturn:
    """Fork a guard for each program that Holdfast sends, until Holdfast and all guards have ended."""
    parent = os.getppid()
    with suppress(PermissionError):
        os.setsid()
    os.chdir("/")
    for handle in map(int, os.listdir("/dev/fd")):  # noqa: PTH208
        if handle > 2:
            with suppress(OSError):
                os.close(handle)  # inherited from the process that started Holdfast
    control = socket.socket(fileno=os.dup(0))
    _close_streams()
    holdfast = _Death(parent)
    children = _Children()
    guards: set[int] = set()
    auto = ""  # unknown before the first program
    watched = [control.fileno(), *holdfast.handles]
    while watched or guards:
        ready = children.wait(watched)
        ended = list(children.reap())
        if any(status != 0 for _, status in ended):  # a guard was killed, and this process has adopted its orphans
            ended += _end_descendants(guards, seconds=_PATIENCE)
        guards -= {pid for pid, _ in ended}
        if control.fileno() not in ready:
            watched = [] if ready else watched
            continue
        message, handles, _, _ = socket.recv_fds(control, 1, 4, _RECEIVED)
        if not message:
            watched = []
            continue
        auto = auto or _kind_here()
        guard = os.fork()
        if guard == 0:
            control.close()
            children.close()
            _serve_program(socket.socket(fileno=handles[0]), handles[1:], holdfast, auto)
        guards.add(guard)
        for handle in handles:
            os.close(handle)
    os._exit(0)


def _serve_program(channel: socket.socket, streams: list[int], holdfast: _Death, auto: str) -> NoReturn:
    for handle in (channel.fileno(), *streams):
        os.set_inheritable(handle, False)
    with suppress(OSError), channel.makefile("rb", buffering=0) as reading:
        request = json.loads(_read_exactly(reading, int.from_bytes(_read_exactly(reading, 8), "big")))
        _guard(channel, request, streams, holdfast, auto)
    os._exit(1)


def _read_exactly(reading: Any, count: int) -> bytes:
    content = b""
    while len(content) < count:
        part = reading.read(count - len(content))
        if not part:
            os._exit(0)  # Holdfast has ended
        content += part
    return content


def _run(kind: str, arguments: list[str]) -> NoReturn:
    """Run a program for a parent that starts and ends programs itself, and exit with the program's code."""
    parent = _Death(os.getppid())
    if _LINUX:
        confine.libc.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    ours, theirs = socket.socketpair()
    children = _Children()
    request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd(), "kind": kind}  # noqa: PTH109
    auto = _kind_here() if kind == "auto" else kind
    os.chdir("/")  # the folder may be removed before the program ends
    guard = os.fork()
    if guard == 0:
        ours.close()
        children.close()
        _guard(theirs, request, [0, 1, 2], _Death(os.getppid()), auto)
    theirs.close()
    _close_streams(keep=(2,))
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    pid, code, answers, deadline = 0, 125, b"", None
    while True:
        ready = children.wait([ours.fileno(), *parent.handles], deadline and max(0.0, deadline - time.monotonic()))
        if ours.fileno() in ready:
            part = ours.recv(4096)
            if not part:
                break
            *lines, answers = (answers + part).split(b"\n")
            for answer in map(json.loads, lines):
                pid = answer.get("pid", pid)
                if "error" in answer:
                    os.write(2, f"{arguments[0]} cannot be run: {answer['error'][1]}\n".encode())
                    code = 127
                if "status" in answer:
                    code = os.waitstatus_to_exitcode(answer["status"])
        if signals and pid:
            signals.clear()
            deadline = deadline or time.monotonic() + _GRACE
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGTERM)
        if any(handle in ready for handle in parent.handles) or (deadline and time.monotonic() >= deadline):
            parent.handles, deadline = (), None
            ours.shutdown(socket.SHUT_WR)
    _end_descendants(())
    os._exit(code if code >= 0 else 128 - code)


def _guard(channel: socket.socket, request: dict[str, Any], streams: list[int], holdfast: _Death, auto: str) -> None:
    """Start the program, wait until it or Holdfast ends, end all its processes, and report."""

    def tell(**news: Any) -> None:
        with suppress(OSError):
            channel.sendall(json.dumps(news).encode() + b"\n")

    if not request["arguments"]:
        tell(kind=auto, status=0)
        os._exit(0)
    children = _Children()
    try:
        kind, init, program = _start(request, streams, auto, [channel.fileno(), *children.handles, *holdfast.handles])
    except (OSError, confine.NotAllowed) as error:
        tell(error=_reason(error))
        os._exit(0)
    if _LINUX:
        confine.libc.prctl(_DUMPABLE, 0, 0, 0, 0)  # or the program could read its memory, and report in its place
    tell(pid=program, kind=kind)
    status = None
    watched = [channel.fileno(), *holdfast.handles]
    while status is None and not children.wait(watched):
        status = dict(children.reap()).get(program)
    if kind == "pid":
        with suppress(ProcessLookupError):
            os.kill(init, signal.SIGKILL)
        # The namespace ends when every process in it has been waited for, and the program is a child of the guard.
        for pid, ended in _wait_for_all():
            status = ended if pid == program else status
    elif kind == "reaper":
        status = dict(_end_descendants(())).get(program, status)
    else:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(program, signal.SIGKILL)
        status = dict(_wait_for_all()).get(program, status)
    tell(status=signal.SIGKILL if status is None else status)
    os._exit(0)


def _start(request: dict[str, Any], streams: list[int], auto: str, private: list[int]) -> tuple[str, int, int]:
    """Start the program; return its kind of containment, the pid of its init, if any, and its own pid.

    The request has `arguments` (without any, Holdfast asks only for the kind), `environment`, `folder` and `kind`.
    `confine` restricts the program further: a mapping of the fields of `sandbox.Isolation`, the workspace and the
    limits.
    """
    restrictions = request.get("confine") or {}
    kind = auto if request["kind"] == "auto" else request["kind"]
    asked = {"network": restrictions.get("network") == "namespace", "read_only": restrictions.get("read_only", False)}
    try:
        confine.enter_namespaces(**asked, processes=kind == "pid")
    except confine.NoNamespaces:
        if request["kind"] != "auto" or any(asked.values()):
            raise
        kind = "reaper"  # a limit on the number of namespaces may have been reached just this once
    if restrictions.get("read_only"):
        confine.mount_read_only(restrictions["workspace"])
    if kind == "reaper":
        confine.libc.prctl(_SUBREAPER, 1, 0, 0, 0)
    init = _fork(lambda: _be_init(streams, private)) if kind == "pid" else 0
    failure, failing = os.pipe()
    program = os.fork()
    if program == 0:
        os.close(failure)
        try:
            _be_program(request, streams, restrictions, kind)
        except Exception as error:
            os.write(failing, json.dumps(_reason(error)).encode())
        finally:
            os._exit(125)
    os.close(failing)
    for handle in streams:
        os.close(handle)
    with open(failure, "rb") as reading:  # noqa: PTH123
        reason = reading.read()
    if reason:
        if init:
            os.kill(init, signal.SIGKILL)
        for _ in _wait_for_all():
            pass
        number, message = json.loads(reason)
        raise OSError(number, message) if number else confine.NotAllowed(message)
    return kind, init, program


def _reason(error: Exception) -> tuple[int | None, str]:
    """Return the reason that a program cannot be started: the system's error number, if any, and its text."""
    return getattr(error, "errno", None), getattr(error, "strerror", None) or str(error)


def _fork(run: Callable[[], None]) -> int:
    """Fork a process that the kernel kills when this process dies; return its pid once this is in force."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        confine.libc.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        with suppress(OSError):
            os.close(reading)
            os.write(writing, b" ")  # fails if the parent has died in the meantime
            os.close(writing)
            run()
        os._exit(1)
    os.close(writing)
    os.read(reading, 1)
    os.close(reading)
    return child


def _be_init(streams: list[int], private: list[int]) -> None:
    for handle in (*streams, *private):
        os.close(handle)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel then reaps the orphans that it adopts
    while True:
        signal.pause()


def _be_program(request: dict[str, Any], streams: list[int], restrictions: dict[str, Any], kind: str) -> None:
    signal.set_wakeup_fd(-1)
    if _LINUX:
        confine.libc.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    os.setsid()  # signals to the program's group do not reach init and the guard
    copies = [os.dup(handle) if handle < 3 else handle for handle in streams]
    for number, handle in enumerate(copies):
        os.dup2(handle, number)
    if kind == "pid":
        confine.mount_proc(read_only=bool(restrictions))
    if restrictions:
        confine.limit(restrictions)
        if restrictions["network"] == "tcp" or (restrictions["writes"] and confine.landlock_abi() > 0):
            workspace = restrictions["workspace"] if restrictions["writes"] else None
            confine.landlock(workspace, tcp=restrictions["network"] == "tcp")
        if os.geteuid() == 0:
            confine.drop_capabilities()
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)  # the program would inherit what Python or `nohup` ignores
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.chdir(request["folder"])
    os.execvpe(request["arguments"][0], request["arguments"], request["environment"])  # noqa: S606 - what it is for


def _kind_here() -> str:
    """Try which containment works on this machine.

    A PID namespace needs its own /proc: programs that search /proc for processes to signal would get the ids of other
    processes.
    """
    if not _LINUX:
        return "group"
    return "pid" if confine.works(lambda: confine.start_in_namespace(own_proc=True)) else "reaper"


def _wait_for_all() -> Iterable[tuple[int, int]]:
    """Wait for all children, and yield the pid and the status of each."""
    with suppress(ChildProcessError):
        while True:
            yield os.waitpid(-1, 0)


def _end_descendants(spared: Collection[int], seconds: float = math.inf) -> list[tuple[int, int]]:
    """Kill all descendants of this process, except spared children and theirs; return the children's statuses.

    Orphans become children of this process, so without children it has no descendants. A search of /proc does not
    prove that, because it misses a process whose parent ends during the search. With spared children, which rule out
    the first test, two empty searches in a row must do. Processes that may not be killed, such as another user's, are
    waited for.
    """
    ended: list[tuple[int, int]] = []
    pause, deadline, own, searches = 0.001, time.monotonic() + seconds, os.getpgrp(), 0
    while True:
        try:
            while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                ended.append(reaped)
        except ChildProcessError:
            return ended
        if _kill(_children() - {*spared}):  # immediately, to catch children that start another process and end
            pause = 0.001
        families = _families()
        doomed = [child for child in families.get(os.getpid(), ()) if child[0] not in spared]
        searches = 0 if doomed else searches + 1
        if (spared and searches == 2) or time.monotonic() > deadline:
            return ended
        for pid, _ in doomed:
            doomed += families.get(pid, ())
        for group in {group for _, group in doomed} - {0, own}:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)  # also kills processes that its members start in the meantime
        _kill(pid for pid, _ in doomed)
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def _kill(pids: Iterable[int]) -> int:
    """Kill processes; return how many could be killed."""
    count = 0
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
            count += 1
    return count


def _children() -> set[int]:
    """Return the children of this process; empty if the kernel does not list children."""
    with suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children", "rb") as file:  # noqa: PTH123
        return {*map(int, file.read().split())}
    return set()


def _families() -> dict[int, list[tuple[int, int]]]:
    """Return the children of each process, as pairs of process id and process group."""
    families: dict[int, list[tuple[int, int]]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                # The name, in parentheses, may contain anything.
                parent, group = file.read().rpartition(b")")[2].split()[1:3]
                families.setdefault(int(parent), []).append((int(name), int(group)))
    return families


class _Children:
    """Wakes up when a child ends."""

    def __init__(self) -> None:
        self.handles = os.pipe()
        for handle in self.handles:
            os.set_blocking(handle, False)
        signal.set_wakeup_fd(self.handles[1], warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def close(self) -> None:
        """Forget the children, in a forked process."""
        signal.set_wakeup_fd(-1)
        for handle in self.handles:
            os.close(handle)

    def wait(self, others: list[int], seconds: float | None = None) -> list[int]:
        """Wait until a child ends, or other descriptors can be read or are closed; return these descriptors."""
        polling = select.poll()
        for handle in (self.handles[0], *others):
            polling.register(handle, select.POLLIN)
        ready = [handle for handle, _ in polling.poll(None if seconds is None else seconds * 1000)]
        with suppress(BlockingIOError):
            os.read(self.handles[0], 4096)
        return [handle for handle in ready if handle != self.handles[0]]

    @staticmethod
    def reap() -> Iterable[tuple[int, int]]:
        """Return the pid and the status of each child that has ended."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                yield ended


class _Death:
    """Notices the end of a process whose channels may be held open by a process that it forked."""

    def __init__(self, pid: int) -> None:
        self.handles: tuple[int, ...] = ()
        with suppress(OSError, AttributeError):  # Linux 5.3 and later
            self.handles = (os.pidfd_open(pid),)


def _close_streams(keep: tuple[int, ...] = ()) -> None:
    """Close the program's streams, whose end others wait for."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in {0, 1, 2} - {*keep}:
        os.dup2(nothing, number)
    os.close(nothing)


if __name__ == "__main__":
    main()

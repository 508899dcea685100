"""Starts modules by forking a process that has already imported what they need.

Starting Python and importing Holdfast is most of the time a short command takes, and tests start thousands of them.
`Forked` is a `subprocess.Popen` whose process is forked from a warm one: its standard files, working directory,
environment, arguments and `sys.path` are those of a new `python -m MODULE`, and it ends
as one, but for the clearing of its memory.

    python -m tests.support.forking SOCKET

is the warm process: it forks for each request that comes over the socket, and ends when the socket is closed.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import pkgutil
import runpy
import select
import socket
import subprocess
import sys
import threading
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
_LARGEST: Final = 1 << 20
_ENVIRONMENT: Final = dict(os.environ)
"""what the warm process starts with"""
_READ_AT_START: Final = ("PYTHON", "LD_", "LC_", "LANG", "HOLDFAST_LEASE_SECONDS", "MALLOC_")
"""variables that Python or Holdfast reads as it starts: a process forked later would not notice them"""
_ALSO_NEEDED: Final = ("aiohttp", "jinja2", "mcp", "rich.live", "rich.progress", "rich.table", "ruamel.yaml", "uvloop")
"""what commands import as they run"""


def can_fork(env: dict[str, str]) -> bool:
    """True if a process with this environment may be forked from the warm one."""
    differing = (key for key in env.keys() | _ENVIRONMENT.keys() if env.get(key) != _ENVIRONMENT.get(key))
    return not any(key.startswith(_READ_AT_START) for key in differing)


class Forked(subprocess.Popen[Any]):
    """`Forked(["python", "-m", MODULE, *arguments], cwd=…, env=…, …)`."""

    def _execute_child(
        self, args: Any, executable: Any, preexec: Any, close: Any, fds: Any, cwd: Any, env: Any, *rest: Any
    ) -> None:
        stdin, _, _, stdout, _, stderr = pipes = rest[3:9]
        request = {"module": args[2], "arguments": args[3:], "cwd": os.fspath(cwd), "env": env}
        streams = {0: stdin, 1: stdout, 2: stderr}
        streams = {number: file for number, file in streams.items() if file != -1}
        self.pid = _warm().ask({"fork": request, "files": list(streams)}, list(streams.values()))
        self._ended = os.pidfd_open(self.pid)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _try_wait(self, flags: int) -> tuple[int, int]:
        ended, _, _ = select.select([self._ended], [], [], 0 if flags & os.WNOHANG else None)
        if not ended:
            return 0, 0
        os.close(self._ended)
        return self.pid, _warm().ask({"wait": self.pid})

    def _internal_poll(self, _deadstate: Any = None, **_: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                pid, status = (0, 0) if self.returncode is not None else self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


class _Warm:
    """The warm process, from outside."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LARGEST)
        with other:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forking", str(other.fileno())],
                pass_fds=[other.fileno()],
                cwd=ROOT,
                env=_ENVIRONMENT,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        atexit.register(lambda: (self._socket.close(), process.wait()))

    def ask(self, request: dict[str, Any], files: list[int] | None = None) -> int:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], files or [])
            return int(self._socket.recv(64))


_warm_processes: dict[int, _Warm] = {}


def _warm() -> _Warm:
    """The warm process of this process: one that was forked from it has its own."""
    return _warm_processes.get(os.getpid()) or _warm_processes.setdefault(os.getpid(), _Warm())


def _serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork for each request; return the request in the process that was forked for it."""
    while True:
        message, files, _, _ = socket.recv_fds(control, _LARGEST, 3)
        if not message:
            return None
        request = json.loads(message)
        if "wait" in request:
            answer = os.waitpid(request["wait"], 0)[1]
        else:
            answer = os.fork()
            for number, file in zip(request["files"], files, strict=True):
                if answer == 0:
                    os.dup2(file, number)
                os.close(file)
            if answer == 0:
                control.close()
                return request["fork"]
        control.send(b"%d" % answer)


def import_all() -> None:
    """Import what commands could need, ahead of forks."""
    for module in pkgutil.walk_packages(import_module("holdfast").__path__, "holdfast."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
    for name in (*_ALSO_NEEDED, "tests.support.server"):
        with suppress(ImportError):
            import_module(name)
    gc.freeze()  # no fork needs to look through all that, and to copy it by doing so


def _main() -> None:
    import_all()
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    if request:
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        sys.path[0] = request["cwd"]
        sys.argv = ["-m", *request["arguments"]]
        os._exit(_run(request["module"]))


def _run(module: str) -> int:
    """Run a module as `python -m` does, to the end of its threads and exit handlers, and return its exit code.

    What Python would do next, clearing one module after the other, takes longer than most commands.
    """
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code: Any = 0
    except SystemExit as ending:
        code = ending.code
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError:
        code = 120  # as Python does
    return int(code or 0)


if __name__ == "__main__":
    _main()

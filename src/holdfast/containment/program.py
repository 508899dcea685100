"""Starts programs, and ends all their processes when the program ends or is stopped, or when Holdfast dies.

`running` starts a program through `keeper`, a small helper process, so that starting takes a few milliseconds whatever
the size of Holdfast. `contained` returns a command for libraries that start programs themselves.

`HOLDFAST_PROCESS_ISOLATION` chooses the containment; `keeper` describes the kinds.
"""

from __future__ import annotations

import asyncio
import atexit
import errno
import json
import os
import socket
import sys
import threading
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from holdfast.errors import AttemptError, Fault, UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

Kind = Literal["auto", "pid", "reaper", "group"]

_VARIABLE: Final = "HOLDFAST_PROCESS_ISOLATION"
_COMMAND: Final = [sys.executable, "-I", "-S", "-X", "utf8", str(Path(__file__).with_name("keeper.py"))]
_END_SECONDS: Final = 30.0
"""a killed process ends immediately, unless it waits for a device or a network file system"""
_OUT_BYTES: Final = 64_000_000
_ERR_BYTES: Final = 1_000_000
_INHERITED: Final = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
"""variables that Python may need to start; the keeper gets no others, because programs may read its environment"""


def requested_kind() -> Kind:
    """Return the containment that the user chose; raise UsageError for an unknown one."""
    value = os.environ.get(_VARIABLE) or "auto"
    if value not in ("auto", "pid", "reaper"):
        raise UsageError(
            f"{_VARIABLE} is {value!r}, which is not a kind of containment", remedy="Set it to auto, pid or reaper."
        )
    return value  # type: ignore[return-value]


async def find_kind() -> Kind:
    """Return the containment of programs; raise Fault if the user's choice does not work here."""
    requested = requested_kind()
    async with running([], folder=Path("/"), environment={}) as nothing:
        await nothing.wait()
    if requested == "pid" and nothing.kind != "pid":
        message = f"{_VARIABLE} is pid, and this system allows no PID namespace with its own /proc"
        raise Fault("refused", message, remedy=f"Unset {_VARIABLE}, or allow user namespaces: see docs/agents.md.")
    return nothing.kind if requested == "auto" else requested


def contained(arguments: Sequence[str]) -> list[str]:
    """Return a command that runs a program and ends all processes that it started, whichever process is killed."""
    return [*_COMMAND, "run", requested_kind(), *arguments]


class ContainedProgram:
    """A started program. All its processes have ended when `running` exits."""

    def __init__(self, channel: socket.socket) -> None:
        self.pid = 0
        self.kind: Kind = "auto"
        """its containment"""
        self.out, self.err = bytearray(), bytearray()
        """its output, unless it writes to files; of standard error, the end"""
        self.printed_too_much = False
        """it was stopped because it printed too much to standard output"""
        self._channel = channel
        self._answers = b""
        self._error: list[Any] | None = None
        self._status: int | None = None
        self._began, self._over = asyncio.Event(), asyncio.Event()

    async def wait(self) -> int | None:
        """Wait until the program and all its processes have ended.

        Return its exit code, or the negative number of the signal that killed it; None if its guard was killed, so that
        the code is unknown.
        """
        await self._over.wait()
        return None if self._status is None else os.waitstatus_to_exitcode(self._status)

    def _read_answers(self) -> None:
        """Read the guard's messages; only the end of its channel shows that it has ended."""
        try:
            part = self._channel.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        *lines, self._answers = (self._answers + part).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            self.pid, self.kind = answer.get("pid", self.pid), answer.get("kind", self.kind)
            self._error, self._status = answer.get("error"), answer.get("status")
            self._began.set()
        if not part:
            self._began.set()
            self._over.set()

    def _check_out(self, most_bytes: int) -> None:
        """Stop a program whose endless output nobody could use, and which would fill the memory."""
        if len(self.out) > most_bytes:
            del self.out[most_bytes:]
            self.printed_too_much = True
            with suppress(OSError):
                self._channel.shutdown(socket.SHUT_WR)

    def _check_err(self) -> None:
        if len(self.err) > 2 * _ERR_BYTES:
            del self.err[:-_ERR_BYTES]

    async def _begin(self) -> None:
        await self._began.wait()
        if self._error is not None:
            number, message = self._error
            raise OSError(number or errno.EPERM, message)

    async def _end(self) -> None:
        """Stop the program and wait until all its processes have ended, even when cancelled."""
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)
        cancelled: asyncio.CancelledError | None = None
        while not self._over.is_set():
            try:
                await asyncio.wait_for(self._over.wait(), _END_SECONDS)
            except asyncio.CancelledError as error:
                cancelled = error
            except TimeoutError:
                message = f"processes that it started do not end; the first was process {self.pid}"
                raise AttemptError("agent", message, retry=False) from None
        if cancelled is not None:
            raise cancelled


@asynccontextmanager
async def running(
    arguments: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    stdin: bytes | None = None,
    files: tuple[int, int, int] | None = None,
    merged: bool = False,
    most_bytes: int = _OUT_BYTES,
    kind: Kind | None = None,
    confine: Mapping[str, Any] | None = None,
) -> AsyncIterator[ContainedProgram]:
    """Start a program; stop it and its processes when the block exits. Raise OSError if it cannot be started.

    `files` are descriptors of its three streams. Without them it reads `stdin`, and its output is kept; `merged`
    writes both streams to `out`. A program that prints more than `most_bytes` there is stopped. `confine` restricts it
    further: see `keeper`.
    """
    loop = asyncio.get_running_loop()
    request = {
        "arguments": list(arguments),
        "environment": dict(environment),
        "folder": str(folder),
        "kind": kind or requested_kind(),
        "confine": confine,
    }
    body = json.dumps(request).encode()
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    program = ContainedProgram(ours)
    with ours, _Pipes(loop) as pipes:
        with theirs:
            if files is None:
                standard_output = pipes.reading_into(program.out, lambda: program._check_out(most_bytes))
                standard_error = standard_output if merged else pipes.reading_into(program.err, program._check_err)
                files = (pipes.writing(stdin), standard_output, standard_error)
            _keep([theirs.fileno(), *files])
        pipes.close_theirs()
        with _reader(loop, ours.fileno(), program._read_answers):
            try:
                with suppress(BrokenPipeError, ConnectionResetError):  # noticed by the end of the channel
                    await loop.sock_sendall(ours, len(body).to_bytes(8, "big") + body)
                await program._begin()
                yield program
            finally:
                await program._end()
                pipes.drain()


class _Pipes:
    """The streams of a program, read and written by the event loop.

    Does not use `connect_read_pipe`: uvloop's closes the descriptor twice, and the second time it may be another
    thread's file (https://github.com/MagicStack/uvloop/issues/763).
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._reading: dict[int, tuple[bytearray, Callable[[], None]]] = {}
        self._writing: dict[int, memoryview] = {}
        self._theirs: list[int] = []

    def __enter__(self) -> _Pipes:
        return self

    def __exit__(self, *details: object) -> None:
        for handle in [*self._reading, *self._writing]:
            self._close(handle)
        self.close_theirs()

    def reading_into(self, content: bytearray, check: Callable[[], None]) -> int:
        """Return the program's end of a pipe. Its output is appended to the content, and then checked."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self._theirs.append(writing)
        self._reading[reading] = (content, check)
        self._loop.add_reader(reading, self._read, reading)
        return writing

    def writing(self, content: bytes | None) -> int:
        """Return the program's end of a pipe from which it reads the content; None is `/dev/null`."""
        if content is None:
            self._theirs.append(os.open(os.devnull, os.O_RDONLY))
            return self._theirs[-1]
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        self._theirs.append(reading)
        self._writing[writing] = memoryview(content)
        self._loop.add_writer(writing, self._write, writing)
        return reading

    def close_theirs(self) -> None:
        """Close the program's ends, which the program has inherited."""
        while self._theirs:
            os.close(self._theirs.pop())

    def drain(self) -> None:
        """Read the rest of the pipes' contents."""
        for handle in [*self._reading]:
            while handle in self._reading and self._read(handle):
                pass

    def _read(self, handle: int) -> bool:
        try:
            part = os.read(handle, 1 << 16)
        except BlockingIOError:
            return False
        content, check = self._reading[handle]
        content += part
        check()
        if not part:
            self._close(handle)
        return True

    def _write(self, handle: int) -> None:
        try:
            if rest := self._writing[handle]:
                self._writing[handle] = rest[os.write(handle, rest) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # a program may exit, or close its input, without reading it
            self._writing[handle] = memoryview(b"")
        if not self._writing[handle]:
            self._close(handle)

    def _close(self, handle: int) -> None:
        if self._reading.pop(handle, None) is not None:
            self._loop.remove_reader(handle)
        elif self._writing.pop(handle, None) is not None:
            self._loop.remove_writer(handle)
        os.close(handle)


@contextmanager
def _reader(loop: asyncio.AbstractEventLoop, handle: int, read: Callable[[], None]) -> Iterator[None]:
    loop.add_reader(handle, read)
    try:
        yield
    finally:
        loop.remove_reader(handle)


class _Keeper:
    """The helper process that starts programs. It ends when this process does."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._control, theirs = socket.socketpair()
        environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        with theirs:
            streams: list[Any] = [(os.POSIX_SPAWN_DUP2, theirs.fileno(), 0)]
            streams += [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (1, 2)]
            # Not `subprocess`, which would expect this process to wait for it.
            self._pid = os.posix_spawn(_COMMAND[0], [*_COMMAND, "serve"], environment, file_actions=streams)
        atexit.register(self.close)

    def take(self, handles: Sequence[int]) -> None:
        """Hand over the channel and the streams of a program."""
        socket.send_fds(self._control, [b" "], handles)

    def close(self) -> None:
        """Release the process, which waits for the end of its programs."""
        self._control.close()
        if self.owner == os.getpid():
            with suppress(ChildProcessError):
                os.waitpid(self._pid, os.WNOHANG)


_keeper: _Keeper | None = None
_one_at_a_time = threading.Lock()


def _keep(handles: Sequence[int]) -> None:
    """Hand a program over to this process's keeper; start a keeper for the first program, or if it was killed."""
    global _keeper
    with _one_at_a_time:
        if _keeper is not None:
            if _keeper.owner == os.getpid():
                with suppress(BrokenPipeError, ConnectionResetError):
                    _keeper.take(handles)
                    return
            _keeper.close()
        _keeper = _Keeper()
        _keeper.take(handles)

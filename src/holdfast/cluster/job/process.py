"""The processes of a job that read and import users' code, so that such code cannot take the job down.

A worker job starts `holdfast work`. A main job starts a process that prepares the run and then works on it, see
`evaluate`. Each drains when its standard input closes, as it does when the job ends, and reports by lines of JSON on
its standard output.
"""

from __future__ import annotations

import queue
import signal
import subprocess
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from holdfast.cluster.job.containers import evaluation_words, removal
from holdfast.cluster.job.context import POLL_SECONDS
from holdfast.engine.ended import FINISH

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.cluster.job.context import JobContext

BEGIN: Final = b"begin\n"
"""what a process that has prepared a run reads on its standard input to work on it"""
_Message = TypeVar("_Message", bound=msgspec.Struct)


class EvaluationProcess:
    """A process of the evaluation, in the task's image if there is one, that knows where the servers are."""

    def __init__(
        self, job: JobContext, part: str, command: Sequence[str], base_urls: Sequence[str], env: Mapping[str, str]
    ) -> None:
        self._job = job
        self.addresses = tuple(base_urls), dict(env)
        variables = {**env, **({"OPENAI_BASE_URL": base_urls[0]} if base_urls else {})}  # others know one URL only
        own = ("PYTHONDONTWRITEBYTECODE", *job.task.env, *variables)
        words, self._container = evaluation_words(job.task, job.place, part, own)
        self._process = subprocess.Popen(
            [*words, *command, *(word for url in base_urls for word in ("--base-url", url))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=job.env(job.task.env, **variables),
            start_new_session=True,
        )
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        """the lines of its output that were not received yet, then b"" for its end"""
        self._last = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._process.wait()
        self._lines.put(b"")

    @property
    def exit_code(self) -> int | None:
        """The exit code, once the process has ended."""
        return self._process.poll()

    def receive(self) -> bytes | None:
        """Wait a moment for the next line of the output; return b"" once the process has ended, None if none came."""
        try:
            line = self._lines.get(timeout=POLL_SECONDS)
        except queue.Empty:
            if self.exit_code is None:
                return None
            self._reader.join(5)  # not for longer: a process that was left behind may hold the output open
            line = b"" if self._lines.empty() else self._lines.get()
        if not line:
            self._lines.put(line)  # for whoever asks again
        return line

    def has_ended(self) -> bool:
        """Wait a moment for the end of the process, and return True if it has ended."""
        while line := self.receive():
            self._last = line
        return line is not None

    def last_message(self, default: _Message) -> _Message:
        """Return the message in the last line that the process wrote; the default if that was none."""
        with suppress(msgspec.DecodeError):
            return msgspec.json.decode(self._last, type=type(default))
        return default

    def send(self, line: bytes) -> None:
        """Write a line to its standard input."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def terminate(self) -> None:
        """End the process at once."""
        self._process.terminate()
        self._process.wait()

    def drain(self, patience: float = 60.0, *, finish: float = 0.0) -> int:
        """Ask the process to stop, wait, and kill it if it does not.

        Requests in flight get `finish` seconds to complete, unless the job itself is asked to stop first.

        Not by a signal at first: Slurm may have sent one already, and at the second the process would exit at once.
        """
        if finish:
            self.send(FINISH)
        end = time.monotonic() + finish
        while time.monotonic() < end and self._job.signal in (None, signal.SIGUSR2) and self.exit_code is None:
            time.sleep(POLL_SECONDS)
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(subprocess.TimeoutExpired):
                return self._process.wait(patience / 2)
            with suppress(ProcessLookupError):
                self._process.send_signal(number)
        if self._job.task.container is not None:  # it outlives the program that started it
            subprocess.run(["sh", "-c", removal(self._job.task.container.engine, self._container)], check=False)
        return self._process.wait()

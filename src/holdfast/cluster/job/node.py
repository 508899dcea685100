"""What a job does: `python -m holdfast.cluster.job.node TASK_DIR --role main|worker`.

It works from the task's folder alone. Signals are what Slurm says with: USR2 that the time is nearly up, TERM that the
job must go. Both let what is in hand end in good order; everything finished is on disk at any time.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.cluster.remote import invocation as layout
from holdfast.cluster.remote.invocation import TaskPlace
from holdfast.cluster.remote.transport import Here
from holdfast.engine.ended import Ended
from holdfast.errors import HoldfastError
from holdfast.spec.redact import looks_secret

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.cluster.remote.invocation import TaskFile

LOOK_SECONDS: Final = 0.25
GOES_ON: Final = 75
"""the exit code of a job whose successor is to go on: EX_TEMPFAIL"""


@dataclass
class NodeJob:
    """The job that this process is."""

    place: TaskPlace
    task: TaskFile
    role: str
    id: str
    restart: int
    node: str
    secrets: Mapping[str, str] = field(repr=False)
    index: int = 0
    """among the workers, from 1"""
    told: int | None = None
    """the signal that told us to stop"""
    began: float = field(default_factory=time.monotonic)

    @classmethod
    def here(cls, folder: Path, role: str, index: int | None) -> NodeJob:
        """The job that the environment says we are."""
        place, transport = TaskPlace.of(folder), Here(pauses=())
        environ = os.environ
        task = layout.read_task(transport, place)
        job = environ.get("SLURM_ARRAY_JOB_ID") or environ.get("SLURM_JOB_ID")
        if task.executor != "slurm" or job is None:
            from holdfast.cluster.remote.local import process_id

            job = process_id(os.getpid())
        return cls(
            place=place,
            task=task,
            role=role,
            id=job,
            restart=int(environ.get("SLURM_RESTART_COUNT") or 0),
            node=environ.get("SLURMD_NODENAME") or os.uname().nodename,
            secrets=layout.read_secrets(Path(place.secrets).read_bytes()),
            index=index or int(environ.get("SLURM_ARRAY_TASK_ID") or 0),
        )

    @property
    def log_kind(self) -> str:
        return "main" if self.role == "main" else f"worker-{self.index}"

    def log(self, kind: str, instance: int = 0) -> Path:
        """The log of one of its parts."""
        return Path(self.place.logs) / layout.log_name(kind, self.id, self.restart, instance)

    @property
    def stopped(self) -> bool:
        """Whether the invocation, or this task of it, was told to stop."""
        return any(Path(mark).exists() for mark in self.place.stops)

    @property
    def must_go(self) -> bool:
        """Whether it is time to stop: told so, or the time is nearly up, of which a signal may have been missed."""
        over = self.task.executor == "slurm" and time.monotonic() - self.began > self.task.walltime - self.task.margin
        if over and self.told is None:
            self.told = signal.SIGUSR2
        return self.told is not None or self.stopped

    @property
    def cancelled(self) -> bool:
        """Whether somebody cancelled this Slurm job, as opposed to preempting or requeueing it, or its time limit.

        Slurm's programs only call the job COMPLETING while it ends, so this reads the line that slurmstepd writes to
        the job's output before it sends the signal: `*** JOB 7 ON node1 CANCELLED AT … DUE TO PREEMPTION ***`.
        """
        number = os.environ.get("SLURM_JOB_ID", "")
        try:
            with (Path(self.place.logs) / f"slurm-{number}.log").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 16_384))
                text = file.read().decode(errors="replace")
        except OSError:
            return False
        causes = re.findall(rf"\*\*\* JOB {number} ON \S+ CANCELLED AT \S+ (DUE TO [A-Z ]+)?\*\*\*", text)
        return bool(causes) and causes[-1] == ""

    def env(self, given: Mapping[str, str], **more: str) -> dict[str, str]:
        """The environment of one part: what the node has, without secrets, and what that part was given."""
        made = {key: value for key, value in os.environ.items() if key not in self.secrets and not looks_secret(key)}
        for name, text in given.items():
            kind, _, value = text.partition(":")
            found = {"host": self.secrets, "runtime": os.environ}.get(kind, {value: value}).get(value)
            if found is not None:
                made[name] = found
        # Bundles are shared and named by their content: nothing is written beside the user's modules.
        return {**made, "PYTHONDONTWRITEBYTECODE": "1", **more}

    def listen(self) -> None:
        """From now on signals are noted."""
        for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, _: object) -> None:
        self.told = number


class Working:
    """`holdfast work` as a child, which drains when we say so and when we are gone."""

    def __init__(
        self, job: NodeJob, run_dir: str, worker: str, base_urls: Sequence[str], env: Mapping[str, str]
    ) -> None:
        self._process = subprocess.Popen(
            [
                *(job.task.python, "-m", "holdfast", "work", run_dir, "--worker", worker),
                *("--wait", "--attached", "--display", "plain"),
                *url_words(base_urls),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=job.env(job.task.env, **first_url(base_urls), **env),
            start_new_session=True,
        )
        self._said = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self._said = self._process.stdout.read()

    @property
    def code(self) -> int | None:
        """Its exit code, once it has ended."""
        return self._process.poll()

    def drain(self, patience: float = 60.0) -> int:
        """Tell it to stop, and wait; what does not is killed.

        Not by a signal at first: Slurm may have sent it one, and at the second it would leave at once.
        """
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(subprocess.TimeoutExpired):
                return self._process.wait(patience / 2)
            with suppress(ProcessLookupError):
                self._process.send_signal(number)
        return self._process.wait()

    @property
    def ended(self) -> Ended:
        """What it said of its end."""
        self._reader.join(5)
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(msgspec.DecodeError):
            return msgspec.json.decode(self._said, type=Ended)
        return Ended()


def url_words(base_urls: Sequence[str]) -> list[str]:
    """Where the model is, as commands of ours take it."""
    return [word for url in base_urls for word in ("--base-url", url)]


def first_url(base_urls: Sequence[str]) -> dict[str, str]:
    """The same for everybody else, who knows one only."""
    return {"OPENAI_BASE_URL": base_urls[0]} if base_urls else {}


def say(message: str) -> None:
    """A line of the job's own, with the time."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {message}\n")
    sys.stderr.flush()


def run_hook(job: NodeJob, command: str | None, name: str) -> None:
    """Shell of the user's before or after the work."""
    if command is None:
        return
    argv = ["bash", "-c", command]
    done = subprocess.run(argv, env=job.env(job.task.env), stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise HoldfastError(f"{name} failed with exit code {done.returncode}")


def main(arguments: list[str] | None = None) -> int:
    """The entry point."""
    parser = argparse.ArgumentParser(prog="holdfast.cluster.job.node")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--role", choices=["main", "worker", "prepare", "copy"], required=True)
    parser.add_argument("--index", type=int)
    parser.add_argument("--base-url", action="append", default=[])
    parser.add_argument("--first", action="store_true")
    parser.add_argument("--run-dir", type=Path)
    given = parser.parse_args(arguments)
    try:
        if given.role == "prepare":
            from holdfast.cluster.job.prepare import prepare_task

            return prepare_task(given.folder, given.base_url, first=given.first)
        if given.role == "copy":
            from holdfast.cluster.job.prepare import copy_task

            return copy_task(given.folder, given.run_dir)
        job = NodeJob.here(given.folder, given.role, given.index)
        job.listen()
        _into_log(job)
        if given.role == "worker":
            from holdfast.cluster.job.worker import work_beside

            return work_beside(job)
        from holdfast.cluster.job.main import run_attempts

        return run_attempts(job)
    except HoldfastError as error:
        say(str(error))
        return error.exit_code


def _into_log(job: NodeJob) -> None:
    """What is said from here on, by us and by our children, goes to this job's own log."""
    path = job.log(job.log_kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)


if __name__ == "__main__":
    sys.exit(main())

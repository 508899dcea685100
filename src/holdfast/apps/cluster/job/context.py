"""The job that this process runs in: its task, id, environment and signals, and what all roles share.

Slurm sends USR2 when the time limit is near, and TERM when the job must end. Both stop the work. After USR2, requests
in flight may finish for a while; others are cancelled and repeated by the next job. All that finished is on disk.
"""

from __future__ import annotations

import math
import os
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from holdfast.apps.cluster.remote import invocation as layout
from holdfast.apps.cluster.remote.executor import Executor, find_executor
from holdfast.apps.cluster.remote.invocation import TaskFolder
from holdfast.apps.cluster.remote.transport import Here
from holdfast.display.terminal import echo
from holdfast.spec.redact import looks_secret

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.apps.cluster.config.launch import TaskFile

POLL_SECONDS: Final = 0.25
FILES_SECONDS: Final = 4.0
"""how often a job looks for other jobs' files: each look is a request to the shared file system's server"""


class StopRequested(Exception):
    """The job has to stop now."""


@dataclass
class JobContext:
    """The job that this process runs in."""

    place: TaskFolder
    task: TaskFile
    executor: Executor
    role: str
    id: str
    restart: int
    node: str
    secrets: Mapping[str, str] = field(repr=False)
    index: int = 0
    """among the workers, from 1"""
    signal: int | None = None
    """the signal that asked the job to stop"""
    began: float = field(default_factory=time.monotonic)
    _looked: float = field(default=-math.inf, repr=False)
    """when `must_stop` last looked for the marks of `holdfast kill`"""
    _killed: bool = field(default=False, repr=False)

    @classmethod
    def detect(cls, folder: Path, role: str, index: int | None) -> JobContext:
        """Read the task, and find out from the environment which job this is."""
        place = TaskFolder.of(folder)
        task = layout.read_task(Here(pauses=()), place)
        executor = find_executor(task.executor)
        environ = os.environ
        return cls(
            place=place,
            task=task,
            executor=executor,
            role=role,
            id=executor.job_id(),
            restart=int(environ.get("SLURM_RESTART_COUNT") or 0),
            node=environ.get("SLURMD_NODENAME") or os.uname().nodename,
            secrets=layout.load_secrets(place),
            index=index or int(environ.get("SLURM_ARRAY_TASK_ID") or 0),
        )

    def log(self, kind: str, instance: int = 0) -> Path:
        """Return the path of a log of this job."""
        return Path(self.place.logs) / layout.log_name(kind, self.id, self.restart, instance)

    def redirect_output(self) -> None:
        """Send the output of this process and its children to the job's log."""
        path = self.log("main" if self.role == "main" else f"worker-{self.index}")
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for number in (1, 2):
            os.dup2(file, number)
        os.close(file)

    def handle_signals(self) -> None:
        """Record signals that ask the job to stop."""
        for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._record_signal)

    def _record_signal(self, number: int, _: object) -> None:
        self.signal = number

    @property
    def kill_requested(self) -> bool:
        """True if `holdfast kill` stopped the invocation, or this task."""
        return any(Path(mark).exists() for mark in self.place.stops)

    @property
    def must_stop(self) -> bool:
        """True if the job was asked to stop, or its time is nearly up, whose signal may have been missed."""
        limited = self.executor.queues_successors
        if limited and self.signal is None and time.monotonic() - self.began > self.task.walltime - self.task.margin:
            self.signal = signal.SIGUSR2
        now = time.monotonic()
        if now - self._looked >= FILES_SECONDS:
            self._looked, self._killed = now, self.kill_requested
        return self.signal is not None or self._killed

    @property
    def finish_seconds(self) -> float:
        """How long requests in flight may take to finish: most of the margin before a time limit, else no time."""
        return max(self.task.margin - 30, self.task.margin / 3) if self.signal == signal.SIGUSR2 else 0.0

    def check_stop(self) -> None:
        """Raise StopRequested if the job has to stop."""
        if self.must_stop:
            raise StopRequested

    @property
    def was_cancelled(self) -> bool:
        """True if a user cancelled this Slurm job, as opposed to preemption, a requeue or the time limit.

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

    def env(self, variables: Mapping[str, str], **more: str) -> dict[str, str]:
        """Return the environment of one part of the job: the node's, without secrets, and the part's own variables."""
        env = {key: value for key, value in os.environ.items() if key not in self.secrets and not looks_secret(key)}
        for name, text in variables.items():
            kind, _, value = text.partition(":")
            resolved = {"host": self.secrets, "runtime": os.environ}.get(kind, {value: value}).get(value)
            if resolved is not None:
                env[name] = resolved
        # Bundles are shared and named by their content, so nothing may be written next to the user's modules.
        return {**env, "PYTHONDONTWRITEBYTECODE": "1", **more}


def say(message: str) -> None:
    """Write a line with the time to the job's log."""
    echo(f"{time.strftime('%H:%M:%S')} {message}", err=True)

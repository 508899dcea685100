"""The `local` executor: jobs are processes on this machine that outlive the command.

Folders, files and code are the same as on a cluster, except that the main process repeats its work itself, instead of
queueing successors. A process is identified by its id and its start.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from holdfast.apps.cluster.remote.executor import Executor, job_command
from holdfast.apps.cluster.remote.ledger import INTENT, Job, Ledger, Submitted, new_intent
from holdfast.apps.cluster.remote.slurm import JobName, JobState
from holdfast.errors import Unreachable
from holdfast.store.lease import is_running, start_token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.apps.cluster.config.launch import TaskFile
    from holdfast.apps.cluster.remote.invocation import TaskFolder
    from holdfast.apps.cluster.remote.transport import Transport


class LocalExecutor(Executor):
    """Runs jobs as processes on this machine."""

    name = "local"
    is_local = True

    def command(self, task: TaskFile, place: TaskFolder) -> list[str]:
        """Return the command of a task's main process."""
        return job_command(task, place)

    def start(self, ledger: Ledger, task: TaskFile, place: TaskFolder) -> list[Job]:
        """Start the main process of a task."""
        names = (JobName.parse(job.intent.name) for job in ledger.jobs())
        number = 1 + sum(name is not None and name.task == task.number for name in names)
        argv = self.command(task, place)
        name = JobName(task.invocation, task.number, "main" if number == 1 else f"main-{number}")
        intent = new_intent(name, "\0".join(argv).encode())
        ledger.write(intent)
        # Not `subprocess`, which expects the starting process to wait for the end of the started one.
        no_streams = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]
        env = {**os.environ, INTENT: intent.intent}
        job = _process_id(os.posix_spawnp(argv[0], argv, env, file_actions=no_streams, setsid=True))
        ledger.write(Submitted(intent.intent, job, time.time()))
        return [Job(intent, job)]

    def states(
        self, transport: Transport, invocation: str, jobs: Sequence[Job], *, mine: bool = True, history: bool = False
    ) -> list[JobState]:
        """Return the processes that run. Those that have ended are not listed."""
        elsewhere = {job.intent.host for job in jobs} - {os.uname().nodename}
        if elsewhere:
            raise Unreachable(f"its processes are on {', '.join(sorted(elsewhere))}, and this is {os.uname().nodename}")
        now = time.time()
        return [
            JobState(
                id=job.id,
                task=None,
                name=job.intent.name,
                comment=job.intent.intent,
                state="running",
                nodes=job.intent.host,
                start=job.intent.time,
                elapsed=now - job.intent.time,
            )
            for job in jobs
            if job.id is not None and _is_alive(job.id)
        ]

    def cancel(self, transport: Transport, states: Sequence[JobState]) -> None:
        """Send SIGTERM. A main process cancels its requests in flight, and stops its server and workers."""
        for state in states:
            if _is_alive(state.id):
                with suppress(ProcessLookupError):
                    os.kill(int(state.id.partition("-")[0]), signal.SIGTERM)

    def job_id(self) -> str:
        """Return the id of this process."""
        return _process_id(os.getpid())


def _process_id(pid: int) -> str:
    """Return the id of a process as a job: `<pid>-<start token>`."""
    return f"{pid}-{start_token(pid) or 0}"


def _is_alive(job: str) -> bool:
    """Return True if the process with this id still runs."""
    pid, _, start = job.partition("-")
    return is_running(int(pid), "" if start == "0" else start)

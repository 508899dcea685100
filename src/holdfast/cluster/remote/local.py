"""Jobs on this machine: processes of their own that outlive the command, known by process id and start time.

The same folders, files and code as on a cluster; instead of successors the main process makes its attempts itself.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from holdfast.canonical import digest_bytes
from holdfast.cluster.remote.ledger import INTENT, Intent, Job, Ledger, Submitted
from holdfast.cluster.remote.slurm import JobName
from holdfast.store.processes import is_running, start_token

if TYPE_CHECKING:
    from holdfast.cluster.remote.invocation import TaskFile, TaskPlace


def process_id(pid: int) -> str:
    """Return the id of a process as a job: `<pid>-<start token>`."""
    return f"{pid}-{start_token(pid) or 0}"


def is_alive(job: str) -> bool:
    """Return True if the process with this id still runs."""
    pid, _, start = job.partition("-")
    return is_running(int(pid), "" if start == "0" else start)


def start(ledger: Ledger, task: TaskFile, place: TaskPlace) -> Job:
    """Start the main process of a task, and record it."""
    number = 1 + sum(JobName.parse(job.intent.name) is not None for job in jobs_of(ledger, task.number))
    name = JobName(task.invocation, task.number, "main" if number == 1 else f"main-{number}")
    argv = [task.python, "-m", "holdfast.cluster.job.node", place.path, "--role", "main"]
    intent = Intent(
        secrets.token_hex(8),
        str(name),
        digest_bytes("\0".join(argv).encode()),
        time.time(),
        os.uname().nodename,
        os.getpid(),
        start=start_token(os.getpid()),
    )
    ledger.write(intent)
    # Not `subprocess`, which wants whoever starts a process to stay for its end.
    nothing = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]
    env = {**os.environ, INTENT: intent.intent}
    job = process_id(os.posix_spawn(argv[0], argv, env, file_actions=nothing, setsid=True))
    ledger.write(Submitted(intent.intent, job, time.time()))
    return Job(intent, job)


def jobs_of(ledger: Ledger, task: int) -> list[Job]:
    """The processes of a task that were ever started."""
    names = ((job, JobName.parse(job.intent.name)) for job in ledger.jobs())
    return [job for job, name in names if name is not None and name.task == task]


def live_jobs(ledger: Ledger, task: int) -> list[Job]:
    """Those that still run."""
    return [job for job in jobs_of(ledger, task) if job.id is not None and is_alive(job.id)]


def cancel(job: Job) -> None:
    """Tell a process to stop, if it is still that one. It puts away what is in hand, and its server and workers."""
    if job.id is not None and is_alive(job.id):
        with suppress(ProcessLookupError):
            os.kill(int(job.id.partition("-")[0]), signal.SIGTERM)

"""Jobs on this machine: processes of their own that outlive the command, known by process id and start time.

The same folders, files and code as on a cluster; instead of successors the main process makes its attempts itself.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.canonical import digest_bytes
from holdfast.cluster.remote.ledger import INTENT, Intent, Job, Ledger, Submitted
from holdfast.cluster.remote.slurm import JobName

if TYPE_CHECKING:
    from holdfast.cluster.remote.invocation import TaskFile, TaskPlace


def process_id(pid: int) -> str:
    """A process as no other ever is called on this machine since it was started: `<pid>-<start in clock ticks>`."""
    with suppress(OSError):
        return f"{pid}-{_fields(pid)[19]}"
    return f"{pid}-0"


def _fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; the name before them may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def is_alive(job: str) -> bool:
    """Whether that very process still runs."""
    pid = int(job.partition("-")[0])
    try:
        return process_id(pid) == job and _fields(pid)[0] != "Z"
    except OSError:
        return False


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

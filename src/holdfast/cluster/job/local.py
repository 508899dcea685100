"""The main process of a task that has no scheduler to start its jobs: it waits for its turn, and starts its workers."""

from __future__ import annotations

import signal
import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from holdfast.cluster.job.context import POLL_SECONDS, say
from holdfast.cluster.remote import invocation as layout
from holdfast.cluster.remote.executor import active_main_jobs, job_command
from holdfast.cluster.remote.invocation import TaskFolder
from holdfast.cluster.remote.ledger import Ledger
from holdfast.cluster.remote.transport import Here

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.cluster.job.context import JobContext


def await_turn(job: JobContext) -> None:
    """Wait for the tasks before this one, unless all are to run at once."""
    if job.task.mode != "sequential":
        return
    transport = Here(pauses=())
    ledger = Ledger(transport, job.place.invocation)
    for number in range(job.task.number):
        earlier = TaskFolder(job.place.invocation, number)
        while layout.read_state(transport, earlier).phase not in layout.OVER and number in active_main_jobs(
            job.executor, ledger, job.task.invocation
        ):
            if job.must_stop:
                return
            time.sleep(4 * POLL_SECONDS)


@contextmanager
def child_workers(job: JobContext) -> Iterator[None]:
    """Run the workers of a task as child processes."""
    command = [*job_command(job.task, job.place, "worker"), "--index"]
    workers = [
        subprocess.Popen([*command, str(number)], stdin=subprocess.DEVNULL, start_new_session=True)
        for number in range(1, job.task.workers)
    ]
    try:
        yield
    finally:
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
        for worker in workers:
            try:
                worker.wait(30)
            except subprocess.TimeoutExpired:
                say(f"worker {worker.pid} did not stop; killing it")
                worker.kill()
                worker.wait()

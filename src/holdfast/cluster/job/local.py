"""A task's main process on this machine: it waits for its turn, and starts its workers itself."""

from __future__ import annotations

import signal
import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from holdfast.cluster.job.node import LOOK_SECONDS, say
from holdfast.cluster.remote import invocation as layout
from holdfast.cluster.remote.invocation import TaskPlace
from holdfast.cluster.remote.ledger import Ledger
from holdfast.cluster.remote.local import live_jobs
from holdfast.cluster.remote.transport import Here

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.cluster.job.node import NodeJob


def await_turn(job: NodeJob) -> None:
    """One task after the other, unless they are to run at once."""
    if job.task.mode != "sequential":
        return
    here, ledger = Here(pauses=()), Ledger(Here(pauses=()), job.place.invocation)
    for number in range(job.task.number):
        before = TaskPlace(job.place.invocation, number)
        while layout.read_state(here, before).phase not in layout.OVER and live_jobs(ledger, number):
            if job.must_go:
                return
            time.sleep(4 * LOOK_SECONDS)


@contextmanager
def workers_beside(job: NodeJob) -> Iterator[None]:
    """The workers of a task, for as long as its main process is there."""
    argv = [job.task.python, "-m", "holdfast.cluster.job.node", job.place.path, "--role", "worker", "--index"]
    workers = [
        subprocess.Popen([*argv, str(number)], stdin=subprocess.DEVNULL, start_new_session=True)
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
                say(f"worker {worker.pid} does not stop, and is killed")
                worker.kill()
                worker.wait()

"""A worker job: processes chunks while the main job offers work, then exits."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.apps.cluster.job.context import FILES_SECONDS, POLL_SECONDS, say
from holdfast.apps.cluster.job.process import EvaluationProcess, run_hook
from holdfast.apps.cluster.remote import invocation as layout
from holdfast.apps.cluster.remote.executor import active_main_jobs
from holdfast.apps.cluster.remote.invocation import EndpointFile
from holdfast.apps.cluster.remote.ledger import INTENT, Ledger
from holdfast.apps.cluster.remote.transport import Here
from holdfast.engine.attached import Ended
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.apps.cluster.job.context import JobContext

_ASK_SECONDS: Final = 60.0
"""how often Slurm is asked whether a main job runs"""
_RESTARTS: Final = 5
"""how often a worker process that died is started again"""
_PAUSE_SECONDS: Final = 5.0
_FINISH_SECONDS: Final = 60.0
"""how long requests in flight may take when the main job withdraws its server, which may answer a while longer"""
_ALONE_SECONDS: Final = 180.0
"""how long a worker waits for the next main job: Slurm starts a requeued one after two minutes"""


def run_worker(job: JobContext) -> int:
    """Work until the run is done or stopped, or its main job has ended for good."""
    ledger = Ledger(Here(pauses=()), job.place.invocation)
    if job.executor.queues_successors and ledger.is_disowned(os.environ.get(INTENT, "")):
        say("another process has taken over this submission; nothing to do")
        return 0
    main_job = _MainJob(job, ledger)
    last_serial = newest_serial = restarts = refusals = 0
    prepared = False
    while True:
        if reason := _why_over(job, main_job):
            say(f"exiting: {reason}")
            return 0
        if not prepared:
            run_hook(job, job.task.pre_cmd, "pre_cmd")
            prepared = True
        endpoint = read_endpoint(job)
        if endpoint is None or endpoint.serial <= last_serial:
            _rest(job, FILES_SECONDS)
            continue
        last_serial = endpoint.serial
        code, ended = _work(job, endpoint, main_job)
        say(f"worked on {endpoint.run_dir}: exit code {code}")
        if last_serial > newest_serial:  # else it may be the offer of a job that was killed long ago
            newest_serial = last_serial
            main_job.note_seen()
        refusals = refusals + 1 if ended.away else 0
        if refusals:  # for a while, or only from here: the main job offers other work if all have to pause
            last_serial = 0
            _rest(job, min(60.0, 2.0**refusals))
        elif code not in (0, 1, 3) and restarts < _RESTARTS:  # killed, or another process holds the worker's lease
            last_serial, restarts = 0, restarts + 1
            time.sleep(_PAUSE_SECONDS)


def _rest(job: JobContext, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not job.must_stop:
        time.sleep(POLL_SECONDS)


def _work(job: JobContext, endpoint: EndpointFile, main_job: _MainJob) -> tuple[int, Ended]:
    """Work for as long as the main job offers this work; return the exit code, and how the work ended."""
    local, worker = seen_from_here(endpoint), f"w{job.index}"
    command = [job.task.python, "-m", "holdfast", "work", endpoint.run_dir, "--worker", worker]
    command += ["--wait", "--attached", "--display", "plain"]
    process = EvaluationProcess(job, f"work-{worker}", command, local.base_urls, local.env)
    looked = time.monotonic()
    while not process.has_ended():
        if job.must_stop or main_job.has_died():
            return process.drain(finish=job.finish_seconds), Ended()
        if time.monotonic() - looked < FILES_SECONDS:
            continue
        looked = time.monotonic()
        offered = read_endpoint(job)
        # The server is gone, or another one. If the model is elsewhere, work continues until the next main job begins.
        serves = endpoint.base_urls or endpoint.env
        if serves and (offered is None or offered.serial != endpoint.serial):
            return process.drain(finish=_FINISH_SECONDS), Ended()
    if (ended := process.last_message(Ended())).kind:
        say(f"{ended.message}")
    return process.drain(), ended


def seen_from_here(endpoint: EndpointFile) -> EndpointFile:
    """Return the endpoint with addresses of this node replaced by 127.0.0.1."""
    if endpoint.host != os.uname().nodename:
        return endpoint

    def localize(text: str) -> str:
        return text.replace(f"//{endpoint.host}:", "//127.0.0.1:")

    env = {name: localize(text) for name, text in endpoint.env.items()}
    return msgspec.structs.replace(endpoint, base_url=tuple(map(localize, endpoint.base_urls)), env=env)


def read_endpoint(job: JobContext) -> EndpointFile | None:
    """Return what the main job offers now, if anything."""
    try:
        data = Path(job.place.endpoint).read_bytes()
    except FileNotFoundError:
        return None
    return layout.decode(data, EndpointFile, job.place.endpoint)


def _why_over(job: JobContext, main_job: _MainJob) -> str | None:
    """Return why there is nothing more to do, or None."""
    if job.must_stop:
        return "stopped by `holdfast kill`" if job.signal is None else f"signal {job.signal}"
    state = layout.read_state(Here(pauses=()), job.place)
    if state.phase in layout.OVER:
        return f"the run is {state.phase}"
    return "no main job runs; the next one queues workers" if main_job.is_gone() else None


class _MainJob:
    """Watches for a main job that runs, or ran a moment ago."""

    def __init__(self, job: JobContext, ledger: Ledger) -> None:
        self._job = job
        self._ledger = ledger
        self._parent = os.getppid()
        self._asked = self._seen = -math.inf

    def note_seen(self) -> None:
        """Record that a main job was there until now."""
        self._seen = time.monotonic()

    def has_died(self) -> bool:
        """Return True if the main job was the parent of this process and is dead, so that none follows by itself."""
        return not self._job.executor.queues_successors and os.getppid() != self._parent

    def is_gone(self) -> bool:
        """Return True if no main job runs, and none has been seen for a while.

        A main job may be pending for hours, and this worker may hold the very node that it waits for. A worker that has
        never seen a main job leaves at once.
        """
        if not self._job.executor.queues_successors:
            return self.has_died()
        now = time.monotonic()
        if now - self._asked > _ASK_SECONDS:
            self._asked = now
            try:
                active = active_main_jobs(self._job.executor, self._ledger, self._job.task.invocation)
                if any(state.state in ("running", "unknown") for state in active.get(self._job.place.number, ())):
                    self._seen = now
            except HoldfastError as error:
                say(f"cannot ask for the main job: {error}")
                self._seen = now
        return now - self._seen > _ALONE_SECONDS

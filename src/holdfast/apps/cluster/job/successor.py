"""The jobs that a main job queues in Slurm: its successor before anything else, and workers once there is work."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from holdfast.apps.cluster.job.context import say
from holdfast.apps.cluster.remote.chain import Chain, is_role
from holdfast.apps.cluster.remote.ledger import INTENT, Ledger, Submitter
from holdfast.apps.cluster.remote.slurm import Slurm
from holdfast.apps.cluster.remote.transport import Here
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.apps.cluster.job.context import JobContext
    from holdfast.apps.cluster.remote.ledger import Job
    from holdfast.apps.cluster.remote.slurm import JobState


_ARRAYS: Final = 5
"""arrays of workers that one main job queues at most"""


class QueuedJobs:
    """The successor and the workers of one main job."""

    def __init__(self, job: JobContext) -> None:
        self._job = job
        self._task = job.place.number
        ledger = Ledger(Here(pauses=(1.0, 2.0)), job.place.invocation)
        self._submitter = Submitter(Slurm(ledger.transport), ledger)
        self._chain = Chain(self._submitter, job.task.invocation, job.place)
        self._successor: Job | None = None
        self._arrays = 0
        """of workers, queued by this job"""
        self._reported: set[str] = set()

    def is_disowned(self) -> bool:
        """Return True if another process has given this job up, and submitted another one."""
        return self._submitter.ledger.is_disowned(os.environ.get(INTENT, ""))

    def cancelled_predecessor(self) -> str | None:
        """Return the id of the job that this one was queued to continue, if a user cancelled that job."""
        jobs = self._chain.known("main")
        mine = next((job for job in jobs if job.intent.intent == os.environ.get(INTENT)), None)
        if mine is None or mine.intent.after is None:
            return None  # submitted by a user, whatever became of earlier jobs
        try:
            states = self._chain.states()
            cancelled = [
                job.id for job in jobs if job.id == mine.intent.after and self._chain.was_cancelled(job, states)
            ]
        except HoldfastError as error:
            say(f"cannot ask Slurm how job {mine.intent.after} ended; continuing it: {error}")
            return None
        return cancelled[0] if cancelled else None

    def ensure(self, *, workers: bool = False) -> bool:
        """Queue a successor, and `workers` if asked to, unless they are queued. Return True if there is a successor.

        Jobs that a user cancelled are not replaced: otherwise new ones would appear without end.
        """
        if self._job.kill_requested:
            return False
        try:
            self._submitter.reconcile()
            states = self._chain.states()  # one question for all: every running job asks it every minute
            self._successor = self._queued_successor(states)
            if workers and self._job.task.workers > 1:
                self._ensure_workers([state for state in states if is_role(state.name, self._task, "workers")])
        except HoldfastError as error:
            say(f"cannot queue the jobs that follow this one, trying again later: {error}")
        return self._successor is not None

    def _queued_successor(self, states: Sequence[JobState]) -> Job | None:
        live = {state.id for state in states if state.active and is_role(state.name, self._task, "main")}
        live -= {self._job.id}
        jobs = self._chain.known("main")
        later = [job for job in jobs if job.id in live]
        if later:
            return later[-1]
        earlier = [job for job in jobs if job.intent.after == self._job.id and job.id is not None]
        if earlier and self._chain.was_cancelled(earlier[-1], states):
            self._report_once(f"job {earlier[-1].id}, which would continue this one, was cancelled; queueing no other")
            return None
        return self._chain.submit_main(after=self._job.id)

    def _ensure_workers(self, states: Sequence[JobState]) -> None:
        if any(state.active for state in states):
            return
        newest = max((int(state.id) for state in states), default=0)
        cancelled = any(state.state == "cancelled" for state in states if int(state.id) == newest)
        if cancelled and newest > self._submitted_by_user():
            self._report_once(f"workers (job {newest}) were cancelled; continuing without them")
        else:
            self._queue_workers()

    def _submitted_by_user(self) -> int:
        """Return the id of the job that the chain began with. Workers that were cancelled before it do not count."""
        first = [job.id for job in self._chain.known("main") if job.intent.after is None and job.id is not None]
        return max(map(int, first), default=0)

    def _report_once(self, message: str) -> None:
        if message not in self._reported:
            self._reported.add(message)
            say(message)

    def _queue_workers(self) -> None:
        """Queue workers, but not endlessly if they cannot run, as with a `pre_cmd` that fails there."""
        if self._arrays < _ARRAYS:
            self._chain.submit_workers()
        elif self._arrays == _ARRAYS:
            say(f"workers have ended {_ARRAYS} times; this job continues without new ones, see their logs")
        self._arrays += 1

    def cancel_waiting(self) -> None:
        """Cancel the successor and workers that have not begun. Otherwise they end as soon as they begin."""
        try:
            states = [state for state in self._chain.states() if state.active and state.id != self._job.id]
            waiting = [
                state
                for state in states
                if is_role(state.name, self._task, "main") or state.state in ("pending", "requeued")
            ]
            if waiting:
                self._submitter.slurm.cancel(ids={state.handle: state.name for state in waiting})
        except HoldfastError as error:
            say(f"jobs that wait could not be cancelled; they will do nothing: {error}")

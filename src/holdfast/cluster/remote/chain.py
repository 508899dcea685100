"""The jobs of a task, as they follow each other: `main`, `main-2`, … each queued before the one before it works.

A successor depends on its predecessor ending badly (`afternotok`): by its time limit, by preemption, with its node, or
killed. When that ends well Slurm itself throws the successor away. A predecessor that was cancelled (`scancel`) also
counts as a bad end for Slurm, but means stop: the successor checks for it before it does anything.

Workers are an array: `workers`, `workers-2`, …
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from holdfast.cluster.remote.scripts import comment_of
from holdfast.cluster.remote.slurm import JobName

if TYPE_CHECKING:
    from holdfast.cluster.remote.invocation import TaskPlace
    from holdfast.cluster.remote.ledger import Job, Submitter
    from holdfast.cluster.remote.slurm import JobState


class Chain:
    """The jobs of one task."""

    def __init__(self, submitter: Submitter, invocation: str, place: TaskPlace) -> None:
        self.submitter = submitter
        self.invocation = invocation
        self.place = place

    def submit_main(self, after: str | None = None) -> Job:
        """Queue the main job, or one that goes on when job `after` ends badly."""
        options = [] if after is None else [f"--dependency=afternotok:{after}", "--kill-on-invalid-dep=yes"]
        return self._submit("main", self.place.script, options, after)

    def submit_workers(self) -> Job:
        """Queue the workers beside it."""
        return self._submit("workers", self.place.worker_script, [])

    def _submit(self, role: str, script: str, options: list[str], after: str | None = None) -> Job:
        text = self.submitter.ledger.transport.read(script)
        number = len(self.known(role)) + 1
        name = JobName(self.invocation, self.place.number, role if number == 1 else f"{role}-{number}")
        return self.submitter.submit(name, text, options=options, comment=comment_of(text), after=after)

    def known(self, role: str) -> list[Job]:
        """All jobs of that role that were ever intended."""
        return [job for job in self.submitter.ledger.jobs() if self._is(job.intent.name, role)]

    def states(self, role: str) -> list[JobState]:
        """Jobs of that role as Slurm has them: active ones, and those that ended a few minutes ago at most."""
        jobs = self.submitter.slurm.jobs(invocation=self.invocation)
        return [job for job in jobs if self._is(job.name, role)]

    def live(self, role: str) -> list[JobState]:
        """Jobs of that role that may still run."""
        return [job for job in self.states(role) if job.active]

    def was_cancelled(self, job: Job) -> bool:
        """Whether somebody cancelled this job, as far as Slurm still knows; preempted or timed out is not cancelled."""
        states = [state for state in self.states("main") if (state.name, state.id) == (job.intent.name, job.id)]
        if not states:
            accounted = self.submitter.slurm.accounted([job.intent.name], since=job.intent.time) or []
            states = [state for state in accounted if state.id == job.id]
        return any(state.state == "cancelled" for state in states)

    def _is(self, name: str, role: str) -> bool:
        parsed = JobName.parse(name)
        if parsed is None or (parsed.invocation, parsed.task) != (self.invocation, self.place.number):
            return False
        return re.fullmatch(rf"{role}(-\d+)?", parsed.role) is not None

    def cancel(self, job: JobState | Job) -> None:
        """Cancel this very job."""
        name = job.intent.name if hasattr(job, "intent") else job.name
        if job.id is not None:
            self.submitter.slurm.cancel(ids={job.id: name})

"""The jobs around a main job, in Slurm: its successor, queued before anything is done, and the workers beside it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from holdfast.cluster.chain import Chain
from holdfast.cluster.node import say
from holdfast.cluster.slurm import Slurm
from holdfast.cluster.submission import INTENT, Ledger, Submitter
from holdfast.cluster.transport import Here
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.cluster.node import NodeJob
    from holdfast.cluster.submission import Job


_ARRAYS: Final = 5
"""how many arrays of workers one main job queues at most"""


class Neighbours:
    """Those of one main job."""

    def __init__(self, job: NodeJob) -> None:
        self._job = job
        ledger = Ledger(Here(pauses=(1.0, 2.0)), job.place.invocation)
        self._submitter = Submitter(Slurm(ledger.transport), ledger)
        self._chain = Chain(self._submitter, job.task.invocation, job.place)
        self._successor: Job | None = None
        self._arrays = 0
        """of workers, queued by this job"""

    def disowned(self) -> bool:
        """Whether nobody counts on us."""
        return self._submitter.ledger.disowned(os.environ.get(INTENT, ""))

    def ensure(self) -> bool:
        """Have a successor queued, and workers where there are to be some; True when there is a successor.

        Not where all is to stop: whoever ends the jobs would meet new ones without end.
        """
        if self._job.stopped:
            return False
        try:
            self._submitter.reconcile()
            live = {state.id for state in self._chain.live("main")} - {self._job.id}
            later = [job for job in self._chain.known("main") if job.id in live]
            self._successor = later[-1] if later else self._chain.submit_main(after=self._job.id)
            if self._job.task.workers > 1 and not self._chain.live("workers"):
                self._queue_workers()
        except HoldfastError as error:
            say(f"what is to follow could not be queued, which is tried again: {error}")
        return self._successor is not None

    def _queue_workers(self) -> None:
        """Not again and again where they cannot stay, as with a `pre_cmd` that fails there."""
        if self._arrays < _ARRAYS:
            self._chain.submit_workers()
        elif self._arrays == _ARRAYS:
            say(f"workers have ended {_ARRAYS} times; this job goes on without new ones, see their logs")
        self._arrays += 1

    def take_back(self) -> None:
        """Cancel the successor; where Slurm does not answer it is thrown away by Slurm when we end well."""
        try:
            for state in self._chain.live("main"):
                if state.id != self._job.id:
                    self._chain.cancel(state)
        except HoldfastError as error:
            say(f"the successor could not be cancelled; it will not begin: {error}")

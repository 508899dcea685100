"""Where the loop's trials come from: for one process all that is left, for a worker chunk after chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.engine.brake import Brake
    from holdfast.plan.plan import Job


class Supply:
    """The trials of a process that has the run for itself."""

    def __init__(self, jobs: Iterator[Job]) -> None:
        self._jobs = jobs
        self.arrived: Callable[[], None] = lambda: None
        """to be called when there is something to do again"""

    def next(self) -> Job | None:
        """A trial to start; None when there is none just now."""
        return next(self._jobs, None)

    def ended(self, job: Job) -> None:
        """A trial is on disk, or given up."""

    async def more(self, brake: Brake) -> bool:
        """Nothing is in flight: wait for more to do; False when none will come, or the brake is pulled."""
        return False

    async def close(self) -> None:
        """Nothing more is started."""

"""The protocol of executors, which run the jobs of an invocation.

`slurm` (`chain.SlurmExecutor`) and `local` (`local.LocalExecutor`) implement it. A package adds another one with an
entry point of the group `holdfast.executors`; see docs/extending.md.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Protocol, cast

from holdfast.apps.cluster.config.executor import ExecutorRules, load_executor
from holdfast.apps.cluster.remote.slurm import JobName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.apps.cluster.config.launch import TaskFile
    from holdfast.apps.cluster.remote.invocation import TaskFolder
    from holdfast.apps.cluster.remote.ledger import Job, Ledger
    from holdfast.apps.cluster.remote.slurm import JobState
    from holdfast.apps.cluster.remote.transport import Transport


class Executor(ExecutorRules, Protocol):
    """Starts, lists and cancels the jobs of an invocation.

    A job runs `job_command(task, place)` on a machine that sees the invocation's directory.
    """

    is_local: bool = False
    queues_successors: bool = False
    """a main job queues the job that continues it, and jobs of workers; else one process does all of a task,
    and starts its workers itself"""

    @abstractmethod
    def start(self, ledger: Ledger, task: TaskFile, place: TaskFolder) -> list[Job]:
        """Start the jobs of a task that has no active main job, and record them in the ledger."""

    def start_all(self, ledger: Ledger, tasks: Sequence[tuple[TaskFile, TaskFolder]]) -> list[Job]:
        """Start the jobs of several tasks, as `start` does."""
        return [job for task, place in tasks for job in self.start(ledger, task, place)]

    @abstractmethod
    def states(
        self, transport: Transport, invocation: str, jobs: Sequence[Job], *, mine: bool = True, history: bool = False
    ) -> list[JobState]:
        """Return the active jobs of an invocation, and others if they are known.

        `jobs` are the ledger's. `mine` is False for an invocation of another user; `history` also asks for jobs
        that ended long ago. Raises Unreachable if the jobs cannot be seen from here.
        """

    @abstractmethod
    def cancel(self, transport: Transport, states: Sequence[JobState]) -> None:
        """Cancel jobs. Returns at once; the jobs may take a while to end."""

    @abstractmethod
    def job_id(self) -> str:
        """Return the id of the job that this process runs in."""

    def settle(self, ledger: Ledger) -> list[Job]:
        """Find out what became of submissions without an answer, and return those that are still in doubt."""
        return []


def find_executor(name: str) -> Executor:
    """Return the executor of that name."""
    return cast("Executor", load_executor(name))


def active_main_jobs(executor: Executor, ledger: Ledger, invocation: str) -> dict[int, list[JobState]]:
    """Return the main jobs that are running, or may run, by their tasks."""
    return select_main_jobs(executor.states(ledger.transport, invocation, ledger.jobs()))


def select_main_jobs(states: Sequence[JobState]) -> dict[int, list[JobState]]:
    """Return the active main jobs by their tasks."""
    active: dict[int, list[JobState]] = {}
    for state in states:
        name = JobName.parse(state.name)
        if state.active and name is not None and name.role.startswith("main"):
            active.setdefault(name.task, []).append(state)
    return active


def job_command(task: TaskFile, place: TaskFolder, role: str = "main") -> list[str]:
    """Return the command of a job, for the interpreter of the task."""
    return [task.python, "-m", "holdfast.apps.cluster.job", place.path, "--role", role]

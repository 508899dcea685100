"""Ending an invocation, or a task of it: the mark that nobody goes on first, then its jobs, and nothing else.

Which jobs those are is known by name and id together. A job that has come by an id of ours, or that is called almost
like one of ours, is nobody's business here: Slurm itself compares both.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

from holdfast.cluster.remote.invocation import TaskPlace, write_stop
from holdfast.cluster.remote.ledger import Ledger, Submitter
from holdfast.cluster.remote.slurm import JobName, Slurm
from holdfast.cluster.watch.status import jobs_of, read_files
from holdfast.errors import Unreachable, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.cluster.remote.slurm import JobState
    from holdfast.cluster.watch.find import Subject
    from holdfast.cluster.watch.status import Files

PATIENCE: Final = 90.0
"""Seconds that jobs have to end: Slurm gives them half a minute after the signal."""
POLL_SECONDS: Final = 1.0


class Killed(NamedTuple):
    """What was done."""

    ended: list[str]
    """jobs by name and id"""
    remain: list[str]
    """told, and not yet gone"""


def kill(
    subject: Subject,
    why: str,
    *,
    patience: float = PATIENCE,
    poll: float = POLL_SECONDS,
    say: Callable[[str], None] = lambda _: None,
) -> Killed:
    """End all jobs of an invocation, or of one of its tasks, and wait until they are gone. Safe to repeat.

    The `stop` mark is left first, so that nothing that begins meanwhile goes on: a successor, say, which would queue
    the next one.
    """
    files = read_files(subject.transport, subject.directory)
    if not files.mine:
        raise UsageError(
            f"{subject.name} is an invocation of {files.invocation.user}", remedy="Only they can cancel its jobs."
        )
    marked = subject.directory if subject.task is None else TaskPlace(subject.directory, subject.task).path
    write_stop(subject.transport, marked, why)
    try:
        return _end_jobs(subject, patience, poll, say)
    except Unreachable as error:
        raise Unreachable(
            f"{error.message}; jobs that start from now on will not continue it, "
            "but running jobs may not have been cancelled",
            remedy="Run the same command again when it answers.",
        ) from None


def _end_jobs(subject: Subject, patience: float, poll: float, say: Callable[[str], None]) -> Killed:
    told: dict[tuple[str, str], str] = {}
    end = time.monotonic() + patience
    while True:
        files = read_files(subject.transport, subject.directory)
        live = [state for state in jobs_of(subject.transport, files) if state.active and _is_meant(subject, state)]
        fresh = [state for state in live if (state.name, state.handle) not in told]
        fresh.sort(key=lambda state: state.state != "pending")  # a successor, before what it waits for ends badly
        if fresh:
            _cancel(subject, files, fresh)
        for state in fresh:
            told[state.name, state.handle] = _shown(state)
            say(f"ending {_shown(state)}")
        if not live or (not fresh and time.monotonic() > end):
            break
        time.sleep(poll)
    if files.invocation.executor == "slurm":
        # What was being submitted when the mark was set: found by its name, or disowned and told so at its start.
        Submitter(Slurm(subject.transport), Ledger(subject.transport, subject.directory)).reconcile()
    remain = {(state.name, state.handle) for state in live}
    return Killed(
        [shown for key, shown in told.items() if key not in remain],
        [shown for key, shown in told.items() if key in remain],
    )


def _is_meant(subject: Subject, state: JobState) -> bool:
    name = JobName.parse(state.name)
    return name is not None and subject.task in (None, name.task)


def _shown(state: JobState) -> str:
    return f"{state.name} (job {state.handle}, {state.state})"


def _cancel(subject: Subject, files: Files, states: list[JobState]) -> None:
    if files.invocation.executor == "local":
        from holdfast.cluster.remote.local import cancel

        ids = {(state.name, state.id) for state in states}
        for job in files.jobs:
            if (job.intent.name, job.id) in ids:
                cancel(job)
        return
    slurm = Slurm(subject.transport)
    slurm.cancel(ids={state.handle: state.name for state in states})

"""Stop an invocation or one of its tasks: leave a mark that nothing continues, then cancel its jobs, and nothing else.

Jobs are cancelled by name and id together, which Slurm itself compares: ids are reused, and names may be similar.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

from holdfast.cluster.remote.executor import find_executor
from holdfast.cluster.remote.invocation import TaskFolder, write_stop
from holdfast.cluster.remote.ledger import Ledger
from holdfast.cluster.remote.slurm import JobName
from holdfast.cluster.watch.status import read_files
from holdfast.errors import Unreachable, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.cluster.remote.slurm import JobState
    from holdfast.cluster.watch.find import Subject
    from holdfast.cluster.watch.status import Files

PATIENCE: Final = 90.0
"""seconds that jobs have to end: Slurm gives them half a minute after the signal"""
POLL_SECONDS: Final = 1.0
"""between the first two looks; later ones come less often"""
_LONGEST_POLL: Final = 5.0


class Killed(NamedTuple):
    """The jobs of an invocation that was stopped, by name and id."""

    ended: list[str]
    remain: list[str]
    """cancelled, but still there"""


def kill(
    subject: Subject,
    why: str,
    *,
    patience: float = PATIENCE,
    poll: float = POLL_SECONDS,
    say: Callable[[str], None] = lambda _: None,
) -> Killed:
    """Cancel all jobs of an invocation, or of one of its tasks, and wait until they are gone. Safe to repeat.

    The `stop` mark is left first, so that no job that starts meanwhile continues: a successor would queue another one.
    """
    files = read_files(subject.transport, subject.directory)
    if not files.mine:
        raise UsageError(
            f"{subject.name} is an invocation of {files.invocation.user}", remedy="Only they can cancel its jobs."
        )
    try:
        before = _live_jobs(subject, files)
    except Unreachable:  # the mark matters more than their number
        before = []
    marked = subject.directory if subject.task is None else TaskFolder(subject.directory, subject.task).path
    write_stop(subject.transport, marked, why)
    try:
        return _end_jobs(subject, before, patience, poll, say)
    except Unreachable as error:
        raise Unreachable(
            f"{error.message}; jobs that start from now on will not continue it, "
            "but running jobs may not have been cancelled",
            remedy="Run the same command again when it answers.",
        ) from None


def _end_jobs(
    subject: Subject, before: list[JobState], patience: float, poll: float, say: Callable[[str], None]
) -> Killed:
    """Cancel jobs until there are none; those `before` the mark that are gone by then have stopped because of it."""
    cancelled: dict[tuple[str, str], str] = {}
    end = time.monotonic() + patience
    while True:
        files = read_files(subject.transport, subject.directory)
        live = _live_jobs(subject, files)
        fresh = [state for state in live if (state.name, state.handle) not in cancelled]
        fresh.sort(key=lambda state: state.state != "pending")  # a successor, before the job fails that it waits for
        if fresh:
            find_executor(files.invocation.executor).cancel(subject.transport, fresh)
        for state in fresh:
            cancelled[state.name, state.handle] = _describe(state)
            say(f"cancelling {_describe(state)}")
        if not live or (not fresh and time.monotonic() > end):
            break
        time.sleep(poll)
        poll = min(1.5 * poll, _LONGEST_POLL)
    # A job that was being submitted when the mark was set is adopted, or disowned, which it learns at its start.
    find_executor(files.invocation.executor).settle(Ledger(subject.transport, subject.directory))
    remain = {(state.name, state.handle) for state in live}
    stopped = {(state.name, state.handle): _describe(state) for state in before} | cancelled
    return Killed(
        [shown for key, shown in stopped.items() if key not in remain],
        [shown for key, shown in cancelled.items() if key in remain],
    )


def _live_jobs(subject: Subject, files: Files) -> list[JobState]:
    executor = find_executor(files.invocation.executor)
    states = executor.states(subject.transport, files.invocation.id, files.jobs, mine=files.mine)
    return [state for state in states if state.active and _is_selected(subject, state)]


def _is_selected(subject: Subject, state: JobState) -> bool:
    name = JobName.parse(state.name)
    return name is not None and subject.task in (None, name.task)


def _describe(state: JobState) -> str:
    return f"{state.name} (job {state.handle}, {state.state})"

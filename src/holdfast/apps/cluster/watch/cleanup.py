"""Stop invocations, and remove what no run on a cluster needs.

`kill` leaves a mark that nothing continues, then cancels the jobs of an invocation or of one of its tasks, and nothing
else. Jobs are cancelled by name and id together, which Slurm itself compares: ids are reused, and names may be similar.

`find_unneeded` and `remove` are about files that were sent, environments, images and secrets.
An invocation needs what its tasks name until all of them are done. Everything else that nothing has used for a day is
removed; a submission that is under way has used its files, whose times it sets. Runs are never touched.
"""

from __future__ import annotations

import time
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from holdfast.apps.cluster.config.launch import TaskFile
from holdfast.apps.cluster.remote.executor import find_executor
from holdfast.apps.cluster.remote.invocation import State, TaskFolder, write_stop
from holdfast.apps.cluster.remote.ledger import Ledger
from holdfast.apps.cluster.remote.registry import InvocationRegistry
from holdfast.apps.cluster.remote.slurm import JobName
from holdfast.apps.cluster.watch.status import jobs_of, read_files
from holdfast.errors import ClusterError, Unreachable, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from holdfast.apps.cluster.remote.slurm import JobState
    from holdfast.apps.cluster.remote.transport import Transport
    from holdfast.apps.cluster.watch.find import Subject
    from holdfast.apps.cluster.watch.status import Files

SHELVES: Final = ("holdfast/bundles", "holdfast/code", "holdfast/env", "holdfast/arriving", "containers")
"""folders below `remote_job_dir` whose entries are shared by invocations"""

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
    files = _own_files(subject, "cancel its jobs")
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


def _own_files(subject: Subject, action: str) -> Files:
    """Read the files of an invocation; UsageError if it is somebody else's: only they may do this."""
    files = read_files(subject.transport, subject.directory)
    if not files.mine:
        raise UsageError(
            f"{subject.name} is an invocation of {files.invocation.user}", remedy=f"Only they can {action}."
        )
    return files


def _end_jobs(
    subject: Subject, before: list[JobState], patience: float, poll: float, say: Callable[[str], None]
) -> Killed:
    """Cancel jobs until no job is left. Jobs listed `before` the mark that are gone have stopped because of it."""
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


class Unneeded(NamedTuple):
    """A file or folder that is not needed, relative to `remote_job_dir`."""

    path: str
    kilobytes: int


def find_unneeded(transport: Transport, base: str) -> list[Unneeded]:
    """List what no invocation below a `remote_job_dir` needs."""
    needed, secrets = _read_needs(transport, base)
    entries = []
    for line in transport.check(["sh", "-c", _LIST, "sh", base, *SHELVES, *secrets]).text.splitlines():
        size, _, path = line.partition("\t")
        if f"{base}/{path}" not in needed:
            entries.append(Unneeded(path, int(size)))
    return entries


def remove(transport: Transport, base: str, entries: Iterable[Unneeded]) -> None:
    """Remove entries, except those that were used in the meantime."""
    names = b"".join(f"{entry.path}\0".encode() for entry in entries)
    transport.check(["sh", "-c", _REMOVE, "sh", base], input=names, timeout=3600)


def remove_invocation(subject: Subject) -> str:
    """Remove the directory of an invocation without jobs, forget its id, and return its `remote_job_dir`."""
    files = _own_files(subject, "remove it")
    if live := [state.name for state in jobs_of(subject.transport, files) if state.active]:
        raise UsageError(
            f"{subject.name} has jobs: {', '.join(live)}", remedy=f"Stop it first: holdfast kill {subject.name}"
        )
    subject.transport.check(["rm", "-rf", "--", subject.directory])
    InvocationRegistry().remove(files.invocation.id)
    return files.invocation.base


def _read_needs(transport: Transport, base: str) -> tuple[set[str], list[str]]:
    """Return the paths that unfinished invocations need, and the secrets of finished ones."""
    needed: set[str] = set()
    finished: dict[str, bool] = {}
    for invocation, task, state in _read_tasks(transport, base):
        done = state.phase == "done"
        finished[invocation] = finished.get(invocation, True) and done
        if not done:
            needed |= set(_paths_of(task, base))
    return needed, [f"holdfast/{invocation}/secrets.env" for invocation, done in finished.items() if done]


def _read_tasks(transport: Transport, base: str) -> Iterator[tuple[str, TaskFile, State]]:
    lines = transport.check(["sh", "-c", _TASKS, "sh", base]).text.splitlines()
    for invocation, task, state in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        try:
            yield (
                invocation,
                msgspec.json.decode(task, type=TaskFile),
                msgspec.json.decode(state, type=State) if state else State(),
            )
        except msgspec.DecodeError as error:
            raise ClusterError(
                f"{transport.host}: {base}/holdfast/{invocation}: cannot be read, so what it needs is unknown: {error}",
                remedy=f"Remove that folder if the invocation is over, or run `holdfast clean {invocation}`.",
            ) from None


def _paths_of(task: TaskFile, base: str) -> Iterator[str]:
    """Yield the entries that a task needs."""
    for path in (task.eval_file, task.python, *(server.image for server in task.served)):
        for shelf in SHELVES:
            if path is not None and PurePosixPath(path).is_relative_to(f"{base}/{shelf}"):
                inner = PurePosixPath(path).relative_to(f"{base}/{shelf}")
                yield f"{base}/{shelf}/{inner.parts[0]}"


_TASKS: Final = r"""
cd -- "$1/holdfast" 2>/dev/null || exit 0
for task in [0-9a-f]*/[0-9]*/task.json; do
    test -e "$task" || continue
    state=$(dirname -- "$task")/state.json
    echo "${task%%/*}"
    tr -d '\n' <"$task"; echo
    if test -e "$state"; then tr -d '\n' <"$state"; fi; echo
done
"""
# `-mtime +0`: a day or more ago. Files that begin with a dot in `containers` are logs of imports.
_LIST: Final = r"""
cd -- "$1" 2>/dev/null || exit 0
shift
for place; do
    case $place in
    */secrets.env) test ! -e "$place" || du -k -- "$place" ;;
    containers) test ! -d "$place" || find "$place" -maxdepth 1 -name '*.sqsh' -mtime +0 -exec du -k -- {} + ;;
    *) test ! -d "$place" || find "$place" -mindepth 1 -maxdepth 1 -mtime +0 -exec du -sk -- {} + ;;
    esac
done
"""
_REMOVE: Final = r"""
cd -- "$1" || exit
xargs -0 -r -I@ find @ -maxdepth 0 \( -mtime +0 -o -name secrets.env \) -exec rm -rf -- {} +
"""

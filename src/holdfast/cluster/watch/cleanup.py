"""Remove what no run on a cluster needs any more: files that were sent, environments, images, secrets.

An invocation needs what its tasks name until all of them are done. Everything else that nothing has used for a day is
removed; a submission that is under way has used its files, whose times it sets. Runs are never touched.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from holdfast.cluster.config.launch import TaskFile
from holdfast.cluster.remote.invocation import State
from holdfast.cluster.remote.registry import InvocationRegistry
from holdfast.cluster.watch.status import jobs_of, read_files
from holdfast.errors import ClusterError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from holdfast.cluster.remote.transport import Transport
    from holdfast.cluster.watch.find import Subject

SHELVES: Final = ("holdfast/bundles", "holdfast/code", "holdfast/env", "holdfast/arriving", "containers")
"""folders below `remote_job_dir` whose entries are shared by invocations"""


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
    files = read_files(subject.transport, subject.directory)
    if not files.mine:
        raise UsageError(
            f"{subject.name} is an invocation of {files.invocation.user}", remedy="Only they can remove it."
        )
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

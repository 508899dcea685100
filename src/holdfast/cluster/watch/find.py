"""Find what `480d`, `480d.0`, `/lustre/…/holdfast/480d3c89bfe4a55c`, a run directory or `host:/path` names.

Ids are looked up in this user's registry. A path needs no registry: everything is in the directory, so a colleague, or
the same user on another machine, sees the same.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from holdfast.cluster.remote.invocation import State
from holdfast.cluster.remote.registry import InvocationRegistry
from holdfast.cluster.remote.transport import Here, connect
from holdfast.errors import ClusterError, UsageError

if TYPE_CHECKING:
    from holdfast.cluster.remote.registry import Invocation
    from holdfast.cluster.remote.transport import Transport


class NotKnown(UsageError):
    """The registry has no such id."""


class Subject(NamedTuple):
    """An invocation, or one of its tasks."""

    transport: Transport
    directory: str
    task: int | None = None
    entry: Invocation | None = None
    """of the registry, if it was found there"""

    @property
    def name(self) -> str:
        """A name by which commands find it again."""
        base = self.entry.id if self.entry else _full_path(self.transport, self.directory)
        if self.task is None:
            return base
        return f"{base}.{self.task}" if self.entry else f"{base}/{self.task}"


def _full_path(transport: Transport, directory: str) -> str:
    return directory if isinstance(transport, Here) else f"{transport.host}:{directory}"


def subject_from(entry: Invocation, task: int | None = None) -> Subject:
    """Return an invocation of the registry."""
    return Subject(connect(entry.host, entry.user, entry.identity), entry.directory, task, entry)


def find(text: str, registry: InvocationRegistry | None = None) -> Subject | Path:
    """Return an invocation or one of its tasks, else the path of a run on this machine.

    UsageError if there is no such thing, or several; `Unreachable` if that cannot be found out.
    """
    remote = re.fullmatch(r"(?:([^@:/\s]+)@)?([^@:/\s]+):(/.*)", text)
    if remote is not None:
        transport = connect(remote[2], remote[1])
        subject = _find_at(transport, remote[3])
        if isinstance(subject, Path):
            raise UsageError(
                f"{text} is a run directory, but no invocation on that host uses it",
                remedy="Use its path on that machine.",
            )
        return subject
    if "/" in text or text in (".", ".."):
        return _find_at(Here(), str(Path(text).absolute()))
    registry = registry or InvocationRegistry()
    digits = re.fullmatch(r"([0-9a-f]{1,16})(\.\d+)?", text)
    if digits and any(registry.folder.glob(f"{digits[1]}*.json")):
        return subject_from(*registry.resolve(text))
    if Path(text).is_dir():
        return _find_at(Here(), str(Path(text).absolute()))
    raise NotKnown(
        f"no invocation {text!r} in {registry.folder}, and no such directory here",
        remedy="`holdfast status` lists ids. Name an invocation of another user by its directory, or HOST:PATH.",
    )


_FIND: Final = r"""
cd -- "$1" 2>/dev/null || { test -e "$1" && exit 45; exit 44; }
if test -e invocation.json; then echo invocation; pwd; exit 0; fi
name=$(basename -- "$PWD")
case $name in
*[!0-9]*) ;;
*) if test -e ../invocation.json; then echo task; dirname -- "$PWD"; echo "$name"; exit 0; fi ;;
esac
test -e manifest.json || exit 46
echo run; pwd
for state in ../../../holdfast/*/*/state.json; do
    grep -qF -- "/$name\"" "$state" 2>/dev/null || continue
    (cd "$(dirname -- "$state")" && pwd); tr -d '\n' <"$state"; echo
done
"""


def _find_at(transport: Transport, path: str) -> Subject | Path:
    completed = transport.run(["sh", "-c", _FIND, "sh", path])
    lines = completed.text.splitlines()
    shown = _full_path(transport, path)
    if completed.code == 44:
        raise UsageError(f"there is no {shown}")
    if completed.code in (45, 46):
        raise UsageError(
            f"{shown} is neither an invocation's directory nor a run's",
            remedy="They have an invocation.json or a manifest.json. `holdfast status` lists ids.",
        )
    if completed.code != 0 or len(lines) < 2:
        raise ClusterError(f"{shown}: {completed.stderr.strip() or 'cannot be read'}")
    if lines[0] == "invocation":
        return Subject(transport, lines[1])
    if lines[0] == "task":
        return Subject(transport, lines[1], int(lines[2]))
    run = Path(lines[1])
    tasks: list[tuple[float, str]] = []
    for folder, text in zip(lines[2::2], lines[3::2], strict=False):
        with suppress(msgspec.DecodeError):
            state = msgspec.json.decode(text, type=State)
            if state.run_dir is not None and Path(state.run_dir).parts[-2:] == run.parts[-2:]:
                tasks.append((state.updated, folder))
    if not tasks:
        return run
    task = Path(max(tasks)[1])
    return Subject(transport, str(task.parent), int(task.name))

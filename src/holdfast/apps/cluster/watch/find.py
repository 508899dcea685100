"""Find what `480d`, `480d.0`, `/lustre/…/holdfast/480d3c89bfe4a55c`, a run directory or `host:/path` names.

Ids are looked up in this user's registry. A path needs no registry: everything is in the directory, so a colleague, or
the same user on another machine, sees the same.
"""

from __future__ import annotations

import re
import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from holdfast.apps.cluster.remote.invocation import State
from holdfast.apps.cluster.remote.registry import InvocationRegistry
from holdfast.apps.cluster.remote.transport import Here, connect
from holdfast.errors import ClusterError, UsageError

if TYPE_CHECKING:
    from holdfast.apps.cluster.remote.registry import Invocation
    from holdfast.apps.cluster.remote.transport import Transport


class NotKnown(UsageError):
    """The registry has no such id, and this machine no such directory."""


class RunPlace(NamedTuple):
    """A run directory, on this machine or another."""

    transport: Transport
    path: str

    @property
    def is_here(self) -> bool:
        """True if the run is on this machine."""
        return isinstance(self.transport, Here)

    @property
    def name(self) -> str:
        """A name by which commands find it again."""
        return _full_path(self.transport, self.path)


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
    subject, run = look_up(text, registry)
    if subject is not None:
        return subject
    assert run is not None
    if run.is_here:
        return Path(run.path)
    raise UsageError(
        f"{text} is a run directory, but no invocation on that host uses it",
        remedy=f"To read it here: holdfast show {shlex.quote(text)}",
    )


def look_up(text: str, registry: InvocationRegistry | None = None) -> tuple[Subject | None, RunPlace | None]:
    """Return the invocation or task that a text names, and the run if it names the directory of one; at least one."""
    remote = re.fullmatch(r"(?:([^@:/\s]+)@)?([^@:/\s]+):(/.*)", text)
    if remote is not None:
        return _look_at(connect(remote[2], remote[1]), remote[3])
    if "/" in text or text in (".", ".."):
        return _look_at(Here(), str(Path(text).absolute()))
    registry = registry or InvocationRegistry()
    digits = re.fullmatch(r"([0-9a-f]{1,16})(\.\d+)?", text)
    if digits and any(registry.folder.glob(f"{digits[1]}*.json")):
        return subject_from(*registry.resolve(text)), None
    if Path(text).is_dir():
        return _look_at(Here(), str(Path(text).absolute()))
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


def _look_at(transport: Transport, path: str) -> tuple[Subject | None, RunPlace | None]:
    completed = transport.run(["sh", "-c", _FIND, "sh", path])
    lines = completed.text.splitlines()
    shown = _full_path(transport, path)
    kind = NotKnown if isinstance(transport, Here) else UsageError
    if completed.code == 44:
        raise kind(f"there is no {shown}")
    if completed.code in (45, 46):
        raise kind(
            f"{shown} is neither an invocation's directory nor a run's",
            remedy="They have an invocation.json or a manifest.json. `holdfast status` lists ids.",
        )
    if completed.code != 0 or len(lines) < 2:
        raise ClusterError(f"{shown}: {completed.stderr.strip() or 'cannot be read'}")
    if lines[0] == "invocation":
        return Subject(transport, lines[1]), None
    if lines[0] == "task":
        return Subject(transport, lines[1], int(lines[2])), None
    run = Path(lines[1])
    tasks: list[tuple[float, str]] = []
    for folder, text in zip(lines[2::2], lines[3::2], strict=False):
        with suppress(msgspec.DecodeError):
            state = msgspec.json.decode(text, type=State)
            if state.run_dir is not None and Path(state.run_dir).parts[-2:] == run.parts[-2:]:
                tasks.append((state.updated, folder))
    task = Path(max(tasks)[1]) if tasks else None
    subject = None if task is None else Subject(transport, str(task.parent), int(task.name))
    return subject, RunPlace(transport, lines[1])

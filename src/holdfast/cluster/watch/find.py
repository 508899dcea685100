"""What a user means who says `480d`, `480d.0`, `/lustre/…/holdfast/480d3c89bfe4a55c`, a run directory, or `host:/path`.

Ids are looked up in this user's registry. A path needs none: whoever can read the directory finds all in it, so a
colleague, or the same person on another machine, sees the same.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from holdfast.cluster.remote.invocation import State
from holdfast.cluster.remote.registry import Registry
from holdfast.cluster.remote.transport import Here, connect
from holdfast.errors import ClusterError, UsageError

if TYPE_CHECKING:
    from holdfast.cluster.remote.registry import Invocation
    from holdfast.cluster.remote.transport import Transport


class NotKnown(UsageError):
    """An id that the registry does not have."""


class Subject(NamedTuple):
    """An invocation, or one of its tasks."""

    transport: Transport
    directory: str
    task: int | None = None
    known: Invocation | None = None
    """what the registry says, if that is where it was found"""

    @property
    def name(self) -> str:
        """As the user may name it again."""
        base = self.known.id if self.known else _remote(self.transport, self.directory)
        if self.task is None:
            return base
        return f"{base}.{self.task}" if self.known else f"{base}/{self.task}"


def _remote(transport: Transport, directory: str) -> str:
    return directory if isinstance(transport, Here) else f"{transport.place}:{directory}"


def of_invocation(known: Invocation, task: int | None = None) -> Subject:
    """An invocation of the registry."""
    return Subject(connect(known.host, known.user, known.identity), known.directory, task, known)


def find(text: str, registry: Registry | None = None) -> Subject | Path:
    """What is meant: an invocation or a task of it, else the path of an ordinary run on this machine.

    UsageError where nothing is there, or where several things may be meant; `Unreachable` where that is not known.
    """
    remote = re.fullmatch(r"(?:([^@:/\s]+)@)?([^@:/\s]+):(/.*)", text)
    if remote is not None:
        transport = connect(remote[2], remote[1])
        found = _at(transport, remote[3])
        if isinstance(found, Path):
            raise UsageError(
                f"{text} is a run that no invocation there works on", remedy="Look at it on that machine, by its path."
            )
        return found
    if "/" in text or text in (".", ".."):
        return _at(Here(), str(Path(text).absolute()))
    registry = registry or Registry()
    digits = re.fullmatch(r"([0-9a-f]{1,16})(\.\d+)?", text)
    if digits and any(registry.folder.glob(f"{digits[1]}*.json")):
        return of_invocation(*registry.resolve(text))
    if Path(text).is_dir():
        return _at(Here(), str(Path(text).absolute()))
    raise NotKnown(
        f"no invocation {text!r} in {registry.folder}, and no such directory here",
        remedy="`holdfast status` lists ids. What somebody else submitted is named by its directory, or HOST:PATH.",
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


def _at(transport: Transport, path: str) -> Subject | Path:
    done = transport.run(["sh", "-c", _FIND, "sh", path])
    lines = done.text.splitlines()
    shown = _remote(transport, path)
    if done.code == 44:
        raise UsageError(f"there is no {shown}")
    if done.code in (45, 46):
        raise UsageError(
            f"{shown} is neither an invocation's directory nor a run's",
            remedy="Those have an invocation.json or a manifest.json; ids are listed by `holdfast status`.",
        )
    if done.code != 0 or len(lines) < 2:
        raise ClusterError(f"{shown}: {done.stderr.strip() or 'cannot be read'}")
    if lines[0] == "invocation":
        return Subject(transport, lines[1])
    if lines[0] == "task":
        return Subject(transport, lines[1], int(lines[2]))
    run = Path(lines[1])
    found: list[tuple[float, str]] = []
    for folder, text in zip(lines[2::2], lines[3::2], strict=False):
        with suppress(msgspec.DecodeError):
            state = msgspec.json.decode(text, type=State)
            if state.run_dir is not None and Path(state.run_dir).parts[-2:] == run.parts[-2:]:
                found.append((state.updated, folder))
    if not found:
        return run
    task = Path(max(found)[1])
    return Subject(transport, str(task.parent), int(task.name))

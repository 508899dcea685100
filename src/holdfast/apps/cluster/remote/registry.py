"""List the invocations that this user submitted from this machine.

They are files in `$HOLDFAST_HOME/invocations` (default `~/.holdfast`), each with a copy of the ledger's records. The
registry is a convenience: the directory on the cluster is authoritative.
"""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING

import msgspec

from holdfast.apps.cluster.remote.invocation import write
from holdfast.apps.cluster.remote.ledger import Record  # noqa: TC001 - msgspec reads it
from holdfast.errors import UsageError
from holdfast.store.home import home_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


def new_invocation() -> str:
    """Return the id of a new invocation: 16 hex digits. Its tasks are `<id>.0`, `<id>.1`, …"""
    return secrets.token_hex(8)


class Invocation(msgspec.Struct, frozen=True):
    """An invocation as the registry keeps it."""

    id: str
    created: float
    directory: str
    """on the cluster, or here when `host` is None"""
    tasks: tuple[str, ...]
    """the names of `<id>.0`, `<id>.1`, …"""
    executor: str = "slurm"
    host: str | None = None
    user: str | None = None
    identity: str | None = None
    profile: str | None = None
    jobs: tuple[Record, ...] = ()
    """a copy of the records written from this machine"""


class InvocationRegistry:
    """The invocations that this user submitted from this machine, one file each."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or home_directory() / "invocations"

    def add(self, invocation: Invocation) -> None:
        """Add an invocation, or replace the one of the same id."""
        write(self.folder / f"{invocation.id}.json", invocation)

    def remove(self, invocation: str) -> None:
        """Remove an invocation of which nothing was submitted."""
        (self.folder / f"{invocation}.json").unlink(missing_ok=True)

    def get(self, invocation: str) -> Invocation:
        """Return the invocation of an id."""
        path = self.folder / f"{invocation}.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=Invocation)
        except FileNotFoundError:
            raise UsageError(f"there is no invocation {invocation} in {self.folder}") from None
        except msgspec.DecodeError as error:
            raise UsageError(
                f"{path}: {error}", remedy="Remove it; the run itself is found by its directory on the cluster."
            ) from None

    def all(self) -> list[Invocation]:
        """Return all invocations, the newest first."""
        entries = [self.get(path.stem) for path in self.folder.glob("*.json") if not path.name.startswith(".")]
        return sorted(entries, key=lambda invocation: -invocation.created)

    def resolve(self, text: str) -> tuple[Invocation, int | None]:
        """Return the invocation, and the task if one is named, of `480d3c89bfe4a55c`, `480d` or `480d.0`."""
        match = re.fullmatch(r"([0-9a-f]{1,16})(?:\.(\d+))?", text)
        if match is None:
            raise UsageError(
                f"{text!r} is not the id of an invocation", remedy="Ids are 16 hex digits, with `.0` for a task."
            )
        prefix, task = match[1], None if match[2] is None else int(match[2])
        names = sorted(path.stem for path in self.folder.glob(f"{prefix}*.json"))
        if not names:
            raise UsageError(
                f"there is no invocation {prefix} in {self.folder}",
                remedy="Name an invocation of another user or machine by its directory on the cluster.",
            )
        if len(names) > 1:
            raise UsageError(
                f"{prefix} is ambiguous, it begins {len(names)} ids: {', '.join(names)}", remedy="Give more digits."
            )
        invocation = self.get(names[0])
        if task is not None and task >= len(invocation.tasks):
            raise UsageError(f"{invocation.id} has {len(invocation.tasks)} tasks, from .0; there is no .{task}")
        return invocation, task

    def mirror(self, invocation: str) -> Callable[[Sequence[Record]], None]:
        """Return a function that copies a ledger's records to an invocation."""

        def copy(records: Sequence[Record]) -> None:
            entry = self.get(invocation)
            self.add(msgspec.structs.replace(entry, jobs=(*entry.jobs, *records)))

        return copy

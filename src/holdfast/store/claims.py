"""Assign trials to workers: the pending trials are cut into chunks, and a chunk's state is the name of an empty file.

    claims/0001/plan.json       the chunks, and the eval that the workers run
    claims/0001/00017.free      not yet claimed
    claims/0001/00017.by.w3     claimed by worker w3
    claims/0001/00017.left      released unfinished, or its worker died; the next worker reads the existing records
    claims/0001/00017.done      finished

Each step is a rename from one state's name to another's, so of several workers that try the same step one succeeds,
on network file systems, too. A claim lives as long as its worker's lease: only the process that takes over the lease
of a dead worker may take its claims. Each preparation of a run starts a new round; only the newest round counts.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec
from xxhash import xxh3_64_intdigest

from holdfast.errors import Fault, UsageError
from holdfast.store.files import UNREADABLE, make_directory, read_file, replacing, sync_directory
from holdfast.store.lease import RunLease
from holdfast.store.records import SCHEMA_VERSION
from holdfast.store.run_lock import worker_lease
from holdfast.store.rundir import RunPolicy

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from holdfast.store.rundir import RunDir

MOST_TRIALS: Final = 256
"""maximum number of trials in a chunk"""
CHUNKS_EACH: Final = 8
"""chunks per worker if there are few trials, so that the last worker does not keep the others waiting for long"""
_ASKED_AT_ONCE: Final = 8
"""workers whose lease is looked at in one search for a chunk: a thousand would take longer than the work"""
_WORKER = re.compile(r"[\w-][\w.-]{0,79}", re.ASCII)


class Round(RunPolicy, frozen=True, kw_only=True):
    """`plan.json`: the work of a round of workers."""

    schema_version: str = msgspec.field(name="schemaVersion", default=SCHEMA_VERSION)
    chunks: list[tuple[int, int]]
    """first trial and one past the last; trials are numbered in the dataset's order, sample by sample"""
    starts: list[tuple[int, int, int]] = msgspec.field(default_factory=list)
    """of each chunk: file of the dataset, line and offset of its first row; empty if rows are not lines"""
    eval: dict[str, Any]
    folder: str
    eval_file: str | None
    command: str = ""
    """command that resumes the run"""


def check_worker_id(worker: str) -> None:
    """Check a worker's id, which is part of file names."""
    if not _WORKER.fullmatch(worker):
        raise UsageError(f"{worker!r} is not a worker id", remedy="Use letters, digits, `-`, `_` and `.`.")


def cut(pending: Iterable[int], workers: int) -> list[tuple[int, int]]:
    """Cut the pending trials, given by their numbers in ascending order, into chunks."""
    numbers = list(pending)
    size = max(1, min(MOST_TRIALS, len(numbers) // (workers * CHUNKS_EACH)))
    return [
        (numbers[start], numbers[min(start + size, len(numbers)) - 1] + 1) for start in range(0, len(numbers), size)
    ]


def begin_round(rundir: RunDir, plan: Round) -> Path:
    """Divide the pending trials into chunks and delete earlier rounds. Needs the run's lease."""
    make_directory(rundir.claims)
    earlier = [path for path in rundir.claims.iterdir() if path.is_dir()]
    number = 1 + max((int(path.name) for path in earlier if path.name.isdigit()), default=0)
    folder = rundir.claims / f"{number:04}"
    new = rundir.claims / f".{number:04}.tmp"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    for chunk in range(len(plan.chunks)):
        (new / f"{chunk:05}.free").touch()
    with replacing(new / "plan.json") as file:
        file.write(msgspec.json.encode(plan))
    new.rename(folder)
    sync_directory(rundir.claims)
    for old in earlier:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def newest_round(rundir: RunDir) -> tuple[Path, Round] | None:
    """Return the round that workers join."""
    folders = sorted(rundir.claims.glob("[0-9]*"), reverse=True)
    if not folders:
        return None
    try:
        return folders[0], msgspec.json.decode(read_file(folders[0] / "plan.json"), type=Round)
    except (OSError, *UNREADABLE) as error:
        raise UsageError(
            f"{folders[0] / 'plan.json'}: cannot be read ({error})",
            remedy="Divide the work again: holdfast eval FILE --workers N",
        ) from error


class Claims:
    """One worker's view of a round."""

    def __init__(self, folder: Path, count: int, worker: str, rundir: RunDir) -> None:
        self._folder = folder
        self._count = count
        self._worker = worker
        self._rundir = rundir
        # Claims of an earlier process with this id. Read once, at the start: later they are claims of this process.
        self._leftovers = [chunk for chunk, state in self._states().items() if state == f"by.{worker}"]
        self._watched: dict[str, RunLease] = {}
        self._turn = xxh3_64_intdigest(worker.encode())
        """the worker at which the next search for dead workers begins: each search begins at another"""
        self.over = False
        """all chunks were done when `take` looked last"""

    def take(self) -> tuple[int, bool] | None:
        """Claim a chunk; return its number, and True if a part of it may be done; None if no chunk is free.

        Looks first for chunks that an earlier process of the same id left, then for free ones, then for the claims of
        dead workers.
        """
        if self._leftovers:
            return int(self._leftovers.pop(0)), True
        states = self._states()
        self.over = self._are_done(states)
        for chunk, state in states.items():
            if state in ("free", "left") and self._move(chunk, state, f"by.{self._worker}"):
                return int(chunk), state == "left"
        owners = sorted({state[3:] for state in states.values() if state.startswith("by.")} - {self._worker})
        for _ in range(min(_ASKED_AT_ONCE, len(owners))):
            self._turn += 1
            owner = owners[self._turn % len(owners)]
            if self._inherit(owner, [chunk for chunk, state in states.items() if state == f"by.{owner}"]):
                return self.take()
        return None

    def _inherit(self, owner: str, chunks: list[str]) -> bool:
        """Free the chunks of a dead worker. Only the process that takes its lease may declare it dead."""
        lease = self._watched.setdefault(owner, RunLease(worker_lease(self._rundir, owner)))
        if not lease.take_if_dead():
            return False
        try:
            # Moved by name: the owner may have finished or released chunks, and exited, since the names were read.
            moved = [self._move(chunk, f"by.{owner}", "left") for chunk in chunks]
        finally:
            lease.release()
        return any(moved)

    def finish(self, number: int) -> None:
        """Mark a chunk as done for this round."""
        self._give(number, "done")

    def give_back(self, number: int) -> None:
        """Release a chunk to other workers. Does nothing if another worker has taken it already."""
        with suppress(Fault):
            self._give(number, "left")

    def _give(self, number: int, state: str) -> None:
        chunk = f"{number:05}"
        if not self._move(chunk, f"by.{self._worker}", state):
            raise Fault(
                "lease_lost",
                f"another worker has taken over what {self._worker} was doing",
                remedy="It had no heartbeat for too long. None of its work was touched.",
            )

    @property
    def all_done(self) -> bool:
        """True if all chunks are done."""
        return self._are_done(self._states())

    def _are_done(self, states: dict[str, str]) -> bool:
        # Counted, since a name that is being changed may be missing from a listing.
        return sum(state == "done" for state in states.values()) == self._count

    def _states(self) -> dict[str, str]:
        """Return the state of each chunk by its number, in order."""
        try:
            names = sorted(os.listdir(self._folder))  # noqa: PTH208 - pathlib is slow for thousands of chunks
        except FileNotFoundError:
            raise Fault(
                "lease_lost", f"{self._folder} is gone", remedy="The run was finished or divided again."
            ) from None
        parts = (name.partition(".") for name in names if name[:1].isdigit())
        return {chunk: state for chunk, _, state in parts}

    def _move(self, chunk: str, before: str, after: str) -> bool:
        """Change the state of a chunk; False if another worker was faster."""
        new = self._folder / f"{chunk}.{after}"
        try:
            (self._folder / f"{chunk}.{before}").rename(new)
        except FileNotFoundError:
            # NFS may repeat a rename whose reply was lost, and then reports that the old name does not exist.
            return new.exists()
        return True

"""The ledger of batches: requests that a provider answers in bulk, hours later, while no process of ours may run.

`batches.jsonl` has a line for each step, synced before the next step is taken:

    intent      before anything is sent: which requests, by which account
    uploaded    the provider has the file of requests; nothing is paid for yet
    submitted   the provider has begun: the id that it gave
    collected   the results are in `batches/<intent>.jsonl`, as the provider wrote them
    abandoned   there is no such batch at the provider, or it is no longer wanted

If a process dies between two steps, it is unknown whether the batch was submitted. The next process
asks the provider (`hub`). Each worker has a ledger of its own; readers read them all.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.store.files import UNREADABLE, open_binary, read_lines
from holdfast.store.journal import append_lines
from holdfast.store.lines import LineRef, scan, seal
from holdfast.store.records import to_milliseconds
from holdfast.store.rundir import LEDGER

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from holdfast.store.rundir import RunDir


class BatchIntent(msgspec.Struct, frozen=True, tag="intent", tag_field="step"):
    """A batch is about to be sent."""

    intent: str
    account: str
    """the server and the digest of the API key"""
    where: str
    """`target`, or the grader that asks"""
    digest: str
    """of the file of requests"""
    requests: tuple[str, ...]
    """the `custom_id` of each"""
    time: float


class BatchUploaded(msgspec.Struct, frozen=True, tag="uploaded", tag_field="step"):
    """The provider has stored the file of requests."""

    intent: str
    file: str
    """the provider's id"""
    time: float


class BatchSubmitted(msgspec.Struct, frozen=True, tag="submitted", tag_field="step"):
    """The provider has accepted the batch."""

    intent: str
    batch: str
    """the provider's id"""
    time: float
    adopted: bool = False
    """found at the provider by a later process"""


class BatchCollected(msgspec.Struct, frozen=True, tag="collected", tag_field="step"):
    """The results are on disk."""

    intent: str
    status: str
    """how it ended, in the provider's word"""
    answered: int
    """requests with a result, errors included"""
    time: float


class BatchAbandoned(msgspec.Struct, frozen=True, tag="abandoned", tag_field="step"):
    """The batch does not count: its requests may be asked again."""

    intent: str
    why: str
    time: float
    batch: str | None = None
    """the provider's id, if it was known: a batch that turns out to have been submitted still counts"""


BatchStep = BatchIntent | BatchUploaded | BatchSubmitted | BatchCollected | BatchAbandoned
_decoder: Final = msgspec.json.Decoder(BatchStep)


class Batch(msgspec.Struct):
    """A batch as the ledgers describe it."""

    intent: BatchIntent
    file: str | None = None
    sent: float = 0.0
    """when it was uploaded or submitted last; 0 if it is not known to have been sent"""
    id: str | None = None
    """the provider's, once it is known"""
    collected: BatchCollected | None = None
    abandonments: dict[str | None, str] = msgspec.field(default_factory=dict)
    """by the id that was known: why it was abandoned"""

    @property
    def abandoned(self) -> str | None:
        """Why the batch does not count; does not depend on the order in which ledgers are read."""
        return self.abandonments.get(self.id)

    @property
    def waiting(self) -> bool:
        """True if its results are still to come."""
        return self.collected is None and self.abandoned is None

    @property
    def name(self) -> str:
        """The provider's id, or a substitute for messages."""
        return self.id or f"(unconfirmed {self.intent.intent})"


def apply(batches: dict[str, Batch], steps: Iterable[BatchStep]) -> None:
    """Add steps of one ledger, in their order. Steps of batches whose intent is not known are left out."""
    for step in steps:
        if isinstance(step, BatchIntent):
            batches.setdefault(step.intent, Batch(step))
            continue
        batch = batches.get(step.intent)
        match step:
            case _ if batch is None:
                continue
            case BatchUploaded():
                batch.file, batch.sent = step.file, step.time
            case BatchSubmitted():
                batch.id, batch.sent = step.batch, step.time
            case BatchCollected():
                batch.collected = step
            case BatchAbandoned():
                batch.abandonments[step.batch] = step.why


def read_batches(rundir: RunDir) -> dict[str, Batch]:
    """Return all batches of a run by their intents, from the ledgers of all its writers."""
    return BatchStore(rundir, rundir.path).refresh()


def waiting_batches(rundir: RunDir) -> list[Batch]:
    """Return the batches of a run whose results are still to come."""
    return [batch for batch in read_batches(rundir).values() if batch.waiting]


class BatchStore:
    """The ledgers and results of a run's batches, as one process reads and writes them."""

    def __init__(self, rundir: RunDir, journals: Path) -> None:
        """`journals` is the folder of the ledger that this process writes."""
        self._rundir = rundir
        self._own = journals / f"{LEDGER}.jsonl"
        self._read: dict[Path, int] = {}
        """by ledger: the bytes that were read"""
        self._writing = asyncio.Lock()
        self.batches: dict[str, Batch] = {}

    def refresh(self) -> dict[str, Batch]:
        """Read what was appended to the ledgers. Intents of other writers may come after other steps."""
        steps = [step for path in self._rundir.journals(LEDGER) for step in self._new_steps(path)]
        apply(self.batches, (step for step in steps if isinstance(step, BatchIntent)))
        apply(self.batches, (step for step in steps if not isinstance(step, BatchIntent)))
        return self.batches

    def _new_steps(self, path: Path) -> Iterator[BatchStep]:
        for line in scan(path, self._read.get(path, 0)):
            if not line.whole:
                break  # its writer is writing it, or died over it
            self._read[path] = line.offset + len(line.data) + 1
            if line.sound:
                with suppress(*UNREADABLE):  # sound, but not a step that we wrote
                    yield _decoder.decode(line.data)

    async def write(self, *steps: BatchStep) -> None:
        """Append steps to this process's ledger; return once they are on the medium."""
        async with self._writing:
            await asyncio.to_thread(self._append, b"".join(seal(msgspec.json.encode(step)) for step in steps))
        apply(self.batches, steps)

    def _append(self, data: bytes) -> None:
        if self._ends_torn():
            data = b"\n" + data
        offset = append_lines(self._own, data)
        if self._read.get(self._own, 0) == offset:
            self._read[self._own] = offset + len(data)

    def _ends_torn(self) -> bool:
        """True if a process died while it wrote the last line."""
        try:
            with open_binary(self._own) as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - 1))
                return size > 0 and file.read(1) != b"\n"
        except FileNotFoundError:
            return False

    @property
    def folder(self) -> Path:
        """The folder of the results."""
        return self._rundir.batches

    def results(self, batch: Batch) -> Path:
        """Return the file of a batch's results."""
        return self.folder / f"{batch.intent.intent}.jsonl"

    def spool(self, intent: str) -> Path:
        """Return a file for the requests of a batch while it is sent, which the next process removes if it is left."""
        return self._rundir.path / f".batch-{intent}.tmp"


def result_lines(path: Path) -> Iterator[tuple[LineRef, bytes]]:
    """Yield the lines of a file of results, with their places."""
    offset = 0
    with open_binary(path, buffering=1 << 20) as file:
        for raw in read_lines(file, path):
            line = raw.rstrip(b"\r\n")
            if line:
                yield LineRef(path, offset, len(line)), line
            offset += len(raw)


def now() -> float:
    """Return the time that steps carry."""
    return to_milliseconds(time.time())

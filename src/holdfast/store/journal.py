"""The thread that writes the journals. A record counts once its bytes are synced, and not before.

Callers hand over sealed lines; the thread takes all queued lines, writes each file once, syncs it, and notifies the
event loop in one call for each file. So the loop never waits on the disk, a slow disk makes larger batches instead of
a queue of syncs, and the cost of a line does not depend on how long the file is.

Failures and their handling:

short or failed write   the file is truncated to its last synced byte, then the whole batch is retried once
failed sync             the kernel may have dropped the pages and called them clean, so no later sync of that
                        file can vouch for them: the file is truncated and retired, and the batch is written again
                        to a new file of this writer under `workers/`, which readers read too
both again              the batch failed: waiters get `Fault("disk")`, `failed` is called with it for lines without a
                        waiter, and no line of the batch counts
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import socket
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from holdfast.errors import Fault
from holdfast.store.files import advice_for, make_directory, open_file, sync, sync_directory
from holdfast.store.shared import unseal

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

JournalName = Literal["steps", "outputs", "errors", "grades"]
JOURNALS: Final[tuple[JournalName, ...]] = ("steps", "outputs", "errors", "grades")
"""The order of writing within a batch: if a grade is on disk, so is its output."""

_MAX_WRITE: Final = 64 << 20
_PATIENCE_SECONDS: Final = 0.05
"""how long lines in no hurry wait for others, with which they are written and synced"""
_TAKEN: Final = (
    "It took over this run, because this process had no heartbeat for too long. None of its work was touched."
)


class SecondWriter(OSError):
    """Another process wrote to a file that only this process may write: our lease was taken over."""


class _Entry(msgspec.Struct, frozen=True):
    line: bytes
    waiter: asyncio.Future[None] | None
    then: Callable[[], None] | None


_Batch = dict[JournalName, list[_Entry]]
"""lines by their journal"""


class _Segment(msgspec.Struct):
    """An open journal file, and the length that is known to be on the medium."""

    path: Path
    fd: int
    good: int
    unsynced: int = 0
    """bytes of a batch whose sync failed"""

    @classmethod
    def open(cls, path: Path) -> _Segment:
        unseal(path)
        fd = open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        sync_directory(path.parent)
        return cls(path, fd, os.fstat(fd).st_size)

    def append(self, data: bytes) -> None:
        """Write and sync, or leave the file as it was and raise."""
        self._write(data)
        self.unsynced = len(data)
        sync(self.fd)
        self.unsynced = 0
        self.good += len(data)

    def _write(self, data: bytes) -> None:
        for attempt in (1, 2):
            written = 0
            try:
                view = memoryview(data)
                for start in range(0, len(data), _MAX_WRITE):
                    written += os.write(self.fd, view[start : start + _MAX_WRITE])
                failure = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                failure = error
            size = os.fstat(self.fd).st_size
            if size == self.good + len(data) == self.good + written:
                return
            if size > self.good + written:
                raise SecondWriter(errno.EBUSY, "another process has written to it")
            os.ftruncate(self.fd, self.good)
            if attempt == 2:
                raise failure

    def cut_back(self) -> None:
        """Truncate the bytes that were not synced, unless lines of another process follow them."""
        with suppress(OSError):
            if os.fstat(self.fd).st_size <= self.good + self.unsynced:
                os.ftruncate(self.fd, self.good)
        self.unsynced = 0

    def retire(self) -> None:
        """Truncate the bytes that were not synced, and close the file."""
        self.cut_back()
        with suppress(OSError):
            os.close(self.fd)


def append_lines(path: Path, data: bytes) -> int:
    """Append sealed lines durably, before a run has its journal thread; returns the offset of the first."""
    segment = _Segment.open(path)
    try:
        segment.append(data)
        return segment.good - len(data)
    finally:
        os.close(segment.fd)


class Journal:
    """Appends to the journal files of one writer in a run directory."""

    def __init__(
        self,
        directory: Path,
        *,
        notice: Callable[[str], None],
        failed: Callable[[Fault], None] | None = None,
        held: Callable[[], bool] = lambda: True,
        worker: bool = False,
    ) -> None:
        """Start the writer thread. `worker`: the directory is a worker's part of the run directory."""
        self.directory = directory
        self._worker = worker
        self._notice = notice
        self._failed = failed
        self._held = held
        self._loop = asyncio.get_running_loop()
        self._gathered: _Batch = {}
        self._unhurried: list[tuple[JournalName, _Entry]] = []
        self._queue: SimpleQueue[_Batch | None] = SimpleQueue()
        self._segments: dict[JournalName, _Segment] = {}
        self._spare: Path | None = None
        self.bytes_written = 0
        self._thread = Thread(target=self._run, name="holdfast-journal", daemon=True)
        self._thread.start()

    def write(self, name: JournalName, line: bytes) -> asyncio.Future[None]:
        """Append a line. The future is done once it is on the medium."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._add(name, _Entry(line, waiter, None))
        return waiter

    def post(
        self, name: JournalName, line: bytes, then: Callable[[], None] | None = None, *, hurry: bool = True
    ) -> None:
        """Append a line without waiting; `then` is called on the loop once it is on the medium.

        Without `hurry`, the line may wait a moment, so that one sync serves many: it costs nothing to make it again.
        """
        if hurry:
            self._add(name, _Entry(line, None, then))
            return
        if not self._unhurried:
            self._loop.call_later(_PATIENCE_SECONDS, self._add_unhurried)
        self._unhurried.append((name, _Entry(line, None, then)))

    def _add_unhurried(self) -> None:
        unhurried, self._unhurried = self._unhurried, []
        for name, entry in unhurried:
            self._add(name, entry)

    def _add(self, name: JournalName, entry: _Entry) -> None:
        # Handed over once per iteration of the event loop, so that the thread wakes for a batch and not for each line.
        if not self._gathered:
            self._loop.call_soon(self._hand_over)
        if name in self._gathered:
            self._gathered[name].append(entry)
        else:
            self._gathered[name] = [entry]

    def _hand_over(self) -> None:
        if self._gathered:
            self._queue.put(self._gathered)
            self._gathered = {}

    async def close(self) -> None:
        """Write what is queued and stop the thread."""
        self._add_unhurried()
        self._hand_over()
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)
        await asyncio.sleep(0)  # let the last settled batch reach its waiters
        for segment in self._segments.values():
            os.close(segment.fd)
        self._segments.clear()

    # From here on: the writer thread.

    def _run(self) -> None:
        last = False
        while not last:
            batches = [self._queue.get()]
            with suppress(Empty):
                while True:
                    batches.append(self._queue.get_nowait())
            last = None in batches
            entries: _Batch = {}
            for batch in filter(None, batches):
                for name, part in batch.items():
                    entries.setdefault(name, []).extend(part)
            if entries:
                self._commit(entries)

    def _commit(self, entries: _Batch) -> None:
        """Write, sync and settle one file after the other, so that waiters for an output do not wait for grades."""
        lost = None
        if not self._held():
            lost = Fault("lease_lost", f"{self.directory} belongs to another process now", remedy=_TAKEN)
        for name in JOURNALS:
            part = entries.get(name)
            if part is None:
                continue
            fault = lost or self._commit_file(name, b"".join([entry.line for entry in part]))
            if name == "outputs":
                lost = fault  # a grade is never written without its output
            self._loop.call_soon_threadsafe(self._settle, part, fault)

    def _commit_file(self, name: JournalName, data: bytes) -> Fault | None:
        """Append a batch of lines; return what prevented it."""
        try:
            self._append(name, data)
        except SecondWriter as error:
            return Fault("lease_lost", f"{self.directory / name}.jsonl: {error.strerror}", remedy=_TAKEN)
        except OSError as error:
            return Fault(
                "disk",
                f"cannot write {self.directory / name}.jsonl: {error.strerror or error}",
                remedy=f"{advice_for(error)} Then run the same command again: it resumes from here.",
            )
        self.bytes_written += len(data)
        return None

    def _append(self, name: JournalName, data: bytes) -> None:
        segment = self._segments.get(name)
        if segment is None:
            segment = self._segments[name] = _Segment.open((self._spare or self.directory) / f"{name}.jsonl")
        try:
            segment.append(data)
        except OSError as error:
            if not segment.unsynced:
                raise  # the write itself failed and was undone: the file is sound
            path = self._replace(name)
            self._loop.call_soon_threadsafe(
                self._notice,
                f"sync of {segment.path} failed ({error.strerror}); continuing in {path}",
            )
            segment = self._segments[name]
            try:
                segment.append(data)
            except OSError:
                segment.cut_back()
                raise

    def _replace(self, name: JournalName) -> Path:
        """Retire a file whose sync failed and open one in a new directory."""
        self._segments.pop(name).retire()
        token = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        directory = self.directory
        # Readers do not look into subfolders: a worker's spare directory is next to its own and begins with its name.
        spare = directory.with_name(f"{directory.name}+{token}") if self._worker else directory / "workers" / token
        make_directory(spare)
        self._spare = spare
        path = spare / f"{name}.jsonl"
        self._segments[name] = _Segment.open(path)
        return path

    # On the event loop again.

    def _settle(self, entries: list[_Entry], fault: Fault | None) -> None:
        for entry in entries:
            if entry.waiter is not None:
                if entry.waiter.done():
                    continue
                if fault is None:
                    entry.waiter.set_result(None)
                else:
                    entry.waiter.set_exception(fault)
            elif fault is not None:
                if self._failed is not None:
                    self._failed(fault)
            elif entry.then is not None:
                try:
                    entry.then()
                except Exception as error:  # the other waiters of this batch must still be notified
                    self._loop.call_exception_handler({"message": "after a journal write", "exception": error})

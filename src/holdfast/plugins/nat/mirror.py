"""Keep `workflow_output.jsonl` up to date during a run, in a thread that follows the run's journals.

The journals are the truth and this file is a copy: a failure to write it changes neither the run nor its exit code.
Following the files works for one process and for several workers, and stays off the event loop.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast import HoldfastError
from holdfast.graders.build import grader_places
from holdfast.plugins.nat.export import NatFolder, RowForm, write_nat
from holdfast.plugins.nat.schema import NatOutput
from holdfast.report.exports import LiveExporter
from holdfast.store.files import make_directory, replacing
from holdfast.store.heads import OutputHead, decode_head, read_output, read_steps
from holdfast.store.lines import LineRef, scan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from holdfast import RunView
    from holdfast.plan.identity import RunIdentity
    from holdfast.store.heads import OutputRef
    from holdfast.store.rundir import RunDir

_LOOK_SECONDS: Final = 0.25
_PATIENCE_SECONDS: Final = 30.0
"""how long the end of a run waits for a folder that does not answer"""


class NatMirror(LiveExporter):
    """Copies the outputs of a run, in the order in which they finish."""

    schema = NatOutput

    def __init__(self, block: NatOutput, identity: RunIdentity, rundir: RunDir, notice: Callable[[str], None]) -> None:
        spec = identity.spec
        self._folder = NatFolder(spec.folder / block.dir)
        self._run = identity.id
        self._graders = [place.name for place in grader_places(spec)]
        self._form = RowForm(spec, block)
        self._identity = identity
        self._journals = _Journals(rundir)
        self._rows = _Rows(identity)
        self._notice = notice
        self._waiting: deque[tuple[OutputRef, str]] = deque()
        """outputs that are not copied yet, with their keys"""
        self._seen: set[int] = set()
        self._fd: int | None = None
        self._failed = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="nat-mirror", daemon=True)

    def start(self) -> None:
        """Begin to follow the run."""
        self._thread.start()

    def close(self) -> None:
        """Copy what has finished in the meantime, and stop."""
        self._over.set()
        self._thread.join(_PATIENCE_SECONDS)

    @classmethod
    def write(cls, view: RunView, folder: Path, block: NatOutput) -> Iterable[Path]:
        """Write all of NAT's files, and the lines again."""
        make_directory(folder)
        NatFolder(folder).set_aside()
        return write_nat(view, folder, lines=True, block=block)

    def _follow(self) -> None:
        try:
            while True:
                over = self._over.is_set()  # asked first: what was written before it was set is copied below
                self._look()
                if over:
                    return
                self._over.wait(_LOOK_SECONDS)
        finally:
            if self._fd is not None:
                os.close(self._fd)

    def _look(self) -> None:
        """Copy what is new; retry at the next look if it cannot be written now."""
        try:
            for ref, key in self._journals.news():
                if hash(key) not in self._seen and self._identity.work.fits(ref):
                    self._seen.add(hash(key))
                    self._waiting.append((ref, key))
            if self._fd is None:
                self._begin()
            while self._waiting:
                self._append(self._line(*self._waiting[0]))
                _, key = self._waiting.popleft()
                self._rows.forget(key)
                self._journals.steps.pop(key, None)
            self._failed = False
        except Exception as error:  # whatever a target returned: the copy must not end without a word
            if not self._failed:
                self._failed = True
                reason = getattr(error, "strerror", None) or error
                self._notice(
                    f"output.nat: {self._folder.lines} is not up to date: {reason}; "
                    "it is written again when that works, and when the run finishes"
                )

    def _begin(self) -> None:
        """Take the folder over and write all finished outputs; readers see either the old file or the whole new one."""
        self._folder.take_over(self._run, self._graders)
        rows = self._rows = _Rows(self._identity)  # from the first row on, also after a failure
        with replacing(self._folder.lines) as file:
            for ref, key in self._waiting:
                file.write(self._line(ref, key))
                rows.forget(key)
        self._fd = os.open(self._folder.lines, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        while self._waiting:
            self._journals.steps.pop(self._waiting.popleft()[1], None)

    def _append(self, line: bytes) -> None:
        """Append a whole line, or nothing."""
        assert self._fd is not None
        size = os.fstat(self._fd).st_size
        if (written := os.write(self._fd, line)) < len(line):
            os.ftruncate(self._fd, size)
            raise OSError(errno.ENOSPC, f"{written} of {len(line)} bytes could be written")

    def _line(self, ref: OutputRef, key: str) -> bytes:
        recorded = read_steps(self._journals.steps.get(key, ()))
        return self._form.line(self._rows.of(key), read_output(ref), recorded)


class _StepKey(msgspec.Struct):
    key: str


_step_key = msgspec.json.Decoder(_StepKey)


class _Journals:
    """Reads the new outputs of a run, and keeps the places of the steps of outputs that are not copied yet."""

    def __init__(self, rundir: RunDir) -> None:
        self._rundir = rundir
        self._read_to: dict[Path, int] = {}
        self.steps: dict[str, list[LineRef]] = {}

    def news(self) -> list[tuple[OutputRef, str]]:
        """Return the new outputs with their keys. Steps are read after outputs, so an output's steps are complete."""
        outputs = []
        for line, data in self._lines("outputs"):
            if (head := decode_head(OutputHead, data)) is not None:
                outputs.append((head.ref(line), head.key))
        for line, data in self._lines("steps"):
            try:
                key = _step_key.decode(data).key
            except msgspec.DecodeError:
                continue
            self.steps.setdefault(key, []).append(line)
        return outputs

    def _lines(self, name: str) -> Iterator[tuple[LineRef, bytes]]:
        for path in self._rundir.journals(name):
            for line in scan(path, self._read_to.get(path, 0)):
                if not line.whole:
                    break
                self._read_to[path] = line.offset + len(line.data) + 1
                if line.sound:
                    yield LineRef(path, line.offset, len(line.data)), line.data


class _Rows:
    """The rows of trials, by their keys: read forward once, and held until they are needed."""

    def __init__(self, identity: RunIdentity) -> None:
        self._unread = self._read(identity)
        self._held: dict[str, dict[str, Any]] = {}

    @staticmethod
    def _read(identity: RunIdentity) -> Iterator[tuple[str, dict[str, Any]]]:
        try:
            for sample in identity.dataset:
                for trial in range(1, identity.work.trials + 1):
                    yield identity.work.key(sample.asked, trial), sample.fields
        except HoldfastError:
            return  # the dataset has changed, which stops the run

    def of(self, key: str) -> dict[str, Any]:
        """Return a trial's row; an empty one if the dataset no longer has it."""
        if key not in self._held:
            for read, fields in self._unread:
                self._held[read] = fields
                if read == key:
                    break
        return self._held.get(key, {})

    def forget(self, key: str) -> None:
        """Drop a row that is no longer needed."""
        self._held.pop(key, None)

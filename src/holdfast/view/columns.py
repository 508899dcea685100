"""Columns of a run: status, scores, usage and place of every trial, for filters, sorting and pages of rows.

They are kept outside the run directory, which may be someone else's or read-only:
`$HOLDFAST_HOME/view/<run id>-<digest of path>/columns`. A stored file names the files that it was made of, with their
sizes and inodes and the checksum of the last line that was read. Whatever does not fit is built again. The folders that
were used least recently are removed beyond 2 GB.

A row number stands for the same trial as long as the dataset stays as it is: rows are in the dataset's order, trial by
trial, followed by outputs whose row is gone.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from threading import Lock, RLock
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.canonical import digest_bytes
from holdfast.data.dataset import Dataset
from holdfast.errors import HoldfastError
from holdfast.report.run_view import RunView
from holdfast.store.index import read_error_head
from holdfast.store.run_files import UNREADABLE, open_binary
from holdfast.store.rundir import INDEX
from holdfast.store.trial_notes import TableNotes, journals_of, stamp_journals, stamp_report
from holdfast.store.trial_table import STATUSES, TABLE, RowStatus, TrialTable, field_column, score_column, status_column
from holdfast.versions import __version__
from holdfast.view.building import BuildOrder
from holdfast.view.fields import read_field
from holdfast.view.recorded import JournalReader, RecordedNotes, StaleColumnsError, read_everything
from holdfast.view.reported import plan_report, read_reported
from holdfast.view.search import TextHits

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from holdfast.store.lines import LineRef
    from holdfast.store.rundir import RunDir
    from holdfast.view.snapshot import Facet, Snapshot

Progress = Callable[[float], None]
"""gets the share of the work that is done, from 0 to 1; 0 when a helper process begins, which takes a while"""

_MOST_BYTES: Final = 2 << 30
_LARGE: Final = 32 << 20
"""bytes of journals from which on a helper process builds the columns"""
_MOST_SEARCHES: Final = 8
"""texts whose hits are kept"""
_PREVIEW: Final = 300
"""characters of an answer in a row"""


class TrialRow(msgspec.Struct, frozen=True, kw_only=True):
    """A trial in a list."""

    row: int
    """number of the row"""
    sample: str
    """id of the sample"""
    trial: int
    """number of the trial, from 1"""
    status: RowStatus
    score: float | None
    graders: dict[str, tuple[RowStatus, float | None]]
    """status and score by grader, of those that look at the row"""
    turns: int | None
    tokens: int | None
    cost: float | None
    """dollars"""
    seconds: float | None
    attempt: int | None
    answer: str
    """class of the answer; empty without an output"""
    stop: str
    """why the conversation ended, as the target reports it"""
    stopped: int | None
    """turn of the checkpoint that ended the conversation"""
    error: str
    """why there is no output or no verdict: kind and message of the last failed attempt"""
    preview: str
    """beginning of the answer"""


class _Answer(msgspec.Struct):
    output: str


_answer: Final = msgspec.json.Decoder(_Answer)


class ColumnNotes(TableNotes):
    """The files that a stored table was made from, with those that it grows with."""

    recorded: RecordedNotes | None = None


class Columns:
    """The columns of one run, empty until they are opened or built. Threads may share them."""

    def __init__(self, rundir: RunDir, folder: Path) -> None:
        self.rundir = rundir
        self.lock = RLock()
        """held while the table is read or changed"""
        self.generation = 0
        """grows whenever a row changes"""
        self.snapshots: dict[tuple[str, str, int], Snapshot] = {}
        """answers to the latest queries, by query, order and generation"""
        self.counts: dict[tuple[int, int, tuple[str, ...]], dict[str, list[Facet]]] = {}
        """latest counts, by generation, rows and fields"""
        self.view = RunView(rundir)
        self.table = TrialTable(())
        self.folder = folder
        """where the table and what is made of it are stored"""
        self._notes = ColumnNotes("everything", [], [])
        self._recorder: JournalReader | None = None
        self._unsaved = 0
        self._searches: dict[tuple[str, int], TextHits] = {}
        self._refreshing = Lock()

    def open(self, progress: Progress) -> None:
        """Take the stored table if it is not stale, else build it."""
        if not self.open_stored():
            self._rebuild(progress)
        progress(1.0)
        with suppress(OSError):
            os.utime(self.folder)  # used most recently

    def open_stored(self) -> bool:
        """Take the stored table; returns False if there is none, or it is stale."""
        stored = TrialTable.load(self.folder)
        return stored is not None and self._adopt(stored)

    @property
    def settled(self) -> bytes | None:
        """State of the files that the table was made of; None if it grows with them."""
        return None if self._recorder else msgspec.json.encode((__version__, self._notes))

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.table)

    @property
    def graders(self) -> list[str]:
        """Names of the graders, as metrics have them."""
        return self.table.graders

    def find(self, sample: str, trial: int) -> int | None:
        """Return the row number of a trial."""
        with self.lock:
            row = self.table.find(sample, trial)
            self.table.release()
            return row

    def line(self, row: int) -> LineRef | None:
        """Return the place of a row's output; None if there is none."""
        with self.lock:
            return self.table.line(row, self.rundir.path)

    def find_text(self, text: str, wait: float | None) -> tuple[bytes, bool]:
        """Search transcripts and ids for at most `wait` seconds; returns a byte of 1 for each row that contains a text.

        Also returns whether the search has ended; if not, it goes on, and the next call returns more.
        """
        with self.lock:
            key = text, self.generation
            if key not in self._searches:
                while len(self._searches) >= _MOST_SEARCHES:
                    self._searches.pop(next(iter(self._searches))).stop()
                self._searches[key] = TextHits(self, text)
            hits = self._searches[key]
        return hits.flags(wait)

    def field(self, name: str, position: int = 0) -> tuple[list[str], Any]:
        """Return the values of a field of the rows, and for each row the number of its value, 0 if the row is gone.

        The dataset is read for it at the first time, unless results are broken down by it. Raises QueryError, for a
        place in a query, if no row has the field or if its values are too many.
        """
        column = field_column(name)
        while True:
            table, stamp = self.table, self._dataset_stamp()
            with self.lock:
                if column in table and (table.dataset == stamp or self._is_reported(name)):
                    return table.values[column], table[column]
                rows = len(table)
            values, codes = read_field(self.view, table, name, position)  # for long; others may read meanwhile
            with self.lock:
                if self.table is table and len(table) == rows:
                    table.set_field(name, values, codes, stamp)
                    self._store()

    def _is_reported(self, name: str) -> bool:
        """Return True for a field whose values are in the report, whatever has become of the dataset."""
        return self._notes.kind == "reported" and name in self.view.spec.by

    def refresh(self) -> int:
        """Read what the run has written since the last look, and return how many rows are new or have changed."""
        with self._refreshing:
            if stamp_report(self.rundir) == self._notes.report:
                if self._recorder is None and self._notes.journals == stamp_journals(self.rundir):
                    return 0
                if self._recorder is not None and self._notes.dataset == self._dataset_stamp():
                    with suppress(StaleColumnsError), self.lock:
                        return self._changed(self._recorder.grow())
            old = self.table
            self._rebuild(_ignore)
            with self.lock:
                return self._changed(changed_rows(old, self.table))

    def close(self) -> None:
        """Store what was read since the columns were stored last, and end searches."""
        with self.lock:
            for hits in self._searches.values():
                hits.stop()
            self._searches.clear()
            if self._unsaved:
                self._store()

    def _changed(self, rows: int) -> int:
        if rows:
            self.generation += 1
            self._unsaved += rows
            if self._unsaved > len(self.table) // 4:
                self._store()
        return rows

    def _adopt(self, stored: TrialTable) -> bool:
        """Use a stored table, extended by what journals have gained; returns False if it is stale."""
        try:
            notes = msgspec.convert(stored.notes, ColumnNotes)
        except msgspec.ValidationError:
            return False
        journals = {str(path.relative_to(self.rundir.path)) for path in journals_of(self.rundir)}
        if notes.report != stamp_report(self.rundir) or stored.graders != self.view.graders:
            return False
        if not journals.issuperset(stored.files):  # it comes with the run, and somebody else may have made it
            return False
        recorder = None
        if notes.recorded is not None:
            recorder = JournalReader(self.view, stored, notes.recorded)
            try:
                if notes.dataset != self._dataset_stamp():
                    return False
                self._unsaved = recorder.grow()
            except StaleColumnsError:
                return False
        elif notes.journals != stamp_journals(self.rundir):
            return False
        self._use(stored, notes, recorder)
        return True

    def _use(self, table: TrialTable, notes: ColumnNotes, recorder: JournalReader | None) -> None:
        with self.lock:
            self.table, self._notes, self._recorder = table, notes, recorder

    def _rebuild(self, progress: Progress) -> None:
        """Take the table that the report has left, or build it: a large one in a helper process, which frees memory."""
        self.view = RunView(self.rundir)
        large = sum(self.rundir.journal_bytes().values()) > _LARGE
        if not (self._copy_reported() and self.open_stored()) and not (
            large and self._build_in_helper(progress) and self.open_stored()
        ):
            self.build(progress)
        with suppress(OSError):
            remove_least_used(self.folder.parent, keep=self.folder)

    def _copy_reported(self) -> bool:
        """Copy the table in the run directory, which may be stale; returns False if there is none.

        It is not used where it is, since a mapped file that vanishes, as on a network file system, ends the process.
        """
        source = self.rundir.path / INDEX / TABLE
        temporary = self.folder / f".{TABLE}.{secrets.token_hex(6)}.tmp"
        try:
            if not self.rundir.finished or not source.is_file():
                return False
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            shutil.copyfile(source, temporary)
            temporary.replace(self.folder / TABLE)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            return False
        return True

    def _build_in_helper(self, progress: Progress) -> bool:
        notes = self._present_notes()
        plan = plan_report(self.view, notes.dataset)
        order = BuildOrder(str(self.rundir.path), str(self.folder), plan, msgspec.to_builtins(notes))
        command = [sys.executable, "-P", "-m", "holdfast.view.building"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None and process.stdout is not None
            progress(0.0)
            try:
                with suppress(BrokenPipeError), process.stdin as pipe:
                    pipe.write(msgspec.json.encode(order))
                for line in process.stdout:
                    progress(float(line))
            except BaseException:
                process.kill()
                raise
        return process.returncode == 0

    def build(self, progress: Progress, *, reported: bool = True) -> None:
        """Build the table in this process, and store it: from the report if it fits and is `reported`."""
        notes, recorder = self._present_notes(), None
        plan = plan_report(self.view, notes.dataset) if reported else None
        table = None if plan is None else read_reported(plan, progress)
        if table is None:
            try:
                recorder = JournalReader(self.view)
                recorder.grow(progress)
                table = recorder.table
                notes.kind, notes.journals, notes.recorded = "recorded", [], recorder.notes
            except StaleColumnsError:  # trials with several keys
                recorder, notes.kind = None, "everything"
                table = read_everything(self.view)
        self._use(table, notes, recorder)
        self._store()

    def _store(self) -> None:
        """Keep the table for the next time; a cache that cannot be written is no reason to show nothing."""
        self._unsaved = 0
        with suppress(OSError):
            self.table.store(self.folder, msgspec.to_builtins(self._notes))

    def _present_notes(self) -> ColumnNotes:
        return ColumnNotes("reported", stamp_report(self.rundir), self._dataset_stamp(), stamp_journals(self.rundir))

    def _dataset_stamp(self) -> list[list[int]]:
        try:
            return list(map(list, Dataset(self.view.spec).stamp()))
        except HoldfastError:
            return []


def _ignore(share: float) -> None:
    """Take progress that nobody looks at."""


def changed_rows(old: TrialTable, new: TrialTable) -> int:
    """Return how many rows of a table are new, or differ in status or in the place of their output."""
    rows = min(len(old), len(new))
    same = sum(
        one == other
        for one, other in zip(
            zip(old["status"], old["at"], strict=True), zip(new["status"], new["at"], strict=True), strict=False
        )
    )
    return len(new) - rows + rows - same


def open_columns(rundir: RunDir, home: Path, progress: Progress | None = None) -> Columns:
    """Return the columns of a run: from the cache below `home` where it still fits, else built and stored there."""
    place = digest_bytes(os.fsencode(rundir.path.resolve()))[7:23]
    manifest = RunView(rundir).manifest
    columns = Columns(rundir, home / "view" / f"{manifest.id}-{place}")
    columns.open(progress or _ignore)
    return columns


def read_rows(columns: Columns, numbers: Iterable[int]) -> list[TrialRow]:
    """Return rows as lists show them, with the beginnings of their answers."""
    with columns.lock:
        rows = [_read_row(columns, row) for row in numbers]
        columns.table.release()
        return rows


def _read_row(columns: Columns, row: int) -> TrialRow:
    table = columns.table
    graders: dict[str, tuple[RowStatus, float | None]] = {}
    for number, name in enumerate(table.graders):
        if code := table[status_column(number)][row]:
            graders[name] = STATUSES[code - 1], _number(table[score_column(number)][row])
    tokens, turns, attempt = (_number(table[name][row]) for name in ("tokens", "turns", "attempt"))
    line = columns.line(row)
    return TrialRow(
        row=row,
        sample=table.id_at(row),
        trial=table["trial"][row],
        status=STATUSES[table["status"][row] - 1],
        score=_number(table["score"][row]),
        graders=graders,
        turns=None if turns is None else int(turns),
        tokens=None if tokens is None else int(tokens),
        cost=_number(table["cost"][row]),
        seconds=_number(table["seconds"][row]),
        attempt=None if attempt is None else int(attempt),
        answer=table.values["answer"][table["answer"][row]],
        stop=table.values["stop"][table["stop"][row]],
        stopped=table["stopped"][row] or None,
        error=_read_error(columns, table["error_at"][row]),
        preview="" if line is None else _preview(line),
    )


def _preview(line: LineRef) -> str:
    try:
        return _answer.decode(line.read()).output[:_PREVIEW]
    except UNREADABLE:
        return ""  # the journal has been repaired, which the next look at it notices


def _number(value: float) -> float | None:
    return None if value != value else value


def _read_error(columns: Columns, place: int) -> str:
    if not place:
        return ""
    file, offset = columns.table.file_and_offset(place)
    with open_binary(columns.rundir.path / file) as journal:
        journal.seek(offset)
        head = read_error_head(journal.readline())
    if head is None:
        return ""
    reason = f"{head.kind}: {head.message}"
    return reason if head.where == "target" else f"{head.where}: {reason}"


def remove_least_used(folder: Path, *, keep: Path, limit: int = _MOST_BYTES) -> None:
    """Remove the folders of a cache that were used least recently, until the others have at most `limit` bytes."""
    folders = sorted((path for path in folder.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    sizes = {path: sum(file.stat().st_size for file in path.iterdir()) for path in folders}
    total = sum(sizes.values())
    for path in folders:
        if total <= limit:
            return
        if path != keep:
            shutil.rmtree(path, ignore_errors=True)
            total -= sizes[path]

"""The index of a large run, cached in its directory: `.index/journals`.

The cache holds the packed tables of the index, and how far each journal was read for them: its inode, the end and the
digest of the last line, and the digest of the first bytes. It is written by a process that holds the run's lease, after
that process has read the journals and verified every line. Whoever opens the run later reads the cache, and of the
journals only what was appended.

The journals stay the source of truth. A cache that is torn, damaged, of another version or another machine's byte
order, and one that does not fit the journals (which were truncated, replaced, repaired or moved), is ignored, and the
journals are read from their beginning. So they are where the order of lines in several files decides which line counts.

A run that shares journals (`store.shared`) shares the tables, too: `.index/journals` then names the lender's cache, to
which `.index/lent` is a hard link, and holds the rest.
"""

from __future__ import annotations

import os
import sys
from array import array
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec
from xxhash import xxh3_128_hexdigest

from holdfast.store.cache_file import read_header, write_cache
from holdfast.store.index import KINDS, AmbiguousOrderError, Entry, Extent, Index, IndexReader, Spent, StepHead
from holdfast.store.index_table import RareOutput, RareVerdict
from holdfast.store.lines import LineRef, count_lines, last_line
from holdfast.store.run_files import UNREADABLE, open_binary
from holdfast.store.rundir import INDEX
from holdfast.store.shared import journal_size, unwanted_keys

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import BinaryIO

    from holdfast.store.index_table import PackedTable
    from holdfast.store.rundir import RunDir

_NAME: Final = "journals"
_LENT: Final = "lent"
_MAGIC: Final = b"holdfast index 6\n"
_HEAD: Final = 4096
"""bytes at the beginning of a journal that are compared"""


class _Mark(msgspec.Struct, array_like=True):
    """How far a journal was read."""

    kind: str
    file: str
    """relative to the run directory"""
    inode: int
    last: int
    """where the last line begins that was read"""
    end: int
    head_digest: str
    tail_digest: str
    """of the last line"""


class _Step(msgspec.Struct, array_like=True):
    """A call of a conversation without an output."""

    file: str
    offset: int
    length: int
    head: StepHead


class _Table(msgspec.Struct, array_like=True):
    """The parts of a packed table beside its rows and slots, and the numbers of those."""

    rows: int
    width: int
    """bytes of a row"""
    slots: int
    odd_keys: dict[int, str]
    rare: Any


class _Header(msgspec.Struct, array_like=True):
    byte_order: str
    marks: list[_Mark]
    files: list[str]
    """journals that outputs are in, by their numbers"""
    outputs: _Table
    verdicts: _Table
    attempts: dict[str, int]
    failed_at: dict[str, float]
    uncertain: list[str]
    grader_attempts: list[tuple[str, str, int]]
    steps: list[_Step]
    spent: tuple[int, int, float, int, int]
    """tokens, requests, cost, unpriced and unmetered work, without the calls"""
    periods: list[tuple[float, float]]
    lent: str
    """digest of the lender's cache with the tables; empty if they are here"""


class Stale(ValueError):
    """The cache does not fit the journals."""


class IndexCache:
    """The cached index of one run."""

    def __init__(self, rundir: RunDir) -> None:
        self._rundir = rundir
        self._path = rundir.path / INDEX / _NAME
        self.origin = ""
        """digest of the cache from which the index was read, where no line replaced one of it, else empty"""

    def load(self, *, durable: bool) -> IndexReader | None:
        """Read the cache and what was appended since; None if there is no cache that fits.

        `durable` is that of `IndexReader.read`.
        """
        try:
            with open_binary(self._path) as file:
                header, digest = _read(file)
                reader = self._restore(header, file) if not header.lent else self._restore_lent(header)
            reader.read(self._rundir.journals, durable=durable)
        except (OSError, AmbiguousOrderError, *UNREADABLE, ValueError, EOFError):
            return None
        self.origin = "" if reader.replaced else digest
        return reader

    def covers(self) -> int:
        """Return how many bytes of the journals the cache covers; 0 if there is none. They may have changed since."""
        with suppress(OSError, ValueError, *UNREADABLE), open_binary(self._path) as file:
            return sum(mark.end for mark in _read(file)[0].marks)
        return 0

    def save_live(self, index: Index) -> bool:
        """Store the index of a process that has written the journals alone, without reading them; False if unsuitable.

        That process has read what was there before, and synced what it appended. The index is stored only if it has a
        row for each line of outputs and of grades: no line was replaced, left out by a cancelled task, or is damaged.
        """
        paths = {kind.name: [path for path in self._rundir.journals(kind.name) if path.exists()] for kind in KINDS}
        if paths["steps"] or index.outputs.holes or index.verdicts.holes:
            return False
        ends = index.outputs.last_lines()
        if any(ends.get(path, (0, 0, 0))[2] != journal_size(path) for path in paths["outputs"]):
            return False
        if sum(count_lines(path) for path in paths["grades"]) != len(index.verdicts):
            return False
        reader = IndexReader()  # failed attempts are counted by their lines, which are few
        reader.read(lambda name: paths[name] if name == "errors" else (), durable=False)
        counts = ("attempts", "failed_at", "uncertain", "grader_attempts")
        reader.index = msgspec.structs.replace(index, **{name: getattr(reader.index, name) for name in counts})
        reader.extents |= {path: Extent(*ends[path][:2]) for path in paths["outputs"] if path in ends}
        for path in paths["grades"]:
            if end := journal_size(path):
                reader.extents[path] = Extent(last_line(path), end)
        self.save(reader)
        return bool(self.origin)

    def _restore_lent(self, header: _Header) -> IndexReader:
        """Restore an index whose tables are those of a lender, less the outputs that are not of this run."""
        with open_binary(self._path.with_name(_LENT)) as file:
            lent, digest = _read(file)
            if digest != header.lent:
                raise Stale
            header.outputs, header.verdicts = lent.outputs, lent.verdicts
            reader = self._restore(header, file)
        outputs = reader.index.outputs
        for path in outputs.files:
            for key in unwanted_keys(path):
                if (ref := outputs.get(key)) is not None and ref.line.path == path:
                    del outputs[key]
        return reader

    def share(self, lender: RunDir, origin: str, places: Mapping[Path, Path]) -> None:
        """Use the cache of a run whose journals this run shares, if it is still the one that `origin` names.

        `places` are those of the journals here, by those there. Where the cache cannot be shared, there is none.
        """
        path = IndexCache(lender)._path
        with suppress(OSError, ValueError, *UNREADABLE), open_binary(path) as file:
            header, digest = _read(file)
            files = [places.get(lender.path / name) for name in header.files]
            if digest != origin or None in files:
                return
            marks = []
            for mark in header.marks:
                place = places.get(lender.path / mark.file)
                if place is not None:
                    mark.file, mark.inode = str(place.relative_to(self._rundir.path)), place.stat().st_ino
                    marks.append(mark)
            own = _Header(
                byte_order=sys.byteorder,
                marks=marks,
                files=[str(place.relative_to(self._rundir.path)) for place in files if place is not None],
                outputs=_Table(0, 0, 0, {}, {}),
                verdicts=_Table(0, 0, 0, {}, {}),
                attempts={},
                failed_at={},
                uncertain=[],
                grader_attempts=[],
                steps=[],
                spent=(0, 0, 0.0, 0, 0),
                periods=[],
                lent=header.lent or digest,
            )
            self._path.parent.mkdir(parents=True, exist_ok=True)
            link = self._path.with_name(_LENT)
            link.unlink(missing_ok=True)
            os.link(path.with_name(_LENT) if header.lent else path, link)
            self.origin = write_cache(self._path, _MAGIC, msgspec.msgpack.encode(own))

    def _restore(self, header: _Header, file: BinaryIO) -> IndexReader:
        root = self._rundir.path
        index = Index()
        index.outputs.use_files([root / name for name in header.files])
        for table, notes, rare in (
            (index.outputs, header.outputs, dict[int, RareOutput]),
            (index.verdicts, header.verdicts, dict[int, RareVerdict]),
        ):
            _fill(table, notes, msgspec.convert(notes.rare, rare), file)
        index.attempts = header.attempts
        index.failed_at, index.uncertain = header.failed_at, {*header.uncertain}
        index.grader_attempts = {(key, where): count for key, where, count in header.grader_attempts}
        index.spent = Spent(*header.spent)
        for period in header.periods:
            index.spent.add_time(*period)
        reader = IndexReader(index)
        reader.steps = [Entry(LineRef(root / step.file, step.offset, step.length), step.head) for step in header.steps]
        stats = {path: path.stat() for kind in KINDS for path in self._rundir.journals(kind.name) if path.exists()}
        for mark in header.marks:
            path = root / mark.file
            stat = stats.get(path)
            if (
                stat is None
                or stat.st_ino != mark.inode
                or stat.st_size < mark.end
                or _digests(path, mark)
                != (
                    mark.head_digest,
                    mark.tail_digest,
                )
            ):
                raise Stale
            reader.extents[path] = Extent(mark.last, mark.end)
        return reader

    def save(self, reader: IndexReader) -> None:
        """Store an index as it was read from the journals, in one step.

        Nothing is synced: the digest tells what a power cut has left of the file. Where it cannot be written, there
        is no cache.
        """
        root, index = self._rundir.path, reader.index
        spent = index.spent
        marks = []
        for kind in KINDS:
            for path in self._rundir.journals(kind.name):
                if (extent := reader.extents.get(path)) is not None and extent.end:
                    mark = _Mark(kind.name, str(path.relative_to(root)), path.stat().st_ino, *extent, "", "")
                    mark.head_digest, mark.tail_digest = _digests(path, mark)
                    marks.append(mark)
        header = _Header(
            byte_order=sys.byteorder,
            marks=marks,
            files=[str(path.relative_to(root)) for path in index.outputs.files],
            outputs=_notes(index.outputs),
            verdicts=_notes(index.verdicts),
            attempts=index.attempts,
            failed_at=index.failed_at,
            uncertain=sorted(index.uncertain),
            grader_attempts=[(key, where, count) for (key, where), count in index.grader_attempts.items()],
            steps=[
                _Step(str(line.path.relative_to(root)), line.offset, line.length, head) for line, head in reader.steps
            ],
            spent=(spent.tokens, spent.requests, spent.cost, spent.unpriced, spent.unmetered),
            periods=spent.periods(),
            lent="",
        )
        tables = index.outputs, index.verdicts
        with suppress(OSError, OverflowError):  # a number that is too large to be encoded
            parts = [part for table in tables for part in (table.rows, memoryview(table.slots).cast("B"))]
            self.origin = write_cache(self._path, _MAGIC, msgspec.msgpack.encode(header), parts)
            self._path.with_name(_LENT).unlink(missing_ok=True)
            reader.new_bytes = 0


def _read(file: BinaryIO) -> tuple[_Header, str]:
    """Read the header of a cache, and its digest."""
    data, digest = read_header(file, _MAGIC)
    header = msgspec.msgpack.decode(data, type=_Header)
    if header.byte_order != sys.byteorder:
        raise Stale
    return header, digest


def _digests(path: Path, mark: _Mark) -> tuple[str, str]:
    """Return the digests of the first bytes and of the last line that were read of a journal."""
    head = LineRef(path, 0, min(_HEAD, mark.end)).read()
    return xxh3_128_hexdigest(head), xxh3_128_hexdigest(LineRef(path, mark.last, mark.end - mark.last).read())


def _notes(table: PackedTable[Any]) -> _Table:
    table.compact()
    return _Table(table.row_count, table.width, len(table.slots), table.odd_keys, table.rare)


def _fill(table: PackedTable[Any], notes: _Table, rare: dict[int, Any], file: BinaryIO) -> None:
    """Read the rows and slots of a table."""
    table.make_rows(notes.rows, notes.width)
    table.slots = array("I", [0]) * notes.slots
    for part in (table.rows, memoryview(table.slots).cast("B")):
        if file.readinto(part) != len(part):  # type: ignore[attr-defined]
            raise Stale
    table.odd_keys, table.rare = notes.odd_keys, rare

"""The index of a large run, cached in its directory: `.index/journals`.

The cache holds the packed tables of the index, and how far each journal was read for them: its inode, the end and the
digest of the last line, and the digest of the first bytes. It is written by a process that holds the run's lease, after
that process has read the journals and verified every line. Whoever opens the run later reads the cache, and of the
journals only what was appended.

The journals stay the source of truth. A cache that is torn, damaged, of another version or another machine's byte
order, and one that does not fit the journals (which were truncated, replaced, repaired or moved), is ignored, and the
journals are read from their beginning. So they are where the order of lines in several files decides which line counts.
"""

from __future__ import annotations

import sys
from array import array
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec
from xxhash import xxh3_128_hexdigest

from holdfast.store.cache_file import read_header, write_cache
from holdfast.store.index import KINDS, AmbiguousOrderError, Entry, Extent, Index, IndexReader, Spent, StepHead
from holdfast.store.index_table import RareOutput, RareVerdict
from holdfast.store.lines import LineRef
from holdfast.store.rundir import INDEX

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

    from holdfast.store.index_table import PackedTable
    from holdfast.store.rundir import RunDir

_NAME: Final = "journals"
_MAGIC: Final = b"holdfast index 1\n"
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
    """The parts of a packed table beside its rows and slots, and the sizes of those in bytes."""

    rows: int
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
    grader_attempts: list[tuple[str, str, int]]
    steps: list[_Step]
    spent: tuple[int, int, float, int, int]
    """tokens, requests, cost, unpriced and unmetered work, without the calls"""
    periods: list[tuple[float, float]]


class Stale(Exception):
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
            with self._path.open("rb") as file:
                data, digest = read_header(file, _MAGIC)
                reader = self._restore(msgspec.msgpack.decode(data, type=_Header), file)
            reader.read(self._rundir.journals, durable=durable)
        except (OSError, Stale, AmbiguousOrderError, msgspec.DecodeError, ValueError, EOFError):
            return None
        self.origin = "" if reader.replaced else digest
        return reader

    def _restore(self, header: _Header, file: BinaryIO) -> IndexReader:
        if header.byte_order != sys.byteorder:
            raise Stale
        root = self._rundir.path
        index = Index()
        index.outputs.use_files([root / name for name in header.files])
        for table, notes, rare in (
            (index.outputs, header.outputs, dict[int, RareOutput]),
            (index.verdicts, header.verdicts, dict[int, RareVerdict]),
        ):
            _fill(table, notes, msgspec.convert(notes.rare, rare), file)
        index.attempts = header.attempts
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
            grader_attempts=[(key, where, count) for (key, where), count in index.grader_attempts.items()],
            steps=[
                _Step(str(line.path.relative_to(root)), line.offset, line.length, head) for line, head in reader.steps
            ],
            spent=(spent.tokens, spent.requests, spent.cost, spent.unpriced, spent.unmetered),
            periods=spent.periods(),
        )
        body: list[bytearray | array[int]] = [
            index.outputs.rows,
            index.outputs.slots,
            index.verdicts.rows,
            index.verdicts.slots,
        ]
        with suppress(OSError, OverflowError):  # a number that is too large to be encoded
            parts = [memoryview(part).cast("B") for part in body]
            self.origin = write_cache(self._path, _MAGIC, msgspec.msgpack.encode(header), parts)
            reader.new_bytes = 0


def _digests(path: Path, mark: _Mark) -> tuple[str, str]:
    """Return the digests of the first bytes and of the last line that were read of a journal."""
    head = LineRef(path, 0, min(_HEAD, mark.end)).read()
    return xxh3_128_hexdigest(head), xxh3_128_hexdigest(LineRef(path, mark.last, mark.end - mark.last).read())


def _notes(table: PackedTable[Any]) -> _Table:
    assert not table.holes, "rows are removed only after an index was read"
    return _Table(len(table.rows), 4 * len(table.slots), table.odd_keys, table.rare)


def _fill(table: PackedTable[Any], notes: _Table, rare: dict[int, Any], file: BinaryIO) -> None:
    """Read the rows and slots of a table."""
    table.rows = bytearray(notes.rows)
    file.readinto(table.rows)  # type: ignore[attr-defined]
    table.slots = array("I")
    table.slots.fromfile(file, notes.slots // 4)
    table.odd_keys, table.rare = notes.odd_keys, rare

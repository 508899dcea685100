"""Columns of trials: arrays while they grow, a memory-mapped file once they are stored.

A stored table is one file: a magic word, the place, length and checksum of the header, then the columns, each at a
multiple of eight bytes, and last the header as JSON, with a checksum of each column. So it can be written some rows at
a time, by whoever knows their number. A file that is torn, damaged or of another version is not a table: `load` returns
None, and the caller builds the table again.
"""

from __future__ import annotations

import mmap
import os
import secrets
import sys
from array import array
from bisect import bisect_left
from contextlib import suppress
from itertools import accumulate, islice, repeat
from operator import add, eq
from struct import Struct as Layout
from struct import pack
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import msgspec
from xxhash import xxh3_64, xxh3_64_intdigest, xxh3_128_digest

from holdfast.store.lines import LineRef
from holdfast.store.run_files import UNREADABLE, open_binary

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

RowStatus = Literal["passed", "failed", "error", "skipped", "not_reached", "pending", "ungraded", "uncertain"]
"""`pending`: no output yet; `ungraded`: verdicts are still to come; `error` where an attempt at either has failed;
`uncertain`: no output, since a person has to settle a call that may have happened"""
STATUSES: Final[tuple[RowStatus, ...]] = get_args(RowStatus)
CODES: Final[dict[str, int]] = {status: code for code, status in enumerate(STATUSES, 1)}
"""numbers of the statuses in columns; 0 is a grader that does not look at the row"""
NAN: Final = float("nan")
"""stands for unknown numbers, which fulfil no condition"""

TABLE: Final = "columns"
"""name of the file of a stored table"""
_MAGIC: Final = b"holdfast columns 4\n"
_FRAME: Final = Layout("<QQQ")
"""place, length and checksum of the header"""
_BODY: Final = 48
"""where the columns begin"""
_FILE_SHIFT: Final = 48
_KEY_LENGTH: Final = len("sha256:") + 32
_LINE: Final = "\n"
_SEPARATOR: Final = b"\xff"
"""before and after each sample id; no UTF-8 text contains this byte"""

NUMBERS: Final = {
    "score": "d",
    "turns": "f",
    "tokens": "d",
    "input_tokens": "d",
    "output_tokens": "d",
    "cost": "d",
    "seconds": "d",
    "first_token": "d",
    "started": "d",
    "attempt": "f",
}
"""numbers of a trial, with their type codes"""
CODED: Final = ("stop", "answer", "error", "source")
"""columns of texts, of which few are different; stored as numbers of values"""
_PLAIN: Final = {
    "trial": "I",
    "status": "B",
    "stopped": "H",  # turn of the checkpoint that ended the conversation, else 0
    "at": "Q",  # place of the output's line, and its length
    "length": "I",
    "error_at": "Q",  # place of the line of the last failed attempt
    "panel": "H",  # of tables made of journals: number of the panel, and of verdicts whose lines were read
    "seen": "B",
}
_IDS: Final = {"ids": "B", "id_starts": "Q", "keys": "B"}
_FIELD: Final = "field."


def status_column(grader: int) -> str:
    """Return the name of the column of a grader's statuses."""
    return f"grader{grader}.status"


def score_column(grader: int) -> str:
    """Return the name of the column of a grader's scores."""
    return f"grader{grader}.score"


def field_column(name: str) -> str:
    """Return the name of the column of a field of the rows."""
    return _FIELD + name


def join_place(file: int, offset: int) -> int:
    """Return the number that stands for an offset in a numbered journal; 0 stands for no place."""
    return (file + 1) << _FILE_SHIFT | offset


def split_place(place: int) -> tuple[int, int]:
    """Return the number of the journal, and the offset in it, of a place."""
    return (place >> _FILE_SHIFT) - 1, place & ((1 << _FILE_SHIFT) - 1)


def key_bytes(key: str) -> bytes:
    """Return the 16 bytes of a key."""
    try:
        raw = bytes.fromhex(key[7:])
    except ValueError:
        raw = b""
    if len(raw) == 16:
        return raw
    return xxh3_128_digest(key.encode("utf-8", "surrogatepass"))  # not a key that Holdfast makes


def many_key_bytes(keys: list[str]) -> bytes:
    """Return the bytes of keys, one after the other; much faster than key by key."""
    if set(map(len, keys)) == {_KEY_LENGTH}:
        with suppress(ValueError):
            raw = bytes.fromhex("".join([key[7:] for key in keys]))
            if len(raw) == 16 * len(keys):  # else there is a space among the digits
                return raw
    return b"".join(map(key_bytes, keys))


def key_text(key: bytes) -> str:
    """Return the key of 16 bytes, as records have it."""
    return f"sha256:{key.hex()}"


class _StoredColumn(msgspec.Struct, array_like=True):
    code: str
    """of its type"""
    offset: int
    """in the file"""
    size: int
    """in bytes"""
    checksum: str = ""


class _Header(msgspec.Struct):
    rows: int
    byte_order: str
    columns: dict[str, _StoredColumn]
    values: dict[str, list[str]]
    graders: list[str]
    files: list[str]
    notes: Any
    dataset: Any


class TrialTable:
    """Rows of trials, column by column."""

    def __init__(self, graders: Sequence[str]) -> None:
        self.graders = list(graders)
        """names as metrics have them"""
        self.files: list[str] = []
        """journals that lines are in, relative to the run directory"""
        self.values: dict[str, list[str]] = {name: [""] for name in CODED}
        """values of the coded columns; the first is empty and means none"""
        self.notes: Any = None
        """what the table was made of, for whoever stores it"""
        self.dataset: Any = None
        """state of the dataset that columns of fields were read from"""
        types = {**_IDS, **_PLAIN, **NUMBERS, **dict.fromkeys(CODED, "I")}
        for number in range(len(graders)):
            types |= {status_column(number): "B", score_column(number): "d"}
        self._columns: dict[str, Any] = {name: array(code) for name, code in types.items()}
        self._columns["ids"].frombytes(_SEPARATOR)
        self._codes: dict[str, dict[str, int]] = {}
        self._mapped: mmap.mmap | None = None
        """the file of a stored table"""
        self._ids: tuple[mmap.mmap, int, int] | None = None
        """where the ids are in it"""

    def __len__(self) -> int:
        return len(self._columns["trial"])

    def __getitem__(self, name: str) -> Any:
        """Return a column: an array, or a memory view of a stored one."""
        return self._columns[name]

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    @property
    def names(self) -> list[str]:
        """Names of the columns."""
        return list(self._columns)

    @property
    def grader_numbers(self) -> dict[str, int]:
        """Numbers of the graders by their names."""
        return {name: number for number, name in enumerate(self.graders)}

    def code(self, name: str, value: str) -> int:
        """Return the number of a value in a coded column, which is added if it is new."""
        codes = self._codes.get(name)
        if codes is None:
            codes = self._codes[name] = {text: number for number, text in enumerate(self.values[name])}
        number = codes.setdefault(value, len(codes))
        if number == len(self.values[name]):
            self.values[name].append(value)
        return number

    def codes(self, name: str, values: list[str]) -> list[int]:
        """Return the numbers of many values in a coded column."""
        numbers = {value: self.code(name, value) for value in dict.fromkeys(values)}
        return [numbers[value] for value in values]

    def place(self, file: str, offset: int) -> int:
        """Return the number that stands for a place in a journal."""
        if file not in self.files:
            self.files.append(file)
        return join_place(self.files.index(file), offset)

    def file_and_offset(self, place: int) -> tuple[str, int]:
        """Return the journal and the offset of a place."""
        file, offset = split_place(place)
        return self.files[file], offset

    def set_field(self, name: str, values: list[str], codes: array[int], dataset: Any) -> None:
        """Add a column of texts, read from a dataset in a given state; columns of another state are dropped."""
        if self.dataset != dataset:
            for old in [each for each in self._columns if each.startswith(_FIELD)]:
                del self._columns[old], self.values[old]
        column = field_column(name)
        self.dataset, self.values[column], self._columns[column] = dataset, values, codes

    def append(self, sample: str, trial: int, key: bytes) -> int:
        """Append a trial without an output, and return its row number."""
        columns = self._columns
        row = len(self)
        if row and self.id_at(row - 1) == sample:
            columns["id_starts"].append(columns["id_starts"][row - 1])
        else:
            ids = columns["ids"]
            columns["id_starts"].append(len(ids))
            ids.frombytes(sample.encode("utf-8", "surrogatepass") + _SEPARATOR)
        columns["keys"].frombytes(key)
        for name, column in columns.items():
            if name not in _IDS:
                column.append(NAN if column.typecode in "df" else 0)  # 0 in a field: the row is gone
        columns["trial"][row] = trial
        columns["status"][row] = CODES["pending"]
        return row

    def extend(self, samples: list[str], trials: list[int], keys: list[str]) -> None:
        """Append many trials by sample, number and key. Their other columns are to be filled, or padded."""
        columns = self._columns
        starts, ids = columns["id_starts"], columns["ids"]
        last = self.id_at(len(self) - 1) if len(self) else None
        joined = _LINE.join(samples)
        if joined.count(_LINE) == len(samples) - 1 and not any(map(eq, samples, [last, *samples])):
            raw = joined.encode("utf-8", "surrogatepass")
            lengths = map(len, samples if len(raw) == len(joined) else raw.split(_LINE.encode()))
            places = accumulate(map(add, lengths, repeat(1)), initial=len(ids))
            starts.frombytes(pack(f"={len(samples)}Q", *islice(places, len(samples))))
            ids.frombytes(raw.replace(_LINE.encode(), _SEPARATOR) + _SEPARATOR)
        else:  # the trials of a sample share its id
            start = starts[-1] if len(self) else 0
            for sample in samples:
                if sample != last:
                    last, start = sample, len(ids)
                    ids.frombytes(sample.encode("utf-8", "surrogatepass") + _SEPARATOR)
                starts.append(start)
        self.fill("trial", trials)
        columns["keys"].frombytes(many_key_bytes(keys))

    def fill(self, name: str, values: Sequence[float]) -> None:
        """Append many values to a column."""
        column = self._columns[name]
        column.frombytes(pack(f"={len(values)}{column.typecode}", *values))  # faster than by way of an array

    def pad(self) -> None:
        """Fill columns that are shorter than the table with unknown numbers and zeros."""
        for name, column in self._columns.items():
            if name not in _IDS:
                column.extend(
                    array(column.typecode, [NAN if column.typecode in "df" else 0]) * (len(self) - len(column))
                )

    def set(self, row: int, **values: float) -> None:
        """Set values of a row."""
        for name, value in values.items():
            self._columns[name][row] = value

    def id_at(self, row: int) -> str:
        """Return the sample id of a row."""
        start = self._columns["id_starts"][row]
        later = self._columns["id_starts"]
        stop = bisect_left(later, start + 1, row)  # the next id begins behind this one
        end = (later[stop] if stop < len(later) else len(self._columns["ids"])) - 1
        return bytes(self._columns["ids"][start:end]).decode("utf-8", "surrogatepass")

    def key_at(self, row: int) -> bytes:
        """Return the key of a row's trial."""
        return bytes(self._columns["keys"][row * 16 : row * 16 + 16])

    def keys(self) -> dict[bytes, int]:
        """Return the row numbers by key."""
        keys = bytes(self._columns["keys"])
        return {keys[start : start + 16]: start >> 4 for start in range(0, len(keys), 16)}

    def rows_of(self, sample: str) -> Iterator[int]:
        """Yield the rows of a sample."""
        starts = self._columns["id_starts"]
        needle = _SEPARATOR + sample.encode("utf-8", "surrogatepass") + _SEPARATOR
        where: bytes | mmap.mmap
        where, begin, end = self._ids or (bytes(self._columns["ids"]), 0, len(self._columns["ids"]))
        place = where.find(needle, begin, end)
        while place >= 0:
            start = place - begin + 1
            row = bisect_left(starts, start)
            while row < len(starts) and starts[row] == start:
                yield row
                row += 1
            place = where.find(needle, place + 1, end)

    def find(self, sample: str, trial: int) -> int | None:
        """Return the row of a trial; None if there is none."""
        trials = self._columns["trial"]
        return next((row for row in self.rows_of(sample) if trials[row] == trial), None)

    def line(self, row: int, run: Path) -> LineRef | None:
        """Return the place of a row's output in a run directory; None if there is none."""
        place = self._columns["at"][row]
        if not place:
            return None
        file, offset = self.file_and_offset(place)
        return LineRef(run / file, offset, self._columns["length"][row])

    def release(self) -> None:
        """Give the memory of a stored table back; its pages are mapped again when they are needed."""
        if self._mapped is not None:
            self._mapped.madvise(mmap.MADV_DONTNEED)

    def thaw(self) -> None:
        """Copy a stored table into memory, so that it can grow."""
        if self._mapped is not None:
            for name, view in self._columns.items():
                column: array[Any] = array(memoryview(view).format)
                column.frombytes(bytes(view))
                self._columns[name] = column
            self._mapped = self._ids = None

    def clear(self) -> None:
        """Remove all rows, and keep what their numbers stand for."""
        for column in self._columns.values():
            del column[:]
        self._columns["ids"].frombytes(_SEPARATOR)

    def store(self, folder: Path, notes: Any) -> None:
        """Store the table in a folder, in one step, with what it was made of.

        It is a cache: nothing is synced, and the checksums tell what was lost.
        """
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.notes = notes
        writer = TableWriter(folder, self, len(self))
        try:
            writer.write()
            writer.finish()
        except BaseException:
            writer.discard()
            raise

    @classmethod
    def load(cls, folder: Path) -> TrialTable | None:
        """Open the table in a folder; None if the file is missing, torn, damaged or of another version."""
        try:
            with open_binary(folder / TABLE) as file:
                return cls._load(file)
        except (OSError, ValueError, *UNREADABLE):
            return None

    @classmethod
    def _load(cls, file: Any) -> TrialTable | None:
        magic, frame = file.read(len(_MAGIC)), file.read(_FRAME.size)
        if magic != _MAGIC or len(frame) < _FRAME.size:
            return None
        place, length, checksum = _FRAME.unpack(frame)
        if place + length != os.fstat(file.fileno()).st_size:
            return None
        file.seek(place)
        data = file.read(length)
        if xxh3_64_intdigest(data) != checksum:
            return None
        header = msgspec.json.decode(data, type=_Header)
        table = cls(header.graders)
        if header.byte_order != sys.byteorder or not table._describes(header):
            return None
        if any(_checksum(file, column) != column.checksum for column in header.columns.values()):
            return None
        table.files, table.values = header.files, header.values
        table.notes, table.dataset = header.notes, header.dataset
        table._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        mapped: Any = memoryview(table._mapped)
        ids = header.columns["ids"]
        table._ids = table._mapped, ids.offset, ids.offset + ids.size
        table._columns = {
            name: mapped[each.offset : each.offset + each.size].cast(each.code) if each.size else array(each.code)
            for name, each in header.columns.items()
        }
        return table

    def _describes(self, header: _Header) -> bool:
        """Return True if a header has the columns of such a table, each as long as its rows are many."""
        stored = header.columns
        own = {name: memoryview(column).format for name, column in self._columns.items()}
        fields = {name: "I" for name in stored.keys() - own.keys() if name.startswith(_FIELD)}
        return (
            {name: column.code for name, column in stored.items()} == own | fields
            and header.values.keys() == self.values.keys() | fields.keys()
            and all(
                column.size == header.rows * _width(name, column.code) and column.offset % 8 == 0
                for name, column in stored.items()
                if name != "ids"
            )
        )


class TableWriter:
    """A table on its way into a file: its rows pass through a table in memory, some at a time."""

    def __init__(self, folder: Path, table: TrialTable, rows: int) -> None:
        """Begin a file with room for a number of rows. The table has all its columns, and none of the rows yet."""
        self._table, self._rows = table, rows
        self._path = folder / TABLE
        self._temporary = folder / f".{TABLE}.{secrets.token_hex(6)}.tmp"
        self._columns: dict[str, _StoredColumn] = {}
        self._checksums = {name: xxh3_64() for name in table.names}
        end = _BODY
        for name in sorted(table.names, key="ids".__eq__):  # their size is not known before the end, so they are last
            code = memoryview(table[name]).format
            self._columns[name] = _StoredColumn(code, end, 0)
            end += -(-rows * _width(name, code) // 8) * 8
        self._file = self._temporary.open("xb", buffering=0)

    def write(self) -> None:
        """Write the rows that the table has now, behind those that were written before."""
        before = self._columns["ids"].size  # bytes
        for name, column in self._columns.items():
            values = self._table[name]
            if before and name == "id_starts":
                values = array("Q", map(add, values, repeat(before - 1)))
            elif before and name == "ids":
                values = values[1:]  # without the separator that the ids of each table begin with
            if len(values):
                data = memoryview(values).cast("B")
                self._checksums[name].update(data)
                self._write_at(column.offset + column.size, data)
                column.size += len(data)

    def finish(self) -> None:
        """Write the header, and give the file its name in one step; raise ValueError if rows are missing."""
        table, ids = self._table, self._columns["ids"]
        for name, column in self._columns.items():
            column.checksum = self._checksums[name].hexdigest()
        values = table.values, table.graders, table.files, table.notes, table.dataset
        header = _Header(self._rows, sys.byteorder, self._columns, *values)
        if not table._describes(header):
            raise ValueError("not as many rows as expected")
        data, place = msgspec.json.encode(header), ids.offset + ids.size
        self._write_at(place, memoryview(data))
        frame = _MAGIC + _FRAME.pack(place, len(data), xxh3_64_intdigest(data))
        self._write_at(0, memoryview(frame))
        self._file.close()
        self._temporary.replace(self._path)

    def discard(self) -> None:
        """Remove the file."""
        self._file.close()
        with suppress(OSError):
            self._temporary.unlink()

    def _write_at(self, place: int, data: memoryview) -> None:
        while len(data):
            written = os.pwrite(self._file.fileno(), data, place)
            data, place = data[written:], place + written


def _width(name: str, code: str) -> int:
    """Return the bytes that each row takes in a column; 0 for the ids, of which each takes its own."""
    return 0 if name == "ids" else 16 if name == "keys" else array(code).itemsize


def _checksum(file: Any, column: _StoredColumn) -> str:
    """Return the checksum of a stored column: read, not mapped, so that checked pages do not stay in this process."""
    checksum, size = xxh3_64(), column.size
    file.seek(column.offset)
    while chunk := file.read(min(size, 1 << 20)):
        checksum.update(chunk)
        size -= len(chunk)
    return checksum.hexdigest()

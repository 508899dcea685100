"""Journal lines: each is a JSON object whose last field, `sum`, is an xxh3 checksum of the bytes before it.

    {"key":"…","sample":"a",…,"sum":"9a1b3c5d7e9f0a2b"}

The checksum covers every byte of the line up to, not including, `,"sum":`. A line counts only if it ends in a
newline and its checksum matches, so a torn or corrupt line is ignored and its trial is run again. The process that
holds the lease moves such bytes out of the journal.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import Raw
from msgspec.json import decode, encode
from xxhash import xxh3_64_hexdigest

from holdfast.store.files import LONGEST_LINE, make_directory, open_binary, open_file, read_lines, replacing, too_long
from holdfast.store.shared import end_of, lender_of, unseal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

_TAIL = len(b',"sum":"0123456789abcdef"}')
_BLOCK: Final = 1 << 20
"""bytes that are read and searched at once"""
_FIRST_STEP: Final = 1 << 12
"""bytes that are searched first: most lines are short and nearby"""


def seal(body: bytes) -> bytes:
    """Turn an encoded JSON object into a journal line."""
    head = body[:-1]
    return head + b',"sum":"' + xxh3_64_hexdigest(head).encode() + b'"}\n'


def with_source(line: bytes, source: str, *, row: str | None = None, time: float | None = None) -> bytes:
    """Return a sound line (without its newline) for copying into another run: sealed again, with its source.

    A copy of a copy keeps the first source, the run that did the work. `row` is the digest of the sample's row there,
    if an output has one, and `time` when a verdict was given there.
    """
    head = line[:-_TAIL]
    changes = {name: value for name, value in (("row", row), ("time", time)) if value is not None}
    if any(b'"%b":%b' % (name.encode(), encode(value)) not in head for name, value in changes.items()):
        head = encode({**decode(head + b"}", type=dict[str, Raw]), **changes})[:-1]
        line = seal(head + b"}").rstrip(b"\n")
    if b'"source":' in head and "source" in decode(head + b"}"):
        return line + b"\n"
    return seal(b'%b,"source":%b}' % (head, encode(source)))


def is_sound(line: bytes) -> bool:
    """True if a line, without its newline, is whole and unchanged."""
    return line[-_TAIL:] == b',"sum":"%b"}' % xxh3_64_hexdigest(line[:-_TAIL]).encode()


class LineRef(NamedTuple):
    """The place of a journal line."""

    path: Path
    offset: int
    length: int
    """without the newline"""

    def read(self) -> bytes:
        """Read the line, without its newline."""
        fd = open_file(self.path)
        try:
            return os.pread(fd, self.length, self.offset)
        finally:
            os.close(fd)


class Line(NamedTuple):
    """A line of a journal file, sound or not."""

    offset: int
    data: bytes
    """without the newline"""
    sound: bool
    whole: bool
    """False for a last line that has no newline"""


class LineBlock(NamedTuple):
    """Whole lines of a journal file that follow each other, unchecked."""

    offset: int
    data: bytes
    """may continue after the last line"""
    starts: list[int]
    ends: list[int]
    """offsets in the data of the lines' first bytes and of their newlines"""

    def all_sound(self) -> bool:
        """True if every line is whole and unchanged; much faster than checking them one by one."""
        data = self.data
        bounds = zip(self.starts, self.ends, strict=True)
        sums = '"},"sum":"'.join([xxh3_64_hexdigest(data[start : end - _TAIL]) for start, end in bounds])
        return b"".join([data[end - _TAIL : end] for end in self.ends]) == b',"sum":"%b"}' % sums.encode()

    def lines(self) -> list[bytes]:
        """Return the lines, without their newlines."""
        return [self.data[start:end] for start, end in zip(self.starts, self.ends, strict=True)]


def read_blocks(path: Path, start: int, stop: int) -> Iterator[LineBlock]:
    """Yield the whole lines of a journal file that begin between two offsets, many at once."""
    fd = open_file(path)
    try:
        if (end := end_of(path)) is not None:
            stop = min(stop, end)
        offset = max(0, start - 1)  # a line begins at `start` only if a newline is before it
        skip = start > 0
        while offset < stop and (data := _read_block(fd, offset, path)):
            ends, place = [], data.find(b"\n")
            while place >= 0:
                ends.append(place)
                place = data.find(b"\n", place + 1)
            if not ends:
                return  # the last line is not finished
            starts = [0, *[end + 1 for end in ends[:-1]]]
            count = bisect_left(starts, stop - offset)
            block = LineBlock(offset, data, starts[skip:count], ends[skip:count])
            if block.starts:
                yield block
            offset, skip = offset + ends[-1] + 1, False
    finally:
        os.close(fd)


def _read_block(fd: int, offset: int, path: Path) -> bytes:
    """Read a block, or as many as it takes to come to the end of a line."""
    pieces = [os.pread(fd, _BLOCK, offset)]
    while len(pieces[-1]) == _BLOCK and b"\n" not in pieces[-1]:
        if len(pieces) * _BLOCK > LONGEST_LINE:
            raise too_long(path, offset)
        pieces.append(os.pread(fd, _BLOCK, offset + len(pieces) * _BLOCK))
    return b"".join(pieces)


def scan(path: Path, start: int = 0) -> Iterator[Line]:
    """Yield every line of a journal file after an offset, sound or not. A missing file counts as empty."""
    for offset, raw in _raw(path, start):
        whole = raw.endswith(b"\n")
        data = raw[:-1] if whole else raw
        yield Line(offset, data, whole and is_sound(data), whole)


def scan_raw(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the whole lines of a journal file, unchecked, with their offsets: for readers that need only a few."""
    return ((offset, raw[:-1]) for offset, raw in _raw(path) if raw.endswith(b"\n"))


def search(path: Path, words: bytes, start: int = 0) -> Iterator[Line]:
    """Yield the sound lines of a journal file that contain these bytes, without reading the others line by line."""
    for offset, data in find_lines(path, words, start):
        if is_sound(data):
            yield Line(offset, data, sound=True, whole=True)


def find_lines(path: Path, words: bytes, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and text of each whole line that contains these bytes. A missing file counts as empty.

    The search begins at an offset where the line is likely to be, and wraps around at the end of the file.
    """
    with _opened(path) as content:
        turn = content.rfind(b"\n", 0, min(start, content.size)) + 1 if start > 0 else 0
        yield from _find_in(content, words, ((turn, content.size), (0, turn)))


def _find_in(content: _Content, words: bytes, parts: Iterable[tuple[int, int]]) -> Iterator[tuple[int, bytes]]:
    for position, end in parts:
        while (match := content.find(words, position, end)) >= 0:
            offset, newline = content.rfind(b"\n", 0, match) + 1, content.find(b"\n", match, content.size)
            if newline < 0:
                break
            yield offset, content.read(offset, newline)
            position = newline + 1


class _Content:
    """The bytes of a file, read on demand.

    Mapping the file would be simpler. But a process that reads past the end of a mapped file is killed, and another
    process may truncate a journal when it repairs the run.
    """

    def __init__(self, fd: int, size: int, path: Path) -> None:
        self._fd = fd
        self._path = path
        self.size = size

    def read(self, start: int, stop: int) -> bytes:
        if stop - start > LONGEST_LINE:
            raise too_long(self._path, start)
        return os.pread(self._fd, stop - start, start)

    def find(self, words: bytes, start: int, stop: int) -> int:
        """Return the offset of the first occurrence of some bytes; -1 if there is none."""
        step = _FIRST_STEP
        while start < stop:
            match = self.read(start, min(stop, start + step + len(words) - 1)).find(words)
            if match >= 0:
                return start + match
            start, step = start + step, min(2 * step, _BLOCK)
        return -1

    def rfind(self, words: bytes, start: int, stop: int) -> int:
        """Return the offset of the last occurrence of some bytes; -1 if there is none."""
        step = _FIRST_STEP
        end = stop
        while end > start:
            begin = max(start, end - step)
            match = self.read(begin, min(stop, end + len(words) - 1)).rfind(words)
            if match >= 0:
                return begin + match
            end, step = begin, min(2 * step, _BLOCK)
        return -1


@contextmanager
def _opened(path: Path) -> Iterator[_Content]:
    """Open a file; a missing file counts as empty."""
    try:
        fd = open_file(path)
    except FileNotFoundError:
        yield _Content(-1, 0, path)
        return
    try:
        size, end = os.fstat(fd).st_size, end_of(path)
        yield _Content(fd, size if end is None else min(size, end), path)
    finally:
        os.close(fd)


def _raw(path: Path, start: int = 0) -> Iterator[tuple[int, bytes]]:
    try:
        file = open_binary(path, buffering=1 << 20)
    except FileNotFoundError:
        return
    offset, end = start, end_of(path)
    with file:
        file.seek(start)
        for raw in read_lines(file, path):
            if end is not None and offset >= end:
                return
            yield offset, raw
            offset += len(raw)


class Damage(NamedTuple):
    """Bytes of a journal file that are not a sound line."""

    path: Path
    offset: int
    length: int
    torn: bool
    """an unfinished last line, left by a process that was killed while writing"""

    @property
    def what(self) -> str:
        """Human-readable description."""
        return "an unfinished last line" if self.torn else "a damaged line"

    @property
    def lender(self) -> str | None:
        """The run that owns the file, if it is shared."""
        return lender_of(self.path)

    def __str__(self) -> str:
        if self.lender is not None:
            return f"{self.lender}: {self.what} at byte {self.offset} of its journal; its work counts as not done here"
        return f"{self.path.name}: {self.what} at byte {self.offset} was set aside; its work counts as not done"


def cut_damage(damage: Iterable[Damage], aside: Path) -> None:
    """Move damaged bytes of a run's own journals into a folder. The caller is their only writer."""
    by_file: dict[Path, list[Damage]] = {}
    for spot in damage:
        by_file.setdefault(spot.path, []).append(spot)
    for path, spots in by_file.items():
        _cut_out(path, spots, aside)


def _cut_out(path: Path, damage: list[Damage], aside: Path) -> None:
    make_directory(aside)
    unseal(path)
    with os.fdopen(open_file(path, os.O_RDWR), "r+b") as file:
        with (aside / path.name).open("ab") as backup:
            for spot in damage:
                file.seek(spot.offset)
                _copy(file.read, backup.write, spot.length - 1)
                backup.write(file.read(1).rstrip(b"\n") + b"\n")
            backup.flush()
            os.fsync(backup.fileno())
        if all(spot.torn for spot in damage):
            file.truncate(damage[0].offset)
            os.fsync(file.fileno())
            return
        with replacing(path) as repaired:
            position = 0
            for start, length in [(spot.offset, spot.length) for spot in damage] + [(path.stat().st_size, 0)]:
                file.seek(position)
                _copy(file.read, repaired.write, start - position)
                position = start + length


def _copy(read: Callable[[int], bytes], write: Callable[[bytes], int], length: int) -> None:
    while length > 0 and (chunk := read(min(length, 1 << 20))):
        write(chunk)
        length -= len(chunk)

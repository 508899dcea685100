"""Journal lines: each is a JSON object whose last field, `sum`, is an xxh3 checksum of the bytes before it.

    {"key":"…","sample":"a",…,"sum":"9a1b3c5d7e9f0a2b"}

The checksum covers every byte of the line up to, not including, `,"sum":`. A line counts only if it ends in a
newline and its checksum matches, so a torn or corrupt line is ignored and its trial is run again.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec.json import decode, encode
from xxhash import xxh3_64_hexdigest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_TAIL = len(b',"sum":"0123456789abcdef"}')
_WINDOW: Final = 8 << 20
"""bytes that are searched at once, so that other threads of the process are not kept waiting"""


def seal(body: bytes) -> bytes:
    """Turn an encoded JSON object into a journal line."""
    head = body[:-1]
    return b'%b,"sum":"%b"}\n' % (head, xxh3_64_hexdigest(head).encode())


def with_source(line: bytes, source: str) -> bytes:
    """Return a sound line (without its newline) for copying into another run: sealed again, with its source.

    A copy of a copy keeps the first source, the run that did the work.
    """
    head = line[:-_TAIL]
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
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
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


def scan(path: Path, start: int = 0) -> Iterator[Line]:
    """Yield every line of a journal file from an offset on, sound or not. A missing file has none."""
    for offset, raw in _raw(path, start):
        whole = raw.endswith(b"\n")
        data = raw[:-1] if whole else raw
        yield Line(offset, data, whole and is_sound(data), whole)


def scan_raw(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the whole lines of a journal file, unchecked, with their offsets: for readers that need only a few."""
    return ((offset, raw[:-1]) for offset, raw in _raw(path) if raw.endswith(b"\n"))


def search(path: Path, words: bytes) -> Iterator[Line]:
    """Yield the sound lines of a journal file that contain these bytes, without reading the others line by line."""
    for start, data in find_lines(path, words):
        if is_sound(data):
            yield Line(start, data, sound=True, whole=True)


def find_lines(path: Path, words: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and text of each whole line of a file that contains these bytes. A missing file has none."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as content:
            position = 0
            while position < size:
                match = content.find(words, position, position + _WINDOW + len(words) - 1)
                if match < 0:
                    position += _WINDOW
                    continue
                start, end = content.rfind(b"\n", 0, match) + 1, content.find(b"\n", match)
                if end < 0:
                    return
                yield start, content[start:end]
                position = end + 1


def _raw(path: Path, start: int = 0) -> Iterator[tuple[int, bytes]]:
    try:
        file = path.open("rb", buffering=1 << 20)
    except FileNotFoundError:
        return
    offset = start
    with file:
        file.seek(start)
        for raw in file:
            yield offset, raw
            offset += len(raw)

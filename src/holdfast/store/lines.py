"""How a journal line looks: one JSON object, its last field `sum` an xxh3 checksum of the bytes before it.

    {"key":"…","sample":"a",…,"sum":"9a1b3c5d7e9f0a2b"}

The checksum covers every byte of the line up to, not including, `,"sum":`. A line counts only if it ends in a
newline and its checksum fits, so a torn or rotten line is owed again, never trusted and never a crash.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from xxhash import xxh3_64_hexdigest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_MARK = b',"sum":"'
_TAIL = len(_MARK) + 16 + len(b'"}')


def seal(body: bytes) -> bytes:
    """Turn an encoded JSON object into a journal line."""
    head = body[:-1]
    return b'%b,"sum":"%b"}\n' % (head, xxh3_64_hexdigest(head).encode())


def is_sound(line: bytes) -> bool:
    """Whether a line, without its newline, is whole and unchanged."""
    head, tail = line[:-_TAIL], line[-_TAIL:]
    return tail.startswith(_MARK) and tail.endswith(b'"}') and tail[len(_MARK) : -2] == xxh3_64_hexdigest(head).encode()


class Line(NamedTuple):
    """A line found in a journal file."""

    offset: int
    data: bytes
    """without the newline"""
    sound: bool
    whole: bool
    """False for a last line that has no newline"""


def scan(path: Path) -> Iterator[Line]:
    """Every line of a journal file, good or bad, in order. A missing file has none."""
    try:
        file = path.open("rb", buffering=1 << 20)
    except FileNotFoundError:
        return
    offset = 0
    with file:
        for raw in file:
            whole = raw.endswith(b"\n")
            data = raw[:-1] if whole else raw
            yield Line(offset, data, whole and is_sound(data), whole)
            offset += len(raw)

"""Search for a text in transcripts, ignoring case, in a helper process.

The needle is encoded as JSON and looked for in the raw lines, which is fast. A hit might be a key or a part of an
escape sequence, so it is decoded before it counts, unless it is certainly inside a text. Rows are searched in their
order, in windows that grow, so that the first hits come at once.

Run as a program, this module is the helper: it reads a job from standard input and writes row numbers to its output.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from array import array
from bisect import bisect_right
from contextlib import suppress
from threading import Event, Thread
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgspec

from holdfast.store.files import UNREADABLE, open_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from io import BufferedReader

    from holdfast.report.trial_table import TrialTable

    Read = Callable[[int, int, int], bytes]
    """returns bytes of a file, by its number, an offset and a size; fewer if the file has become shorter"""

_FIRST_WINDOW: Final = 512
_LARGEST_WINDOW: Final = 32_768
"""rows"""
_SPAN: Final = 4 << 20
"""bytes that are searched at once"""
_GAP: Final = 16 << 10
"""bytes between two lines that are searched along with them"""
_LONGEST_ESCAPE: Final = 6
_FILE_SHIFT: Final = 48
_OFFSET: Final = (1 << _FILE_SHIFT) - 1
"""a place is the number of a file, and an offset in it"""
_OPAQUE: Final = frozenset({"role", "type", "id", "tool_call_id"})
"""keys in transcripts whose values are not part of what was said"""
_TEXT_KEYS: Final = (b'"content":', b'"output":', b'"text":', b'"arguments":')
"""keys whose values always count"""


class _Job(msgspec.Struct):
    """A search for the helper process; `at` and `length` of the rows follow as raw arrays."""

    text: str
    files: list[str]
    rows: int


class _Mark(msgspec.Struct):
    output: str = ""


class _Transcript(msgspec.Struct):
    """The parts of an output in which texts are found."""

    messages: Any
    output: str
    state: Any = None
    calls: Any = None
    trace: Any = None
    marks: list[_Mark] = []


_transcript: Final = msgspec.json.Decoder(_Transcript)


def fold(text: str) -> str:
    """Return a text in lower case, character by character: every character stays one, and ASCII stays ASCII."""
    if text.isascii():
        return text.lower()
    return "".join([low if len(low := c.lower()) == 1 and low.isascii() == c.isascii() else c for c in text])


def contains_text(line: bytes, folded: str) -> bool:
    """Return True if what was said in a transcript contains a text that is already folded."""
    try:
        transcript = _transcript.decode(line)
    except UNREADABLE:
        return False  # the line was cut off or replaced meanwhile
    replies = [transcript.output, *(mark.output for mark in transcript.marks)]
    parts = replies, transcript.messages, transcript.state, transcript.calls, transcript.trace
    return any(folded in fold(text) for part in parts for text in _texts(part))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in _OPAQUE and not (key == "url" and isinstance(item, str) and item.startswith("data:")):
                yield from _texts(item)


class _Needle(NamedTuple):
    """A text to be searched for."""

    folded: str
    piece: bytes
    """bytes, in lower case, that every line with the text contains; empty if there are no such bytes"""
    whole: bool
    """the piece is the whole text"""

    @classmethod
    def of(cls, text: str) -> _Needle:
        folded = fold(text)
        pieces = [msgspec.json.encode(piece)[1:-1].lower() for piece in re.split(r"[^\x00-\x7f]+", folded)]
        return cls(folded, max(pieces, key=len), len(pieces) == 1)


def search_lines(read: Read, at: Any, length: Any, text: str) -> Iterator[list[int]]:
    """Yield the rows whose transcript contains a text, window by window."""
    needle = _Needle.of(text)
    start, size = 0, _FIRST_WINDOW
    while start < len(at):
        rows = [row for row in range(start, min(start + size, len(at))) if length[row]]
        rows.sort(key=at.__getitem__)
        yield sorted(_search_window(read, at, length, rows, needle))
        start, size = start + size, min(size * 2, _LARGEST_WINDOW)


def _search_window(read: Read, at: Any, length: Any, rows: list[int], needle: _Needle) -> Iterator[int]:
    first = 0
    while first < len(rows):
        begin = at[rows[first]]
        last = first
        end = begin + length[rows[first]]
        while last + 1 < len(rows):
            row = rows[last + 1]
            if at[row] - end > _GAP or at[row] + length[row] - begin > _SPAN:
                break
            end = at[row] + length[row]
            last += 1
        span = read(begin >> _FILE_SHIFT, begin & _OFFSET, end - begin)
        starts = [at[row] - begin for row in rows[first : last + 1]]
        for number in _search_span(span, starts, [length[row] for row in rows[first : last + 1]], needle):
            yield rows[first + number]
        first = last + 1


def _search_span(span: bytes, starts: list[int], lengths: list[int], needle: _Needle) -> Iterator[int]:
    """Yield the numbers of the lines of a span that contain a text."""
    if not needle.piece:
        for number, (start, size) in enumerate(zip(starts, lengths, strict=True)):
            if contains_text(span[start : start + size], needle.folded):
                yield number
        return
    lowered = span.lower()
    place = lowered.find(needle.piece)
    while place >= 0:
        number = bisect_right(starts, place) - 1
        start = starts[number]
        end = start + lengths[number]
        if place < end and (
            (needle.whole and _certainly_text(lowered, start, place)) or contains_text(span[start:end], needle.folded)
        ):
            yield number
        place = lowered.find(needle.piece, max(end, place + 1))


def _certainly_text(lowered: bytes, start: int, place: int) -> bool:
    """Return True if a hit is inside a JSON string that is text, and does not begin within an escape sequence."""
    if lowered.find(b"\\", max(start, place - _LONGEST_ESCAPE), place) >= 0:
        return False
    quote = lowered.rfind(b'"', start, place)
    if quote < 0 or lowered[quote - 1] == 92:  # an escaped quotation mark: the string begins earlier
        return False
    return lowered[max(start, quote - 12) : quote].endswith(_TEXT_KEYS)


class TextSearch:
    """A search in a helper process. Iterate over it once, for the rows as they are found.

    The caller holds the lock of the table while the search starts.
    """

    def __init__(self, table: TrialTable, text: str) -> None:
        job = _Job(text, [str(file) for file in table.files], table.rows)
        at, length = array("Q", bytes(8 * table.rows)), array("I", bytes(4 * table.rows))
        for number, file, offset, size in table.select("n, file, at, len", "file IS NOT NULL"):
            at[number], length[number] = file << _FILE_SHIFT | offset, size
        data = msgspec.json.encode(job) + b"\n" + at.tobytes() + length.tobytes()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "holdfast.apps.view.search"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._sender = Thread(target=_send, args=(self._process.stdin, data), daemon=True)
        self._sender.start()

    def __iter__(self) -> Iterator[int]:
        process = self._process
        stdout = cast("BufferedReader", process.stdout)
        try:
            while chunk := stdout.read1(1 << 16):
                chunk += stdout.read(-len(chunk) % 4)
                yield from memoryview(chunk[: len(chunk) // 4 * 4]).cast("I")  # the last one may be cut off
            if process.wait():
                raise OSError(f"the search for a text ended with exit code {process.returncode}")
        finally:
            self.stop()
            self._sender.join()
            stdout.close()

    def stop(self) -> None:
        """End the helper process."""
        self._process.kill()
        self._process.wait()


class TextHits:
    """The rows that contain a text in their transcript or sample id, collected while a helper process searches."""

    def __init__(self, table: TrialTable, text: str) -> None:
        self._flags = bytearray(table.rows)
        for row in _rows_by_id(table, _Needle.of(text)):
            self._flags[row] = 1
        self._search = TextSearch(table, text)
        self._error: OSError | None = None
        self._ended = Event()
        Thread(target=self._collect, daemon=True).start()

    def _collect(self) -> None:
        try:
            for row in self._search:
                self._flags[row] = 1
        except OSError as error:
            self._error = error
        finally:
            self._ended.set()

    def flags(self, wait: float | None) -> tuple[bytes, bool]:
        """Wait up to `wait` seconds; return a byte of 1 for each row found so far, and True if the search has ended."""
        complete = self._ended.wait(wait)
        if self._error is not None:
            raise self._error
        return bytes(self._flags), complete

    def stop(self) -> None:
        """End the search."""
        self._search.stop()


def _rows_by_id(table: TrialTable, needle: _Needle) -> Iterator[int]:
    """Yield the rows whose sample id contains a text."""
    where, values = ("instr(lower(sample), ?)", [needle.folded]) if needle.folded.isascii() else ("1", [])
    for number, sample in table.select("n, sample", where, values):
        if needle.folded in fold(sample):
            yield number


def _send(pipe: IO[bytes], data: bytes) -> None:
    with suppress(OSError), pipe:  # the helper may have ended, which the reader notices
        pipe.write(data)


def main() -> None:
    """Do one job: search, and write row numbers as they are found."""
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=_Job)
    at, length = array("Q"), array("I")
    at.frombytes(sys.stdin.buffer.read(job.rows * 8))
    length.frombytes(sys.stdin.buffer.read(job.rows * 4))
    files = [open_file(file) for file in job.files]

    def read(file: int, offset: int, size: int) -> bytes:
        return os.pread(files[file], size, offset)  # a mapped file must not be truncated while it is read

    with suppress(BrokenPipeError):  # nobody waits for the result
        for rows in search_lines(read, at, length, job.text):
            if rows:
                sys.stdout.buffer.write(array("I", rows))
                sys.stdout.buffer.flush()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # Ctrl-C ends the viewer, and its helpers with it
        sys.exit(1)

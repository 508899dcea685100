"""Outputs of a run as rows of equal length, in the order of their lines, for columns in whatever order.

A row is a few numbers side by side. Putting rows in another order is one operation for each trial, and taking a column
out of them or putting it in is one operation for all.

The outputs of a large run are read by several processes: each takes the next chunk of the journals until none is left.
Run as a program, this module is one of them, and writes its rows to its output.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from array import array
from contextlib import contextmanager, suppress
from itertools import accumulate, chain
from pathlib import Path
from struct import Struct as Layout
from struct import iter_unpack
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from holdfast.store.lines import is_sound, read_blocks
from holdfast.store.shared import journal_size, lender_of
from holdfast.view.table import NAN, TrialTable, join_place, many_key_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from holdfast.store.lines import LineBlock
    from holdfast.store.rundir import RunDir

_LARGE: Final = 32 << 20
"""bytes of outputs from which on helper processes read them"""
_CHUNK: Final = 16 << 20
"""bytes that a process takes at once"""
_MOST_CHUNKS: Final = 4_000
"""so many numbers fit into a pipe"""
_MOST_HELPERS: Final = 3
_NUMBER: Final = Layout("=I")
COLUMNS: Final = (
    *("tokens", "input_tokens", "output_tokens", "cost", "seconds", "first_token", "started", "at"),
    *("turns", "attempt", "stop", "source", "length", "stopped"),
)
"""columns that outputs fill, as a row holds them: larger numbers first, so that each is at a multiple of its size"""
_TYPES: Final[dict[str, Any]] = {name: TrialTable(())[name].typecode for name in COLUMNS}
_SIZES: Final = {name: array(code).itemsize for name, code in _TYPES.items()}
_OFFSETS: Final = dict(zip(COLUMNS, accumulate(_SIZES.values(), initial=0), strict=False))
_WIDTH: Final = -(-sum(_SIZES.values()) // 8) * 8
"""bytes of a row"""
_pack_row: Final = Layout("=" + "".join(_TYPES.values()) + "x" * (_WIDTH - sum(_SIZES.values()))).pack
NO_OUTPUT: Final = _pack_row(*(NAN if code in "df" else 0 for code in _TYPES.values()))
"""the row of a trial without an output"""


class _Mark(msgspec.Struct):
    """The end of a turn, of which only the number counts here."""


class _Usage(msgspec.Struct, gc=False):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cost: float | None = None


class _Timing(msgspec.Struct, gc=False):
    started: float
    seconds: float
    first_token: float | None = None


class _Output(msgspec.Struct, gc=False):
    """The fields of an output that have columns. Those of `records` would have more, and take longer to make."""

    key: str
    attempt: int
    turns: int
    stop: str
    usage: _Usage
    timing: _Timing
    marks: tuple[_Mark, ...] = ()
    stopped_by: str | None = None
    source: str | None = None


_output: Final = msgspec.json.Decoder(_Output)


class _Chunk(NamedTuple):
    """A part of a journal: the lines that begin in it."""

    file: int
    """number of the journal"""
    start: int
    stop: int


class _Job(msgspec.Struct):
    """What a helper process needs to know."""

    root: str
    files: list[str]
    chunks: list[_Chunk]


class _Head(msgspec.Struct):
    """The line before the rows that a helper process writes."""

    values: dict[str, dict[str, int]]
    chunks: list[tuple[int, int]]


class _Numbers(dict[str, int]):
    """Numbers of texts, in the order in which they were asked for first; the empty text has 0."""

    def __init__(self) -> None:
        super().__init__({"": 0})

    def __missing__(self, text: str) -> int:
        number = self[text] = len(self)
        return number


class OutputRows:
    """Outputs of a run, chunk by chunk."""

    def __init__(self) -> None:
        self.values = {"stop": _Numbers(), "source": _Numbers()}
        """numbers of the texts in columns of texts"""
        self._chunks: list[tuple[int, int]] = []
        """number of each chunk, and how many outputs it has"""
        self._keys = bytearray()
        self._rows = bytearray()

    def pairs(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the key and the row of each output, in the order of the journals."""
        keys, rows = memoryview(self._keys), memoryview(self._rows)
        starts = accumulate((count for _, count in self._chunks), initial=0)
        parts = [(chunk, start, count) for (chunk, count), start in zip(self._chunks, starts, strict=False)]
        for _, start, count in sorted(parts):
            some_keys = iter_unpack("16s", keys[start * 16 : (start + count) * 16])
            some_rows = iter_unpack(f"{_WIDTH}s", rows[start * _WIDTH : (start + count) * _WIDTH])
            yield from zip(chain.from_iterable(some_keys), chain.from_iterable(some_rows), strict=True)

    def __len__(self) -> int:
        return len(self._keys) // 16

    def add(self, chunk: int, keys: list[str], rows: list[bytes]) -> None:
        """Add outputs of a chunk."""
        self._chunks.append((chunk, len(keys)))
        self._keys += many_key_bytes(keys)
        self._rows += b"".join(rows)

    def write(self, file: IO[bytes]) -> None:
        """Write everything to a file."""
        file.write(msgspec.json.encode(_Head({**self.values}, self._chunks)) + b"\n")
        file.write(self._keys)
        file.write(self._rows)

    def extend(self, file: IO[bytes]) -> None:
        """Add outputs that were written to a file; raise ValueError where some are missing."""
        head = msgspec.json.decode(file.readline(), type=_Head)
        count = sum(count for _, count in head.chunks)
        self._chunks += head.chunks
        self._keys += file.read(count * 16)
        rows = bytearray(file.read(count * _WIDTH))
        if len(rows) != count * _WIDTH:
            raise ValueError("rows are missing")
        for name, numbers in head.values.items():
            codes = array(_TYPES[name])
            codes.frombytes(column_of(rows, name))
            here = [self.values[name][text] for text in numbers]
            if here != list(numbers.values()):
                _set_column(rows, name, array(_TYPES[name], map(here.__getitem__, codes)))
        self._rows += rows


def _set_column(rows: bytearray, name: str, values: Any) -> None:
    place, step = _OFFSETS[name] // _SIZES[name], _WIDTH // _SIZES[name]
    numbers: Any = memoryview(rows).cast(_TYPES[name])
    numbers[place::step] = memoryview(values)


def column_of(rows: bytes | bytearray, name: str) -> bytes:
    """Return a column of rows that follow each other."""
    place, step = _OFFSETS[name] // _SIZES[name], _WIDTH // _SIZES[name]
    numbers: memoryview[Any] = memoryview(rows).cast(_TYPES[name])
    return numbers[place::step].tobytes()


def place_and_length(row: bytes) -> tuple[int, int]:
    """Return where the line of an output is, and its length."""
    return int.from_bytes(column_of(row, "at"), sys.byteorder), int.from_bytes(column_of(row, "length"), sys.byteorder)


def _read_chunks(job: _Job, numbers: Iterable[int]) -> OutputRows:
    outputs = OutputRows()
    for number in numbers:
        chunk = job.chunks[number]
        path = Path(job.root, job.files[chunk.file])
        lender = lender_of(path) or ""
        for block in read_blocks(path, chunk.start, chunk.stop):
            outputs.add(number, *_read_block(outputs.values, chunk.file, block, lender))
    return outputs


def _read_block(values: dict[str, _Numbers], file: int, block: LineBlock, lender: str) -> tuple[list[str], list[bytes]]:
    """Return the keys and the rows of the sound outputs in a block."""
    first = join_place(file, block.offset)
    bounds: Iterable[tuple[int, int]] = zip(block.starts, block.ends, strict=True)
    try:
        data = memoryview(block.data)[block.starts[0] : block.ends[-1]]
        every = _output.decode_lines(data) if block.all_sound() else None
    except msgspec.DecodeError:
        every = None
    if every is None:
        lines = zip(bounds, block.lines(), strict=True)
        sound = [(each, output) for each, text in lines if is_sound(text) and (output := _decode(text)) is not None]
        bounds, every = [each for each, _ in sound], [output for _, output in sound]
    rows, stops, sources = [], values["stop"], values["source"]
    for (start, end), output in zip(bounds, every, strict=True):
        usage, timing = output.usage, output.timing
        incoming = NAN if usage.input_tokens is None else usage.input_tokens
        outgoing = NAN if usage.output_tokens is None else usage.output_tokens
        rows.append(  # in the order of `COLUMNS`
            _pack_row(
                incoming + outgoing,
                incoming,
                outgoing,
                NAN if usage.cost is None else usage.cost,
                timing.seconds,
                NAN if timing.first_token is None else timing.first_token,
                timing.started,
                first + start,
                output.turns,
                output.attempt,
                stops[output.stop],
                sources[output.source or lender],
                end - start,
                0 if output.stopped_by is None else len(output.marks) or 1,
            )
        )
    return [output.key for output in every], rows


def _decode(line: bytes) -> _Output | None:
    try:
        return _output.decode(line)
    except msgspec.DecodeError:
        return None  # sound, but not an output


@contextmanager
def reading_outputs(rundir: RunDir) -> Iterator[Callable[[], OutputRows]]:
    """Begin to read the outputs of a run, many of them in helper processes.

    Yields a function that helps them, waits for them and returns all sound outputs. It raises ValueError if a helper
    has failed, and OSError if a journal cannot be read.
    """
    job = _Job(str(rundir.path), output_files(rundir), [])
    sizes = [journal_size(rundir.path / file) for file in job.files]
    step = max(_CHUNK, sum(sizes) // _MOST_CHUNKS)
    for file, size in enumerate(sizes):
        job.chunks += [_Chunk(file, start, min(size, start + step)) for start in range(0, size, step)]
    if sum(sizes) < _LARGE:
        yield lambda: _read_chunks(job, range(len(job.chunks)))
        return
    claims, end = os.pipe()
    os.write(end, b"".join(map(_NUMBER.pack, range(len(job.chunks)))))
    os.close(end)
    helpers = [_start_helper(job, claims) for _ in range(max(1, min(_MOST_HELPERS, (os.cpu_count() or 1) - 1)))]

    def collect() -> OutputRows:
        outputs = _read_chunks(job, _claim(claims))
        for helper in helpers:
            assert helper.stdout is not None
            outputs.extend(helper.stdout)
        return outputs

    try:
        yield collect
    finally:
        os.close(claims)
        for helper in helpers:
            assert helper.stdout is not None
            helper.stdout.close()
            helper.kill()
            helper.wait()


def output_files(rundir: RunDir) -> list[str]:
    """Return the journals of outputs, relative to the run directory."""
    return [str(path.relative_to(rundir.path)) for path in rundir.journals("outputs")]


def _start_helper(job: _Job, claims: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "holdfast.view.outputs", str(claims)]
    helper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[claims])
    assert helper.stdin is not None
    with suppress(BrokenPipeError), helper.stdin as pipe:  # a helper that has ended is noticed when its rows are read
        pipe.write(msgspec.json.encode(job))
    return helper


def _claim(claims: int) -> Iterator[int]:
    """Yield numbers of chunks that no other process takes: they are in a pipe, and reading one takes it out."""
    while number := os.read(claims, _NUMBER.size):
        yield _NUMBER.unpack(number)[0]


def main() -> None:
    """Read chunks of outputs, and write their rows to standard output."""
    gc.disable()  # nothing here has cycles, and looking for them takes half of the time
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=_Job)
    _read_chunks(job, _claim(int(sys.argv[1]))).write(sys.stdout.buffer)


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, BrokenPipeError):  # the viewer has ended, and its helpers end with it
        sys.exit(1)

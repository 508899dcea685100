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
from operator import add, sub
from pathlib import Path
from struct import Struct as Layout
from struct import iter_unpack, pack
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from holdfast.store.lines import is_sound, read_blocks
from holdfast.store.records import Timing, Usage  # noqa: TC001 - msgspec reads them
from holdfast.store.shared import journal_size, lender_of
from holdfast.view.table import NAN, NUMBERS, TrialTable, join_place, many_key_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

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
_NAMES: Final = (*(name for name in NUMBERS if name != "score"), "stop", "source", "stopped", "at", "length")
_TYPES: Final[dict[str, Any]] = {name: TrialTable(())[name].typecode for name in _NAMES}
_SIZES: Final = {name: array(code).itemsize for name, code in _TYPES.items()}
COLUMNS: Final = tuple(sorted(_NAMES, key=_SIZES.__getitem__, reverse=True))
"""columns that outputs fill; those with larger numbers first, so that each is at a multiple of its size"""
_OFFSETS: Final = dict(zip(COLUMNS, accumulate(map(_SIZES.__getitem__, COLUMNS), initial=0), strict=False))
_WIDTH: Final = -(-sum(_SIZES.values()) // 8) * 8
"""bytes of a row"""


class _Mark(msgspec.Struct):
    """The end of a turn, of which only the number counts here."""


class _Output(msgspec.Struct, gc=False):
    """The fields of an output that have columns."""

    key: str
    attempt: int
    turns: int
    stop: str
    usage: Usage
    timing: Timing
    marks: list[_Mark] = []
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
    rows: int


class OutputRows:
    """Outputs of a run, one after the other."""

    def __init__(self) -> None:
        self.values = {"stop": {"": 0}, "source": {"": 0}}
        """numbers of the texts in columns of texts"""
        self._keys = bytearray()
        self._rows = bytearray()

    def pairs(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the key and the row of each output."""
        keys, rows = iter_unpack("16s", self._keys), iter_unpack(f"{_WIDTH}s", self._rows)
        return zip(chain.from_iterable(keys), chain.from_iterable(rows), strict=True)

    def __len__(self) -> int:
        return len(self._keys) // 16

    def add(self, keys: list[str], columns: dict[str, Sequence[Any]]) -> None:
        """Add outputs, given as columns."""
        self._keys += many_key_bytes(keys)
        self._rows += _to_rows(columns, len(keys))

    def write(self, file: IO[bytes]) -> None:
        """Write everything to a file."""
        file.write(msgspec.json.encode(_Head(self.values, len(self))) + b"\n")
        file.write(self._keys)
        file.write(self._rows)

    def extend(self, file: IO[bytes]) -> None:
        """Add outputs that were written to a file; raise ValueError where some are missing."""
        head = msgspec.json.decode(file.readline(), type=_Head)
        self._keys += file.read(head.rows * 16)
        rows = bytearray(file.read(head.rows * _WIDTH))
        if len(rows) != head.rows * _WIDTH:
            raise ValueError("rows are missing")
        for name, numbers in head.values.items():
            codes = array(_TYPES[name])
            codes.frombytes(column_of(rows, name))
            here = _codes(self.values[name], list(numbers))
            if here != list(numbers.values()):
                _set_column(rows, name, array(_TYPES[name], map(here.__getitem__, codes)))
        self._rows += rows


def _to_rows(columns: dict[str, Sequence[Any]], count: int) -> bytearray:
    rows = bytearray(count * _WIDTH)
    for name, values in columns.items():
        # faster than making an array of the values
        _set_column(rows, name, memoryview(pack(f"={count}{_TYPES[name]}", *values)).cast(_TYPES[name]))
    return rows


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


NO_OUTPUT: Final = bytes(_to_rows({name: [NAN if code in "df" else 0] for name, code in _TYPES.items()}, 1))
"""the row of a trial without an output"""


def _read_chunks(job: _Job, chunks: Iterable[_Chunk]) -> OutputRows:
    outputs = OutputRows()
    for chunk in chunks:
        path = Path(job.root, job.files[chunk.file])
        for block in read_blocks(path, chunk.start, chunk.stop):
            _add_block(outputs, chunk.file, block, lender_of(path) or "")
    return outputs


def _add_block(outputs: OutputRows, file: int, block: LineBlock, lender: str) -> None:
    first = join_place(file, block.offset)
    places = [first + start for start in block.starts]
    lengths = list(map(sub, block.ends, block.starts))
    try:
        data = memoryview(block.data)[block.starts[0] : block.ends[-1]]
        every = _output.decode_lines(data) if block.all_sound() else None
    except msgspec.DecodeError:
        every = None
    if every is None:
        lines = zip(places, lengths, block.lines(), strict=True)
        sound = [(*line, output) for *line, text in lines if is_sound(text) and (output := _decode(text)) is not None]
        places, lengths = [place for place, _, _ in sound], [length for _, length, _ in sound]
        every = [output for _, _, output in sound]
    usages, timings = [output.usage for output in every], [output.timing for output in every]
    inputs = known([usage.input_tokens for usage in usages])
    tokens = known([usage.output_tokens for usage in usages])
    outputs.add(
        [output.key for output in every],
        {
            "turns": [output.turns for output in every],
            "attempt": [output.attempt for output in every],
            "tokens": list(map(add, inputs, tokens)),
            "input_tokens": inputs,
            "output_tokens": tokens,
            "cost": known([usage.cost for usage in usages]),
            "seconds": [timing.seconds for timing in timings],
            "first_token": known([timing.first_token for timing in timings]),
            "started": [timing.started for timing in timings],
            "stop": _codes(outputs.values["stop"], [output.stop for output in every]),
            "source": _codes(outputs.values["source"], [output.source or lender for output in every]),
            "stopped": [0 if output.stopped_by is None else len(output.marks) or 1 for output in every],
            "at": places,
            "length": lengths,
        },
    )


def _decode(line: bytes) -> _Output | None:
    try:
        return _output.decode(line)
    except msgspec.DecodeError:
        return None  # sound, but not an output


def _codes(numbers: dict[str, int], texts: list[str]) -> list[int]:
    for text in dict.fromkeys(texts):
        numbers.setdefault(text, len(numbers))
    return [numbers[text] for text in texts]


def known(values: list[Any]) -> list[float]:
    """Return numbers with NaN for those that are unknown."""
    return [NAN if value is None else value for value in values] if None in values else values


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
        yield lambda: _read_chunks(job, job.chunks)
        return
    claims, end = os.pipe()
    os.write(end, b"".join(map(_NUMBER.pack, range(len(job.chunks)))))
    os.close(end)
    helpers = [_start_helper(job, claims) for _ in range(max(1, min(_MOST_HELPERS, (os.cpu_count() or 1) - 1)))]

    def collect() -> OutputRows:
        outputs = _read_chunks(job, _claim(job, claims))
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


def _claim(job: _Job, claims: int) -> Iterator[_Chunk]:
    """Yield chunks that no other process takes: their numbers are in a pipe, and reading one takes it out."""
    while number := os.read(claims, _NUMBER.size):
        yield job.chunks[_NUMBER.unpack(number)[0]]


def main() -> None:
    """Read chunks of outputs, and write their rows to standard output."""
    gc.disable()  # nothing here has cycles, and looking for them takes half of the time
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=_Job)
    _read_chunks(job, _claim(job, int(sys.argv[1]))).write(sys.stdout.buffer)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # Ctrl-C ends the viewer, and its helpers with it
        sys.exit(1)

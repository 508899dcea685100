"""Outputs of a run as rows of equal length, in the order of their lines, for columns in whatever order.

A row is a few numbers side by side. Putting rows in another order is one operation for each trial, and taking a column
out of them or putting it in is one operation for all.
"""

from __future__ import annotations

import sys
from array import array
from itertools import accumulate, chain
from struct import Struct as Layout
from struct import iter_unpack
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.store.lines import is_sound, read_blocks
from holdfast.store.shared import lender_of
from holdfast.view.table import NAN, TrialTable, join_place, many_key_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from holdfast.store.lines import LineBlock

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
        self.count = 0
        self.values = {"stop": _Numbers(), "source": _Numbers()}
        """numbers of the texts in columns of texts"""
        self._chunks: list[tuple[bytes, bytearray]] = []
        """keys and rows"""

    def pairs(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the key and the row of each output."""
        return chain.from_iterable(
            zip(chain.from_iterable(iter_unpack("16s", keys)), _split(rows), strict=True) for keys, rows in self._chunks
        )

    def short_pairs(self) -> Iterator[tuple[int, bytes]]:
        """Yield the short key and the row of each output; those of chunks that are appended later, too."""
        return chain.from_iterable(zip(short_keys(keys), _split(rows), strict=True) for keys, rows in self._chunks)

    def append(self, columns: dict[str, bytes], values: dict[str, list[str]]) -> None:
        """Append a chunk as `read_outputs` returns it."""
        rows = bytearray(columns["rows"])
        for name, texts in values.items():
            numbers = [self.values[name][text] for text in texts]
            if numbers != list(range(len(numbers))):
                codes = array(_TYPES[name], column_of(rows, name))
                _set_column(rows, name, array(_TYPES[name], map(numbers.__getitem__, codes)))
        self._chunks.append((columns["keys"], rows))
        self.count += len(columns["keys"]) // 16


def read_outputs(path: Path, file: int, start: int, stop: int) -> tuple[dict[str, bytes], dict[str, list[str]]]:
    """Return keys and rows of the sound outputs in a chunk of a numbered journal, and the texts of its numbers."""
    values = {"stop": _Numbers(), "source": _Numbers()}
    keys, rows = bytearray(), bytearray()
    lender = lender_of(path) or ""
    for block in read_blocks(path, start, stop):
        keys_of_block, rows_of_block = _read_block(values, file, block, lender)
        keys += many_key_bytes(keys_of_block)
        rows += b"".join(rows_of_block)
    return {"keys": bytes(keys), "rows": bytes(rows)}, {name: list(texts) for name, texts in values.items()}


def short_keys(keys: bytes | array[int]) -> memoryview[int]:
    """Return the first halves of keys as numbers, which are made faster than texts; few keys have the same, if any."""
    numbers: Any = memoryview(keys).cast("B").cast("Q")
    return numbers[::2]  # type: ignore[no-any-return]


def _split(rows: bytearray) -> Iterator[bytes]:
    return chain.from_iterable(iter_unpack(f"{_WIDTH}s", rows))


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

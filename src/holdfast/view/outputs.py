"""Outputs of a run as rows of equal length, in the order of their lines, for columns in whatever order."""

from __future__ import annotations

import sys
from itertools import chain
from struct import iter_unpack
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.store.lines import is_sound, read_blocks
from holdfast.store.output_rows import (
    WIDTH,
    OutputNumbers,
    TextNumbers,
    column_of,
    pack_outputs,
    renumber,
    text_numbers,
)
from holdfast.store.run_files import UNREADABLE
from holdfast.store.shared import lender_of
from holdfast.store.trial_table import join_place, many_key_bytes

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from holdfast.store.lines import LineBlock


class _Output(OutputNumbers, kw_only=True, gc=False):
    key: str


_output: Final = msgspec.json.Decoder(_Output)


class OutputRows:
    """Outputs of a run, chunk by chunk."""

    def __init__(self) -> None:
        self.count = 0
        self.values = text_numbers()
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
                renumber(rows, name, numbers)
        self._chunks.append((columns["keys"], rows))
        self.count += len(columns["keys"]) // 16


def read_outputs(path: Path, file: int, start: int, stop: int) -> tuple[dict[str, bytes], dict[str, list[str]]]:
    """Return keys and rows of the sound outputs in a chunk of a numbered journal, and the texts of its numbers."""
    values = text_numbers()
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
    return chain.from_iterable(iter_unpack(f"{WIDTH}s", rows))


def place_and_length(row: bytes) -> tuple[int, int]:
    """Return where the line of an output is, and its length."""
    return int.from_bytes(column_of(row, "at"), sys.byteorder), int.from_bytes(column_of(row, "length"), sys.byteorder)


def _read_block(
    values: dict[str, TextNumbers], file: int, block: LineBlock, lender: str
) -> tuple[list[str], list[bytes]]:
    """Return the keys and the rows of the sound outputs in a block."""
    first = join_place(file, block.offset)
    bounds: Iterable[tuple[int, int]] = zip(block.starts, block.ends, strict=True)
    try:
        data = memoryview(block.data)[block.starts[0] : block.ends[-1]]
        every = _output.decode_lines(data) if block.all_sound() else None
    except UNREADABLE:
        every = None
    if every is None:
        lines = zip(bounds, block.lines(), strict=True)
        sound = [(each, output) for each, text in lines if is_sound(text) and (output := _decode(text)) is not None]
        bounds, every = [each for each, _ in sound], [output for _, output in sound]
    if lender:
        for output in every:
            output.source = output.source or lender
    rows = pack_outputs(every, [(first + start, end - start) for start, end in bounds], values)
    return [output.key for output in every], rows


def _decode(line: bytes) -> _Output | None:
    try:
        return _output.decode(line)
    except UNREADABLE:
        return None  # sound, but not an output

"""The answers of many outputs, and the numbers that columns hold of them, read from the journals in few pieces.

Outputs are asked for in the dataset's order, a batch at a time, and journals have them nearly in this order. So most of
a batch is one piece of a journal.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.store.index import check_line
from holdfast.store.index_table import lines_of
from holdfast.store.lines import LineBlock, LineRef
from holdfast.store.output_rows import OutputNumbers
from holdfast.store.run_files import open_file
from holdfast.store.shared import lender_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.store.index_table import OutputFields, OutputTable

_GAP: Final = 1 << 13
"""bytes between two lines that are read faster than skipped"""
_PIECE: Final = 1 << 18
"""bytes that are read at once, unless a line is longer"""

_Place = tuple[int, int, int, int]
"""number of the file, offset and length of a line, and the number of its output among those asked for"""


class OutputText(OutputNumbers, kw_only=True, gc=False):
    """The fields of an output that a report uses."""

    output: str


_output_text = msgspec.json.Decoder(OutputText)


class TextReader:
    """Reads outputs, keeping the files open."""

    def __init__(self, outputs: OutputTable) -> None:
        self._outputs = outputs
        self._fds: dict[int, int] = {}
        """by the number of the file"""

    def read(self, fields: Sequence[OutputFields]) -> list[OutputText]:
        """Return outputs of which the index holds these fields; raise Fault for a damaged line."""
        outputs: dict[int, OutputText] = {}
        piece: list[_Place] = []
        file = start = end = 0
        for place in sorted([(*line, number) for number, line in enumerate(lines_of(fields))]):
            other, offset, length, _ = place
            if piece and (other != file or offset > end + _GAP or offset + length > start + _PIECE):
                self._read_piece(piece, outputs)
                piece = []
            if not piece:
                file, start = other, offset
            end = offset + length
            piece.append(place)
        if piece:
            self._read_piece(piece, outputs)
        return [outputs[number] for number in range(len(fields))]

    def _read_piece(self, places: Sequence[_Place], outputs: dict[int, OutputText]) -> None:
        """Read lines of one file that are near each other, in their order."""
        file, begin, _, _ = places[0]
        starts = [offset - begin for _, offset, _, _ in places]
        ends = [offset + length - begin for _, offset, length, _ in places]
        block = LineBlock(begin, os.pread(self._open(file), ends[-1], begin), starts, ends)
        lines, decode = block.lines(), _output_text.decode
        if not block.all_sound():
            for start, line in zip(starts, lines, strict=True):
                check_line(LineRef(self._outputs.files[file], begin + start, len(line)), line)
        lender = lender_of(self._outputs.files[file])
        for place, line in zip(places, lines, strict=True):
            output = outputs[place[3]] = decode(line)
            if lender is not None:
                output.source = output.source or lender

    def _open(self, file: int) -> int:
        fd = self._fds.get(file)
        if fd is None:
            fd = self._fds[file] = open_file(self._outputs.files[file])
        return fd

    def close(self) -> None:
        """Close the files."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

"""The answers of many outputs, read from the journals in few pieces.

Outputs are asked for in the dataset's order, a batch at a time, and journals have them nearly in this order. So most of
a batch is one piece of a journal.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.store.heads import check_line
from holdfast.store.lines import LineBlock, LineRef
from holdfast.store.run_files import open_file

if TYPE_CHECKING:
    from collections.abc import Sequence

_GAP: Final = 1 << 13
"""bytes between two lines that are read faster than skipped"""
_PIECE: Final = 1 << 18
"""bytes that are read at once, unless a line is longer"""

_Place = tuple[str, int, int, int]
"""path of the file, offset and length of a line, and the number of its output among those asked for"""


class OutputText(msgspec.Struct, gc=False):
    """The field of an output that a report uses."""

    output: str


_output_text = msgspec.json.Decoder(OutputText)


class TextReader:
    """Reads answers, keeping the files open."""

    def __init__(self) -> None:
        self._fds: dict[str, int] = {}

    def read(self, lines: Sequence[LineRef]) -> list[str]:
        """Return the answers of outputs; raise Fault for a damaged line."""
        texts: dict[int, str] = {}
        piece: list[_Place] = []
        file, start, end = "", 0, 0
        for place in sorted([(str(path), at, length, number) for number, (path, at, length) in enumerate(lines)]):
            other, offset, length, _ = place
            if piece and (other != file or offset > end + _GAP or offset + length > start + _PIECE):
                self._read_piece(piece, texts)
                piece = []
            if not piece:
                file, start = other, offset
            end = offset + length
            piece.append(place)
        if piece:
            self._read_piece(piece, texts)
        return [texts[number] for number in range(len(lines))]

    def _read_piece(self, places: Sequence[_Place], texts: dict[int, str]) -> None:
        """Read lines of one file that are near each other, in their order."""
        file, begin, _, _ = places[0]
        starts = [offset - begin for _, offset, _, _ in places]
        ends = [offset + length - begin for _, offset, length, _ in places]
        block = LineBlock(begin, os.pread(self._open(file), ends[-1], begin), starts, ends)
        lines, decode = block.lines(), _output_text.decode
        if not block.all_sound():
            for start, line in zip(starts, lines, strict=True):
                check_line(LineRef(Path(file), begin + start, len(line)), line)
        for place, line in zip(places, lines, strict=True):
            texts[place[3]] = decode(line).output

    def _open(self, file: str) -> int:
        fd = self._fds.get(file)
        if fd is None:
            fd = self._fds[file] = open_file(file)
        return fd

    def close(self) -> None:
        """Close the files."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

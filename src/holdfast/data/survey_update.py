"""Bring the survey of a file of JSON lines up to date: only lines that are new or changed are decoded and checked.

The result is the survey that reading the whole dataset gives. Where there is anything to object to, there is no result:
reading the whole dataset tells what.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import msgspec
from xxhash import xxh3_64_intdigest, xxh3_128, xxh3_128_digest

from holdfast.canonical import digest_bytes
from holdfast.data.dataset import MOST_SHAPES, Ids, Survey, SurveyBuilder
from holdfast.data.grouping import MOST_VALUES, Grouping
from holdfast.data.matching import WIDTH, CommonRows, match_rows
from holdfast.data.numbers import code_for, fit_code
from holdfast.data.panels import Panels
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence
    from pathlib import Path
    from typing import BinaryIO

    from holdfast.data.dataset import Dataset, RowCheck
    from holdfast.data.readers import Row
    from holdfast.spec.eval import Eval

_Value = TypeVar("_Value", bound="Hashable")

_CHUNK: Final = 1 << 20
_BOM: Final = b"\xef\xbb\xbf"


class Lines(NamedTuple):
    """The lines of a dataset's files, without blank ones."""

    digests: bytes
    """of their bytes, one behind the other"""
    file_digests: list[str]
    offsets: array[int]
    numbers: array[int]
    """from 1, in their file"""
    starts: list[int]
    """by file: the position of its first line"""
    files: list[Path]

    def place(self, position: int) -> tuple[Path, int, int]:
        """Return the file of a line, its number and its offset."""
        file = self.files[bisect_right(self.starts, position) - 1]
        return file, self.numbers[position], self.offsets[position]

    def where(self, position: int) -> str:
        """Return the place of a line, for messages."""
        path, number, _ = self.place(position)
        return f"{path}:{number}"


def read_lines(files: Sequence[Path]) -> Lines | None:
    """Digest files and their lines; None if one begins with a byte order mark, which belongs to no line."""
    digests, offsets, numbers, starts = bytearray(), array("Q"), array("I"), []
    file_digests = []
    for path in files:
        starts.append(len(numbers))
        checksum = xxh3_128()
        number, offset = 1, 0
        with path.open("rb") as file:
            while lines := file.readlines(_CHUNK):
                if offset == 0 and lines[0].startswith(_BOM):
                    return None
                checksum.update(b"".join(lines))
                places = accumulate(map(len, lines), initial=offset)
                rows = list(zip(places, range(number, number + len(lines)), lines, strict=False))
                number, offset = number + len(lines), offset + sum(map(len, lines))
                if any(map(bytes.isspace, lines)):
                    rows = [row for row in rows if not row[2].isspace()]
                digests += b"".join([xxh3_128_digest(line) for _, _, line in rows])
                offsets.extend([place for place, _, _ in rows])
                numbers.extend([line_number for _, line_number, _ in rows])
        file_digests.append(checksum.hexdigest())
    return Lines(bytes(digests), file_digests, offsets, numbers, starts, list(files))


class _Piece(NamedTuple):
    """Samples that follow each other, of one of two surveys."""

    is_new: bool
    """of the survey of new lines, not of the earlier one"""
    start: int
    length: int


def update_survey(
    spec: Eval, dataset: Dataset, earlier: Survey, earlier_lines: bytes, lines: Lines, check: RowCheck | None
) -> Survey | None:
    """Return the survey of changed files, from an earlier survey and the digests of the lines that it was made of.

    Each line has to be a sample. None if the files cannot be surveyed in this way.
    """
    if len(earlier.shapes) >= MOST_SHAPES:
        return None
    pieces, new_lines = _pieces(earlier_lines, lines.digests)
    kept = [piece for piece in pieces if not piece.is_new]
    kept_shapes = set().union(*(earlier.shape_rows[start : start + count] for _, start, count in kept))
    fields = {name for number, (names, _) in enumerate(earlier.shapes) if number in kept_shapes for name in names}
    builder = SurveyBuilder(spec, check, fields, must_differ=dataset.must_differ)
    try:
        for pair in _rows(lines, new_lines):
            builder.add(dataset.sample(pair))
        new = builder.conclude()
    except (HoldfastError, msgspec.DecodeError, UnicodeDecodeError, OSError):
        return None
    if new.unsendable is not None or builder.may_repeat_ids or _shares_ids(earlier.ids, kept, new.ids):
        return None
    survey = _join(earlier, new, pieces, lines)
    if any(len(survey.groupings[field]) > MOST_VALUES for field in spec.by) or not survey.count:
        return None
    return survey


def _pieces(earlier: bytes, now: bytes) -> tuple[list[_Piece], list[int]]:
    """Return the pieces that the lines of now consist of, and the positions of those that are new."""
    pieces: list[_Piece] = []
    new: list[int] = []
    position = 0
    for match in [*match_rows(earlier, now), CommonRows(len(now) // WIDTH, 0, 0)]:
        if position < match.new:
            pieces.append(_Piece(True, len(new), match.new - position))
            new.extend(range(position, match.new))
        if match.length:
            pieces.append(_Piece(False, match.old, match.length))
        position = match.new + match.length
    return pieces, new


def _rows(lines: Lines, positions: Sequence[int]) -> Iterator[tuple[str, Row]]:
    """Read some of the lines."""
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    opened: BinaryIO | None = None
    try:
        for position in positions:
            path, number, offset = lines.place(position)
            if opened is None or opened.name != str(path):
                if opened is not None:
                    opened.close()
                opened = path.open("rb")
            opened.seek(offset)
            yield f"{path}:{number}", decode(opened.readline())
    finally:
        if opened is not None:
            opened.close()


def _shares_ids(earlier: Ids, kept: Sequence[_Piece], new: Ids) -> bool:
    """Return True if one of the new ids seems to be among the earlier ones that are kept."""
    digests = frozenset(map(xxh3_64_intdigest, new.encoded()))
    return bool(digests) and not all(
        digests.isdisjoint(map(xxh3_64_intdigest, earlier.encoded(start, count))) for _, start, count in kept
    )


def _join(earlier: Survey, new: Survey, pieces: Sequence[_Piece], lines: Lines) -> Survey:
    """Put a survey together, with everything in the order in which it first occurs."""
    digests, asked = (
        b"".join([column[not is_new][start * WIDTH : (start + count) * WIDTH] for is_new, start, count in pieces])
        for column in ((new.digests, earlier.digests), (new.asked, earlier.asked))
    )
    both = earlier.panels.packed(), new.panels.packed()
    kinds, panel_rows = _join_columns(*both, pieces, first=both[0][0][0])
    shapes, shape_rows = _join_columns(
        (list(earlier.shapes), earlier.shape_rows), (list(new.shapes), new.shape_rows), pieces
    )
    groupings = {}
    for field, grouping in earlier.groupings.items():
        other = new.groupings[field]
        columns = (grouping.values, grouping.packed()), (other.values, other.packed())
        groupings[field] = Grouping.unpacked(*_join_columns(*columns, pieces))
    ids = Ids()
    for is_new, start, count in pieces:
        ids.extend(new.ids if is_new else earlier.ids, start, count)
    return Survey(
        count=len(digests) // WIDTH,
        digest=digest_bytes(digests),
        digests=digests,
        panels=Panels.unpacked(kinds, panel_rows),
        asked=asked,
        shapes={shape: lines.where(shape_rows.index(number)) for number, shape in enumerate(shapes)},
        shape_rows=shape_rows,
        groupings=groupings,
        ids=ids,
    )


_Column = tuple[list[_Value], "array[int]"]
"""different values, and the number of the value of each row"""


def _join_columns(
    earlier: _Column[_Value], new: _Column[_Value], pieces: Sequence[_Piece], first: _Value | None = None
) -> _Column[_Value]:
    """Join the pieces of two columns. Values are numbered as they first occur, except for the `first`."""
    numbers = {value: number for number, value in enumerate(earlier[0])}
    new_numbers = [numbers.setdefault(value, len(numbers)) for value in new[0]]
    code = code_for(len(numbers))
    new_rows, earlier_rows = array(code, [new_numbers[number] for number in new[1]]), fit_code(earlier[1], len(numbers))
    rows = array(code)
    for is_new, start, count in pieces:
        rows += (new_rows if is_new else earlier_rows)[start : start + count]
    values = list(numbers)
    order = list(dict.fromkeys(rows if first is None else chain([numbers[first]], rows)))
    if order != list(range(len(order))):
        renumbered = {number: place for place, number in enumerate(order)}
        rows = array(code, map(renumbered.__getitem__, rows))
    return [values[number] for number in order], fit_code(rows, len(order))

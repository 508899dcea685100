"""The columns of `results.json`, in which each trial is a line, read part by part."""

from __future__ import annotations

import os
import re
import struct
from array import array
from functools import cache
from itertools import pairwise, repeat
from operator import add, attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from holdfast.store.run_files import UNREADABLE, open_binary, open_file
from holdfast.store.trial_table import CODES, NAN, TrialTable, field_column, score_column, status_column

if TYPE_CHECKING:
    from collections.abc import Iterator

_BLOCK: Final = 1 << 20
"""bytes that are decoded at once"""
_LAST: Final = b"\n]}\n"
"""the end of the file"""
_NOT_IN_STRUCTS: Final = re.compile(r"[\\\"\x00-\x1f]")
"""characters that no field of a struct may have in its name"""
_COMMA: Final = ord(",")
_ERROR: Final = CODES["error"]
_VERDICT_CODES: Final = {"": 0, **CODES}
Verdict = Literal["passed", "failed", "error", "skipped", "not_reached"]


class _Grade(msgspec.Struct, frozen=True, gc=False):
    status: Verdict | Literal[""] = ""
    """empty for a grader that does not look at the row"""
    score: float | None = None


def find_chunks(path: Path, names: list[str], step: int) -> list[tuple[int, int]] | None:
    """Return where chunks of whole lines begin and end.

    Returns None if the file is not one trial to a line, or has names of graders or fields that cannot be decoded.
    """
    if any(map(_NOT_IN_STRUCTS.search, names)):
        return None
    with open_binary(path) as file:
        if not file.readline().endswith(b'"trials":[\n'):
            return None
        bounds = [file.tell()]
        end = file.seek(-len(_LAST), os.SEEK_END)
        if file.read() != _LAST:
            return None
        while bounds[-1] < end:
            file.seek(min(bounds[-1] + step, end))
            file.readline()
            bounds.append(file.tell())
    return list(pairwise(bounds))


def read_results(
    root: str, graders: list[str], fields: list[str], start: int, stop: int
) -> tuple[dict[str, bytes], dict[str, list[str]], list[tuple[int, str, bool]]]:
    """Return columns, texts and errors of a chunk; raises ValueError if a line is not as expected."""
    table, errors = TrialTable(graders), list[tuple[int, str, bool]]()
    for name in fields:
        table.set_field(name, [""], array("I"), None)
    decode = _decoder(tuple(graders), tuple(fields)).decode
    try:
        for lines in _lists(Path(root, "results.json"), start, stop):
            _add(table, len(graders), fields, decode(lines), errors)
    except UNREADABLE as error:
        raise ValueError("unexpected results") from error
    columns = {name: table[name].tobytes() for name in _columns(graders, fields)}
    return columns, {field_column(name): table.values[field_column(name)] for name in fields}, errors


def _columns(graders: list[str], fields: list[str]) -> Iterator[str]:
    yield from ("ids", "id_starts", "keys", "trial", "status", "score")
    for number in range(len(graders)):
        yield from (status_column(number), score_column(number))
    yield from map(field_column, fields)


@cache
def _decoder(graders: tuple[str, ...], fields: tuple[str, ...]) -> msgspec.json.Decoder[list[Any]]:
    grades = msgspec.defstruct(
        "Grades",
        [(f"grader{number}", _Grade, _Grade()) for number in range(len(graders))],
        rename={f"grader{number}": name for number, name in enumerate(graders)},
        gc=False,
    )
    breakdown = msgspec.defstruct(
        "Breakdown",
        [(f"field{number}", str, "") for number in range(len(fields))],
        rename={f"field{number}": name for number, name in enumerate(fields)},
        frozen=True,
        gc=False,
    )
    result = msgspec.defstruct(
        "Result",
        [
            ("sample", str),
            ("trial", int),
            ("key", str),
            ("status", Verdict),
            ("score", float | None),
            ("output", msgspec.Raw),
            ("grades", grades),
            ("by", breakdown, breakdown()),
        ],
        gc=False,
    )
    return msgspec.json.Decoder(list[result])  # type: ignore[valid-type]


def _lists(path: Path, start: int, stop: int) -> Iterator[memoryview]:
    """Yield the lines between two offsets as JSON lists, many at once.

    They are read into the same memory again and again, from the newline before the first of them on: it becomes the
    opening bracket, and the comma behind the last one becomes the closing bracket. So nothing is copied.
    """
    buffer, place = bytearray(_BLOCK), start - 1
    with os.fdopen(open_file(path), "rb", buffering=0) as file:
        while place < stop - 1:
            file.seek(place)
            size = file.readinto(memoryview(buffer)[: stop - place])
            end = buffer.rfind(b"\n", 1, size)
            if end < 0:
                if size < len(buffer):
                    raise ValueError("the file has become shorter")
                buffer = bytearray(2 * len(buffer))  # for a line that is longer than a block
                continue
            place += end
            end -= buffer[end - 1] == _COMMA
            buffer[0], buffer[end] = b"[]"
            yield memoryview(buffer)[: end + 1]


def _add(
    table: TrialTable, graders: int, fields: list[str], batch: list[Any], errors: list[tuple[int, str, bool]]
) -> None:
    first = len(table)
    table.extend([each.sample for each in batch], [each.trial for each in batch], [each.key for each in batch])
    statuses = bytes([CODES[each.status] for each in batch])
    table["status"].frombytes(statuses)
    _fill(table, "score", [each.score for each in batch])
    every_grades = [each.grades for each in batch]
    for number in range(graders):
        verdicts = list(map(attrgetter(f"grader{number}"), every_grades))
        table[status_column(number)].frombytes(bytes([_VERDICT_CODES[verdict.status] for verdict in verdicts]))
        _fill(table, score_column(number), [verdict.score for verdict in verdicts])
    for number, field in enumerate(fields):
        texts = list(map(attrgetter(f"by.field{number}"), batch))
        table.fill(field_column(field), table.codes(field_column(field), texts))
    if _ERROR in statuses:
        for row, (code, each) in enumerate(zip(statuses, batch, strict=True), first):
            if code == _ERROR:
                errors.append((row, each.key, bytes(each.output) != b"null"))


def _fill(table: TrialTable, name: str, values: list[Any]) -> None:
    """Append numbers to a column, of which some may be unknown."""
    try:
        table.fill(name, values)
    except struct.error:
        table.fill(name, [NAN if value is None else value for value in values])


def append_results(table: TrialTable, columns: dict[str, bytes], values: dict[str, list[str]]) -> None:
    """Append the rows of a chunk to a table."""
    ids, starts = table["ids"], array("Q", columns["id_starts"])
    if not starts:
        return
    of_chunk = columns["ids"]
    skipped = 1  # the separator before the first id
    if len(table) and (last := ids[table["id_starts"][-1] :].tobytes()) == of_chunk[1 : 1 + len(last)]:
        skipped += len(last)  # the first trials are of the last sample in the table
    table["id_starts"].extend(map(add, starts, repeat(len(ids) - skipped)))
    ids.frombytes(of_chunk[skipped:])
    for name, column in columns.items():
        if name in values:
            numbers = [table.code(name, text) for text in values[name]]
            table[name].extend(map(numbers.__getitem__, array("I", column)))
        elif name not in ("ids", "id_starts"):
            table[name].frombytes(column)

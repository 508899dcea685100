"""Outputs as rows of equal length: a few numbers side by side, which stand for columns of a table of trials.

Putting rows in another order is one operation for each trial, and taking a column out of them or putting it in is one
operation for all.
"""

from __future__ import annotations

from array import array
from itertools import accumulate
from struct import Struct as Layout
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.store.trial_table import NAN, TrialTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

COLUMNS: Final = (
    *("tokens", "input_tokens", "output_tokens", "cost", "seconds", "first_token", "started", "at"),
    *("turns", "attempt", "stop", "answer", "source", "length", "stopped"),
)
"""columns that outputs fill, as a row holds them: larger numbers first, so that each is at a multiple of its size"""
_TYPES: Final[dict[str, Any]] = {name: TrialTable(())[name].typecode for name in COLUMNS}
_SIZES: Final = {name: array(code).itemsize for name, code in _TYPES.items()}
_OFFSETS: Final = dict(zip(COLUMNS, accumulate(_SIZES.values(), initial=0), strict=False))
WIDTH: Final = -(-sum(_SIZES.values()) // 8) * 8
"""bytes of a row"""
_pack_row: Final = Layout("=" + "".join(_TYPES.values()) + "x" * (WIDTH - sum(_SIZES.values()))).pack
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


class OutputNumbers(msgspec.Struct, gc=False):
    """The fields of an output that have columns. Those of `records` would have more, and take longer to make."""

    attempt: int
    turns: int
    stop: str
    answer: str
    usage: _Usage
    timing: _Timing
    marks: tuple[_Mark, ...] = ()
    stopped_by: str | None = None
    source: str | None = None


class TextNumbers(dict[str, int]):
    """Numbers of texts, in the order in which they were asked for first; the empty text has 0."""

    def __init__(self) -> None:
        super().__init__({"": 0})

    def __missing__(self, text: str) -> int:
        number = self[text] = len(self)
        return number


def text_numbers() -> dict[str, TextNumbers]:
    """Return numbers of no texts yet, for each column of texts that outputs fill."""
    return {name: TextNumbers() for name in ("stop", "answer", "source")}


def pack_outputs(
    outputs: Iterable[OutputNumbers], lines: Iterable[tuple[int, int]], numbers: Mapping[str, TextNumbers]
) -> list[bytes]:
    """Return the rows of outputs, of which the places and lengths of the lines are passed."""
    rows, stops, answers, sources = [], numbers["stop"], numbers["answer"], numbers["source"]
    for (place, length), output in zip(lines, outputs, strict=True):
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
                place,
                output.turns,
                output.attempt,
                stops[output.stop],
                answers[output.answer],
                sources[output.source or ""],
                length,
                0 if output.stopped_by is None else len(output.marks) or 1,
            )
        )
    return rows


def column_of(rows: bytes | bytearray, name: str) -> bytes:
    """Return a column of rows that follow each other."""
    column: bytes = _column(rows, name).tobytes()
    return column


def renumber(rows: bytearray, name: str, numbers: list[int]) -> None:
    """Replace the numbers in a column of texts."""
    column = _column(rows, name)
    column[:] = memoryview(array(_TYPES[name], map(numbers.__getitem__, array(_TYPES[name], column.tobytes()))))


def _column(rows: bytes | bytearray, name: str) -> Any:
    place, step = _OFFSETS[name] // _SIZES[name], WIDTH // _SIZES[name]
    numbers: memoryview[Any] = memoryview(rows).cast(_TYPES[name])
    return numbers[place::step]

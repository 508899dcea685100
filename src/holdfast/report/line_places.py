"""Where the lines of each trial are in the journals of one kind, for readers that go through all trials.

A conversation has hundreds of calls, and a run as many conversations as it likes. So the places are in a temporary
file, each with the number of the trial's place before it, and the memory holds a number for each trial.
"""

from __future__ import annotations

from array import array
from struct import Struct
from typing import TYPE_CHECKING, Final

from holdfast.store.lines import LineRef
from holdfast.store.spool import Spool

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from holdfast.store.index_table import OutputTable

_PLACE: Final = Struct("<qIQI")
"""number of the trial's place before this one, or -1; number of the file, offset and length of the line"""


class LinePlaces:
    """The lines of each trial, by its key."""

    def __init__(self, files: Sequence[Path], outputs: OutputTable) -> None:
        self._files = files
        self._outputs = outputs
        self._places = Spool()
        self._count = 0
        self._last = array("q", [-1]) * outputs.row_count
        """number of a trial's last place, by the row of its output"""
        self._pending: dict[str, int] = {}
        """… by the key of a trial that has no output"""

    def add(self, key: str, file: int, offset: int, length: int) -> None:
        """Add a line of a trial, before any line is asked for."""
        row = self._outputs.row_of(key)
        before = self._last[row] if row >= 0 else self._pending.get(key, -1)
        self._places.write(_PLACE.pack(before, file, offset, length))
        if row >= 0:
            self._last[row] = self._count
        else:
            self._pending[key] = self._count
        self._count += 1

    def lines(self, key: str) -> list[LineRef]:
        """Return the lines of a trial, in the order in which they were added."""
        row, lines = self._outputs.row_of(key), []
        number = self._last[row] if row >= 0 else self._pending.get(key, -1)
        while number >= 0:
            self._places.seek(number * _PLACE.size)
            number, file, offset, length = _PLACE.unpack(self._places.read(_PLACE.size))
            lines.append(LineRef(self._files[file], offset, length))
        return lines[::-1]

"""The spending of a run so far: tokens, requests, dollars and time, over all its processes."""

from __future__ import annotations

from array import array
from math import fsum
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from holdfast.store.records import Usage

_FEWEST_PERIODS: Final = 1 << 14
"""periods of work that are kept before they are merged"""


class Spent(msgspec.Struct):
    """Usage of a run: outputs, judges, failed attempts, and calls of conversations that have no output yet."""

    tokens: int = 0
    requests: int = 0
    cost: float = 0.0
    unpriced: int = 0
    """number of trials and grades without a known price"""
    unmetered: int = 0
    """number of trials and grades that do not report their tokens"""
    _starts: array[float] = msgspec.field(default_factory=lambda: array("d"))
    _ends: array[float] = msgspec.field(default_factory=lambda: array("d"))
    """periods of work; overlapping ones are merged from time to time"""
    _merge_at: int = _FEWEST_PERIODS

    def add(self, usage: Usage) -> None:
        """Add the usage of a trial, a grade or a call."""
        if usage.input_tokens is None or usage.output_tokens is None:
            self.unmetered += 1
        self.tokens += (usage.input_tokens or 0) + (usage.output_tokens or 0)
        self.requests += usage.requests
        if usage.cost is None:
            self.unpriced += 1
        else:
            self.cost += usage.cost

    def add_time(self, started: float, ended: float) -> None:
        """Add a period of work; periods may overlap and come in any order."""
        self._starts.append(started)
        self._ends.append(ended)
        if len(self._starts) >= self._merge_at:
            self.periods()

    def add_grade(self, usage: Usage | None, time: float, seconds: float) -> None:
        """Add a grade: the usage of its judge, and its time if noticeable."""
        if usage is not None:
            self.add(usage)
        if seconds >= 0.001:
            self.add_time(time - seconds, time)

    def become(self, other: Spent) -> None:
        """Take over the numbers of another object, which was read from the journals."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(other, name))

    def copy(self) -> Spent:
        """Return an independent copy."""
        return msgspec.structs.replace(self, _starts=self._starts[:], _ends=self._ends[:])

    @property
    def seconds(self) -> float:
        """Wall time with work in flight, without the pauses between processes."""
        return fsum(ended - started for started, ended in self.periods())

    def periods(self) -> list[tuple[float, float]]:
        """Return the periods with work in flight, in order and without overlaps. There are few, however long a run."""
        merged: list[tuple[float, float]] = []
        for started, ended in sorted(zip(self._starts, self._ends, strict=True)):
            if merged and started <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(merged[-1][1], ended)
            elif ended > started:
                merged.append((started, ended))
        self._starts, self._ends = (array("d", [period[side] for period in merged]) for side in (0, 1))
        self._merge_at = max(_FEWEST_PERIODS, 2 * len(merged))
        return merged

"""Decide which graders apply to which rows, by their `where`, once for each row when the dataset is surveyed.

A grader that does not apply to a row costs that row nothing: no line, no pending verdict, no number.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Callable, Collection
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from holdfast.canonical import digest, digest_bytes
from holdfast.spec.template import RENDER_ERRORS, expression

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.spec.load import Eval
    from holdfast.spec.template import Expression

_NAMED: Final = 5
"""graders that a notice names"""


Stale = Callable[[Collection[str]], bool]
"""tells whether a grader reads a row with these fields differently than earlier versions did"""


class Panel(NamedTuple):
    """The graders that apply to a row, by their numbers, in the order in which they are called."""

    graders: tuple[int, ...]
    unsure: frozenset[int] = frozenset()
    """graders whose `where` fails on this row: their grade is an error"""
    reread: frozenset[int] = frozenset()
    """graders that read this row differently than earlier versions did: their grades have other keys"""


class _Condition(NamedTuple):
    holds: Expression
    graders: list[int]
    """the graders with this `where`"""


class Conditions:
    """The `where` of all graders of an eval. A condition that several graders share is evaluated once for a row.

    `stale` is for graders whose block does not tell how they read a row, by their numbers: users' functions.
    """

    def __init__(self, spec: Eval, stale: Mapping[int, Stale] = MappingProxyType({})) -> None:
        blocks = [grader for _, grader in spec.placed_graders()]
        wheres = [block.where for block in blocks]
        self._readers = {number: block for number, block in enumerate(blocks) if block.alternatives}
        self._stale = stale
        self.everyone = Panel(tuple(range(len(wheres))))
        self._always = tuple(number for number, where in enumerate(wheres) if where is None)
        self._panels: dict[Panel, Panel] = {}
        self._texts: dict[str, dict[str, _Condition]] = {}
        """conditions of the form `field == "text"`, as graders of single tasks have, looked up by the text"""
        self._others: list[_Condition] = []
        graders: dict[str, list[int]] = {}
        for number, where in enumerate(wheres):
            if where is not None:
                graders.setdefault(where, []).append(number)
        for where, numbers in graders.items():
            condition = _Condition(expression(where), numbers)
            if (equality := condition.holds.equality) is None:
                self._others.append(condition)
            else:
                earlier = self._texts.setdefault(equality[0], {}).setdefault(equality[1], condition)
                if earlier is not condition:  # equal to an earlier condition, but spelled differently
                    earlier.graders.extend(numbers)

    def panel_for(self, fields: Mapping[str, Any]) -> Panel:
        """Return the panel of a row."""
        panel = self.everyone if len(self._always) == len(self.everyone.graders) else self._select(fields)
        if not self._readers and not self._stale:
            return panel
        reread = [
            number
            for number in panel.graders
            if (number in self._readers and not self._readers[number].reads_as_before(fields))
            or (number in self._stale and self._stale[number](fields))
        ]
        if not reread:
            return panel
        panel = panel._replace(reread=frozenset(reread))
        return self._panels.setdefault(panel, panel)

    def _select(self, fields: Mapping[str, Any]) -> Panel:
        applicable, unsure = list(self._always), set()
        others = self._others
        for field, texts in self._texts.items():
            if type(text := fields.get(field)) is not str:
                others = [*others, *texts.values()]
            elif text in texts:
                applicable += texts[text].graders
        for holds, graders in others:
            try:
                if holds(fields):
                    applicable += graders
            except RENDER_ERRORS:
                applicable += graders
                unsure.update(graders)
        panel = Panel(tuple(sorted(applicable)), frozenset(unsure))
        return self._panels.setdefault(panel, panel)


class Panels:
    """The panel of each row in the dataset's order, stored as one number per row."""

    def __init__(self, everyone: Panel) -> None:
        self._everyone = everyone
        self._numbers: dict[Panel, int] = {everyone: 0}
        self._kinds = [everyone]
        self._rows = array("I")

    @classmethod
    def unpacked(cls, kinds: list[Panel], rows: array[int]) -> Panels:
        """Restore panels from what `packed` returned."""
        panels = cls(kinds[0])
        panels._kinds, panels._rows = kinds, rows
        panels._numbers = {kind: number for number, kind in enumerate(kinds)}
        return panels

    def packed(self) -> tuple[list[Panel], array[int]]:
        """Return the different panels, that of all graders first, and the number of the panel of each row."""
        return self._kinds, self._rows

    def add(self, panel: Panel) -> None:
        """Add the panel of the next row."""
        number = self._numbers.setdefault(panel, len(self._kinds))
        if number == len(self._kinds):
            self._kinds.append(panel)
        self._rows.append(number)

    def panel_at(self, position: int) -> Panel:
        """Return the panel of the row at a position."""
        return self._kinds[self._rows[position]]

    def fingerprint(self) -> str:
        """Return a digest of all rows' panels."""
        kinds = [[kind.graders, sorted(kind.unsure), sorted(kind.reread)] for kind in self._kinds]
        return digest([kinds, digest_bytes(self._rows.tobytes()), sys.byteorder])

    @property
    def mean(self) -> float:
        """Mean number of graders per row."""
        return sum(self.rows()) / max(1, len(self._rows))

    def rows(self) -> list[int]:
        """Return the number of rows of each grader."""
        counts = [0] * len(self._everyone.graders)
        for kind, rows in Counter(self._rows).items():
            for number in self._kinds[kind].graders:
                counts[number] += rows
        return counts

    def reread(self) -> frozenset[int]:
        """Return the graders that read some row differently than earlier versions did."""
        return frozenset().union(*(kind.reread for kind in self._kinds))


def name_graders(names: Sequence[str]) -> str:
    """Return `grader a` or `graders a, b`, and at most five names."""
    shown = ", ".join(f"`{name}`" for name in names[:_NAMED])
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return f"grader{'' if len(names) == 1 else 's'} {shown}{more}"

"""Decide which graders apply to which rows, by their `where`, once for each row when the dataset is surveyed.

A grader that does not apply to a row costs that row nothing: no line, no pending verdict, no number.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from holdfast.canonical import digest, digest_bytes
from holdfast.data.columns import RowValues
from holdfast.spec.template import RENDER_ERRORS, expression

if TYPE_CHECKING:
    from array import array
    from collections.abc import Mapping, Sequence

    from holdfast.spec.eval import Eval
    from holdfast.spec.template import Expression

_NAMED: Final = 5
"""graders that a notice names"""


class Panel(NamedTuple):
    """The graders that apply to a row, by their numbers, in the order in which they are called."""

    graders: tuple[int, ...]
    unsure: frozenset[int] = frozenset()
    """graders whose `where` fails on this row: their grade is an error"""


class _Condition(NamedTuple):
    holds: Expression
    graders: list[int]
    """the graders with this `where`"""


class Conditions:
    """The `where` of all graders of an eval. A condition that several graders share is evaluated once for a row."""

    def __init__(self, spec: Eval) -> None:
        wheres = self._wheres = [grader.where for _, grader in spec.placed_graders()]
        self.wheres = sorted({where for where in wheres if where is not None})
        """the different conditions"""
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
        return self.everyone if len(self._always) == len(self.everyone.graders) else self._select(fields)

    def holding_in(self, panel: Panel) -> Panel:
        """Return the conditions that hold, or fail, for rows with a panel, by their numbers in `wheres`."""
        holding, failing = (
            [self.wheres.index(where) for where in {self._wheres[number] for number in numbers} if where is not None]
            for numbers in (panel.graders, panel.unsure)
        )
        return Panel(tuple(sorted(holding)), frozenset(failing))

    def panel_like(self, holding: Panel, wheres: Sequence[str]) -> Panel | None:
        """Return the panel of rows for which some of `wheres` hold, or fail; None if it depends on the row."""
        applicable, unsure = [], set()
        for number, where in enumerate(self._wheres):
            if where is not None:
                if where not in wheres:
                    return None
                condition = wheres.index(where)
                if condition not in holding.graders:
                    continue
                if condition in holding.unsure:
                    unsure.add(number)
            applicable.append(number)
        panel = Panel(tuple(applicable), frozenset(unsure))
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
    """The panel of each row in the dataset's order. The panel of all graders is the first, even if no row has it."""

    def __init__(self, everyone: Panel) -> None:
        self._everyone = everyone
        self._column = RowValues([everyone])

    def packed(self) -> tuple[list[Panel], array[int]]:
        """Return the different panels, and the number of each row's panel."""
        return self._column.values, self._column.packed()

    def extend(self, panels: Sequence[Panel], packed: bytes) -> None:
        """Add rows as `RowValues.extend` does."""
        self._column.extend(panels, packed)

    def panel_at(self, position: int) -> Panel:
        """Return the panel of the row at a position."""
        return self._column[position]

    def fingerprint(self) -> str:
        """Return a digest of all rows' panels."""
        kinds = [[kind.graders, sorted(kind.unsure)] for kind in self._column.values]
        return digest([kinds, digest_bytes(self._column.packed().tobytes()), sys.byteorder])

    @property
    def mean(self) -> float:
        """Mean number of graders per row."""
        return sum(self.rows()) / max(1, len(self._column.packed()))

    def rows(self) -> list[int]:
        """Return the number of rows of each grader."""
        counts = [0] * len(self._everyone.graders)
        for kind, rows in Counter(self._column.packed()).items():
            for number in self._column.values[kind].graders:
                counts[number] += rows
        return counts


def name_graders(names: Sequence[str]) -> str:
    """Return `grader a` or `graders a, b`, and at most five names."""
    shown = ", ".join(f"`{name}`" for name in names[:_NAMED])
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return f"grader{'' if len(names) == 1 else 's'} {shown}{more}"

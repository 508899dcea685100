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
from holdfast.data.numbers import code_for, fit_code
from holdfast.spec.load_graders import GRADERS
from holdfast.spec.template import RENDER_ERRORS, expression

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.spec.grader_schema import GraderBlock
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


class Sign(NamedTuple):
    """Two graders with equal signs apply to the same rows, and read them in the same way."""

    where: str | None
    reading: str
    """values that it expects; empty where these are the same for all rows"""


def sign_of(block: GraderBlock) -> Sign:
    """Return the sign of a grader."""
    reading = repr([block.type, [getattr(block, name) for name in block.alternatives]])
    depends = "{" in reading or not GRADERS.is_builtin(block.type)  # on the row
    return Sign(block.where, reading if block.alternatives and depends else "")


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
        self.signs = [sign_of(block) for block in blocks]
        readers = {number: block for number, block in enumerate(blocks) if block.alternatives}
        self._readers = {number: block for number, block in readers.items() if self.signs[number].reading}
        self._reread = {
            number for number, block in readers.items() if number not in self._readers and not block.reads_as_before({})
        }
        """graders that read all rows differently than earlier versions did"""
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
        if not self._readers and not self._stale and not self._reread:
            return panel
        reread = [
            number
            for number in panel.graders
            if (number in self._readers and not self._readers[number].reads_as_before(fields))
            or self._is_reread(number, fields)
        ]
        return self._with_reread(panel, reread)

    def panel_like(self, earlier: Panel, signs: Sequence[Sign], names: Collection[str]) -> Panel | None:
        """Return the panel of rows with an earlier panel and these fields; None if it depends on the row.

        `signs` are those of the earlier panel's graders.
        """
        applicable, unsure, reread = [], set(), []
        alike = {sign.where: other for other, sign in enumerate(signs)}
        readers = {signs[other].reading: other for other in earlier.graders}
        for number, (where, reading) in enumerate(self.signs):
            if where is not None:
                if where not in alike:
                    return None
                if alike[where] not in earlier.graders:
                    continue
                if alike[where] in earlier.unsure:
                    unsure.add(number)
            applicable.append(number)
            if reading and reading not in readers:
                return None
            if (reading and readers[reading] in earlier.reread) or self._is_reread(number, names):
                reread.append(number)
        panel = Panel(tuple(applicable), frozenset(unsure))
        return self._with_reread(self._panels.setdefault(panel, panel), reread)

    def _is_reread(self, number: int, names: Collection[str]) -> bool:
        return number in self._reread or (number in self._stale and self._stale[number](names))

    def _with_reread(self, panel: Panel, reread: Sequence[int]) -> Panel:
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
        self._rows = array(code_for(1))

    @classmethod
    def unpacked(cls, kinds: list[Panel], rows: array[int]) -> Panels:
        """Restore panels from what `packed` returned."""
        panels = cls(kinds[0])
        panels._kinds, panels._rows = kinds, fit_code(rows, len(kinds))
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
            self._rows = fit_code(self._rows, len(self._kinds))
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

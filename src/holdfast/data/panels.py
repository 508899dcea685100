"""The graders that look at each row, by their `where`: decided once for each row, when the dataset is surveyed.

A grader that does not look at a row costs that row nothing: no line, no verdict that is waited for, no number.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Collection
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from holdfast.spec.template import RENDER_ERRORS, expression

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.spec.load import Eval
    from holdfast.spec.template import Expression

_NAMED: Final = 5
"""graders that a notice names"""


Stale = Callable[[Collection[str]], bool]
"""tells of a row's fields whether a grader sees other values there than it did in earlier versions"""


class Panel(NamedTuple):
    """The graders that look at the outputs of a row, by their numbers in the order in which they are asked."""

    graders: tuple[int, ...]
    unsure: frozenset[int] = frozenset()
    """those of them whose `where` fails on this row: their grade is an error"""
    reread: frozenset[int] = frozenset()
    """those that read this row differently than earlier versions did: their grades have other keys"""


class _Condition(NamedTuple):
    holds: Expression
    graders: list[int]
    """whose `where` it is"""


class Conditions:
    """The `where` of all graders of an eval. The same condition of several graders is looked at once for a row.

    `stale` is for graders whose way to read a row their block does not tell, by their numbers: users' functions.
    """

    def __init__(self, spec: Eval, stale: Mapping[int, Stale] = MappingProxyType({})) -> None:
        blocks = [grader for _, grader in spec.placed_graders()]
        wheres = [block.where for block in blocks]
        self._readers = {number: block for number, block in enumerate(blocks) if block.alternatives}
        self._stale = stale
        self.everyone = Panel(tuple(range(len(wheres))))
        self._always = tuple(number for number, where in enumerate(wheres) if where is None)
        self._known: dict[Panel, Panel] = {}
        self._texts: dict[str, dict[str, _Condition]] = {}
        """those that say `field == "text"`, as the graders of single tasks do: found by the text, however many"""
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
                if earlier is not condition:  # written in another way, with the same meaning
                    earlier.graders.extend(numbers)

    def of(self, fields: Mapping[str, Any]) -> Panel:
        """The panel of a row."""
        panel = self.everyone if len(self._always) == len(self.everyone.graders) else self._chosen(fields)
        reread = [
            number
            for number in panel.graders
            if (number in self._readers and not self._readers[number].reads_as_before(fields))
            or (number in self._stale and self._stale[number](fields))
        ]
        if not reread:
            return panel
        panel = panel._replace(reread=frozenset(reread))
        return self._known.setdefault(panel, panel)

    def _chosen(self, fields: Mapping[str, Any]) -> Panel:
        looking, unsure = list(self._always), set()
        others = self._others
        for field, texts in self._texts.items():
            if type(text := fields.get(field)) is not str:
                others = [*others, *texts.values()]
            elif text in texts:
                looking += texts[text].graders
        for holds, graders in others:
            try:
                if holds(fields):
                    looking += graders
            except RENDER_ERRORS:
                looking += graders
                unsure.update(graders)
        panel = Panel(tuple(sorted(looking)), frozenset(unsure))
        return self._known.setdefault(panel, panel)


class Panels:
    """The panel of each row, in the dataset's order: a number for each, however many graders there are."""

    def __init__(self, everyone: Panel) -> None:
        self._everyone = everyone
        self._numbers: dict[Panel, int] = {everyone: 0}
        self._kinds = [everyone]
        self._rows = array("I")

    def add(self, panel: Panel) -> None:
        """The next row's."""
        number = self._numbers.setdefault(panel, len(self._kinds))
        if number == len(self._kinds):
            self._kinds.append(panel)
        self._rows.append(number)

    def of(self, position: int) -> Panel:
        """The panel of the row at a position."""
        return self._kinds[self._rows[position]]

    @property
    def mean(self) -> float:
        """Mean number of graders that look at a row."""
        return sum(len(self._kinds[number].graders) for number in self._rows) / max(1, len(self._rows))

    def rows(self) -> list[int]:
        """Return the number of rows that each grader looks at."""
        counts = [0] * len(self._everyone.graders)
        for kind, rows in Counter(self._rows).items():
            for number in self._kinds[kind].graders:
                counts[number] += rows
        return counts

    def reread(self) -> frozenset[int]:
        """The graders that read some row differently than earlier versions did."""
        return frozenset().union(*(kind.reread for kind in self._kinds))


def name_graders(names: Sequence[str]) -> str:
    """Return `grader a` or `graders a, b`, and at most five names."""
    shown = ", ".join(f"`{name}`" for name in names[:_NAMED])
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return f"grader{'' if len(names) == 1 else 's'} {shown}{more}"

"""Columns: one value for each row of a dataset, stored as a number.

They hold the values by which results are broken down, and the panel of each row: the graders that apply to it by their
`where`, which is decided once, when the dataset is surveyed. A grader that does not apply to a row costs that row
nothing: no line, no pending verdict, no number.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, TypeVar

import msgspec

from holdfast.canonical import digest, digest_bytes
from holdfast.errors import ConfigError, Problem, suggest
from holdfast.spec.eval import TASK_FIELD, benchmark_tasks
from holdfast.spec.template import RENDER_ERRORS, expression

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

    from holdfast.spec.document import Location
    from holdfast.spec.eval import Eval
    from holdfast.spec.template import Expression

_Value = TypeVar("_Value", bound="Hashable")

NO_VALUE: Final = "(none)"
"""stands for the value of rows that lack the field, or hold null in it"""
_NESTED: Final = (list, tuple, dict)
_MOST_VALUES: Final = 10_000
"""a field with more different values is a text or an id, and breaks nothing down"""
_NAMED: Final = 5
"""graders that a notice names"""


def code_for(count: int) -> Literal["B", "I"]:
    """Return the type code of an array of numbers below a count: one byte each, as long as that is enough."""
    return "B" if count <= 256 else "I"


class RowValues(Generic[_Value]):
    """A value for each row, in the dataset's order. Values are numbered in the order in which they first occur."""

    def __init__(self, values: Iterable[_Value] = ()) -> None:
        """Reserve the first numbers for `values`, whether or not they occur."""
        self.values = list(values)
        """the different values"""
        self._numbers = {value: number for number, value in enumerate(self.values)}
        self._rows = array(code_for(len(self.values)))

    def __len__(self) -> int:
        """Return the number of different values."""
        return len(self.values)

    def __getitem__(self, position: int) -> _Value:
        return self.values[self._rows[position]]

    def packed(self) -> array[int]:
        """Return the number of each row's value."""
        return self._rows

    def number_at(self, position: int) -> int:
        """Return the number, among `values`, of the value of the row at a position."""
        return self._rows[position]

    def add(self, value: _Value) -> int:
        """Add the value of the next row, and return its number."""
        number = self._numbers.get(value)
        if number is None:
            number = self._number(value)
        self._rows.append(number)
        return number

    def extend(self, values: Sequence[_Value], packed: bytes) -> None:
        """Add rows with numbers of their own, among `values`, as the bytes of `packed`. Values may be equal."""
        numbers = [self._number(value) for value in values]
        if len(values) <= 256 and self._rows.typecode == "B":
            is_same = numbers == list(range(len(numbers)))
            self._rows.frombytes(packed if is_same else packed.translate(bytes(numbers).ljust(256, b"\0")))
        else:
            rows = array(code_for(len(values)), packed)
            self._rows.extend(array(self._rows.typecode, map(numbers.__getitem__, rows)))

    def _number(self, value: _Value) -> int:
        number = self._numbers.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
            if self._rows.typecode != code_for(len(self.values)):
                self._rows = array("I", self._rows)
        return number


Grouping = RowValues[str]
"""the values of one field"""


class Groupings:
    """The groupings of an eval: by the fields under `by`, by `cluster`, and for a benchmark by task."""

    def __init__(self, spec: Eval) -> None:
        self._spec = spec
        self._named = list(dict.fromkeys([*spec.by, *([] if spec.cluster is None else [spec.cluster])]))
        fields = dict.fromkeys(self._named)
        if (benchmark := benchmark_tasks(spec.document.data)) is not None and len(benchmark.tasks) > 1:
            fields[TASK_FIELD] = None
        self.by_field: dict[str, Grouping] = {field: RowValues() for field in fields}
        self._present: set[str] = set()
        self._problems: dict[str, str] = {}

    def value_of(self, field: str, fields: Mapping[str, Any], where: str) -> str:
        """Return the value of a row."""
        value = fields.get(field)
        if isinstance(value, _NESTED):
            kind = "a mapping" if isinstance(value, dict) else "a list"
            self._problems.setdefault(field, f"{where}: {field!r} is {kind}, and results need one value per row")
            value = None
        return value if type(value) is str else as_text(value)

    def extend(self, parts: Mapping[str, tuple[list[str], bytes]], names: Collection[str]) -> None:
        """Add the values of rows, as `RowValues.extend` does; `names` are their fields."""
        self._present.update(names)
        for field, grouping in self.by_field.items():
            grouping.extend(*parts[field])
            if len(grouping) > _MOST_VALUES and field in self._spec.by:
                message = f"{field!r} has more than {_MOST_VALUES:,} different values, which breaks nothing down"
                raise ConfigError([Problem(self._where(field), message)])

    def conclude(self, names: Collection[str]) -> None:
        """Raise ConfigError for fields that no row has, and for values that are not one value. `names` are all fields.

        The tasks of a benchmark are not the user's: rows without them count for no task.
        """
        for field in self._named:
            if field not in self._present:
                known = f"; they have: {', '.join(sorted(names))}" if names else ""
                self._problems[field] = f"no sample has a field {field!r}{suggest(field, names) or known}"
        problems = [
            Problem(self._where(field), message) for field, message in self._problems.items() if field in self._named
        ]
        if problems:
            raise ConfigError(problems)

    def _where(self, field: str) -> str:
        if field not in self._spec.by:
            return self._spec.document.where(("cluster",))
        written: Location = ("by",)
        if isinstance(self._spec.document.data.get("by"), list):
            written = ("by", self._spec.by.index(field))
        return self._spec.document.where(written)


def as_text(value: Any) -> str:
    """Return a value as the name of its group: texts as they are, other values as JSON."""
    if value is None or value != value:  # NaN, which JSON cannot hold
        return NO_VALUE
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


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


class Panels(RowValues[Panel]):
    """The panel of each row in the dataset's order. The panel of all graders is the first, even if no row has it."""

    def __init__(self, everyone: Panel) -> None:
        super().__init__([everyone])
        self._everyone = everyone

    def panel_at(self, position: int) -> Panel:
        """Return the panel of the row at a position."""
        return self.values[self._rows[position]]

    def fingerprint(self) -> str:
        """Return a digest of all rows' panels."""
        kinds = [[kind.graders, sorted(kind.unsure)] for kind in self.values]
        return digest([kinds, digest_bytes(self._rows.tobytes()), sys.byteorder])

    @property
    def mean(self) -> float:
        """Mean number of graders per row."""
        return sum(self.rows()) / max(1, len(self._rows))

    def rows(self) -> list[int]:
        """Return the number of rows of each grader."""
        counts = [0] * len(self._everyone.graders)
        for kind, rows in Counter(self._rows).items():
            for number in self.values[kind].graders:
                counts[number] += rows
        return counts


def name_graders(names: Sequence[str]) -> str:
    """Return `grader a` or `graders a, b`, and at most five names."""
    shown = ", ".join(f"`{name}`" for name in names[:_NAMED])
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return f"grader{'' if len(names) == 1 else 's'} {shown}{more}"

"""Columns: one value for each row of a dataset, stored as a number; and the values by which results are broken down."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar

import msgspec

from holdfast.errors import ConfigError, Problem, suggest
from holdfast.spec.eval import TASK_FIELD, benchmark_tasks

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

    from holdfast.spec.document import Location
    from holdfast.spec.eval import Eval

_Value = TypeVar("_Value", bound="Hashable")

NO_VALUE: Final = "(none)"
"""stands for the value of rows that lack the field, or hold null in it"""
_NESTED: Final = (list, tuple, dict)
_MOST_VALUES: Final = 10_000
"""a field with more different values is a text or an id, and breaks nothing down"""


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

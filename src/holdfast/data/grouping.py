"""Values of the fields by which results are broken down, taken from each row when the dataset is surveyed."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.data.numbers import code_for, fit_code
from holdfast.errors import ConfigError, Problem
from holdfast.spec.benchmark_tasks import TASK_FIELD, benchmark_tasks
from holdfast.spec.validation import suggest

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from holdfast.spec.document import Location
    from holdfast.spec.eval import Eval

NO_VALUE: Final = "(none)"
"""stands for the value of rows that lack the field, or hold null in it"""
_NESTED: Final = (list, tuple, dict)
MOST_VALUES: Final = 10_000
"""a field with more different values is a text or an id, and breaks nothing down"""


class Grouping:
    """The value of one field in each row, in the dataset's order, stored as one number per row."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._rows = array(code_for(1))

    @classmethod
    def unpacked(cls, values: list[str], rows: array[int]) -> Grouping:
        """Restore a grouping from its values and what `packed` returned."""
        grouping = cls()
        grouping._numbers = {value: number for number, value in enumerate(values)}
        grouping._rows = fit_code(rows, len(values))
        return grouping

    def packed(self) -> array[int]:
        """Return the number of the value of each row."""
        return self._rows

    def __len__(self) -> int:
        """Return the number of different values."""
        return len(self._numbers)

    @property
    def values(self) -> list[str]:
        """The values, in the order in which they first occur."""
        return list(self._numbers)

    def add(self, value: str) -> bool:
        """Add the value of the next row; return True if no row before has it."""
        numbers = self._numbers
        is_new = value not in numbers
        if is_new:
            numbers[value] = len(numbers)
            self._rows = fit_code(self._rows, len(numbers))
        self._rows.append(numbers[value])
        return is_new

    def number_at(self, position: int) -> int:
        """Return the number, among `values`, of the value of the row at a position."""
        return self._rows[position]


class Groupings:
    """The groupings of an eval: by the fields under `by`, by `cluster`, and for a benchmark by task."""

    def __init__(self, spec: Eval, present: Collection[str] = ()) -> None:
        """`present` are the fields of other rows of the dataset."""
        self._spec = spec
        self._named = list(dict.fromkeys([*spec.by, *([] if spec.cluster is None else [spec.cluster])]))
        fields = dict.fromkeys(self._named)
        if (benchmark := benchmark_tasks(spec.document.data)) is not None and len(benchmark.tasks) > 1:
            fields[TASK_FIELD] = None
        self.by_field = {field: Grouping() for field in fields}
        self._present = set(present)
        self._problems: dict[str, str] = {}

    def add(self, fields: Mapping[str, Any], where: str) -> None:
        """Take the values of the next row."""
        for field, grouping in self.by_field.items():
            value = fields.get(field)
            if field in fields:
                self._present.add(field)
            if isinstance(value, _NESTED):
                kind = "a mapping" if isinstance(value, dict) else "a list"
                self._problems.setdefault(field, f"{where}: {field!r} is {kind}, and results need one value per row")
                value = None
            new = grouping.add(value if type(value) is str else as_text(value))
            if new and len(grouping) > MOST_VALUES and field in self._spec.by:
                message = f"{field!r} has more than {MOST_VALUES:,} different values, which breaks nothing down"
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

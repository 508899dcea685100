"""Fields of the dataset's rows as columns, read when somebody filters or groups by them."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Final

from holdfast.data.columns import as_text
from holdfast.data.dataset import Dataset
from holdfast.errors import HoldfastError, QueryError
from holdfast.spec.validation import suggest
from holdfast.store.trial_table import CODED, NUMBERS, key_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from holdfast.data.dataset import Sample
    from holdfast.report.run_view import RunView
    from holdfast.store.trial_table import TrialTable

_MOST_VALUES: Final = 10_000
"""a field with more different values is a text or an id, and groups nothing"""


def read_field(view: RunView, table: TrialTable, name: str, position: int) -> tuple[list[str], array[int]]:
    """Return the values of a field, and the number of each row's value; 0 is a row that the dataset no longer has.

    `position` is the place in a query that an error is about.
    """
    numbers: dict[str, int] = {"": 0}
    codes = array("I", bytes(4 * len(table)))
    names: dict[str, None] = {}
    present = False
    try:
        for sample, rows in _rows_by_sample(view, table):
            names |= dict.fromkeys(sample.fields)
            value = field_value(sample.fields, name)
            present = present or value is not None
            number = numbers.setdefault(as_text(value), len(numbers))
            for row in rows:
                codes[row] = number
            if len(numbers) > _MOST_VALUES:
                break
    except HoldfastError as error:
        raise QueryError(f"the field `{name}` cannot be read: {error.message}", position, error.remedy) from error
    if len(numbers) > _MOST_VALUES:
        message = f"the field `{name}` has more than {_MOST_VALUES:,} different values"
        raise QueryError(message, position, 'Search for its text in quotes instead: `"words"`.')
    if not present:
        known = [*table.graders, *NUMBERS, *CODED, "sample", "trial", "status", *names]
        fields = f"Fields of the rows are {', '.join(names)}. " if names else ""
        remedy = f"{fields}Numbers are {', '.join(NUMBERS)}, and the graders' scores."
        raise QueryError(f"no row has a field `{name}`{suggest(name, known)}", position, remedy)
    return list(numbers), codes


def field_value(fields: Mapping[str, Any], name: str) -> Any:
    """Return a field of a row; a name such as `tag.level` is a field, or else the field `level` inside `tag`."""
    if name in fields:
        return fields[name]
    value: Any = fields
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return value


def _rows_by_sample(view: RunView, table: TrialTable) -> Iterator[tuple[Sample, list[int]]]:
    """Yield the samples of the dataset with their rows; a row of the same id but other content is another sample's."""
    trials = view.manifest.trials
    expected = 0
    for sample in Dataset(view.spec):
        keys = {key_bytes(view.work.key(sample.asked, trial)) for trial in range(1, trials + 1)}
        if expected < len(table) and table.key_at(expected) in keys:
            yield sample, list(range(expected, min(expected + trials, len(table))))
            expected += trials
            continue
        if expected < len(table) and table.id_at(expected) == sample.id:
            expected += trials  # its content has changed since
        yield sample, [row for row in table.rows_of(sample.id) if table.key_at(row) in keys]

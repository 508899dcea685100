"""Snapshots: the rows that a query selects from the columns of a run, in an order, with counts.

A condition is evaluated on a whole column at once. Its result is an integer with a byte of 0 or 1 for each row, so that
conditions are joined by `&`, `|` and `^`, which take a millisecond for a million rows.
"""

from __future__ import annotations

import operator
import sys
from array import array
from collections import Counter
from itertools import compress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from holdfast.errors import QueryError
from holdfast.spec.validation import suggest
from holdfast.store.trial_table import CODED, CODES, NUMBERS, STATUSES, score_column, status_column
from holdfast.view.query import Compares, Contains, Every, HasFlag, HasStatus, Not, Some, quote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from holdfast.store.trial_table import TrialTable
    from holdfast.view.columns import Columns
    from holdfast.view.query import Condition, Query

_NUMBERS: Final = (*NUMBERS, "trial")
_TEXTS: Final = ("sample", "status", *CODED)
_COMPARE: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    "=": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}
_MIRRORED: Final = {"<": "__gt__", "<=": "__ge__", "=": "__eq__", ">=": "__le__", ">": "__lt__"}
"""the method of the limit that tells whether a value compares with it"""
_SEVERITY: Final = ("not_reached", "skipped", "passed", "ungraded", "failed", "error")
"""of the statuses of a checkpoint's graders the last one counts for the checkpoint"""
_KEPT_BYTES: Final = 16 << 20
"""of snapshots that are kept for further pages"""
_KEPT_COUNTS: Final = 8
_BYTE: Final = 256
_FEW: Final = 16
"""values that are counted faster one after the other than row by row"""


class Snapshot(NamedTuple):
    """The rows that a query selects, as they were when it was asked."""

    rows: array[int]
    """row numbers in order"""
    total: int
    """number of all rows"""
    complete: bool
    """False while the search for a text goes on: ask again for the other rows"""
    generation: int
    """of the columns"""
    mask: int
    """a byte of 1 for each selected row"""


class Facet(msgspec.Struct, frozen=True):
    """A value, and how many of the selected rows have it."""

    value: str
    count: int
    query: str
    """the condition that selects these rows"""


def select(columns: Columns, query: Query, sort: str = "", *, wait: float | None = None) -> Snapshot:
    """Return the rows for which a query holds, sorted by a column, descending if its name follows `-`.

    Rows without a value are last in either direction. Without a column, rows are in the dataset's order. A text is
    searched for at most `wait` seconds; None waits for the end. Until the end, rows that are not searched yet count as
    rows without it. Raises QueryError for names that the run does not have.
    """
    while True:
        # What takes long is done while others may read: the search for texts, and reading fields from the dataset.
        generation = columns.generation
        texts = {text: columns.find_text(text, wait) for text in _texts_to_find(columns, query, sort)}
        _read_fields(columns, query, sort)
        with columns.lock:
            if columns.generation == generation:
                return _select(columns, query, sort, texts)


def _texts_to_find(columns: Columns, query: Query, sort: str) -> list[str]:
    kept = columns.snapshots.get((query.text, sort, columns.generation))
    return [] if kept is not None and kept.complete else query.texts


def _read_fields(columns: Columns, query: Query, sort: str) -> None:
    for leaf in query.comparisons:
        if leaf.name not in _TEXTS and number_column(columns.table, leaf.name) is None:
            columns.field(leaf.name, leaf.position)
    name = sort.removeprefix("-")
    if name and name not in _TEXTS and number_column(columns.table, name) is None:
        columns.field(name)


def _select(columns: Columns, query: Query, sort: str, texts: dict[str, tuple[bytes, bool]]) -> Snapshot:
    key = query.text, sort, columns.generation
    kept = columns.snapshots.get(key)
    if kept is not None and kept.complete:
        columns.snapshots[key] = columns.snapshots.pop(key)  # the most recently used is last
        return kept
    evaluation, total = _Evaluation(columns, texts), columns.rows
    mask = evaluation.mask(query.condition)
    every = range(total)
    rows = array("I", every if mask == evaluation.all else compress(every, mask.to_bytes(total, "little")))
    if sort:
        rows = _sorted(columns, rows, sort)
    snapshot = Snapshot(rows, total, all(complete for _, complete in texts.values()), columns.generation, mask)
    _keep(columns.snapshots, key, snapshot)
    columns.table.release()
    return snapshot


def _keep(snapshots: dict[Any, Snapshot], key: Any, snapshot: Snapshot) -> None:
    for old in [each for each in snapshots if each[2] != snapshot.generation]:
        del snapshots[old]  # no page asks for rows of an earlier generation by query
    snapshots[key] = snapshot
    while len(snapshots) > 1 and sum(len(each.rows) * 4 + each.total for each in snapshots.values()) > _KEPT_BYTES:
        del snapshots[next(iter(snapshots))]


class _Evaluation:
    """Evaluates the conditions of one query."""

    def __init__(self, columns: Columns, texts: dict[str, tuple[bytes, bool]]) -> None:
        self._columns = columns
        self._table: TrialTable = columns.table
        self._texts = texts
        self.all = int.from_bytes(b"\1" * len(columns.table), "little")
        """all rows"""

    def mask(self, condition: Condition) -> int:
        """Return the rows for which a condition holds."""
        if isinstance(condition, Every):
            result = self.all
            for part in condition.conditions:
                result &= self.mask(part)
            return result
        if isinstance(condition, Some):
            result = 0
            for part in condition.conditions:
                result |= self.mask(part)
            return result
        if isinstance(condition, Not):
            return self.all ^ self.mask(condition.condition)
        if isinstance(condition, HasStatus):
            return _equal(status_codes(self._table, condition.name, condition.position), CODES[condition.status])
        if isinstance(condition, HasFlag):
            column = self._table["stopped" if condition.flag == "stopped" else "source"]
            return _pack(map(bool, column))
        if isinstance(condition, Contains):
            return int.from_bytes(self._texts[condition.text][0], "little")
        return self._compare(condition)

    def _compare(self, condition: Compares) -> int:
        name, sign, value, position = condition
        if name in _TEXTS and sign in ("=", "!="):
            mask = self._equal_text(name, value)
            return mask if sign == "=" else self.all ^ mask
        column = number_column(self._table, name)
        if column is not None:
            if value in STATUSES and name in self._table.graders and sign in ("=", "!="):
                mask = _equal(status_codes(self._table, name, position), CODES[value])
                return mask if sign == "=" else self.all ^ mask
            return _compare_numbers(column, sign, _number(condition))
        values, codes = self._columns.field(name, position)
        return _chosen(codes, [_fulfils(each, sign, value) for each in values])

    def _equal_text(self, name: str, value: str) -> int:
        table = self._table
        if name == "status":
            return _equal(bytes(table["status"]), CODES.get(value, 0))
        if name == "sample":
            flags = bytearray(len(table))
            for row in table.rows_of(value):
                flags[row] = 1
            return int.from_bytes(flags, "little")
        return _chosen(table[name], [each == value for each in table.values[name]])


def _number(condition: Compares) -> float:
    try:
        return float(condition.value)
    except ValueError:
        place = condition.position + len(condition.name) + len(condition.operator)
        raise QueryError(
            f"`{condition.name}` is compared with a number, and `{condition.value}` is none",
            place,
            f"Write for example `{condition.name}{condition.operator}0.5`.",
        ) from None


def _pack(flags: Iterable[bool]) -> int:
    return int.from_bytes(bytes(flags), "little")


def _equal(codes: bytes, code: int) -> int:
    return int.from_bytes(codes.translate(bytes(each == code for each in range(256))), "little")


def _chosen(codes: Any, chosen: list[bool]) -> int:
    """Return the rows whose code is that of a chosen value."""
    if len(chosen) <= _BYTE:
        return int.from_bytes(_as_bytes(codes).translate(bytes(chosen).ljust(_BYTE)), "little")
    return _pack(map(chosen.__getitem__, codes))


def _as_bytes(codes: Any) -> bytes:
    """Return a column of numbers below 256 as a byte for each row."""
    size = codes.itemsize
    return bytes(codes)[0 if sys.byteorder == "little" else size - 1 :: size]


def _compare_numbers(column: Any, sign: str, limit: float) -> int:
    """Compare the numbers of a column with a limit. Unknown numbers fulfil no condition, also not `!=`."""
    if sign == "!=":
        return _pack(value != limit and value == value for value in column)
    return _pack(map(getattr(limit, _MIRRORED[sign]), column))


def _fulfils(text: str, sign: str, value: str) -> bool:
    """Compare the value of a field, as a text, with a value of a query. A list fulfils what one of its items does."""
    texts = [text]
    if text.startswith("["):
        items = msgspec.json.decode(text)
        texts += [item if isinstance(item, str) else msgspec.json.encode(item).decode() for item in items]
    if sign == "=":
        return value in texts
    if sign == "!=":
        return value not in texts
    try:
        return any(_COMPARE[sign](float(each), float(value)) for each in texts)
    except ValueError:
        return False


def status_codes(table: TrialTable, name: str, position: int = 0) -> bytes:
    """Return the codes of the statuses of trials, or of what a grader or a checkpoint said of them."""
    if not name:
        return bytes(table["status"])
    numbers = [number for number, grader in enumerate(table.graders) if grader == name]
    numbers = numbers or [number for number, grader in enumerate(table.graders) if grader.startswith(f"{name}/")]
    if not numbers:
        names = [*table.graders, *checkpoints(table)]
        remedy = f"Its graders are {', '.join(names)}." if names else "It has no graders."
        raise QueryError(f"the run has no grader `{name}`{suggest(name, names)}", position, remedy)
    columns = [bytes(table[status_column(number)]) for number in numbers]
    if len(columns) == 1:
        return columns[0]
    ranks, codes = bytearray(256), bytearray(256)
    for rank, status in enumerate(_SEVERITY, 1):
        ranks[CODES[status]], codes[rank] = rank, CODES[status]
    return bytes(map(max, *(column.translate(ranks) for column in columns))).translate(codes)


def checkpoints(table: TrialTable) -> list[str]:
    """Return the names of the checkpoints, such as `checkpoint@2`."""
    return list(dict.fromkeys(name.split("/")[0] for name in table.graders if name.startswith("checkpoint@")))


def number_column(table: TrialTable, name: str) -> Any:
    """Return the column of a number, or of a grader's scores; None if there is none of this name."""
    if name in _NUMBERS:
        return table[name]
    number = table.grader_numbers.get(name)
    return None if number is None else table[score_column(number)]


def _sorted(columns: Columns, rows: array[int], sort: str) -> array[int]:
    name, table, reverse = sort.removeprefix("-"), columns.table, sort.startswith("-")
    column = number_column(table, name)
    key: Callable[[int], Any]
    if column is not None:
        known = _pack(value == value for value in column) if name != "trial" else None
        key = column.__getitem__
    elif name == "sample":
        known, key = None, table.id_at
    elif name == "status":
        known, key = None, bytes(table["status"]).__getitem__
    else:
        values, codes = (table.values[name], table[name]) if name in CODED else columns.field(name)
        ranks = _ranks(values)
        known, key = _pack(map(bool, codes)), lambda row: ranks[codes[row]]
    if known is None:
        return array("I", sorted(rows, key=key, reverse=reverse))
    flags = known.to_bytes(len(table), "little")
    ordered = array("I", sorted((row for row in rows if flags[row]), key=key, reverse=reverse))
    ordered.extend(row for row in rows if not flags[row])
    return ordered


def _ranks(values: list[str]) -> list[int]:
    """Return the place of each value in their order: numbers by size, then texts."""

    def order(number: int) -> tuple[bool, float, str]:
        try:
            return False, float(values[number]), ""
        except ValueError:
            return True, 0.0, values[number]

    ranks = [0] * len(values)
    for rank, number in enumerate(sorted(range(len(values)), key=order)):
        ranks[number] = rank
    return ranks


def facets(columns: Columns, snapshot: Snapshot, fields: Sequence[str] = ()) -> dict[str, list[Facet]]:
    """Count the selected rows by status, by what each grader and checkpoint said, and by stop, error and row field.

    Raises QueryError for fields that no row has, or that have too many values.
    """
    for name in fields:
        columns.field(name)
    with columns.lock:
        key = columns.generation, snapshot.mask, tuple(fields)
        if key in columns.counts:
            return columns.counts[key]
        table = columns.table
        result = {"status": _count_statuses(table, snapshot, "")}
        for name in [*checkpoints(table), *table.graders]:
            result[name] = _count_statuses(table, snapshot, name)
        for name in CODED:
            result[name] = _count_values(name, table.values[name], table[name], snapshot)
        for name in fields:
            values, codes = columns.field(name)
            result[name] = _count_values(name, values, codes, snapshot)
        table.release()
        while len(columns.counts) >= _KEPT_COUNTS:
            del columns.counts[next(iter(columns.counts))]
        counts = columns.counts[key] = {name: counted for name, counted in result.items() if counted}
        return counts


def _count_statuses(table: TrialTable, snapshot: Snapshot, name: str) -> list[Facet]:
    codes = status_codes(table, name)
    counted = [(status, (_equal(codes, code) & snapshot.mask).bit_count()) for status, code in CODES.items()]
    prefix = f"{quote(name)}:" if name else ""
    return [Facet(status, count, prefix + status) for status, count in counted if count]


def _count_values(name: str, values: list[str], codes: Any, snapshot: Snapshot) -> list[Facet]:
    if not any(values):
        return []
    if len(values) <= _FEW:
        column = _as_bytes(codes)
        counts = {code: (_equal(column, code) & snapshot.mask).bit_count() for code in range(len(values))}
    else:
        counts = Counter(compress(codes, snapshot.mask.to_bytes(snapshot.total, "little")))
    pairs = sorted(((values[code], count) for code, count in sorted(counts.items())), key=lambda pair: -pair[1])
    return [Facet(value, count, f"{quote(name)}={quote(value)}") for value, count in pairs if count and value]

"""Snapshots: the rows that a query selects from the trials of a run, in an order, with counts.

A query becomes a condition in SQL. Conditions on words and statuses first select outcomes, of which there are few;
the database compares numbers; hits of a text, and of a value of a field that is no column, are a byte for each row.
"""

from __future__ import annotations

import operator
from array import array
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.apps.view.columns import Snapshot
from holdfast.apps.view.query import Compares, Contains, Every, HasFlag, HasStatus, Not, Some, quote
from holdfast.errors import QueryError, suggest
from holdfast.report.trial_table import CODES, NUMBERS, STATUSES, WORDS, score_column

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.apps.view.columns import Columns
    from holdfast.apps.view.query import Condition, Query
    from holdfast.report.trial_table import TrialOutcome, TrialTable

_TEXTS: Final = ("sample", "status", *WORDS)
_COMPARE: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    "=": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}
_SEVERITY: Final = ("not_reached", "skipped", "passed", "ungraded", "failed", "error")
"""statuses in ascending order: a checkpoint has the last of its graders' statuses"""
_RANKS: Final = {CODES[status]: rank for rank, status in enumerate(_SEVERITY, 1)}
_KEPT_BYTES: Final = 16 << 20
"""bytes of row numbers in snapshots that are kept for further pages"""


class Facet(msgspec.Struct, frozen=True):
    """A value, and how many of the selected rows have it."""

    value: str
    count: int
    query: str
    """the condition that selects these rows"""


def select(
    columns: Columns, query: Query, sort: str = "", *, wait: float | None = None, generation: int | None = None
) -> Snapshot:
    """Return the rows for which a query holds, sorted by a column, descending if its name follows `-`.

    Rows without a value are last in either direction. Without a column, rows are in the dataset's order. A text is
    searched for at most `wait` seconds; None waits for the end. Until then, rows that are not searched yet count as
    rows without the text. The answer to an earlier `generation` of the rows is returned if it is still kept. Raises
    QueryError for names that the run does not have.
    """
    for number in (columns.generation if generation is None else generation, columns.generation):
        if (kept := columns.snapshots.pop((query.text, sort, number), None)) is not None:
            columns.snapshots[query.text, sort, number] = kept  # the most recently used is last
            return kept
    while True:
        # What takes long is done while others may read: the search for texts, and reading fields from the dataset.
        generation = columns.generation
        texts = {text: columns.find_text(text, wait) for text in query.texts}
        names = [(leaf.name, leaf.position) for leaf in query.comparisons]
        for name, position in [*names, (sort.removeprefix("-") or "sample", 0)]:
            if not _is_column(columns.table, name):
                columns.field(name, position)
        with columns.lock:
            if columns.generation == generation:
                return _select(columns, query, sort, texts)


def _select(columns: Columns, query: Query, sort: str, texts: dict[str, tuple[bytes, bool]]) -> Snapshot:
    translation, generation = _Translation(columns, texts), columns.generation
    where, values = translation.condition(query.condition), tuple(translation.values)
    rows = _sorted_rows(columns, where, values, sort)
    complete = all(complete for _, complete in texts.values())
    snapshot = Snapshot(rows, columns.rows, complete, generation, query, where, values)
    kept = columns.snapshots
    if complete:
        kept[query.text, sort, generation] = snapshot
    while len(kept) > 1 and sum(len(each.rows) * 4 for each in kept.values()) > _KEPT_BYTES:
        del kept[next(iter(kept))]
    return snapshot


def _is_column(table: TrialTable, name: str) -> bool:
    """Return True if the values of a name are in the table."""
    return name in _TEXTS or name in table.fields or number_column(table, name) is not None


class _Translation:
    """Translates the conditions of one query to SQL. All values are parameters."""

    def __init__(self, columns: Columns, texts: dict[str, tuple[bytes, bool]]) -> None:
        self._columns = columns
        self._table = columns.table
        self._texts = texts
        self.values: list[Any] = []

    def condition(self, condition: Condition) -> str:
        """Return an SQL expression that is true or false for each row, never null."""
        if isinstance(condition, Every | Some):
            word = " AND " if isinstance(condition, Every) else " OR "
            parts = [self.condition(part) for part in condition.conditions]
            return f"({word.join(parts)})" if parts else "1"
        if isinstance(condition, Not):
            return f"(NOT {self.condition(condition.condition)})"
        if isinstance(condition, HasStatus):
            codes = status_codes(self._table, condition.name, condition.position)
            return self._outcomes(lambda number, _: codes[number] == CODES[condition.status])
        if isinstance(condition, HasFlag):
            flag = "stopped" if condition.flag == "stopped" else "source"
            return self._outcomes(lambda _, outcome: bool(getattr(outcome, flag)))
        if isinstance(condition, Contains):
            return self._is_flagged(self._texts[condition.text][0])
        return self._compare(condition)

    def _outcomes(self, holds: Callable[[int, TrialOutcome], bool]) -> str:
        """Select the rows of outcomes for which something holds."""
        chosen = [number for number, outcome in enumerate(self._table.outcomes) if holds(number, outcome)]
        return self._is_in("outcome", chosen)

    def _is_in(self, column: str, numbers: list[int]) -> str:
        self.values.append(msgspec.json.encode(numbers).decode())
        return f"({column} IN (SELECT value FROM json_each(?)))"

    def _is_flagged(self, flags: bytes) -> str:
        """Select the rows that have a byte of 1."""
        self.values.append(flags)
        return "(substr(?, n + 1, 1) = x'01')"

    def _compare(self, condition: Compares) -> str:
        name, sign, value, position = condition
        table = self._table
        if name == "sample" and sign in ("=", "!="):
            self.values.append(value)
            return f"(sample {'=' if sign == '=' else '<>'} ?)"
        if name in _TEXTS and sign in ("=", "!="):
            return self._outcomes(lambda _, outcome: (_word(outcome, name) == value) is (sign == "="))
        column = number_column(table, name)
        if column is not None:
            if value in STATUSES and name in table.graders and sign in ("=", "!="):
                codes = status_codes(table, name, position)
                return self._outcomes(lambda number, _: (codes[number] == CODES[value]) is (sign == "="))
            self.values.append(_number(condition))
            return f"coalesce({column} {sign} ?, 0)"  # unknown numbers meet no condition, not even `!=`
        if name in table.fields:
            chosen = [number for each, number in table.fields[name].items() if _fulfils(each, sign, value)]
            return self._is_in(table.field_column(name), chosen)
        values, numbers = self._columns.field(name, position)
        fulfils = [_fulfils(each, sign, value) for each in values]
        return self._is_flagged(bytes(map(fulfils.__getitem__, numbers)))


def _word(outcome: TrialOutcome, name: str) -> str:
    return STATUSES[outcome.status - 1] if name == "status" else str(getattr(outcome, name))


def _number(condition: Compares) -> float:
    try:
        return float(condition.value)
    except ValueError:
        place = condition.position + len(condition.name) + len(condition.operator)
        raise QueryError(
            f"`{condition.name}` is a number and cannot be compared with `{condition.value}`",
            place,
            f"Write for example `{condition.name}{condition.operator}0.5`.",
        ) from None


def _fulfils(text: str, sign: str, value: str) -> bool:
    """Compare the value of a field, as a text, with a value of a query. A list matches if one of its items does."""
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


def status_codes(table: TrialTable, name: str, position: int = 0) -> list[int]:
    """Return for each outcome the code of its status, or of a grader's or checkpoint's verdict."""
    if not name:
        return [outcome.status for outcome in table.outcomes]
    numbers = [number for number, grader in enumerate(table.graders) if grader == name]
    numbers = numbers or [number for number, grader in enumerate(table.graders) if grader.startswith(f"{name}/")]
    if not numbers:
        names = [*table.graders, *checkpoints(table)]
        remedy = f"Its graders are {', '.join(names)}." if names else "It has no graders."
        raise QueryError(f"the run has no grader `{name}`{suggest(name, names)}", position, remedy)
    if len(numbers) == 1:
        return [outcome.statuses[numbers[0]] for outcome in table.outcomes]
    codes = ([outcome.statuses[number] for number in numbers] for outcome in table.outcomes)
    return [max(each, key=lambda code: _RANKS.get(code, 0)) for each in codes]


def checkpoints(table: TrialTable) -> list[str]:
    """Return the names of the checkpoints, such as `checkpoint@2`."""
    return list(dict.fromkeys(name.split("/")[0] for name in table.graders if name.startswith("checkpoint@")))


def number_column(table: TrialTable, name: str) -> str | None:
    """Return the column of a number, or of a grader's scores; None if no column has this name."""
    if name in NUMBERS or name == "trial":
        return name
    return score_column(table.graders.index(name)) if name in table.graders else None


def _sorted_rows(columns: Columns, where: str, values: Sequence[Any], sort: str) -> array[int]:
    name, table, reverse = sort.removeprefix("-"), columns.table, sort.startswith("-")
    if not sort and where == "1":
        return array("I", range(table.rows))
    column = "n" if not sort else "sample" if name == "sample" else number_column(table, name)
    if column is not None:
        order = f"{column} IS NULL, {column} {'DESC' if reverse else ''}, n" if sort else "n"
        return array("I", (number for (number,) in table.select("n", f"{where} ORDER BY {order}", values)))
    if name in _TEXTS:
        words = [_word(outcome, name) for outcome in table.outcomes]
        pairs = table.select("n, outcome", f"{where} ORDER BY n", values)
    elif name in table.fields:
        words = [*table.fields[name]]
        pairs = table.select(f"n, {table.field_column(name)}", f"{where} ORDER BY n", values)
    else:
        words, values_of_rows = columns.field(name)
        pairs = ((number, values_of_rows[number]) for (number,) in table.select("n", f"{where} ORDER BY n", values))
    ranks, unknown = _ranks(words, name), array("I")
    ranked: dict[int, array[int]] = defaultdict(lambda: array("I"))
    for number, code in pairs:
        (ranked[ranks[code]] if words[code] else unknown).append(number)
    return sum((ranked[rank] for rank in sorted(ranked, reverse=reverse)), array("I")) + unknown


def _ranks(values: list[str], name: str) -> list[int]:
    """Return the place of each value in their order: statuses by code, else numbers by size, then texts."""

    def order(value: str) -> tuple[bool, float, str]:
        if name == "status":
            return False, CODES[value], ""
        try:
            return False, float(value), ""
        except ValueError:
            return True, 0.0, value

    places = {value: place for place, value in enumerate(sorted(set(values), key=order))}
    return [places[value] for value in values]


def facets(columns: Columns, snapshot: Snapshot) -> dict[str, list[Facet]]:
    """Count the selected rows by status, by each grader's and checkpoint's verdict, stop, error and field of `by`."""
    with columns.lock:
        if snapshot.generation != columns.generation:
            snapshot = select(columns, snapshot.query, wait=0.0)
        name = snapshot.query.text, snapshot.complete, len(snapshot.rows)  # they grow while a text is searched for
        return columns.compute(name, lambda table: _count_facets(table, snapshot))


def _count_facets(table: TrialTable, snapshot: Snapshot) -> dict[str, list[Facet]]:
    counted = table.count("outcome", snapshot.where, snapshot.values)
    result = {"status": _count_statuses(table, counted, "")}
    for name in [*checkpoints(table), *table.graders]:
        result[name] = _count_statuses(table, counted, name)
    for name in WORDS:
        words: Counter[str] = Counter()
        for number, count in counted.items():
            words[_word(table.outcomes[number], name)] += count
        result[name] = _count_values(name, words)
    for name, values in table.fields.items():
        if name not in result and number_column(table, name) is None:  # else a query with this name means the other
            numbers = table.count(table.field_column(name), snapshot.where, snapshot.values)
            result[name] = _count_values(name, {value: numbers.get(number, 0) for value, number in values.items()})
    return {name: values for name, values in result.items() if values}


def _count_statuses(table: TrialTable, counted: dict[int, int], name: str) -> list[Facet]:
    codes, counts = status_codes(table, name), Counter[int]()
    for number, count in counted.items():
        counts[codes[number]] += count
    prefix = f"{quote(name)}:" if name else ""
    return [Facet(status, counts[code], prefix + status) for status, code in CODES.items() if counts[code]]


def _count_values(name: str, counts: dict[str, int]) -> list[Facet]:
    pairs = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return [Facet(value, count, f"{quote(name)}={quote(value)}") for value, count in pairs if count and value]

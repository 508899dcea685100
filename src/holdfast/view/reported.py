"""Columns of a finished run: verdicts from `results.json`, in its order, and everything else from the outputs."""

from __future__ import annotations

import gc
from array import array
from contextlib import contextmanager
from itertools import chain, islice, repeat
from pathlib import Path
from struct import iter_unpack
from typing import TYPE_CHECKING, Any, Final

from holdfast.report.trial_facts import LastFailures, set_failure, set_missing
from holdfast.store.index import Entry, Index, keep_output, read_output_head
from holdfast.store.lines import LineRef
from holdfast.store.output_rows import COLUMNS, NO_OUTPUT, column_of
from holdfast.store.rundir import RunDir
from holdfast.store.trial_table import CODES, TrialTable, split_place, status_column
from holdfast.view.chunks import GraderColumn, plan_chunks, sharing_chunks
from holdfast.view.outputs import OutputRows, place_and_length, short_keys
from holdfast.view.results import append_results

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from holdfast.report.run_view import RunView
    from holdfast.view.chunks import ChunkPlan, Part

_WAITING: Final = 1024
"""outputs that are taken at once"""


def plan_report(view: RunView, dataset: Any) -> ChunkPlan | None:
    """Prepare for reading the columns of a finished run; None if its report does not fit its journals.

    `dataset` is the present state of the dataset, for the columns of the fields by which results are broken down.
    """
    metrics = view.metrics
    if metrics is None:
        return None
    sizes = view.rundir.journal_bytes()
    if any(getattr(metrics.timing, name) not in (None, size) for name, size in sizes.items()):
        return None
    graders = [GraderColumn(place.name, place.block.where is not None) for place in view.places]
    return plan_chunks(view.rundir, graders, list(view.spec.by), dataset)


def read_reported(plan: ChunkPlan, progress: Callable[[float], None]) -> TrialTable | None:
    """Return the columns of a finished run; None if its report does not fit its journals, which then decide."""
    results, outputs = _Results(plan), OutputRows()
    order = _Order(results.table, outputs)
    with _without_collector():
        try:
            with sharing_chunks(plan) as collect:
                for part in collect(progress):
                    if part.of_outputs:
                        outputs.append(part.columns, part.values)
                    else:
                        results.append(part)
                    order.advance()
        except (ValueError, OSError):
            return None  # the results are not as expected, or a helper process has failed, as where the disk is full
        return _join(Path(plan.root), results, outputs, order) if results.explain_errors() else None


@contextmanager
def _without_collector() -> Iterator[None]:
    """Switch the garbage collector off: a million short-lived objects without cycles cost it half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Results:
    """The columns of `results.json`, and which of its trials have an output."""

    def __init__(self, plan: ChunkPlan) -> None:
        self._rundir = RunDir(Path(plan.root))
        self._graders = plan.graders
        self.table = TrialTable(plan.grader_names)
        self.table.files = list(plan.files)  # as the outputs number them
        for name in plan.fields:
            self.table.set_field(name, [""], array("I"), plan.dataset)
        self.present = bytearray()
        """a byte of 1 for each trial that has an output"""
        self._errors: list[tuple[int, str, bool]] = []

    def append(self, part: Part) -> None:
        """Append the trials of a chunk."""
        first = len(self.table)
        self._errors += [(first + row, key, present) for row, key, present in part.errors]
        append_results(self.table, part.columns, part.values)

    def explain_errors(self) -> bool:
        """Tell trials without an output from those whose verdicts failed or are still to come.

        Returns False if the results do not tell which graders looked at one of them.
        """
        table, rows = self.table, len(self.table)
        self.present += b"\1" * rows
        for name in ("error", "error_at"):
            table[name].frombytes(bytes(rows * table[name].itemsize))
        failures = LastFailures()
        failures.read(self._rundir.journals("errors"))
        return all(self._explain(failures, *error) for error in self._errors)

    def _explain(self, failures: LastFailures, row: int, key: str, present: bool) -> bool:
        table, root = self.table, self._rundir.path
        if not present:
            self.present[row] = 0
            set_missing(table, row, failures.of_target.get(key), root)
            return True
        failure = failures.of_graders.get(key)
        set_failure(table, row, failure, root)
        columns = [table[status_column(number)] for number in range(len(table.graders))]
        if failure is None and all(column[row] != CODES["error"] for column in columns):
            table["status"][row] = CODES["ungraded"]
        absent = [number for number, column in enumerate(columns) if not column[row]]
        for number in absent:
            columns[number][row] = CODES["ungraded"]
        return not any(self._graders[number].conditional for number in absent)


class _Order:
    """Puts the rows of outputs in the order of a table, and takes them apart into columns, while both grow.

    Outputs are nearly in this order, since requests are sent in it. So few wait for their turn, and the dict of those
    that do stays in the processor's cache. Where two keys have the same short key, an output is missing or in the wrong
    row, which is noticed as if there were one too few or too many.
    """

    def __init__(self, table: TrialTable, outputs: OutputRows) -> None:
        self._table = table
        self._outputs = outputs
        self._pairs = outputs.short_pairs()
        self._waiting = dict[int, bytes]()
        self._taken = 0
        """outputs that are waiting or have come to their rows"""
        self._rows = 0
        """rows of the table that have had their turn"""
        self._columns = {name: bytearray() for name in COLUMNS}

    def advance(self) -> None:
        """Give their turn to rows whose outputs should have been read."""
        while self._rows + _WAITING <= min(len(self._table), self._outputs.count - _WAITING):
            self._take(self._rows + 2 * _WAITING - self._taken)

    def _take(self, outputs: int) -> None:
        self._waiting.update(islice(self._pairs, outputs))
        keys = short_keys(self._table["keys"][self._rows * 16 : (self._rows + _WAITING) * 16])
        rows = b"".join(map(self._waiting.pop, keys, repeat(NO_OUTPUT)))
        for name, column in self._columns.items():
            column += column_of(rows, name)
        self._taken += outputs
        self._rows += len(keys)

    def finish(self) -> dict[str, bytearray] | None:
        """Return the columns in order; None if a key has several outputs, or is not in the table."""
        while self._rows < len(self._table):
            self._take(min(_WAITING, self._outputs.count - self._taken))
        waiting = self._waiting
        waiting.update(self._pairs)
        places = array("Q", self._columns["at"])
        if len(places) - places.count(0) + len(waiting) != self._outputs.count:
            return None  # one output has replaced another
        keys = short_keys(self._table["keys"])
        for row in [row for row, place in enumerate(places) if not place] if waiting else ():
            if (late := waiting.pop(keys[row], None)) is not None:
                for name, column in self._columns.items():
                    value = column_of(late, name)
                    column[row * len(value) : (row + 1) * len(value)] = value
        return None if waiting else self._columns


def _join(root: Path, results: _Results, outputs: OutputRows, order: _Order) -> TrialTable | None:
    """Fill the columns of the results with those of their outputs; None if there is an output too many or too few."""
    table = results.table
    columns: Mapping[str, bytes | bytearray] | None = order.finish()
    if columns is None:
        chosen = _choose_outputs(root, table.files, outputs)
        keys = chain.from_iterable(iter_unpack("16s", table["keys"]))
        rows = b"".join([chosen.pop(key, NO_OUTPUT) for key in keys])
        if chosen:
            return None
        columns = {name: column_of(rows, name) for name in COLUMNS}
    for name, column in columns.items():
        table[name].frombytes(column)
    if bytes(map(bool, table["at"])) != results.present:
        return None
    for name, codes in outputs.values.items():
        table.values[name] = list(codes)
    table.pad()
    return table


def _choose_outputs(root: Path, files: list[str], outputs: OutputRows) -> dict[bytes, bytes]:
    """Return the output that counts for each key, as the index chooses it where there are several."""
    chosen = dict(outputs.pairs())
    if len(chosen) == outputs.count:
        return chosen
    rows: dict[bytes, list[bytes]] = {}
    for key, row in outputs.pairs():
        rows.setdefault(key, []).append(row)
    for key, several in rows.items():
        if len(several) > 1:
            index, by_line = Index(), {}
            for (place, length), row in sorted((place_and_length(row), row) for row in several):
                file, offset = split_place(place)
                line = LineRef(root / files[file], offset, length)
                if (head := read_output_head(line.read())) is not None:
                    keep_output(index, Entry(line, head))
                    by_line[line] = row
            chosen[key] = by_line[next(iter(index.outputs.values())).line]
    return chosen

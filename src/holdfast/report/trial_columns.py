"""The trials of a large run as columns, written while its report is: so the viewer opens the run at once.

They are a cache in `.index/`, made of what the report looks up anyway, and hold what the viewer would read from the
report and the journals. Batches of trials pass through a small table in memory, so a run needs no more of it. Nothing
that happens to this file concerns the run: where it cannot be written, or the columns would lack something, there is
none, and the viewer reads the run itself.
"""

from __future__ import annotations

import struct
from array import array
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.report.trial_facts import LastFailures, set_missing, set_verdicts, verdict_columns, verdict_values
from holdfast.store.output_rows import COLUMNS, NO_OUTPUT, column_of, pack_outputs, text_numbers
from holdfast.store.rundir import INDEX, bytes_to_cache
from holdfast.store.shared import journal_size
from holdfast.store.trial_notes import TableNotes, stamp_journals, stamp_report
from holdfast.store.trial_table import CODES, TABLE, TableWriter, TrialTable, field_column, join_place

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.graders.build import GraderPlace
    from holdfast.plan.identity import RunIdentity
    from holdfast.report.trials import TrialBatch
    from holdfast.report.verdicts import JudgedOutput
    from holdfast.store.index import Index
    from holdfast.store.rundir import RunDir
    from holdfast.store.texts import OutputText

_ROWS: Final = 1 << 12
"""trials that are written at once"""
_MOST_VERDICTS: Final = 1 << 12
"""different combinations of verdicts whose columns are kept"""
_MOST_ERRORS: Final = 64_000_000
"""bytes of failed attempts, of which the last one of each trial is in memory while they are looked up"""
_FIRST_FILE: Final = join_place(0, 0)
"""what places in a table have more than those in the index, which numbers the journals from 0"""
_UNDECIDED: Final = (CODES["error"], CODES["ungraded"])
_UNSUITABLE: Final = (OSError, ValueError, OverflowError, struct.error)
"""the disk is full, a journal is elsewhere, or a number does not fit into its column"""


class TrialColumns:
    """Writes the columns of one run, batch by batch."""

    def __init__(self, identified: RunIdentity, rundir: RunDir, index: Index, places: Sequence[GraderPlace]) -> None:
        self._identified, self._rundir, self._index = identified, rundir, index
        self._dataset = list(map(list, identified.stamp))
        self._journals = stamp_journals(rundir)  # whatever is appended from now on makes the columns stale
        self._table = TrialTable([place.name for place in places])
        self._numbers = text_numbers()
        self._outputs = 0
        self._verdict_columns = verdict_columns(len(places))
        self._values: dict[JudgedOutput, list[float]] = {}
        self._writer: TableWriter | None = None
        if sum(rundir.journal_bytes().values()) >= bytes_to_cache():
            with suppress(*_UNSUITABLE):
                self._writer = self._begin()

    def _begin(self) -> TableWriter | None:
        root, survey, table = self._rundir.path, self._identified.survey, self._table
        if sum(map(journal_size, self._rundir.journals("errors"))) > _MOST_ERRORS:
            return None
        table.files = [str(path.relative_to(root)) for path in self._index.outputs.files]  # as the index numbers them
        for name in dict.fromkeys(self._identified.spec.by):
            table.set_field(name, [""], array("I"), self._dataset)
        folder = root / INDEX
        folder.mkdir(exist_ok=True)
        for leftover in folder.glob(f".{TABLE}.*.tmp"):
            leftover.unlink()
        return TableWriter(folder, table, survey.count * self._identified.spec.trials)

    def add(self, batch: TrialBatch, samples: list[str], outputs: Sequence[OutputText]) -> None:
        """Add trials: the sample id of each, and the outputs of those that have one."""
        if self._writer is None:
            return
        try:
            self._fill(batch, samples, outputs)
            if len(self._table) >= _ROWS:
                self._write(self._writer)
        except _UNSUITABLE:
            self.discard()

    def _fill(self, batch: TrialBatch, samples: list[str], outputs: Sequence[OutputText]) -> None:
        table, trials, first = self._table, self._identified.spec.trials, len(self._table)
        table.extend(samples, [*range(1, trials + 1)] * len(batch.positions), batch.keys)
        for name, values in zip(self._verdict_columns, self._verdicts(batch), strict=True):
            table.fill(name, values)
        lines = [(_FIRST_FILE + each[1], each[2]) for each in batch.fields]
        packed = iter(pack_outputs(outputs, lines, self._numbers))
        rows = b"".join([NO_OUTPUT if row < 0 else next(packed) for row in batch.rows])
        for name in COLUMNS:
            table[name].frombytes(column_of(rows, name))
        for name, codes in self._field_codes.items():
            numbers = self._identified.survey.groupings[name].packed()[batch.positions.start : batch.positions.stop]
            repeated = numbers if trials == 1 else [number for number in numbers for _ in range(trials)]
            table.fill(field_column(name), [codes[number] for number in repeated])
        self._outputs += len(outputs)
        statuses = table["status"][first:].tobytes()
        if any(code in statuses for code in _UNDECIDED):
            table.pad()
            for number, code in enumerate(statuses):
                if code in _UNDECIDED:
                    judged = None if batch.rows[number] < 0 else batch.judged[number]
                    self._explain(first + number, batch.keys[number], judged)

    def _write(self, writer: TableWriter) -> None:
        self._table.pad()
        writer.write()
        self._table.clear()

    def _explain(self, row: int, key: str, judged: JudgedOutput | None) -> None:
        """Tell a failed trial or verdict from one that is still to come."""
        if judged is None:
            set_missing(self._table, row, self._failures.of_target.get(key), self._rundir.path)
        else:
            set_verdicts(self._table, row, judged, self._failures.of_graders.get(key), self._rundir.path)

    def _verdicts(self, batch: TrialBatch) -> Iterator[tuple[float, ...]]:
        """Yield the columns of statuses and scores."""
        values = self._values
        if len(values) > _MOST_VERDICTS:
            values.clear()
        for judged in set(batch.judged).difference(values):
            values[judged] = verdict_values(judged, len(self._table.graders), None)
        return zip(*[values[judged] for judged in batch.judged], strict=True)

    @cached_property
    def _field_codes(self) -> dict[str, list[int]]:
        """The numbers in the table of the values of each field of `by`."""
        groupings = self._identified.survey.groupings
        names = dict.fromkeys(self._identified.spec.by)
        return {name: [self._table.code(field_column(name), text) for text in groupings[name].values] for name in names}

    @cached_property
    def _failures(self) -> LastFailures:
        failures = LastFailures()
        failures.read(self._rundir.journals("errors"))
        return failures

    def finish(self) -> None:
        """Store the columns, after the report: they are those of its files as they are now."""
        if self._writer is None:
            return
        if self._outputs != len(self._index.outputs):  # the viewer also lists outputs whose rows are gone
            self.discard()
            return
        notes = TableNotes("reported", stamp_report(self._rundir), self._dataset, self._journals)
        self._table.notes = msgspec.to_builtins(notes)
        self._table.values |= {name: list(texts) for name, texts in self._numbers.items()}
        try:
            self._write(self._writer)
            self._writer.finish()
        except _UNSUITABLE:
            self.discard()

    def discard(self) -> bool:
        """Remove what was written; return False if there was nothing."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.discard()
        return writer is not None

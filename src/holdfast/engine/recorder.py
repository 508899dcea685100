"""Write records: to disk first, then to the index, the progress and the display."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from msgspec import UnsetType
from msgspec.structs import replace

from holdfast.graders.build import place_name
from holdfast.spec.redact import MARK, Secrets
from holdfast.store.answers import KIND_CODES, answer_kind
from holdfast.store.records import to_line
from holdfast.store.refs import OutputRef, VerdictRef, moments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.display.types import Display
    from holdfast.engine.inputs import InputRecorder
    from holdfast.plan.progress import Progress
    from holdfast.store.index import Index
    from holdfast.store.journal import Journal
    from holdfast.store.lines import LineRef
    from holdfast.store.records import ErrorRecord, Grade, Output, Step


class Recorder:
    """Records the outputs, grades, calls and errors of a run."""

    def __init__(
        self,
        journal: Journal,
        index: Index,
        progress: Progress,
        display: Display,
        *,
        nothing_to_grade: bool,
        inputs: InputRecorder | None = None,
        secrets: Secrets | None = None,
    ) -> None:
        """`inputs` records what users' code reads, if any runs in this process."""
        self._journal = journal
        self.secrets = secrets or Secrets(environ={})
        """secrets that no record may contain; replies are cleaned before they are used"""
        self._inputs = inputs
        self._index = index
        self._progress = progress
        self._display = display
        self._nothing_to_grade = nothing_to_grade
        self._failed_before = frozenset(index.attempts)
        self._missing_grades: dict[str, int] = {}
        """by trial: how many verdicts it still lacks"""

    def failed_attempts(self, key: str, where: str) -> int:
        """Return how often the target, or a grader, has failed for a trial, in all processes."""
        if where == "target":
            return self._index.attempts.get(key, 0)
        return self._index.grader_attempts.get((key, where), 0)

    def failed_before(self, key: str) -> bool:
        """Return True if a trial already failed in an earlier process."""
        return key in self._failed_before

    async def step(self, record: Step) -> None:
        """Record a call of a trial; return when the record is on disk."""
        self._record_inputs()
        await self._journal.write("steps", to_line(record))  # its response was cleaned of secrets
        self._index.spent.add(record.usage)
        self._progress.step(record.kind)

    async def output(self, record: Output, *, usage_counted: bool) -> None:
        """Record a finished trial; return when it is on disk. `usage_counted`: its usage was counted call by call."""
        self._record_inputs()
        data = to_line(record)
        if MARK in data:
            record = replace(record, redacted=data.count(MARK))
            data = to_line(record)
        line = await self._journal.write("outputs", data)
        self._keep_output(record, line)
        timing = record.timing
        if not usage_counted:
            self._index.spent.add(record.usage)
        self._index.spent.add_time(timing.started, timing.started + timing.seconds)
        self._progress.outputs += 1
        self._progress.kinds[answer_kind(record.answer, record.stop)] += 1
        self._progress.graded += self._nothing_to_grade
        self._display.output(record)

    def _record_inputs(self) -> None:
        """Record what code has read since the last time: no result is on disk before its inputs."""
        if self._inputs is not None:
            self._inputs.flush()

    def _keep_output(self, record: Output, line: LineRef) -> None:
        """Add an output to the index, in half the time if it is new and has no rare field, like most."""
        outputs, usage, timing = self._index.outputs, record.usage, record.timing
        marks = () if isinstance(record.marks, UnsetType) else moments(record.marks, usage, timing.seconds)
        stopped_by = None if isinstance(record.stopped_by, UnsetType) else record.stopped_by
        kind = answer_kind(record.answer, record.stop)
        row = None if isinstance(record.row, UnsetType) else record.row
        if not marks and stopped_by is None:
            path, offset, length = line
            place = outputs.number_of(path), offset, length
            times = timing.seconds, timing.started
            if outputs.add_plain(record.key, *place, record.digest, usage, *times, row, KIND_CODES[kind]):
                return
        outputs[record.key] = OutputRef(
            line, record.digest, usage, timing.seconds, marks, stopped_by, timing.started, row, kind
        )

    def expect_grades(self, key: str, graders: Sequence[int]) -> None:
        """Register the graders whose verdicts an output still lacks."""
        if graders:
            self._missing_grades[key] = len(graders)
        else:
            self._progress.graded += 1

    def grade(self, record: Grade) -> None:
        """Record a verdict without waiting for the disk."""
        self._record_inputs()
        record, line = self._without_secrets(record)
        self._journal.post("grades", line, lambda: self._graded(record))

    async def grade_now(self, record: Grade) -> None:
        """Record a verdict; return when it is on disk."""
        self._record_inputs()
        record, line = self._without_secrets(record)
        await self._journal.write("grades", line)
        self._graded(record)

    def _without_secrets(self, record: Grade) -> tuple[Grade, bytes]:
        """Return a verdict whose explanation has no secrets, and its line."""
        line = to_line(record)
        if not self.secrets.found_in(line):
            return record, line
        feedback, details = self.secrets.hide(record.feedback), self.secrets.clean(record.details)
        record = replace(record, feedback=feedback, details=details)
        return record, to_line(record)

    def _graded(self, record: Grade) -> None:
        key, status, score, usage = record.grade_key, record.status, record.score, record.usage
        graded_at = 0.0 if isinstance(record.time, UnsetType) else record.time
        counts = None if isinstance(record.counts, UnsetType) else record.counts
        together = None if isinstance(record.together, UnsetType) else record.together
        verdicts = self._index.verdicts
        rare = counts is not None or together is not None
        if rare or not verdicts.add_plain(key, status, score, usage, graded_at):
            verdicts[key] = VerdictRef(status, score, usage, graded_at, counts, together)
        self._index.spent.add_grade(usage, graded_at, record.seconds)
        self._display.grade(record)
        missing = self._missing_grades.pop(record.key, 0)
        if status == "error":
            self._progress.ungraded += missing > 0
            return
        self._progress.grade(place_name(record.grader, record.turn), score)
        if missing > 1:
            self._missing_grades[record.key] = missing - 1
        else:
            self._progress.graded += missing

    def error(self, record: ErrorRecord) -> None:
        """Record a failed attempt without waiting for the disk."""
        traceback = record.traceback if isinstance(record.traceback, UnsetType) else self.secrets.hide(record.traceback)
        record = replace(record, message=self.secrets.hide(record.message), traceback=traceback)
        if record.where == "target":
            self._index.attempts[record.key] = record.attempt
            self._index.note_failure(record.key, record.kind, math.inf)  # later than any clock
        else:
            self._index.grader_attempts[record.key, record.where] = record.attempt
        if record.usage is not None:
            self._index.spent.add(record.usage)
        self._index.spent.add_time(record.time - record.seconds, record.time)
        if not record.final:
            self._progress.retried[record.kind] += 1
        elif record.where != "target":
            self._progress.failed_grades[record.where] += 1
        self._journal.post("errors", to_line(record))
        self._display.error(record)

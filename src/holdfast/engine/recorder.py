"""Write records: to disk first, then to the index, the progress and the display."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from msgspec import UnsetType
from msgspec.structs import replace

from holdfast.graders.build import place_name
from holdfast.spec.redact import MARK, Secrets
from holdfast.store.heads import VerdictRef
from holdfast.store.records import answer_kind, to_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.display.displays import Display
    from holdfast.engine.inputs import InputRecorder
    from holdfast.plan.progress import Progress
    from holdfast.store.heads import VerdictKey
    from holdfast.store.index import RunIndex
    from holdfast.store.journal import Journal
    from holdfast.store.records import ErrorRecord, Grade, Output, Step


class Recorder:
    """Records the outputs, grades, calls and errors of a run."""

    def __init__(
        self,
        journal: Journal,
        index: RunIndex,
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
        self._spent = progress.spent
        self._attempts, self._grader_attempts = {**index.attempts}, {**index.grader_attempts}
        """failed attempts before this process; the index counts this one's, too, once it has read them"""
        self._failed: Counter[tuple[str, str]] = Counter()
        """failed attempts in this process, by trial and `target` or the grader's name"""
        self._checkpoint_verdicts: dict[str, dict[VerdictKey, VerdictRef]] = {}
        """verdicts of checkpoints on conversations that are going on"""
        self._missing_grades: dict[str, int] = {}
        """by trial: how many verdicts it still lacks"""

    def failed_attempts(self, key: str, where: str) -> int:
        """Return how often the target, or a grader, has failed for a trial, in all processes."""
        before = self._attempts.get(key, 0) if where == "target" else self._grader_attempts.get((key, where), 0)
        return before + self._failed[key, where]

    def failed_before(self, key: str) -> bool:
        """Return True if a trial already failed in an earlier process."""
        return key in self._attempts

    async def step(self, record: Step) -> None:
        """Record a call of a trial; return when the record is on disk."""
        self._record_inputs()
        await self._journal.write("steps", to_line(record))  # its response was cleaned of secrets
        self._spent.add(record.usage)
        self._progress.step(record.kind)

    async def output(self, record: Output, *, usage_counted: bool) -> None:
        """Record a finished trial; return when it is on disk. `usage_counted`: its usage was counted call by call."""
        self._record_inputs()
        data = to_line(record)
        if MARK in data:
            record = replace(record, redacted=data.count(MARK))
            data = to_line(record)
        await self._journal.write("outputs", data)
        timing = record.timing
        if not usage_counted:
            self._spent.add(record.usage)
        self._spent.add_time(timing.started, timing.started + timing.seconds)
        self._progress.outputs += 1
        self._progress.kinds[answer_kind(record.answer, record.stop)] += 1
        self._progress.graded += self._nothing_to_grade
        self._display.output(record)

    def _record_inputs(self) -> None:
        """Record what code has read since the last time: no result is on disk before its inputs."""
        if self._inputs is not None:
            self._inputs.flush()

    def verdicts(self, key: str) -> dict[VerdictKey, VerdictRef]:
        """Return a trial's verdicts, from earlier processes and from checkpoints in this process."""
        return {**self._index.verdicts(key), **self._checkpoint_verdicts.get(key, {})}

    def forget_verdicts(self, key: str) -> None:
        """Forget the verdicts of checkpoints on a trial, which has ended."""
        self._checkpoint_verdicts.pop(key, None)

    def expect_grades(self, key: str, graders: Sequence[int]) -> None:
        """Register the graders whose verdicts an output still lacks."""
        if graders:
            self._missing_grades[key] = len(graders)
        else:
            self._progress.graded += 1

    def grade(self, record: Grade, *, instant: bool = False) -> None:
        """Record a verdict without waiting for the disk. An `instant` grader would give it again at no cost."""
        self._record_inputs()
        record, line = self._without_secrets(record)
        self._journal.post("grades", line, lambda: self._graded(record), hurry=not instant)

    async def grade_now(self, record: Grade) -> None:
        """Record a verdict; return when it is on disk."""
        self._record_inputs()
        record, line = self._without_secrets(record)
        await self._journal.write("grades", line)
        self._graded(record)
        verdict = VerdictRef(record.status, record.score, record.usage)
        self._checkpoint_verdicts.setdefault(record.key, {})[record.by, record.turn, record.judged] = verdict

    def _without_secrets(self, record: Grade) -> tuple[Grade, bytes]:
        """Return a verdict whose explanation has no secrets, and its line."""
        line = to_line(record)
        if not self.secrets.found_in(line):
            return record, line
        feedback, details = self.secrets.hide(record.feedback), self.secrets.clean(record.details)
        record = replace(record, feedback=feedback, details=details)
        return record, to_line(record)

    def _graded(self, record: Grade) -> None:
        status, score = record.status, record.score
        self._spent.add_grade(record.usage, record.time, record.seconds)
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
        self._failed[record.key, record.where] += 1
        if record.usage is not None:
            self._spent.add(record.usage)
        self._spent.add_time(record.time - record.seconds, record.time)
        if not record.final:
            self._progress.retried[record.kind] += 1
        elif record.where != "target":
            self._progress.failed_grades[record.where] += 1
        self._journal.post("errors", to_line(record))
        self._display.error(record)

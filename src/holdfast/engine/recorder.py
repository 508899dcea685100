"""Keeping records: on disk first, and only then in the index, in the progress and on the display."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UnsetType

from holdfast.graders.build import place_name
from holdfast.store.index import OutputRef, VerdictRef, moments
from holdfast.store.records import to_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.display.types import Display
    from holdfast.plan.progress import Progress
    from holdfast.store.index import Index
    from holdfast.store.journal import Journal
    from holdfast.store.records import ErrorRecord, Grade, Output, Step


class Recorder:
    """The one place where outputs, grades and errors of a run are recorded."""

    def __init__(
        self, journal: Journal, index: Index, progress: Progress, display: Display, *, nothing_to_grade: bool
    ) -> None:
        self._journal = journal
        self._index = index
        self._progress = progress
        self._display = display
        self._nothing_to_grade = nothing_to_grade
        self._failed_before = frozenset(index.attempts)
        self._owed: dict[str, int] = {}
        """how many verdicts a trial in hand still lacks"""

    def failed_attempts(self, key: str, where: str) -> int:
        """Return how often the target, or a grader, has failed at a trial so far, in all processes."""
        if where == "target":
            return self._index.attempts.get(key, 0)
        return self._index.grader_attempts.get((key, where), 0)

    def failed_before(self, key: str) -> bool:
        """Whether a trial already failed in an earlier process."""
        return key in self._failed_before

    async def step(self, record: Step) -> None:
        """Keep a call of a conversation; returns when it is on the medium."""
        await self._journal.write("steps", to_line(record))
        self._index.spent.add(record.usage)
        self._progress.step(record.kind)

    async def output(self, record: Output, *, usage_counted: bool) -> OutputRef:
        """Record a finished trial; return when it is on disk. `usage_counted`: its calls were counted one by one."""
        line = await self._journal.write("outputs", to_line(record))
        timing = record.timing
        ref = OutputRef(
            line,
            record.digest,
            record.usage,
            timing.seconds,
            () if isinstance(record.marks, UnsetType) else moments(record.marks, record.usage, timing.seconds),
            None if isinstance(record.stopped_by, UnsetType) else record.stopped_by,
            timing.started,
        )
        self._index.outputs[record.key] = ref
        if not usage_counted:
            self._index.spent.add(record.usage)
        self._index.spent.add_time(timing.started, timing.started + timing.seconds)
        self._progress.outputs += 1
        self._progress.graded += self._nothing_to_grade
        self._display.output(record)
        return ref

    def owes(self, key: str, graders: Sequence[int]) -> None:
        """An output is about to be graded, unless it has all its verdicts from checkpoints on the way."""
        if graders:
            self._owed[key] = len(graders)
        else:
            self._progress.graded += 1

    def grade(self, record: Grade) -> None:
        """Keep a verdict, without waiting."""
        self._journal.post("grades", to_line(record), lambda: self._graded(record))

    async def grade_now(self, record: Grade) -> None:
        """Keep a verdict; returns when it is on the medium."""
        await self._journal.write("grades", to_line(record))
        self._graded(record)

    def _graded(self, record: Grade) -> None:
        given = 0.0 if isinstance(record.time, UnsetType) else record.time
        counts = None if isinstance(record.counts, UnsetType) else record.counts
        self._index.verdicts[record.grade_key] = VerdictRef(record.status, record.score, record.usage, given, counts)
        self._index.spent.add_grade(record.usage, given, record.seconds)
        self._display.grade(record)
        if record.status == "error":
            self._progress.ungraded += self._owed.pop(record.key, None) is not None
            return
        self._progress.grade(place_name(record.grader, record.turn), record.score)
        if record.key in self._owed:
            self._owed[record.key] -= 1
            if self._owed[record.key] == 0:
                del self._owed[record.key]
                self._progress.graded += 1

    def error(self, record: ErrorRecord) -> None:
        """Keep a failed attempt, without waiting."""
        if record.where == "target":
            self._index.attempts[record.key] = record.attempt
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

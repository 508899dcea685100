"""The lines that a run with failures ends with: how many there are, one of them, and the commands that show them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from holdfast.display.format import one_line
from holdfast.display.terminal import printable
from holdfast.plan.changes import format_count
from holdfast.store.heads import decode_line
from holdfast.store.lines import LineRef, search
from holdfast.store.records import Grade

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.report.outcome import Outcome
    from holdfast.store.rundir import RunDir

_SHORT: Final = 60
"""characters up to which an answer is shown beside the feedback: a longer one begins with anything but the mistake"""


class Example(NamedTuple):
    """A trial that failed, and the first grader that says so."""

    sample: str
    grader: str
    feedback: str
    answer: str

    def __str__(self) -> str:
        parts = [self.feedback] if self.feedback.strip() else []
        answer = one_line(self.answer)
        if not parts or len(answer) <= _SHORT:
            parts.append(f"answer: {answer}" if answer else "the answer is empty")
        return f"{printable(self.sample, '')} · {self.grader}: {one_line(' · '.join(parts))}"


def failure_lines(outcome: Outcome, run: str) -> Iterator[str]:
    """Say how many trials failed, with an example, and how to look at what failed; nothing where nothing did."""
    metrics = outcome.metrics or outcome.so_far
    failed = 0 if metrics is None or metrics.overall is None else metrics.overall.failed
    errors = outcome.failures is not None and bool(outcome.failures.pending)
    if metrics is not None and failed:
        example = first_failed(outcome.rundir) if outcome.metrics is not None else None
        counted = f"{failed:,} of {format_count(metrics.graded, 'graded trial')} failed"
        yield from [counted] if example is None else [f"{counted}, for example:", f"  {example}"]
    if failed or errors:
        yield f"look: holdfast show {run} {'--failed' if failed else '--errors'}, or holdfast view {run}"


def first_failed(rundir: RunDir) -> Example | None:
    """Find the first trial of a finished run that failed, without reading more than is needed to find it."""
    trial = next((trial for trial in rundir.iterate_results() if trial.status == "failed"), None)
    if trial is None:
        return None
    grader = next((name for name, grade in trial.grades.items() if grade.status == "failed"), "-")
    return Example(trial.sample, grader, _feedback(rundir, trial.key, grader), trial.output or "")


def _feedback(rundir: RunDir, key: str, grader: str) -> str:
    """Return what a grader said last about an output; empty where it has been renamed since."""
    latest = None
    for path in rundir.journals("grades"):
        for line in search(path, b'{"key":%b,' % msgspec.json.encode(key)):
            grade = decode_line(Grade, LineRef(path, line.offset, len(line.data)), line.data)
            name = grade.grader if grade.turn is None else f"checkpoint@{grade.turn}/{grade.grader}"
            if name == grader and (latest is None or (latest.time or 0) <= (grade.time or 0)):
                latest = grade
    return "" if latest is None else latest.feedback

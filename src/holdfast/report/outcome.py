"""How a run ended: why it stopped, its exit code, and what failed in it, by `errors.jsonl` and `results.json`."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from holdfast.display.displays import Result
from holdfast.display.format import one_line, without_details
from holdfast.display.terminal import printable
from holdfast.errors import BudgetReached, Exit, Fault, Interrupted, Waiting
from holdfast.graders.build import grader_places
from holdfast.plan.changes import format_count
from holdfast.report.trials import read_error_heads
from holdfast.store.heads import ErrorHead, decode_line, is_decision
from holdfast.store.lines import LineRef, search
from holdfast.store.records import Grade, Step, named_sample

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.plan.identity import RunIdentity
    from holdfast.plan.plan import Plan
    from holdfast.store.heads import OutputRef
    from holdfast.store.index import RunIndex
    from holdfast.store.metrics import GateOutcome, Metrics
    from holdfast.store.records import Spent
    from holdfast.store.rundir import RunDir

_MOST_BYTES: Final = 64_000_000
"""of `errors.jsonl` up to which it is summed up"""
_QUICK_BYTES: Final = 8_000_000
"""the same for a user who has pressed Ctrl-C"""
_NAMED: Final = 3
"""samples that are named for a failure"""
_SHOWN: Final = 5
"""reasons, and uncertain trials, that are listed"""
_SHORT: Final = 60
"""characters up to which an answer is shown with the feedback: the mistake is rarely at the beginning of a long one"""


class Outcome(msgspec.Struct, frozen=True):
    """The state of a run when a command ends, and why the command stopped."""

    rundir: RunDir
    plan: Plan
    """what is left to do"""
    metrics: Metrics | None
    """None if the run is not finished"""
    spent: Spent | None
    reason: Fault | BudgetReached | Interrupted | Waiting | None = None
    """why it stopped before all was done"""
    already: bool = False
    """the run was already finished"""
    skipped_graders: bool = False
    grade_only: bool = False
    gate: GateOutcome | None = None
    """the outcome of the gate, if the run is finished and has a gate"""
    so_far: Metrics | None = None
    """the numbers so far of an unfinished run with grades; they are in no file"""
    failures: Failures | None = None
    """what failed and is missing, and what was retried; None if it was not looked up"""
    wall: float | None = None
    """seconds that this process worked on it"""
    finisher: str | None = None
    """the other worker that was to write the report"""

    @property
    def missed_gates(self) -> tuple[str, ...]:
        """The conditions of the gate that are not met, in words."""
        return () if self.gate is None else self.gate.missed

    @property
    def interrupted(self) -> bool:
        """True if a signal stopped the command."""
        return isinstance(self.reason, Interrupted)

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        if isinstance(self.reason, Interrupted):
            return self.reason.exit_code
        if isinstance(self.reason, Waiting):
            return Exit.WAITING
        if self.metrics is None:
            ungraded_on_purpose = self.reason is None and self.plan.to_run == 0 and self.skipped_graders
            reported = self.finisher is not None and self.rundir.finished
            return Exit.FINISHED if ungraded_on_purpose or reported else Exit.UNFINISHED
        return Exit.GATE_FAILED if self.missed_gates else Exit.FINISHED

    @property
    def result(self) -> Result:
        """The outcome in a form for programs."""
        reason: str
        match self.reason:
            case Interrupted():
                reason = "interrupted"
            case BudgetReached():
                reason = "budget"
            case Fault():
                reason = "fault"
            case Waiting():
                reason = "waiting"
            case None if self.metrics is not None:
                reason = "gate" if self.missed_gates else "finished"
            case None:
                reason = "errors" if self.exit_code else "ungraded"
        message = "; ".join(self.missed_gates) or None
        if self.reason is not None:
            plain = isinstance(self.reason, BudgetReached | Waiting)
            message = self.reason.message if plain else str(self.reason)
        return Result(
            exit_code=self.exit_code,
            reason=reason,
            message=message,
            run=str(self.rundir.path),
            metrics=None if self.metrics is None else self.metrics.to_dict(),
            so_far=None if self.so_far is None else self.so_far.to_dict(),
            left={
                "to_run": self.plan.to_run,
                "to_grade": self.plan.to_grade,
                "uncertain": 0 if self.failures is None else len(self.failures.uncertain),
            },
        )


@dataclass
class Alike:
    """Failures that differ in nothing but names and numbers."""

    message: str
    """of the first"""
    count: int = 0
    samples: list[str] = field(default_factory=list)
    """the first few, and `…` if there are more"""
    same: bool = True
    """all messages are identical"""

    def add(self, message: str, sample: str) -> None:
        """Count one more."""
        self.count += 1
        self.same = self.same and message == self.message
        if sample not in self.samples and len(self.samples) <= _NAMED:
            self.samples.append(sample if len(self.samples) < _NAMED else "…")

    def __str__(self) -> str:
        similar = "" if self.same else " and similar"
        return f"{self.count:,}× {self.message}{similar} ({', '.join(self.samples)})"


@dataclass
class Failures:
    """Failures of a run, over all its processes."""

    retried: Counter[str] = field(default_factory=Counter)
    """attempts that were retried, by class"""
    pending: dict[str, list[Alike]] = field(default_factory=dict)
    """why outputs (`target`) or a grader's verdicts are missing, the most frequent reason first"""
    uncertain: list[ErrorHead] = field(default_factory=list)
    """trials that wait for a person to settle calls that may have happened"""


def read_failures(rundir: RunDir, identity: RunIdentity, index: RunIndex, *, quick: bool = False) -> Failures | None:
    """Read what failed and is still missing, and count what was retried; with `quick`, only if that takes no time."""
    try:
        return _read_failures(rundir, identity, index, _QUICK_BYTES if quick else _MOST_BYTES)
    except OSError:
        return None  # it only summarizes records that stay on disk


def _read_failures(rundir: RunDir, identity: RunIdentity, index: RunIndex, most_bytes: int) -> Failures:
    failures = Failures()
    last: dict[tuple[str, str], ErrorHead] = {}
    if sum(path.stat().st_size for path in rundir.journals("errors") if path.exists()) > most_bytes:
        return failures
    for head in read_error_heads(rundir):
        if head.final:
            if (earlier := last.get((head.key, head.where))) is None or earlier.time <= head.time:
                last[head.key, head.where] = head
        else:
            failures.retried[head.kind] += 1
    groups: dict[str, dict[str, Alike]] = {}
    pending = _Pending(identity, index)
    for (key, where), head in sorted(last.items(), key=lambda item: item[1].time):
        if pending(key, where):
            if head.kind == "uncertain":
                if not _is_settled(head, index):
                    failures.uncertain.append(head)
                continue
            message = one_line(head.message)
            alike = groups.setdefault(where, {}).setdefault(without_details(message), Alike(message))
            alike.add(message, named_sample(head.sample, head.row))
    for where in sorted(groups, key=lambda where: where != "target"):  # trials come before grades
        failures.pending[where] = sorted(groups[where].values(), key=lambda alike: -alike.count)
    return failures


def _is_settled(head: ErrorHead, index: RunIndex) -> bool:
    """Return True if an uncertain trial was settled, and has not continued yet."""
    steps = (decode_line(Step, line) for line in index.steps(head.key))
    return any(step.time >= head.time and is_decision(step) for step in steps)


class _Pending:
    """Decides whether the output or grade that a failed attempt was for is still missing."""

    def __init__(self, identity: RunIdentity, index: RunIndex) -> None:
        self._work = identity.work
        self._index = index
        self._slots: dict[str, list[int]] = {}
        """graders by the name under which their failures are recorded; graders of several checkpoints may share one"""
        for number, place in enumerate(grader_places(identity.spec)):
            self._slots.setdefault(place.block.name, []).append(number)

    def __call__(self, key: str, where: str) -> bool:
        ref = self._index.output(key)
        if where == "target" or ref is None:
            return where == "target" and ref is None
        return any(self._lacks(key, ref, number) for number in self._slots.get(where, ()))

    def _lacks(self, key: str, ref: OutputRef, number: int) -> bool:
        """Return True if a grader that applies to an output has no verdict on it."""
        verdict_key = self._work.verdict_key(ref, number)
        verdict = None if verdict_key is None else self._index.verdicts(key).get(verdict_key)
        return verdict_key is not None and (verdict is None or verdict.status == "error")


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


def first_failed(rundir: RunDir) -> Example | None:
    """Find the first failed trial of a finished run, and read no further."""
    trial = next((trial for trial in rundir.iterate_results() if trial.status == "failed"), None)
    if trial is None:
        return None
    grader = next((name for name, grade in trial.grades.items() if grade.status == "failed"), "-")
    return Example(trial.sample, grader, _feedback(rundir, trial.key, grader), trial.output or "")


def _feedback(rundir: RunDir, key: str, grader: str) -> str:
    """Return the latest feedback of a grader on an output; empty if the grader has been renamed since."""
    latest = None
    for path in rundir.journals("grades"):
        for line in search(path, b'{"key":%b,' % msgspec.json.encode(key)):
            grade = decode_line(Grade, LineRef(path, line.offset, len(line.data)), line.data)
            name = grade.grader if grade.turn is None else f"checkpoint@{grade.turn}/{grade.grader}"
            if name == grader and (latest is None or latest.time <= grade.time):
                latest = grade
    return "" if latest is None else latest.feedback


def retried_lines(failures: Failures | None) -> Iterator[str]:
    """Say which attempts were retried, which helps to choose the concurrency."""
    if failures is not None and failures.retried:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in failures.retried.most_common())
        were = "attempt was" if failures.retried.total() == 1 else "attempts were"
        yield f"{failures.retried.total():,} {were} retried: {kinds}"


def failed_lines(failures: Failures | None, *, left_out: bool) -> Iterator[str]:
    """Say why trials and grades are missing, the most frequent reason first."""
    for where, groups in (failures.pending if failures is not None else {}).items():
        count = sum(alike.count for alike in groups)
        what = format_count(count, "trial") if where == "target" else f"{format_count(count, 'grade')} of {where}"
        head = f"{what} failed{' and ' + ('was' if count == 1 else 'were') + ' left out' if left_out else ''}:"
        yield from _reasons(head, groups)


def uncertain_lines(failures: Failures | None, run: str) -> Iterator[str]:
    """List the calls that may have happened, and the commands that settle them."""
    trials = [] if failures is None else failures.uncertain
    if not trials:
        return
    yield f"{format_count(len(trials), 'trial')} {'is' if len(trials) == 1 else 'are'} uncertain:"
    for trial in trials[:_SHOWN]:
        yield printable(f"  {trial.sample}/{trial.trial}: {trial.message}", "")
    if len(trials) > _SHOWN:
        yield f"  … and {len(trials) - _SHOWN:,} more; errors.jsonl has them all"
    yield "Find out what happened, and settle each of them with one of these:"
    name = printable(f"{trials[0].sample}/{trials[0].trial}", "")
    for decision, meaning in (
        ('happened:"RESULT"', "the call was made, and returned this (any JSON)"),
        ("again", "the call was not made; make it"),
        ("restart", "begin the trial again, and make all its calls again"),
    ):
        yield f"  holdfast resume {run} --settle {shlex.quote(f'{name}={decision}')}  # {meaning}"


def _reasons(head: str, groups: list[Alike]) -> Iterator[str]:
    if len(groups) == 1:
        yield f"{head} {groups[0]}"
        return
    yield head
    for alike in groups[:_SHOWN]:
        yield f"  {alike}"
    if len(groups) > _SHOWN:
        yield f"  … and {format_count(len(groups) - _SHOWN, 'other reason')}; errors.jsonl has them all"

"""What failed in a run: read from `errors.jsonl` and `results.json`, and described for the end of a command."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from holdfast.display.format import one_line, without_details
from holdfast.display.terminal import printable
from holdfast.graders.build import grader_places
from holdfast.plan.changes import format_count
from holdfast.store.calls import is_decision
from holdfast.store.heads import ErrorHead, decode_head, decode_line
from holdfast.store.lines import LineRef, scan, search
from holdfast.store.records import Grade, Step, named_sample

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.plan.identity import RunIdentity
    from holdfast.store.heads import OutputRef
    from holdfast.store.index import RunIndex
    from holdfast.store.rundir import RunDir

_MOST_BYTES: Final = 64_000_000
"""of `errors.jsonl` up to which it is summed up"""
_NAMED: Final = 3
"""samples that are named for a failure"""
_SHOWN: Final = 5
"""reasons, and uncertain trials, that are listed"""
_SHORT: Final = 60
"""characters up to which an answer is shown with the feedback: the mistake is rarely at the beginning of a long one"""


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


def read_failures(rundir: RunDir, identity: RunIdentity, index: RunIndex, most_bytes: int = _MOST_BYTES) -> Failures:
    """Read what failed and is still missing, and count what was retried."""
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


def read_error_heads(rundir: RunDir) -> Iterator[ErrorHead]:
    """Yield the heads of the failed attempts of a run, which are enough to count them."""
    for path in rundir.journals("errors"):
        for line in scan(path):
            if line.sound and (head := decode_head(ErrorHead, line.data)) is not None:
                yield head


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

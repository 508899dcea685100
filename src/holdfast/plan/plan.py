"""What is left to do: which trials are finished, which only lack grades, which have to be run."""

from __future__ import annotations

from collections import ChainMap
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from holdfast.canonical import digest
from holdfast.data.dataset import changed_under_us
from holdfast.plan.changes import counted
from holdfast.plan.keys import generation_key, grade_key
from holdfast.store.records import status_by

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from holdfast.data.dataset import Dataset, Sample, Survey
    from holdfast.data.panels import Panel
    from holdfast.plan.reuse import Borrowed
    from holdfast.spec.grader_fields import Measure
    from holdfast.store.index import Index, Moment, OutputRef, VerdictRef
    from holdfast.store.records import GradeStatus


class Slot(NamedTuple):
    """A grader in its place: at the end, or after a turn."""

    fingerprint: str
    turn: int | None
    stops: bool
    """its failure ends the conversation"""
    threshold: float | None
    """None: the grader itself says whether an output passes"""
    measures: tuple[Measure, ...] = ()
    """what it looks at beside what was said"""

    def fails(self, status: GradeStatus, score: float | None) -> bool:
        """Whether a verdict is a failure by the present threshold."""
        return status_by(self.threshold, status, score) == "failed"

    def identified(self, *, reread: bool) -> str:
        """What stands for it in a key; `reread`: for a row that it reads differently than earlier versions did."""
        return _reread(self.fingerprint) if reread else self.fingerprint

    def key(self, generation: str, moment: Moment, *, reread: bool = False) -> str:
        """The key of its verdict on a conversation as it was at a moment."""
        seen = moment.digest
        if self.measures:
            seen = digest([seen, {measure: getattr(moment, measure) for measure in self.measures}])
        return grade_key(generation, seen, self.identified(reread=reread), self.turn)


@cache
def _reread(fingerprint: str) -> str:
    return digest({"grader": fingerprint, "expected": "alternatives"})


@dataclass(frozen=True)
class Work:
    """All that turns a sample and a trial number into keys."""

    digest: str
    """of conversation and target"""
    trials: int
    slots: tuple[Slot, ...]
    """the graders: checkpoints' in the order of their turns, then those at the end"""

    def key(self, sample: str, trial: int) -> str:
        """The generation key of a trial, from its sample's digest."""
        return generation_key(sample, trial, self.digest)

    def keys(self, survey: Survey) -> Iterator[str]:
        """The keys of all trials."""
        for position in range(survey.count):
            sample = "sha256:" + survey.of(position).hex()
            for trial in range(1, self.trials + 1):
                yield generation_key(sample, trial, self.digest)

    def grade_key(self, key: str, ref: OutputRef, number: int, panel: Panel) -> str | None:
        """The key of a slot's verdict on an output; None where the conversation did not get so far."""
        slot, reread = self.slots[number], number in panel.reread
        if slot.turn is None and not slot.measures:  # as most are: no more is needed of the output than its digest
            return grade_key(key, ref.digest, slot.identified(reread=reread))
        moment = ref.at(slot.turn)
        return None if moment is None else slot.key(key, moment, reread=reread)

    def verdicts(
        self, key: str, ref: OutputRef, known: Mapping[str, VerdictRef], panel: Panel
    ) -> Iterator[tuple[int, VerdictRef | None]]:
        """The slots that look at an output, each with its verdict so far. Behind a checkpoint that stops come none."""
        stopped: int | None = None
        for number in panel.graders:
            slot = self.slots[number]
            if stopped is not None and slot.turn != stopped:
                return
            wanted = self.grade_key(key, ref, number, panel)
            if wanted is None:
                continue
            verdict = known.get(wanted)
            yield number, verdict
            if slot.stops and verdict is not None and slot.fails(verdict.status, verdict.score):
                stopped = slot.turn

    def missing(self, key: str, ref: OutputRef, known: Mapping[str, VerdictRef], panel: Panel) -> tuple[int, ...]:
        """Which slots have no verdict on an output yet. An error is no verdict."""
        return tuple(
            number
            for number, verdict in self.verdicts(key, ref, known, panel)
            if verdict is None or verdict.status == "error"
        )

    def stop_digest(self, turn: int) -> str:
        """Of what may end a conversation after a turn: an output that it ended is only good while it stays the same."""
        return digest([[slot.fingerprint, slot.threshold] for slot in self.slots if slot.stops and slot.turn == turn])

    def fits(self, ref: OutputRef) -> bool:
        """Whether an output is what this run would have said: one cut short by a checkpoint needs that checkpoint."""
        return ref.stopped_by is None or ref.stopped_by == self.stop_digest(len(ref.marks) or 1)


class Job(NamedTuple):
    """A trial that is not finished."""

    sample: Sample
    trial: int
    key: str
    output: OutputRef | None
    """None: it has to be run"""
    missing: tuple[int, ...]
    """the slots that have to look at it; none before it was run"""
    panel: Panel
    """all that look at this sample"""


@dataclass(frozen=True)
class Plan:
    """How much there is to do, before anything is done, and why."""

    samples: int
    trials: int
    finished: int
    """complete, with what was done here"""
    to_grade: int
    """have an output but lack verdicts"""
    to_run: int
    reused: int = 0
    """complete, with what another run has done"""
    lenders: Mapping[str, int] = field(default_factory=dict)
    """how many outputs come from which other run"""
    reasons: tuple[str, ...] = ()
    """what changed against the nearest earlier run"""
    begun: int = 0
    """of those to run, how many have calls on record and go on in their middle"""
    done: bytes = field(default=b"", repr=False, compare=False)
    """a 1 for each trial that is finished here, in the dataset's order; empty when there is none"""

    @property
    def total(self) -> int:
        """All trials of the run."""
        return self.samples * self.trials

    @property
    def complete(self) -> bool:
        """Nothing is left to do."""
        return self.to_run == self.to_grade == 0

    def __str__(self) -> str:
        lent = ", ".join(f"{counted(count, 'output')} from {run}" for run, count in self.lenders.items())
        parts = [
            (self.finished, "finished"),
            (self.reused, "reused"),
            (self.to_grade, "to grade"),
            (self.to_run, "to run"),
        ]
        said = ", ".join(f"{count:,} {what}" for count, what in parts if count)
        if self.begun:
            said += f", {self.begun:,} of them from the middle"
        why = f" ({'; '.join(self.reasons)})" if self.reasons else ""
        all_of_it = f"{counted(self.total, 'trial')} of {counted(self.samples, 'sample')}"
        return f"{all_of_it}: {said}{why}" + (f"; {lent}" if lent else "")


def make_plan(survey: Survey, work: Work, index: Index, borrowed: Borrowed | None = None) -> Plan:
    """Count what is finished here, what other runs have done, and what is not done."""
    finished = reused = to_grade = 0
    lent = borrowed.outputs if borrowed else {}
    verdicts: Mapping[str, VerdictRef] = index.verdicts
    if borrowed:
        verdicts = ChainMap(borrowed.verdicts, index.verdicts)
    done = bytearray(survey.count * work.trials if index.outputs else 0)
    if index.outputs or lent:
        for number, key in enumerate(work.keys(survey)):
            own = index.outputs.get(key)
            ref = own or lent.get(key)
            if ref is None:
                continue
            panel = survey.panels.of(number // work.trials)
            if own is not None and not work.missing(key, ref, index.verdicts, panel):
                finished += 1
                done[number] = 1
            elif work.missing(key, ref, verdicts, panel):
                to_grade += 1
            else:
                reused += 1
    total = survey.count * work.trials
    left = total - finished - reused - to_grade
    lenders = dict(borrowed.runs) if borrowed else {}
    begun = min(left, len(index.steps.keys() - index.outputs.keys()))
    return Plan(survey.count, work.trials, finished, to_grade, left, reused, lenders, begun=begun, done=bytes(done))


def jobs(dataset: Dataset, survey: Survey, work: Work, index: Index, done: bytes = b"") -> Iterator[Job]:
    """The unfinished trials in the dataset's order, read from its files as they are needed.

    `done` is the plan's: what it knows to be finished is not looked up again.
    """
    whole = b"\x01" * work.trials
    for position, sample in checked(dataset, survey):
        if done[position * work.trials : (position + 1) * work.trials] == whole:
            continue
        for trial in range(1, work.trials + 1):
            if (job := job_of(sample, trial, survey.panels.of(position), work, index)) is not None:
                yield job


def checked(dataset: Dataset, survey: Survey) -> Iterator[tuple[int, Sample]]:
    """The samples with their positions, as long as they are those of the survey."""
    position = -1
    for position, sample in enumerate(dataset):
        if bytes.fromhex(sample.digest[7:]) != survey.of(position):
            raise changed_under_us(sample.where)
        yield position, sample
    if position + 1 != survey.count:
        raise changed_under_us("it has fewer rows now")


def job_of(sample: Sample, trial: int, panel: Panel, work: Work, index: Index) -> Job | None:
    """What there is to do about a trial; None when it is finished."""
    key = work.key(sample.digest, trial)
    ref = index.outputs.get(key)
    missing = () if ref is None else work.missing(key, ref, index.verdicts, panel)
    return Job(sample, trial, key, ref, missing, panel) if ref is None or missing else None


def left_over(survey: Survey, work: Work, index: Index, *, grades: bool) -> Iterator[int]:
    """The numbers of the trials that are not finished, counted through the dataset; without `grades`, not generated."""
    for number, key in enumerate(work.keys(survey)):
        ref = index.outputs.get(key)
        if ref is None or (grades and work.missing(key, ref, index.verdicts, survey.panels.of(number // work.trials))):
            yield number

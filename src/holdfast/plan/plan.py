"""The plan: which trials are finished, which only lack grades, and which have to be run."""

from __future__ import annotations

from collections import ChainMap
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from holdfast.canonical import digest
from holdfast.data.dataset import dataset_changed
from holdfast.plan.changes import format_count
from holdfast.plan.keys import generation_key, grade_key
from holdfast.plan.votes import combine_votes
from holdfast.store.index import uncertain_trials
from holdfast.store.records import apply_threshold

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from holdfast.data.dataset import Dataset, Sample, Survey
    from holdfast.data.panels import Panel
    from holdfast.plan.reuse import Borrowed
    from holdfast.spec.grader_schema import Combine, Measure
    from holdfast.store.index import Index
    from holdfast.store.manifest import Manifest
    from holdfast.store.records import GradeStatus
    from holdfast.store.refs import Moment, OutputRef, VerdictRef


TO_GRADE: Final = 2
"""stands, where finished trials are known, for one that is known to have an output and to lack a verdict"""


class Slot(NamedTuple):
    """A grader in its place: at the end, or after a turn."""

    fingerprint: str
    turn: int | None
    stops: bool
    """a failed verdict ends the conversation"""
    threshold: float | None
    """None: the grader decides whether an output passes"""
    measures: tuple[Measure, ...] = ()
    """what the grader looks at beside the conversation"""
    reads_row: bool = False
    """the grader sees more of the row than the target does"""
    votes: tuple[int, ...] = ()
    """the slots whose verdicts it combines, instead of having one of its own"""
    combine: Combine = "mean"

    def fails(self, status: GradeStatus, score: float | None) -> bool:
        """Return True if a verdict fails by the present threshold."""
        return apply_threshold(self.threshold, status, score) == "failed"

    def key(self, generation: str, moment: Moment, row: str | None) -> str:
        """Return the key of its verdict on a conversation at a moment; `row` is that of the output."""
        judged = moment.digest
        if self.measures:
            judged = digest([judged, {measure: getattr(moment, measure) for measure in self.measures}])
        return grade_key(generation, judged, self.fingerprint, self.turn, row if self.reads_row else None)


class Work(msgspec.Struct, frozen=True):
    """Turns samples and trial numbers into keys."""

    digest: str
    """of conversation and target"""
    trials: int
    slots: tuple[Slot, ...]
    """the graders: checkpoints' in the order of their turns, then those at the end"""

    @classmethod
    def of_run(cls, manifest: Manifest, slots: tuple[Slot, ...] = ()) -> Work:
        """Return the work of a run, from its manifest."""
        return cls(manifest.fingerprints.work, manifest.trials, slots)

    def key(self, asked: str, trial: int) -> str:
        """Return the generation key of a trial, from the digest of what the target sees of the sample."""
        return generation_key(asked, trial, self.digest)

    def keys(self, survey: Survey, done: bytes = b"") -> Iterator[tuple[int, str]]:
        """Yield the numbers of all trials, except those that are done, with their keys."""
        for number in places_of(0, done) if done else range(survey.count * self.trials):
            position, trial = divmod(number, self.trials)
            yield number, generation_key("sha256:" + survey.asked_at(position).hex(), trial + 1, self.digest)

    def grade_key(self, key: str, ref: OutputRef, number: int) -> str | None:
        """Return the key of a slot's verdict on an output.

        None if the conversation ended before the slot's turn, or if the slot combines the verdicts of others.
        """
        slot = self.slots[number]
        if slot.votes:
            return None
        if slot.turn is None and not slot.measures:  # the common case, which needs only the digest of the output
            return grade_key(key, ref.digest, slot.fingerprint, row=ref.row if slot.reads_row else None)
        moment = ref.at(slot.turn)
        return None if moment is None else slot.key(key, moment, ref.row)

    def verdicts(
        self, key: str, ref: OutputRef, recorded: Mapping[str, VerdictRef], panel: Panel
    ) -> Iterator[tuple[int, VerdictRef | None]]:
        """Yield the slots that grade an output with their verdicts, up to a checkpoint that ended the conversation."""
        stopped: int | None = None
        votes: dict[int, VerdictRef | None] = {}
        for number in panel.graders:
            slot = self.slots[number]
            if stopped is not None and slot.turn != stopped:
                return
            if slot.votes:
                reached = [votes[vote] for vote in slot.votes if vote in votes]
                if not reached:
                    continue
                verdict = combine_votes(reached, slot.combine, slot.threshold)
            else:
                grade = self.grade_key(key, ref, number)
                if grade is None:
                    continue
                verdict = votes[number] = recorded.get(grade)
            yield number, verdict
            if slot.stops and verdict is not None and slot.fails(verdict.status, verdict.score):
                stopped = slot.turn

    def missing(self, key: str, ref: OutputRef, recorded: Mapping[str, VerdictRef], panel: Panel) -> tuple[int, ...]:
        """Return the slots without a verdict on an output. An error is not a verdict."""
        return tuple(
            number
            for number, verdict in self.verdicts(key, ref, recorded, panel)
            if (verdict is None or verdict.status == "error") and not self.slots[number].votes
        )

    def stop_digest(self, turn: int) -> str:
        """Return the digest of the graders that may end a conversation after a turn."""
        return digest(
            [
                [slot.fingerprint, [slot.threshold, slot.combine] if slot.votes else slot.threshold]
                for slot in self.slots
                if slot.stops and slot.turn == turn
            ]
        )

    def fits(self, ref: OutputRef, row: str | None = None) -> bool:
        """Return True if an output is valid here: one that a checkpoint stopped, only while that is unchanged.

        `row` is that of the sample as it is now, for an output of another run: the checkpoint may have read it.
        """
        if ref.stopped_by is None:
            return True
        reads_row = any(slot.stops and slot.reads_row for slot in self.slots)
        if row is not None and row != ref.row and reads_row:
            return False
        return ref.stopped_by == self.stop_digest(len(ref.marks) or 1)

    def drop_unfit(self, index: Index) -> None:
        """Remove the outputs of a run that are not valid any more, so that their trials run again."""
        for key, ref in index.outputs.stopped():
            if not self.fits(ref):
                del index.outputs[key]


def places_of(value: int, data: bytes) -> Iterator[int]:
    """Yield the places of a byte."""
    place = data.find(value)
    while place >= 0:
        yield place
        place = data.find(value, place + 1)


class PendingTrial(NamedTuple):
    """A trial that is not finished."""

    sample: Sample
    trial: int
    key: str
    output: OutputRef | None
    """None: the trial has to be run"""
    missing: tuple[int, ...]
    """the slots without a verdict; none before the trial was run"""
    panel: Panel
    """the graders of this sample"""


class Plan(msgspec.Struct, frozen=True):
    """How much there is to do, and why."""

    samples: int
    trials: int
    finished: int
    """complete, with the records of this run"""
    to_grade: int
    """have an output but lack verdicts"""
    to_run: int
    reused: int = 0
    """complete, with records of other runs"""
    lenders: Mapping[str, int] = {}
    """how many outputs come from which other run"""
    reasons: tuple[str, ...] = ()
    """what changed against the nearest earlier run"""
    begun: int = 0
    """how many of those to run have recorded calls, from which they continue"""
    uncertain: int = 0
    """how many of those to run wait for a person, since a call that must not happen twice was cut off"""
    done: bytes = b""
    """a 1 for each trial that is finished here, in the dataset's order; empty if there is none"""

    @property
    def total(self) -> int:
        """Number of trials of the run."""
        return self.samples * self.trials

    @property
    def complete(self) -> bool:
        """True if nothing is left to do."""
        return self.to_run == self.to_grade == 0

    def __str__(self) -> str:
        borrowed = ", ".join(f"{format_count(count, 'output')} from {run}" for run, count in self.lenders.items())
        parts = [
            (self.finished, "finished"),
            (self.reused, "reused"),
            (self.to_grade, "to grade"),
            (self.to_run, "to run"),
        ]
        counts = ", ".join(f"{count:,} {what}" for count, what in parts if count)
        if self.begun:
            counts += f", {self.begun:,} of them from the middle"
        if self.uncertain:
            counts += f", {self.uncertain:,} uncertain"
        why = f" ({'; '.join(self.reasons)})" if self.reasons else ""
        trials = f"{format_count(self.total, 'trial')} of {format_count(self.samples, 'sample')}"
        return f"{trials}: {counts}{why}" + (f"; {borrowed}" if borrowed else "")


def make_plan(
    survey: Survey, work: Work, index: Index, borrowed: Borrowed | None = None, known_done: bytes = b""
) -> Plan:
    """Count the trials that are finished here, finished in other runs, and not finished.

    `known_done` is `Plan.done` of an earlier plan with the same work, if no record has been replaced since. It may hold
    `TO_GRADE`.
    """
    finished, reused, to_grade = known_done.count(1), 0, known_done.count(TO_GRADE)
    borrowed_outputs = borrowed.outputs if borrowed else {}
    verdicts: Mapping[str, VerdictRef] = index.verdicts
    if borrowed:
        verdicts = ChainMap(borrowed.verdicts, index.verdicts)
    done = bytearray(known_done or bytes(survey.count * work.trials if index.outputs else 0))
    done = done.replace(bytes([TO_GRADE]), b"\0")
    if index.outputs or borrowed_outputs:
        for number, key in work.keys(survey, known_done):
            own_output = index.outputs.get(key)
            ref = own_output or borrowed_outputs.get(key)
            if ref is None:
                continue
            panel = survey.panels.panel_at(number // work.trials)
            if own_output is not None and not work.missing(key, ref, index.verdicts, panel):
                finished += 1
                done[number] = 1
            elif work.missing(key, ref, verdicts, panel):
                to_grade += 1
            else:
                reused += 1
    if borrowed is not None and borrowed.shared is not None:
        finished, reused = 0, finished + reused  # the outputs of a new run are all those of the lender
    total = survey.count * work.trials
    to_run = total - finished - reused - to_grade
    lenders = dict(borrowed.runs) if borrowed else {}
    begun = min(to_run, sum(key not in index.outputs for key in index.steps))
    uncertain = len(uncertain_trials(index))
    counts = survey.count, work.trials, finished, to_grade, to_run, reused
    return Plan(*counts, lenders, begun=begun, uncertain=uncertain, done=bytes(done))


def pending_trials(
    dataset: Dataset, survey: Survey, work: Work, index: Index, done: bytes = b""
) -> Iterator[PendingTrial]:
    """Yield the unfinished trials in the dataset's order, reading its files as they are needed.

    `done` is that of the plan: trials that are finished by it are not looked up again. Raises Fault if a row of another
    trial is not that of the survey.
    """
    whole = b"\x01" * work.trials
    position = -1
    needed = dataset.pick(lambda each: done[each * work.trials : (each + 1) * work.trials] != whole)
    for position, sample in enumerate(needed):
        if sample is None:
            continue
        check_sample(sample, survey, position)
        for trial in range(1, work.trials + 1):
            if (pending := find_pending(sample, trial, survey.panels.panel_at(position), work, index)) is not None:
                yield pending
    if position + 1 != survey.count:
        raise dataset_changed("it has fewer rows now")


def check_sample(sample: Sample, survey: Survey, position: int) -> Sample:
    """Return the sample; raise Fault if the row at its position was another one when the dataset was surveyed."""
    if bytes.fromhex(sample.digest[7:]) != survey.row_at(position):
        raise dataset_changed(sample.where)
    return sample


def check_rows(dataset: Dataset, survey: Survey) -> None:
    """Raise Fault if the rows of a dataset are not those of its survey."""
    position = -1
    for position, sample in enumerate(dataset):
        check_sample(sample, survey, position)
    if position + 1 != survey.count:
        raise dataset_changed("it has fewer rows now")


def find_pending(sample: Sample, trial: int, panel: Panel, work: Work, index: Index) -> PendingTrial | None:
    """Return the trial if it is unfinished, else None."""
    key = work.key(sample.asked, trial)
    ref = index.outputs.get(key)
    missing = () if ref is None else work.missing(key, ref, index.verdicts, panel)
    return PendingTrial(sample, trial, key, ref, missing, panel) if ref is None or missing else None


def unfinished_trials(survey: Survey, work: Work, index: Index, *, grades: bool) -> Iterator[int]:
    """Yield the numbers of unfinished trials in the dataset's order; without `grades`, only those without an output."""
    if not index.outputs:
        yield from range(survey.count * work.trials)
        return
    for number, key in work.keys(survey):
        ref = index.outputs.get(key)
        if ref is None or (
            grades and work.missing(key, ref, index.verdicts, survey.panels.panel_at(number // work.trials))
        ):
            yield number

"""The plan: which trials are finished, which only lack grades, and which have to be run."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec

from holdfast.canonical import digest, digest_bytes
from holdfast.data.dataset import dataset_changed
from holdfast.plan.changes import format_count
from holdfast.plan.keys import generation_digests, generation_key
from holdfast.store.heads import VerdictKey, VerdictRef
from holdfast.store.index import pack, unpack
from holdfast.store.records import apply_threshold

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterable, Iterator, Sequence

    from holdfast.data.columns import Panel
    from holdfast.data.dataset import Dataset, Sample
    from holdfast.data.survey import Survey
    from holdfast.spec.grader_schema import Combine, Measure
    from holdfast.store.heads import Moment, OutputRef
    from holdfast.store.index import Key, RunIndex
    from holdfast.store.records import GradeStatus
    from holdfast.store.rundir import Manifest


def combine_votes(votes: Sequence[VerdictRef | None], combine: Combine, threshold: float | None) -> VerdictRef | None:
    """Return the verdict of several judges; None while a vote is missing.

    The verdict has no usage of its own: the votes' usage is counted separately.
    """
    recorded = [vote for vote in votes if vote is not None]
    if len(recorded) < len(votes):
        return None
    last = max(vote.time for vote in recorded)
    if any(vote.status == "error" for vote in recorded):
        return VerdictRef("error", None, None, last)
    scores = [vote.score for vote in recorded if vote.score is not None]
    if not scores:
        return VerdictRef("skipped", None, None, last)
    score = combine_scores(scores, combine, threshold)
    status = apply_threshold(threshold, "passed", score)
    return VerdictRef(status, score, None, last)


def combine_scores(scores: Sequence[float], combine: Combine, threshold: float | None) -> float:
    """Combine several scores. With `majority` the result is 1 if more than half of them pass, else 0."""
    if combine == "majority":
        passes = sum(apply_threshold(threshold, "passed", score) == "passed" for score in scores)
        return float(2 * passes > len(scores))
    if combine == "median":
        from statistics import median  # which few evals need

        return median(scores)
    return min(scores) if combine == "min" else math.fsum(scores) / len(scores)


Verdicts = Mapping[VerdictKey, VerdictRef]
"""the verdicts on one output"""
_NO_VERDICTS: Final[Verdicts] = {}
_AT_ONCE: Final = 256
"""trials that are looked up at once"""


class Slot(NamedTuple):
    """A grader in its place: at the end, or after a turn."""

    fingerprint: str
    turn: int | None
    stops: bool
    """a failed verdict ends the conversation"""
    threshold: float | None
    """None: the grader decides whether an output passes"""
    measures: tuple[Measure, ...] = ()
    """what the grader looks at besides the conversation"""
    reads_row: bool = False
    """the grader sees more of the row than the target does"""
    votes: tuple[int, ...] = ()
    """the slots whose verdicts this slot combines, instead of having its own verdict"""
    combine: Combine = "mean"

    def fails(self, status: GradeStatus, score: float | None) -> bool:
        """Return True if a verdict fails by the present threshold."""
        return apply_threshold(self.threshold, status, score) == "failed"

    def judged(self, moment: Moment, row: str | None) -> str:
        """Return the digest of what the grader judges of a conversation at a moment; `row` is the output's."""
        if not self.measures and not self.reads_row:
            return moment.digest
        seen = moment.digest
        for measure in self.measures:
            seen += f"\n{measure}={getattr(moment, measure)}"
        return digest_bytes((f"{seen}\nrow={row}" if self.reads_row else seen).encode())


class Work(msgspec.Struct, frozen=True):
    """Turns samples and trial numbers into keys."""

    digest: str
    """of conversation and target"""
    trials: int
    slots: tuple[Slot, ...]
    """the graders: first the checkpoints' in the order of turns, then the final ones"""

    @classmethod
    def of_run(cls, manifest: Manifest, slots: tuple[Slot, ...] = ()) -> Work:
        """Return the work of a run, from its manifest."""
        return cls(manifest.fingerprints.work, manifest.trials, slots)

    def key(self, asked: str, trial: int) -> str:
        """Return the generation key of a trial, from the digest of what the target sees of the sample."""
        return generation_key(asked, trial, self.digest)

    def numbers(self, survey: Survey, done: bytes = b"") -> Sequence[int]:
        """Return the numbers of all trials, in the dataset's order, except those that are marked in `done`."""
        every = range(survey.count * self.trials)
        return array("Q", [number for number in every if not done[number]]) if 1 in done else every

    def packed_keys(self, survey: Survey, numbers: Sequence[int]) -> list[Key]:
        """Return the keys of trials, as an index has them."""
        if isinstance(numbers, range) and numbers.step == 1 and not numbers.start % self.trials:
            rows = slice(16 * (numbers.start // self.trials), 16 * -(-numbers.stop // self.trials))
            return [*generation_digests(survey.asked_digests[rows], self.trials, self.digest)[: len(numbers)]]
        return [pack(self.key_at(survey, number)) for number in numbers]

    def packed_keys_of(self, asked: str) -> list[Key]:
        """Return the keys of all trials of a sample, as an index has them."""
        return [pack(self.key(asked, trial)) for trial in range(1, self.trials + 1)]

    def key_at(self, survey: Survey, number: int) -> str:
        """Return the key of the trial with a number."""
        position, trial = divmod(number, self.trials)
        return generation_key("sha256:" + survey.asked_at(position).hex(), trial + 1, self.digest)

    def verdict_key(self, ref: OutputRef, number: int) -> VerdictKey | None:
        """Return the key of a slot's verdict among the verdicts on an output.

        None if the conversation ended before the slot's turn, or if the slot combines the verdicts of others.
        """
        slot = self.slots[number]
        moment = None if slot.votes else ref.at(slot.turn)
        return None if moment is None else (slot.fingerprint, slot.turn, slot.judged(moment, ref.row))

    def verdicts(self, ref: OutputRef, recorded: Verdicts, panel: Panel) -> Iterator[tuple[int, VerdictRef | None]]:
        """Yield the slots that grade an output with their verdicts, up to a checkpoint that ended the conversation.

        `recorded` are the verdicts on this output.
        """
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
                verdict_key = self.verdict_key(ref, number)
                if verdict_key is None:
                    continue
                verdict = votes[number] = recorded.get(verdict_key)
            yield number, verdict
            if slot.stops and verdict is not None and slot.fails(verdict.status, verdict.score):
                stopped = slot.turn

    def missing(self, ref: OutputRef, recorded: Verdicts, panel: Panel) -> tuple[int, ...]:
        """Return the slots without a verdict on an output. An error is not a verdict."""
        return tuple(
            number
            for number, verdict in self.verdicts(ref, recorded, panel)
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
        """Return True if an output is valid here. If a checkpoint stopped it, the checkpoint must be unchanged.

        For an output of another run, `row` is the sample's current row: the checkpoint may have read it.
        """
        if ref.stopped_by is None:
            return True
        reads_row = any(slot.stops and slot.reads_row for slot in self.slots)
        if row is not None and row != ref.row and reads_row:
            return False
        return ref.stopped_by == self.stop_digest(len(ref.marks) or 1)

    def drop_unfit(self, index: RunIndex) -> None:
        """Discount outputs that are no longer valid, so that their trials run again."""
        for key, ref in index.stopped_outputs():
            if not self.fits(ref):
                index.drop_output(key, ref)


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
    """complete with this run's own records"""
    to_grade: int
    """have an output but lack verdicts"""
    to_run: int
    reused: int = 0
    """complete with records of other runs"""
    lenders: Mapping[str, int] = {}
    """number of outputs by the run that they come from"""
    reasons: tuple[str, ...] = ()
    """changes since the nearest earlier run"""
    begun: int = 0
    """number of trials to run that continue from recorded calls"""
    uncertain: int = 0
    """number of trials to run that wait for a person, since a call that must not happen twice was cut off"""
    done: bytes = b""
    """a 1 for each trial that is finished here, in the dataset's order; empty if no trial is finished"""

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


class TrialRecords(NamedTuple):
    """A trial's records in an index."""

    number: int
    """of the trial, in the dataset's order"""
    key: Key
    output: OutputRef | None
    verdicts: Verdicts


def look_up(survey: Survey, work: Work, index: RunIndex, numbers: Sequence[int]) -> Iterator[TrialRecords]:
    """Look up trials by number in an index, many at a time; yield them in the order of the numbers."""
    for start in range(0, len(numbers), _AT_ONCE):
        some = numbers[start : start + _AT_ONCE]
        keys = work.packed_keys(survey, some)
        outputs = index.find_outputs(keys)
        verdicts = index.find_verdicts([*outputs])
        for number, key in zip(some, keys, strict=True):
            yield TrialRecords(number, key, outputs.get(key), verdicts.get(key, _NO_VERDICTS))


class Lent(Protocol):
    """Records of other runs, which a plan counts."""

    outputs: dict[str, OutputRef]
    verdicts: dict[str, dict[VerdictKey, VerdictRef]]
    """by the key of the output"""

    @property
    def index(self) -> RunIndex | None:
        """The records of the run whose journals are shared, if there is one."""
        ...

    @property
    def runs(self) -> Counter[str]:
        """Number of outputs by run."""
        ...


def make_plan(survey: Survey, work: Work, index: RunIndex, lent: Lent | None = None, known_done: bytes = b"") -> Plan:
    """Count the trials that are finished here, finished in other runs, and not finished.

    `known_done` has a 1 for each trial that is known to be finished, by the records of `index` or of a shared run.
    """
    finished, reused, to_grade = known_done.count(1), 0, 0
    lent_outputs = lent.outputs if lent else {}
    lent_verdicts = lent.verdicts if lent else {}
    shared = lent.index if lent else None
    records = index if shared is None else shared
    done = bytearray(known_done or bytes(survey.count * work.trials if index.rows["outputs"] else 0))
    if records.rows["outputs"] or lent_outputs:
        numbers = work.numbers(survey, known_done)
        for number, packed, own_output, own_verdicts in look_up(survey, work, records, numbers):
            key = unpack(packed) if lent_outputs or lent_verdicts else ""
            ref = own_output or lent_outputs.get(key)
            if ref is None:
                continue
            panel = survey.panels.panel_at(number // work.trials)
            if own_output is not None and not work.missing(ref, own_verdicts, panel):
                finished += 1
                if done:
                    done[number] = 1
            elif work.missing(ref, {**own_verdicts, **lent_verdicts.get(key, {})}, panel):
                to_grade += 1
            else:
                reused += 1
    if shared is not None:
        finished, reused = 0, finished + reused  # the outputs of a new run are all the lender's
    total = survey.count * work.trials
    to_run = total - finished - reused - to_grade
    lenders = dict(lent.runs) if lent else {}
    begun = min(to_run, len(index.begun()))
    counts = survey.count, work.trials, finished, to_grade, to_run, reused
    return Plan(*counts, lenders, begun=begun, uncertain=len(index.uncertain_trials()), done=bytes(done))


def pending_trials(
    dataset: Dataset, survey: Survey, work: Work, index: RunIndex, done: bytes = b""
) -> Iterator[PendingTrial]:
    """Yield the unfinished trials in the dataset's order, reading its files as they are needed.

    Skips trials that are marked in `done`, the plan's. Raises Fault if a row differs from the survey.
    """
    whole = b"\x01" * work.trials
    position = -1
    needed = dataset.pick(lambda each: done[each * work.trials : (each + 1) * work.trials] != whole)
    for position, sample in enumerate(needed):
        if sample is not None:
            check_sample(sample, survey, position)
            first = position * work.trials
            panel = survey.panels.panel_at(position)
            yield from find_pending(sample, panel, work, index, range(first, first + work.trials))
    if position + 1 != survey.count:
        raise dataset_changed("it has fewer rows now")


def check_sample(sample: Sample, survey: Survey, position: int) -> Sample:
    """Return the sample; raise Fault if the row at its position was another one when the dataset was surveyed."""
    if bytes.fromhex(sample.digest[7:]) != survey.row_at(position):
        raise dataset_changed(sample.where)
    return sample


def check_rows(dataset: Dataset, survey: Survey) -> None:
    """Raise Fault if the rows of a dataset differ from its survey."""
    position = -1
    for position, sample in enumerate(dataset):
        check_sample(sample, survey, position)
    if position + 1 != survey.count:
        raise dataset_changed("it has fewer rows now")


def find_pending(
    sample: Sample, panel: Panel, work: Work, index: RunIndex, numbers: Iterable[int]
) -> Iterator[PendingTrial]:
    """Yield the unfinished trials of a sample. `numbers` are the trials' numbers in the dataset's order."""
    for number in numbers:
        trial = number % work.trials + 1
        key = work.key(sample.asked, trial)
        ref = index.output(key)
        missing = () if ref is None else work.missing(ref, index.verdicts(key), panel)
        if ref is None or missing:
            yield PendingTrial(sample, trial, key, ref, missing, panel)


def unfinished_trials(survey: Survey, work: Work, index: RunIndex, *, grades: bool) -> Iterator[int]:
    """Yield the numbers of unfinished trials in the dataset's order; without `grades`, only those without an output."""
    if not index.rows["outputs"]:
        yield from work.numbers(survey)
        return
    for number, _, ref, verdicts in look_up(survey, work, index, work.numbers(survey)):
        if ref is None or (grades and work.missing(ref, verdicts, survey.panels.panel_at(number // work.trials))):
            yield number

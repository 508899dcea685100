"""What is left to do: which trials are finished, which only lack grades, which have to be run."""

from __future__ import annotations

from collections import ChainMap
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from holdfast.canonical import digest
from holdfast.data.dataset import dataset_changed
from holdfast.plan.changes import counted
from holdfast.plan.keys import generation_key, grade_key, work_digests
from holdfast.store.records import apply_threshold

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping

    from holdfast.data.dataset import Dataset, Sample, Survey
    from holdfast.data.panels import Panel
    from holdfast.plan.reuse import Borrowed
    from holdfast.spec.grader_schema import Measure
    from holdfast.store.index import Index, Moment, OutputRef, VerdictRef
    from holdfast.store.manifest import Manifest
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
    revised: str | None = None
    """the fingerprint of a Python grader for rows that it reads differently than earlier versions did"""

    def fails(self, status: GradeStatus, score: float | None) -> bool:
        """Whether a verdict is a failure by the present threshold."""
        return apply_threshold(self.threshold, status, score) == "failed"

    def identified(self, *, reread: bool) -> tuple[str, ...]:
        """Return what stands for it in the keys under which its verdict counts. New verdicts get the first.

        With `reread`, for a row that it reads differently than earlier versions did. Where there was one such row,
        earlier versions gave a Python grader's verdicts on all rows the key of those.
        """
        if reread:
            return (self.revised or _reread(self.fingerprint),)
        return (self.fingerprint,) if self.revised is None else (self.fingerprint, self.revised)

    def keys(self, generation: str, moment: Moment, *, reread: bool = False) -> tuple[str, ...]:
        """Return the keys of its verdict on a conversation as it was at a moment. New verdicts get the first."""
        seen = moment.digest
        if self.measures:
            seen = digest([seen, {measure: getattr(moment, measure) for measure in self.measures}])
        return tuple([grade_key(generation, seen, each, self.turn) for each in self.identified(reread=reread)])


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
    typed_digest: str | None = None
    """that of rows whose requests hold values that are no texts; None: the other one holds for all rows"""

    @classmethod
    def of_run(cls, manifest: Manifest, slots: tuple[Slot, ...] = ()) -> Work:
        """Make the work of a run from its manifest."""
        recorded = manifest.fingerprints.work
        texts, values = work_digests(manifest.identity.conversation, manifest.identity.target)
        if recorded not in (texts, values):  # it kept the keys of another run
            texts, values = recorded, None
        return cls(texts, manifest.trials, slots, values)

    @property
    def digests(self) -> frozenset[str]:
        """Work digests of the runs that can lend to this one."""
        return frozenset({self.digest, self.typed_digest or self.digest})

    def keys_of(self, sample: str, trial: int, *, typed: bool) -> tuple[str, ...]:
        """Return the generation keys under which an output of a trial counts. New outputs get the first.

        Where one row's request held a value that is no text, earlier versions gave all rows the key of such rows.
        """
        if self.typed_digest is None:
            return (generation_key(sample, trial, self.digest),)
        values = generation_key(sample, trial, self.typed_digest)
        return (values,) if typed else (generation_key(sample, trial, self.digest), values)

    def key(self, sample: str, trial: int, *known: Container[str], typed: bool) -> str:
        """Return the generation key of a trial: the first that is in one of `known`, or that of a new output."""
        new = generation_key(sample, trial, self.typed_digest if typed and self.typed_digest else self.digest)
        if typed or self.typed_digest is None or (known and new in known[0]):
            return new
        keys = new, generation_key(sample, trial, self.typed_digest)
        return next((key for holder in known for key in keys if key in holder), new)

    def keys(self, survey: Survey, *known: Container[str]) -> Iterator[str]:
        """Return the keys of all trials, as `key` does."""
        for sample, trial, typed in self._trials(survey):
            yield self.key(sample, trial, *known, typed=typed)

    def all_keys(self, survey: Survey) -> Iterator[tuple[str, ...]]:
        """Return all keys under which outputs count, trial by trial."""
        for sample, trial, typed in self._trials(survey):
            yield self.keys_of(sample, trial, typed=typed)

    def _trials(self, survey: Survey) -> Iterator[tuple[str, int, bool]]:
        for position in range(survey.count):
            sample, typed = "sha256:" + survey.digest_at(position).hex(), survey.is_typed(position)
            for trial in range(1, self.trials + 1):
                yield sample, trial, typed

    def grade_keys(self, key: str, ref: OutputRef, number: int, panel: Panel) -> tuple[str, ...]:
        """Return the keys of a slot's verdict on an output; none where the conversation did not get so far."""
        slot, reread = self.slots[number], number in panel.reread
        if slot.turn is None and not slot.measures:  # as most are: no more is needed of the output than its digest
            return tuple([grade_key(key, ref.digest, each) for each in slot.identified(reread=reread)])
        moment = ref.at(slot.turn)
        return () if moment is None else slot.keys(key, moment, reread=reread)

    def verdicts(
        self, key: str, ref: OutputRef, known: Mapping[str, VerdictRef], panel: Panel
    ) -> Iterator[tuple[int, VerdictRef | None]]:
        """The slots that look at an output, each with its verdict so far. Behind a checkpoint that stops come none."""
        stopped: int | None = None
        for number in panel.graders:
            slot = self.slots[number]
            if stopped is not None and slot.turn != stopped:
                return
            keys = self.grade_keys(key, ref, number, panel)
            if not keys:
                continue
            verdict = find_verdict(keys, known)
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

    def stop_digest(self, turn: int, panel: Panel) -> str:
        """Digest what may end a row's conversation after a turn: an output that it ended is only good with it."""
        return self._stop_digest(turn, revised=self._stops_revised(turn, panel))

    def fits(self, ref: OutputRef, panel: Panel | None = None) -> bool:
        """Whether an output is what this run would have said: one cut short by a checkpoint needs that checkpoint.

        Without its row's panel, which outputs of other runs need, it may be that of any row.
        """
        if ref.stopped_by is None:
            return True
        turn = len(ref.marks) or 1
        if ref.stopped_by == self._stop_digest(turn, revised=True):
            return True
        strict = panel is not None and self._stops_revised(turn, panel)
        return not strict and ref.stopped_by == self._stop_digest(turn, revised=False)

    def _stops_revised(self, turn: int, panel: Panel) -> bool:
        """Whether a grader that may end a conversation reads a row differently than earlier versions did."""
        return any(number in panel.reread and slot.revised is not None for number, slot in self._stopping(turn))

    def _stop_digest(self, turn: int, *, revised: bool) -> str:
        return digest(
            [
                [slot.revised if revised and slot.revised is not None else slot.fingerprint, slot.threshold]
                for _, slot in self._stopping(turn)
            ]
        )

    def _stopping(self, turn: int) -> Iterator[tuple[int, Slot]]:
        return ((number, slot) for number, slot in enumerate(self.slots) if slot.stops and slot.turn == turn)


def verdict_key(keys: tuple[str, ...], known: Mapping[str, VerdictRef]) -> str | None:
    """Return the first of a verdict's keys that has one. An error counts only where there is nothing else."""
    had = [key for key in keys if key in known]
    return next((key for key in had if known[key].status != "error"), had[0] if had else None)


def find_verdict(keys: tuple[str, ...], known: Mapping[str, VerdictRef]) -> VerdictRef | None:
    """Return the verdict that has one of these keys."""
    if len(keys) == 1:  # as almost all have
        return known.get(keys[0])
    key = verdict_key(keys, known)
    return None if key is None else known[key]


class PendingTrial(NamedTuple):
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
        for number, key in enumerate(work.keys(survey, index.outputs, lent, *index.begun)):
            own = index.outputs.get(key)
            ref = own or lent.get(key)
            if ref is None:
                continue
            panel = survey.panels.panel_at(number // work.trials)
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


def pending_trials(
    dataset: Dataset, survey: Survey, work: Work, index: Index, done: bytes = b""
) -> Iterator[PendingTrial]:
    """The unfinished trials in the dataset's order, read from its files as they are needed.

    `done` is the plan's: what it knows to be finished is not looked up again.
    """
    whole = b"\x01" * work.trials
    for position, sample in checked(dataset, survey):
        if done[position * work.trials : (position + 1) * work.trials] == whole:
            continue
        for trial in range(1, work.trials + 1):
            if (pending := find_pending(sample, trial, survey.panels.panel_at(position), work, index)) is not None:
                yield pending


def checked(dataset: Dataset, survey: Survey) -> Iterator[tuple[int, Sample]]:
    """The samples with their positions, as long as they are those of the survey."""
    position = -1
    for position, sample in enumerate(dataset):
        if bytes.fromhex(sample.digest[7:]) != survey.digest_at(position):
            raise dataset_changed(sample.where)
        yield position, sample
    if position + 1 != survey.count:
        raise dataset_changed("it has fewer rows now")


def find_pending(sample: Sample, trial: int, panel: Panel, work: Work, index: Index) -> PendingTrial | None:
    """What there is to do about a trial; None when it is finished."""
    key = work.key(sample.digest, trial, index.outputs, *index.begun, typed=sample.typed)
    ref = index.outputs.get(key)
    missing = () if ref is None else work.missing(key, ref, index.verdicts, panel)
    return PendingTrial(sample, trial, key, ref, missing, panel) if ref is None or missing else None


def unfinished_trials(survey: Survey, work: Work, index: Index, *, grades: bool) -> Iterator[int]:
    """The numbers of the trials that are not finished, counted through the dataset; without `grades`, not generated."""
    for number, key in enumerate(work.keys(survey, index.outputs, *index.begun)):
        ref = index.outputs.get(key)
        if ref is None or (
            grades and work.missing(key, ref, index.verdicts, survey.panels.panel_at(number // work.trials))
        ):
            yield number

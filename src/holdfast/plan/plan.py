"""What is left to do: which trials are finished, which only lack grades, which have to be run."""

from __future__ import annotations

from collections import ChainMap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from holdfast.data.dataset import changed_under_us
from holdfast.plan.keys import generation_key, grade_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from holdfast.data.dataset import Dataset, Sample, Survey
    from holdfast.plan.reuse import Borrowed
    from holdfast.store.index import Index, OutputRef, VerdictRef


@dataclass(frozen=True)
class Work:
    """All that turns a sample and a trial number into keys."""

    digest: str
    """of conversation and target"""
    trials: int
    graders: tuple[str, ...]
    """fingerprints, in the order of the eval file"""

    def key(self, sample: str, trial: int) -> str:
        """The generation key of a trial, from its sample's digest."""
        return generation_key(sample, trial, self.digest)

    def keys(self, survey: Survey) -> Iterator[str]:
        """The keys of all trials."""
        for position in range(survey.count):
            sample = "sha256:" + survey.of(position).hex()
            for trial in range(1, self.trials + 1):
                yield generation_key(sample, trial, self.digest)

    def missing(self, key: str, output: str, verdicts: Mapping[str, VerdictRef]) -> tuple[int, ...]:
        """Which graders have no verdict yet on an output, given by its digest. An error is no verdict."""
        lacking = []
        for number, grader in enumerate(self.graders):
            verdict = verdicts.get(grade_key(key, output, grader))
            if verdict is None or verdict.status == "error":
                lacking.append(number)
        return tuple(lacking)


class Job(NamedTuple):
    """A trial that is not finished."""

    sample: Sample
    trial: int
    key: str
    output: OutputRef | None
    """None: it has to be run"""
    missing: tuple[int, ...]
    """the graders that have to look at it"""


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

    @property
    def total(self) -> int:
        """All trials of the run."""
        return self.samples * self.trials

    @property
    def complete(self) -> bool:
        """Nothing is left to do."""
        return self.to_run == self.to_grade == 0

    def __str__(self) -> str:
        lent = ", ".join(f"{count:,} outputs from {run}" for run, count in self.lenders.items())
        parts = [
            (self.finished, "finished"),
            (self.reused, "reused"),
            (self.to_grade, "to grade"),
            (self.to_run, "to run"),
        ]
        said = ", ".join(f"{count:,} {what}" for count, what in parts if count)
        why = f" ({'; '.join(self.reasons)})" if self.reasons else ""
        return f"{self.total:,} trials of {self.samples:,} samples: {said}{why}" + (f"; {lent}" if lent else "")


def make_plan(survey: Survey, work: Work, index: Index, borrowed: Borrowed | None = None) -> Plan:
    """Count what is finished here, what other runs have done, and what is not done."""
    finished = reused = to_grade = 0
    lent = borrowed.outputs if borrowed else {}
    verdicts: Mapping[str, VerdictRef] = index.verdicts
    if borrowed:
        verdicts = ChainMap(borrowed.verdicts, index.verdicts)
    if index.outputs or lent:
        for key in work.keys(survey):
            own = index.outputs.get(key)
            ref = own or lent.get(key)
            if ref is None:
                continue
            if own is not None and not work.missing(key, ref.digest, index.verdicts):
                finished += 1
            elif work.missing(key, ref.digest, verdicts):
                to_grade += 1
            else:
                reused += 1
    total = survey.count * work.trials
    left = total - finished - reused - to_grade
    lenders = dict(borrowed.runs) if borrowed else {}
    return Plan(survey.count, work.trials, finished, to_grade, left, reused, lenders)


def jobs(dataset: Dataset, survey: Survey, work: Work, index: Index) -> Iterator[Job]:
    """The unfinished trials in the dataset's order, read from its files as they are needed."""
    everyone = tuple(range(len(work.graders)))
    position = -1
    for position, sample in enumerate(dataset):
        if bytes.fromhex(sample.digest[7:]) != survey.of(position):
            raise changed_under_us(sample.where)
        for trial in range(1, work.trials + 1):
            key = work.key(sample.digest, trial)
            ref = index.outputs.get(key)
            missing = everyone if ref is None else work.missing(key, ref.digest, index.verdicts)
            if ref is None or missing:
                yield Job(sample, trial, key, ref, missing)
    if position + 1 != survey.count:
        raise changed_under_us("it has fewer rows now")

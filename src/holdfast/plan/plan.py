"""What is left to do: which trials are finished, which only lack grades, which have to be run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from holdfast.data.dataset import changed_under_us
from holdfast.plan.keys import generation_key, grade_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.data.dataset import Dataset, Sample, Survey
    from holdfast.store.index import Index, OutputRef


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

    def missing(self, key: str, ref: OutputRef, index: Index) -> tuple[int, ...]:
        """Which graders have no verdict on an output yet. An error is no verdict."""
        lacking = []
        for number, grader in enumerate(self.graders):
            verdict = index.verdicts.get(grade_key(key, ref.digest, grader))
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
    """How much there is to do, before anything is done."""

    samples: int
    trials: int
    finished: int
    to_grade: int
    to_run: int

    @property
    def total(self) -> int:
        """All trials of the run."""
        return self.samples * self.trials

    @property
    def complete(self) -> bool:
        """Nothing is left to do."""
        return self.to_run == self.to_grade == 0

    def __str__(self) -> str:
        parts = [(self.finished, "finished"), (self.to_grade, "to grade"), (self.to_run, "to run")]
        said = ", ".join(f"{count:,} {what}" for count, what in parts if count)
        return f"{self.total:,} trials of {self.samples:,} samples: {said}"


def make_plan(survey: Survey, work: Work, index: Index) -> Plan:
    """Count what is finished and what is not."""
    finished = to_grade = 0
    if index.outputs:
        for position in range(survey.count):
            sample = "sha256:" + survey.of(position).hex()
            for trial in range(1, work.trials + 1):
                key = work.key(sample, trial)
                ref = index.outputs.get(key)
                if ref is None:
                    continue
                if work.missing(key, ref, index):
                    to_grade += 1
                else:
                    finished += 1
    total = survey.count * work.trials
    return Plan(survey.count, work.trials, finished, to_grade, total - finished - to_grade)


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
            missing = everyone if ref is None else work.missing(key, ref, index)
            if ref is None or missing:
                yield Job(sample, trial, key, ref, missing)
    if position + 1 != survey.count:
        raise changed_under_us("it has fewer rows now")

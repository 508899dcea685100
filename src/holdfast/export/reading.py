"""A run directory's trials, whole and in the dataset's order, from its path alone.

Where the dataset is gone or has changed, the trials still come, in the order in which they finished and without
the row's fields.

Verdicts are found by their keys and judged by the thresholds and weights of the report: a grader that has been renamed,
or whose threshold has moved, since it gave them says here what it says in `metrics.json`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from holdfast.data.dataset import Dataset
from holdfast.errors import HoldfastError, UsageError
from holdfast.plan.keys import generation_key, grade_key
from holdfast.report.metrics import grading_rules
from holdfast.spec.load import eval_of_run
from holdfast.store.index import OutputRef, read_output
from holdfast.store.lines import scan
from holdfast.store.records import Grade, GradeStatus, Output, status_by

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.spec.load import Eval
    from holdfast.store.rundir import Manifest, RunDir

_grade = msgspec.json.Decoder(Grade)


class _Rules(msgspec.Struct):
    threshold: float | None
    weight: float


class _Report(msgspec.Struct):
    metrics: dict[str, _Rules]


class Trial(NamedTuple):
    """A finished trial with all that is known of it."""

    fields: dict[str, Any]
    """the row; empty where the dataset no longer has it"""
    output: Output
    grades: list[Grade]
    status: GradeStatus
    score: float | None


class RunReader:
    """Reads the trials of one run. Holds where they are, not what they say."""

    def __init__(self, rundir: RunDir) -> None:
        manifest = rundir.read_manifest()
        if manifest is None:
            raise UsageError(f"{rundir.path} is not a run directory: it has no manifest.json")
        self.rundir = rundir
        self.manifest: Manifest = manifest
        self._outputs = rundir.load(mend=False).outputs
        self._grades: dict[str, Grade] = {}
        for path in rundir.journals("grades"):
            for line in scan(path):
                if line.sound:
                    grade = _grade.decode(line.data)
                    known = self._grades.get(grade.grade_key)
                    if known is None or (known.time or 0.0) <= (grade.time or 0.0):  # as the index chooses
                        self._grades[grade.grade_key] = grade
        self._graders: dict[str, str] = manifest.fingerprints.get("graders", {})
        self._rules = self._grading_rules()
        self.missing_rows = 0
        """outputs whose row the dataset no longer has"""

    def trials(self) -> Iterator[Trial]:
        """Every trial that has an output."""
        left = dict(self._outputs)
        work = str(self.manifest.fingerprints.get("work"))
        try:
            for sample in Dataset(self.spec):
                for trial in range(1, self.manifest.trials + 1):
                    ref = left.pop(generation_key(sample.digest, trial, work), None)
                    if ref is not None:
                        yield self._trial(ref, dict(sample.fields))
        except HoldfastError:
            pass  # the dataset cannot be read any more; what follows does not need it
        self.missing_rows = len(left)
        for ref in left.values():
            yield self._trial(ref, {})

    @property
    def spec(self) -> Eval:
        """The eval that made the run."""
        manifest = self.manifest
        return eval_of_run(manifest.eval, manifest.folder, manifest.eval_file)

    def _grading_rules(self) -> dict[str, _Rules]:
        """Thresholds and weights by grader: the report's, and before there is one, the eval's."""
        with suppress(OSError, msgspec.DecodeError):
            return msgspec.convert(self.rundir.read_metrics(), _Report).metrics
        return msgspec.convert(grading_rules(self.spec), dict[str, _Rules])

    def _trial(self, ref: OutputRef, fields: dict[str, Any]) -> Trial:
        output = read_output(ref)
        grades = [
            self._today(name, grade)
            for name, fingerprint in self._graders.items()
            if (grade := self._grades.get(grade_key(output.key, output.digest, fingerprint))) is not None
        ]
        status, score = _together(grades, len(self._graders))
        return Trial(fields, output, grades, status, score)

    def _today(self, name: str, grade: Grade) -> Grade:
        rules = self._rules[name]
        status = status_by(rules.threshold, grade.status, grade.score)
        return msgspec.structs.replace(grade, grader=name, status=status, weight=rules.weight)


def _together(grades: list[Grade], wanted: int) -> tuple[GradeStatus, float | None]:
    if len(grades) < wanted or any(grade.status == "error" for grade in grades):
        return "error", None
    scored = [grade for grade in grades if grade.score is not None]
    if not scored:
        return "skipped", None
    weight = sum(grade.weight for grade in scored)
    score = sum(grade.weight * (grade.score or 0.0) for grade in scored) / weight if weight else None
    return "passed" if all(grade.status == "passed" for grade in scored) else "failed", score

"""A run read back from nothing but its path: rows × trials × verdicts, for reports, exports, comparisons and gates.

Trials come whole and in the dataset's order. If the dataset is gone or has changed, they still come, in the order in
which they finished and without the row's fields.

Verdicts are looked up by their keys and judged by the thresholds and weights of the report: a grader that has been
renamed, or whose threshold has moved, since it gave a verdict has here the status that `metrics.json` counts.
"""

from __future__ import annotations

import shlex
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from holdfast.conversation.turns import Script
from holdfast.data.columns import Conditions, Panel
from holdfast.data.dataset import Dataset
from holdfast.errors import HoldfastError, UsageError
from holdfast.graders.build import GraderPlace, grader_places, threshold
from holdfast.plan.identity import slot_of
from holdfast.plan.plan import Slot, Work
from holdfast.report.trials import grading_rules, judge_output, measured_graders
from holdfast.spec.eval import fields_of_target
from holdfast.spec.load import eval_of_run
from holdfast.store.catalog import is_running
from holdfast.store.heads import decode_line, read_output, read_steps
from holdfast.store.records import ErrorRecord, Grade, GradeStatus, Output, apply_threshold
from holdfast.store.shared import lender_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from holdfast.data.dataset import Sample
    from holdfast.plan.plan import Verdicts
    from holdfast.report.trials import JudgedOutput, TrialStatus
    from holdfast.spec.eval import Eval
    from holdfast.store.heads import OutputRef
    from holdfast.store.index import RunIndex
    from holdfast.store.lines import LineRef
    from holdfast.store.metrics import Metrics, Rule, TrialResult
    from holdfast.store.records import Step
    from holdfast.store.rundir import Manifest, RunDir


_UNCERTAIN: Final = "uncertain: "
"""how the error of a trial begins in which a call was cut off"""


class GradedTrial(NamedTuple):
    """A finished trial with its row and its verdicts."""

    fields: dict[str, Any]
    """the row; empty if the dataset no longer has it"""
    output: Output
    grades: list[Grade]
    """checkpoints' first, by turn; without graders that do not look at the row"""
    status: GradeStatus
    score: float | None
    panel: Panel
    """the graders that look at it"""
    line: LineRef | None = None
    """the place of the output in its journal"""


class Pending(NamedTuple):
    """A trial that has no output."""

    sample: str
    trial: int
    error: str
    """why its last attempt failed; empty if there was no attempt"""
    fields: dict[str, Any]
    """the row"""
    key: str = ""
    """under which its attempts and calls are recorded"""

    @property
    def status(self) -> TrialStatus:
        """`pending` if the trial was not tried yet; else `error`, or `uncertain`."""
        if not self.error:
            return "pending"
        return "uncertain" if self.error.startswith(_UNCERTAIN) else "error"


class RowRef(NamedTuple):
    """A trial that is not read yet: its row, and the place of its output."""

    sample: Sample | None
    """None if the dataset no longer has the row"""
    trial: int
    """0 without a sample: only the output has the number"""
    key: str
    ref: OutputRef | None
    """None without an output"""
    error: str = ""
    """why its last attempt failed, of a trial without an output"""


class RunView:
    """Reads one run. Holds where its trials are, not what they contain."""

    def __init__(self, rundir: RunDir) -> None:
        manifest = rundir.read_manifest()
        if manifest is None:
            raise UsageError(f"{rundir.path} is not a run directory: it has no manifest.json")
        self.rundir = rundir
        self.manifest: Manifest = manifest
        self.missing_rows = 0
        """outputs whose row the dataset no longer has; counted while the trials are read"""

    @cached_property
    def spec(self) -> Eval:
        """The eval that made the run."""
        manifest = self.manifest
        return eval_of_run(manifest.eval, manifest.folder, manifest.eval_file)

    @cached_property
    def metrics(self) -> Metrics | None:
        """The content of `metrics.json`; None while the run is not finished."""
        return self.rundir.read_metrics()

    def final_metrics(self) -> Metrics:
        """Return the metrics. Refuses a run that is not finished, whose numbers may still change."""
        if self.metrics is None:
            raise UsageError(
                f"{self.rundir.path} is not finished: it has no metrics.json",
                remedy="Finish it with the `holdfast eval` command that began it.",
            )
        return self.metrics

    def results(self) -> list[TrialResult]:
        """Read `results.json`: status, score and answer of every trial, and each grader's status and score."""
        return self.rundir.read_results()

    @property
    def graders(self) -> list[str]:
        """Names of the graders as metrics have them."""
        return [place.name for place in self.places]

    @cached_property
    def script(self) -> Script:
        """The templates of the user's messages."""
        return Script(self.spec)

    @cached_property
    def places(self) -> list[GraderPlace]:
        """The graders with their thresholds and weights: the report's, and before there is one, the eval's."""
        rules = {**grading_rules(self.spec), **(self.metrics.rules if self.metrics else {})}
        return [_with_rule(place, rules[place.name]) for place in grader_places(self.spec)]

    @cached_property
    def work(self) -> Work:
        """The keys of the run's trials and verdicts."""
        return Work.of_run(self.manifest, tuple(map(self._slot, self.places)))

    @cached_property
    def index(self) -> RunIndex:
        """Outputs, verdicts, calls and failed attempts of the run."""
        index = self.rundir.load(repair=False)
        self.work.drop_unfit(index)
        return index

    def trial(self, sample: str, number: int, *, near: float = 0.0) -> GradedTrial | Pending | None:
        """Return one trial without reading the others; None if the run has no such trial.

        `near` is the share of the rows before its row, if that is known.
        """
        row = self._row(sample, near) if 1 <= number <= self.manifest.trials else None
        key = "" if row is None else self.work.key(row.asked, number)
        ref = self.index.output(key) if row is not None else None
        if row is not None and ref is not None and self.is_of(ref, row):
            return self._trial(key, ref, dict(row.fields), Conditions(self.spec).panel_for(row.fields))
        if ref is None and (named := self._find_by_name(sample, number)) is not None:
            key, ref = named
        if ref is not None:
            return self._trial(key, ref, {}, None)
        if row is None:
            return None
        error = self._errors((key,)).get(key, "")
        return Pending(sample, number, self._why_missing(key, error), dict(row.fields), key)

    def _row(self, sample: str, near: float) -> Sample | None:
        try:
            return Dataset(self.spec).find(sample, near)
        except HoldfastError:
            return None  # the dataset can no longer be read; an output does not need it

    def _find_by_name(self, sample: str, number: int) -> tuple[str, OutputRef] | None:
        """Return the output of a trial whose row is gone or has changed, with its key."""
        for key in self.index.keys_of(sample, number):
            if (ref := self.index.output(key)) is not None:
                return key, ref
        return None

    def trials(self) -> Iterator[GradedTrial]:
        """Yield every trial that has an output."""
        for trial in self.everything():
            if isinstance(trial, GradedTrial):
                yield trial

    def everything(self) -> Iterator[GradedTrial | Pending]:
        """Yield every trial, also those without an output, to the extent that the dataset can be read."""
        conditions = Conditions(self.spec)
        for row in self.rows():
            fields = {} if row.sample is None else dict(row.sample.fields)
            if row.ref is not None:
                yield self._trial(row.key, row.ref, fields, conditions.panel_for(fields) if fields else None)
            elif row.sample is not None:
                yield Pending(row.sample.id, row.trial, row.error, fields, row.key)

    def rows(self) -> Iterator[RowRef]:
        """Yield every trial unread: the dataset's, if it can be read, then outputs without a row."""
        errors = self._errors(self.index.attempts)
        with_row = changed = 0
        for sample, number, key in self.keyed_rows():
            ref = self.index.output(key)
            if ref is not None and not self.is_of(ref, sample):
                changed += 1
                yield RowRef(None, 0, key, ref)
                continue
            with_row += ref is not None
            yield RowRef(sample, number, key, ref, "" if ref else self._why_missing(key, errors.get(key, "")))
        self.missing_rows = self.index.count_outputs() - with_row
        if self.missing_rows > changed:  # which is rare, so that no keys are kept until then
            keys = {key for _, _, key in self.keyed_rows()}
            for key, ref in self.index.all_outputs():
                if key not in keys:
                    yield RowRef(None, 0, key, ref)

    def keyed_rows(self) -> Iterator[tuple[Sample, int, str]]:
        """Yield the dataset's trials with their keys, up to the first row that cannot be read."""
        with suppress(HoldfastError):  # what needs no row is read nevertheless
            for sample in Dataset(self.spec):
                for number in range(1, self.manifest.trials + 1):
                    yield sample, number, self.work.key(sample.asked, number)

    @staticmethod
    def is_of(ref: OutputRef, sample: Sample) -> bool:
        """Return True if an output was graded by the row as it is now, and not only answers the same question."""
        return ref.row is None or ref.row == sample.row

    def field_names(self) -> list[str]:
        """Return the names of all fields that some row has; none if the dataset can no longer be read."""
        names: dict[str, None] = {}
        with suppress(HoldfastError):
            for sample in Dataset(self.spec):
                names |= dict.fromkeys(sample.fields)
        return list(names)

    def steps(self, key: str) -> list[Step]:
        """Return the recorded calls of a trial, in the order in which they were made."""
        return read_steps(self.index.steps(key))

    def failed_attempts(self, key: str) -> list[ErrorRecord]:
        """Return the failed attempts of a trial, of its target and its graders, by time."""
        errors = (decode_line(ErrorRecord, line) for line in self.index.failures(key))
        return sorted(errors, key=lambda error: error.time)

    def checkpoint_grades(self, key: str) -> list[Grade]:
        """Return the verdicts that checkpoints gave on a trial so far, the latest of each, in the order of turns."""
        places: dict[tuple[str, int | None], GraderPlace] = {
            (place.block.name, place.turn): place for place in self.places if place.turn is not None
        }
        grades: dict[str, Grade] = {}
        verdicts = self.index.verdicts(key).values()
        for line in (verdict.line for verdict in verdicts if verdict.line is not None):
            grade = _read_grade(line)
            if (place := places.get((grade.grader, grade.turn))) is None:
                continue
            earlier = grades.get(place.name)
            if earlier is None or earlier.time <= grade.time:
                status = apply_threshold(threshold(place.block), grade.status, grade.score)
                grades[place.name] = msgspec.structs.replace(grade, grader=place.name, status=status)
        return [grades[place.name] for place in places.values() if place.name in grades]

    def _slot(self, place: GraderPlace) -> Slot:
        return slot_of(place, self.manifest.fingerprints.graders.get(place.name, ""), self._visible)

    @cached_property
    def _visible(self) -> frozenset[str] | None:
        return fields_of_target(self.spec)

    def judge(self, ref: OutputRef, row_panel: Panel | None, verdicts: Verdicts) -> tuple[Panel, JudgedOutput]:
        """Join an output with its verdicts. `row_panel` are the graders of its row; None if the row is gone."""
        panel = self._panel(ref, verdicts) if row_panel is None else row_panel
        recorded = self.work.verdicts(ref, verdicts, panel)
        return panel, judge_output(self.work, self.places, recorded, panel, self._measured)

    @cached_property
    def _measured(self) -> frozenset[int]:
        """The numbers of the graders whose values are measurements."""
        return measured_graders(self.work, self.places, self.index)

    def _panel(self, ref: OutputRef, verdicts: Verdicts) -> Panel:
        """Return the graders of an output whose row is gone: of graders with a `where`, those with a verdict."""
        everyone = range(len(self.places))
        graded = {number for number in everyone if self.work.verdict_key(ref, number) in verdicts}
        graded |= {number for number, place in enumerate(self.places) if graded.intersection(place.votes)}
        return Panel(
            tuple(number for number in everyone if self.places[number].block.where is None or number in graded)
        )

    def _errors(self, keys: Iterable[str]) -> dict[str, str]:
        """Return the last failure of the target at some trials."""
        errors = {}
        for key in keys:
            failures = [error for error in self.failed_attempts(key) if error.where == "target"]
            if failures:
                errors[key] = f"{failures[-1].kind}: {failures[-1].message}"
        return errors

    @cached_property
    def _uncertain(self) -> dict[str, str]:
        return self.index.uncertain_trials(running=is_running(self.rundir))

    def _why_missing(self, key: str, error: str) -> str:
        """Return why a trial has no output, from its last failure: also a call that was cut off."""
        if error.startswith(_UNCERTAIN):
            return error if key in self._uncertain else ""  # it was settled, and has not continued yet
        if key in self._uncertain:
            return f"{_UNCERTAIN}{self._uncertain[key]}"
        return error or self._damage

    @cached_property
    def _damage(self) -> str:
        """The error of a trial of a finished run that has neither an output nor an error; empty if no line was lost."""
        if self.metrics is None or not self.rundir.has_lost_lines(self.metrics):
            return ""
        path = shlex.quote(str(self.rundir.path))
        return (
            "damaged: the output is missing, as journals have become shorter since the report was made; "
            f"`holdfast repair {path} --dry-run` says what is missing"
        )

    def _trial(self, key: str, ref: OutputRef, fields: dict[str, Any], row_panel: Panel | None) -> GradedTrial:
        """Read an output and its verdicts."""
        output, verdicts = read_output(ref), self.index.verdicts(key)
        panel, judged = self.judge(ref, row_panel, verdicts)
        grades: dict[int, Grade] = {}
        for number, verdict in judged.verdicts.items():
            if verdict is not None and verdict.recorded is not None:
                place = self.places[number]
                if place.votes:
                    grade = _combined([grades[vote] for vote in place.votes if vote in grades], verdict.score)
                else:
                    assert verdict.recorded.line is not None
                    grade = _read_grade(verdict.recorded.line)
                grades[number] = msgspec.structs.replace(
                    grade, grader=place.name, status=verdict.status, score=verdict.score, weight=place.block.weight
                )
        return GradedTrial(fields, output, [*grades.values()], judged.status, judged.score, panel, ref.line)


def _combined(votes: list[Grade], score: float | None) -> Grade:
    """Return the grade that stands for several votes, with what each of them says."""
    return msgspec.structs.replace(
        votes[0],
        by="",
        score=score,
        feedback="; ".join(f"{vote.grader}: {vote.feedback}" for vote in votes if vote.feedback),
        details={"votes": {vote.grader: vote.score for vote in votes}},
        seconds=sum(vote.seconds for vote in votes),
        usage=None,
    )


def _read_grade(line: LineRef) -> Grade:
    grade, lender = decode_line(Grade, line), lender_of(line.path)
    return grade if lender is None or grade.source else msgspec.structs.replace(grade, source=lender)


def _with_rule(place: GraderPlace, rule: Rule) -> GraderPlace:
    values = {name: value for name, value in rule._asdict().items() if name != "combine" or value is not None}
    return msgspec.structs.replace(place, block=place.block.model_copy(update=values))

"""A run read back from its path alone: rows × trials × verdicts, for reports, exports, comparisons and gates.

Trials come whole and in the dataset's order. Where the dataset is gone or has changed, they still come, in the order in
which they finished and without the row's fields.

Verdicts are looked up by their keys and judged by the thresholds and weights of the report: a grader that has been
renamed, or whose threshold has moved, since it gave a verdict has here the status that `metrics.json` counts.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from holdfast.conversation.script import Script
from holdfast.data.dataset import Dataset
from holdfast.data.panels import Conditions, Panel
from holdfast.errors import HoldfastError, UsageError
from holdfast.graders.build import GraderPlace, grader_places, threshold
from holdfast.plan.identity import slot_of
from holdfast.plan.plan import Slot, Work
from holdfast.report.line_places import LinePlaces
from holdfast.report.verdicts import as_measurement, grading_rules, judge_output, level_measurements
from holdfast.spec.eval import fields_of_target
from holdfast.spec.load import eval_of_run
from holdfast.store.catalog import is_running
from holdfast.store.index import (
    Entry,
    Index,
    decode_line,
    keep_output,
    keep_verdict,
    read_error_head,
    read_grade_head,
    read_output,
    read_output_head,
    read_steps,
    uncertain_trials,
)
from holdfast.store.lines import LineRef, count_lines, first_line_since, is_sound, scan, search, search_parts
from holdfast.store.records import ErrorRecord, Grade, GradeStatus, Output, apply_threshold
from holdfast.store.run_files import UNREADABLE
from holdfast.store.rundir import INDEX
from holdfast.store.shared import lender_of, unwanted_keys
from holdfast.store.step_places import places_of
from holdfast.store.trial_notes import TableNotes, stamp_journals, stamp_report
from holdfast.store.trial_table import TrialTable

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, MutableMapping

    from holdfast.data.dataset import Sample
    from holdfast.report.checkpoints import TrialStatus
    from holdfast.report.verdicts import JudgedOutput
    from holdfast.spec.eval import Eval
    from holdfast.store.manifest import Manifest
    from holdfast.store.metrics import Metrics, Rule, TrialResult
    from holdfast.store.records import Step
    from holdfast.store.refs import OutputRef, VerdictRef
    from holdfast.store.rundir import RunDir


class _Keyed(msgspec.Struct):
    key: str
    sample: str = ""
    trial: int = 0


_keyed = msgspec.json.Decoder(_Keyed)
_UNCERTAIN: Final = "uncertain: "
"""how the error of a trial begins in which a call was cut off"""


class GradedTrial(NamedTuple):
    """A finished trial with its row and its verdicts."""

    fields: dict[str, Any]
    """the row; empty where the dataset no longer has it"""
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
    """why its last attempt failed; empty where there was none"""
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
    """A trial that is not read yet: its row, and where its output is."""

    sample: Sample | None
    """None where the dataset no longer has the row"""
    trial: int
    """0 without a sample: only the output tells"""
    key: str
    ref: OutputRef | None
    """None where there is no output"""
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
        self._lines: dict[str, LinePlaces] | None = None
        """by kind of journal: where the lines of each trial are, once trials are read one after the other"""

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
    def _index(self) -> Index:
        """Outputs and verdicts of the run."""
        index = self.rundir.load(repair=False)
        self.work.drop_unfit(index)
        level_measurements(self.work, self.places, index)
        return index

    def trial(
        self, sample: str, number: int, *, line: LineRef | None = None, near: float = 0.0
    ) -> GradedTrial | Pending | None:
        """Return one trial without reading the others; None where the run has no such trial.

        `line` is the place of its output and `near` the share of the rows before its row, where these are known.
        """
        row = self._row(sample, near) if 1 <= number <= self.manifest.trials else None
        own_key = "" if row is None else self.work.key(row.asked, number)
        outputs = self._outputs_of(sample, number, line)
        key = own_key if own_key in outputs else next(iter(outputs), None)
        if key is not None:
            fields = dict(row.fields) if row is not None and key == own_key and _is_of(outputs[key], row) else {}
            conditions = Conditions(self.spec)
            panel = conditions.panel_for(fields) if fields else None
            return self._trial(outputs[key], fields, panel, *self._verdicts_of(key, outputs[key], panel))
        if row is None:
            return None
        index, error = Index(), ""
        for failure in self.failed_attempts(own_key):
            if failure.where == "target":
                index.note_failure(own_key, failure.kind, failure.time)
                error = f"{failure.kind}: {failure.message}"
        index.intents, index.steps = {own_key}, {own_key: list(self._lines_of("steps", own_key))}
        return Pending(sample, number, self._why_missing(index)(own_key, error), dict(row.fields), own_key)

    def _row(self, sample: str, near: float) -> Sample | None:
        try:
            return Dataset(self.spec).find(sample, near)
        except HoldfastError:
            return None  # the dataset cannot be read any more; an output does not need it

    def _outputs_of(self, sample: str, number: int, at: LineRef | None) -> dict[str, OutputRef]:
        """Find the outputs of a trial, by key: more than one where a worker was taken over, or the row has changed."""
        index = Index()

        def keep(line: LineRef, data: bytes) -> None:
            head = read_output_head(data)
            if head is not None and _named(data) == (sample, number) and head.key not in unwanted_keys(line.path):
                keep_output(index, Entry(line, head))

        at = at or self._reported_line(sample, number)
        if at is not None and is_sound(data := at.read()):
            keep(at, data)
        if not index.outputs:
            words = b'"sample":%b,"trial":%d,' % (msgspec.json.encode(sample), number)
            for path in self.rundir.journals("outputs"):
                for line in search(path, words):
                    keep(LineRef(path, line.offset, len(line.data)), line.data)
        return {key: ref for key, ref in index.outputs.items() if self.work.fits(ref)}

    def _reported_line(self, sample: str, number: int) -> LineRef | None:
        """Return where the columns that were written with the report have an output; None if they are stale, too."""
        table = None if self.metrics is None else TrialTable.load(self.rundir.path / INDEX)
        if table is None or (row := table.find(sample, number)) is None:
            return None
        with suppress(msgspec.ValidationError):
            notes = msgspec.convert(table.notes, TableNotes)
            if (notes.report, notes.journals) == (stamp_report(self.rundir), stamp_journals(self.rundir)):
                line = table.line(row, self.rundir.path)
                if line is not None and line.path in self.rundir.journals("outputs"):  # the table may be another run's
                    return line
        return None

    def _verdicts_of(
        self, key: str, ref: OutputRef, panel: Panel | None
    ) -> tuple[MutableMapping[str, VerdictRef], list[Grade]]:
        """Read the verdicts on an output; with its panel only as many as there are, if none was given twice."""
        index, grades = Index(), list[Grade]()
        enough = panel is not None and self.graded_once
        for path in self.rundir.journals("grades"):
            start = first_line_since(path, ref.started, _graded_at) if enough else 0
            for line in search(path, _key_words(key), start):
                head = read_grade_head(line.data) if line.data.startswith(_key_words(key)) else None
                if head is None:
                    continue
                keep_verdict(index, head)
                grades.append(_read_grade(LineRef(path, line.offset, len(line.data)), line.data))
                if enough and panel is not None and not self.work.missing(key, ref, index.verdicts, panel):
                    return index.verdicts, grades
        return index.verdicts, grades

    @cached_property
    def graded_once(self) -> bool:
        """True if the run is finished, and no grader has judged an output twice, as with `grade --again`.

        Then the first verdict that is found is the one that counts. An error is no verdict, and may be repeated.
        """
        if self.metrics is None:
            return False
        graders = [each for each in self.metrics.graders.values() if each.combine is None]  # else there is no line
        verdicts = sum(each.passed + each.failed + each.skipped for each in graders)
        journals = self.rundir.journals("grades")
        if sum(map(count_lines, journals)) == verdicts:  # counted much faster, and each verdict has at least one line
            return True
        errors = b',"status":"error",'  # in no text: quotation marks in texts are escaped
        return sum(count_lines(path, errors) for path in journals) == verdicts

    def trials(self) -> Iterator[GradedTrial]:
        """Yield every trial that has an output."""
        for trial in self.everything():
            if isinstance(trial, GradedTrial):
                yield trial

    def everything(self) -> Iterator[GradedTrial | Pending]:
        """Yield every trial, also those without an output, as far as the dataset can be read."""
        if self._lines is None:
            self._lines = {}
        conditions = Conditions(self.spec)
        for row in self.rows():
            fields = {} if row.sample is None else dict(row.sample.fields)
            if row.ref is not None:
                panel = conditions.panel_for(fields) if fields else None
                grades = [_read_grade(line) for line in self._lines_of("grades", row.key)]
                yield self._trial(row.ref, fields, panel, self._index.verdicts, grades)
            elif row.sample is not None:
                yield Pending(row.sample.id, row.trial, row.error, fields, row.key)

    def rows(self) -> Iterator[RowRef]:
        """Yield every trial unread: those of the dataset, as far as it can be read, then outputs without a row."""
        outputs, errors, why_missing = self._index.outputs, self._errors(), self._why_missing(self._index)
        with_row = changed = 0
        for sample, number, key in self._keyed_rows():
            ref = outputs.get(key)
            if ref is not None and not _is_of(ref, sample):
                changed += 1
                yield RowRef(None, 0, key, ref)
                continue
            with_row += ref is not None
            yield RowRef(sample, number, key, ref, "" if ref else why_missing(key, errors.get(key, "")))
        self.missing_rows = len(outputs) - with_row
        if self.missing_rows > changed:  # which is rare, so that no keys are kept until then
            keys = {key for _, _, key in self._keyed_rows()}
            for key, ref in outputs.items():
                if key not in keys:
                    yield RowRef(None, 0, key, ref)

    def _keyed_rows(self) -> Iterator[tuple[Sample, int, str]]:
        """Yield the trials of the dataset, as far as it can be read, with their keys."""
        with suppress(HoldfastError):  # what needs no row is read nevertheless
            for sample in Dataset(self.spec):
                for number in range(1, self.manifest.trials + 1):
                    yield sample, number, self.work.key(sample.asked, number)

    def field_names(self) -> list[str]:
        """Return the names of all fields that some row has; none where the dataset cannot be read any more."""
        names: dict[str, None] = {}
        with suppress(HoldfastError):
            for sample in Dataset(self.spec):
                names |= dict.fromkeys(sample.fields)
        return list(names)

    def steps(self, key: str) -> list[Step]:
        """Return the recorded calls of a trial, in the order in which they were made, where there are any."""
        return read_steps(self._lines_of("steps", key))

    def failed_attempts(self, key: str) -> list[ErrorRecord]:
        """Return the failed attempts of a trial, of its target and its graders, by time."""
        return sorted(
            (decode_line(ErrorRecord, line) for line in self._lines_of("errors", key)), key=lambda error: error.time
        )

    def checkpoint_grades(self, key: str) -> list[Grade]:
        """Return the verdicts that checkpoints gave on a trial so far, the latest of each, in the order of turns."""
        places: dict[tuple[str, int | None], GraderPlace] = {
            (place.block.name, place.turn): place for place in self.places if place.turn is not None
        }
        grades: dict[str, Grade] = {}
        for line in self._lines_of("grades", key):
            grade = _read_grade(line)
            if (place := places.get((grade.grader, grade.turn))) is None:
                continue
            earlier = grades.get(place.name)
            if earlier is None or (earlier.time or 0.0) <= (grade.time or 0.0):
                status = apply_threshold(threshold(place.block), grade.status, grade.score)
                grades[place.name] = msgspec.structs.replace(grade, grader=place.name, status=status)
        return [grades[place.name] for place in places.values() if place.name in grades]

    def _lines_of(self, journal: str, key: str) -> Iterable[LineRef]:
        """Return the lines of a trial: one search for one trial, one pass where all are read."""
        if self._lines is None:
            words = _key_words(key)
            return [
                LineRef(path, line.offset, len(line.data))
                for path in self.rundir.journals(journal)
                for line in (
                    search_parts(path, words, places_of(path, words)) if journal == "steps" else search(path, words)
                )
                if line.data.startswith(words)
            ]
        if journal not in self._lines:
            self._lines[journal] = self._all_lines(journal)
        return self._lines[journal].lines(key)

    def _all_lines(self, journal: str) -> LinePlaces:
        files = list(self.rundir.journals(journal))
        places = LinePlaces(files, self._index.outputs)
        for number, path in enumerate(files):
            for line in scan(path):
                if line.sound:
                    with suppress(*UNREADABLE):  # not a record of Holdfast, which `holdfast repair` sets aside
                        places.add(_keyed.decode(line.data).key, number, line.offset, len(line.data))
        return places

    def _slot(self, place: GraderPlace) -> Slot:
        return slot_of(place, self.manifest.fingerprints.graders.get(place.name, ""), self._visible)

    @cached_property
    def _visible(self) -> frozenset[str] | None:
        return fields_of_target(self.spec)

    def judge(
        self,
        key: str,
        ref: OutputRef,
        row_panel: Panel | None,
        verdicts: MutableMapping[str, VerdictRef] | None = None,
    ) -> tuple[Panel, JudgedOutput]:
        """Join an output with its verdicts: those of the run, or the given ones, by grade key.

        `row_panel` are the graders that look at its row by their conditions; None if the row is gone.
        """
        if verdicts is None:
            verdicts = self._index.verdicts
        panel = self._panel(ref, key, verdicts, row_panel)
        for number in self._measured:
            if (grade := self.work.grade_key(key, ref, number)) is not None and grade in verdicts:
                verdicts[grade] = as_measurement(verdicts[grade])
        return panel, judge_output(self.work, self.places, key, ref, verdicts, panel)

    @cached_property
    def _measured(self) -> list[int]:
        """The numbers of the graders whose values are measurements, by the report."""
        graders = {} if self.metrics is None else self.metrics.graders
        names = {name for name, values in graders.items() if "measured" in values.totals}
        return [number for number, place in enumerate(self.places) if place.name in names]

    def _panel(self, ref: OutputRef, key: str, verdicts: Container[str], row_panel: Panel | None) -> Panel:
        """Return the graders that look at a row; of those with a `where`, if the row is gone, those with a verdict."""
        if row_panel is not None:
            return row_panel
        everyone = range(len(self.places))
        graded = {number for number in everyone if self.work.grade_key(key, ref, number) in verdicts}
        graded |= {number for number, place in enumerate(self.places) if graded.intersection(place.votes)}
        return Panel(
            tuple(number for number in everyone if self.places[number].block.where is None or number in graded)
        )

    def _errors(self) -> dict[str, str]:
        """Return the last failure of the target, by trial."""
        errors: dict[str, tuple[float, str]] = {}
        for path in self.rundir.journals("errors"):
            for line in scan(path):
                error = read_error_head(line.data) if line.sound else None
                if error is None or error.where != "target":
                    continue
                if error.key not in errors or errors[error.key][0] <= error.time:
                    errors[error.key] = error.time, f"{error.kind}: {error.message}"
        return {key: text for key, (_, text) in errors.items()}

    def _why_missing(self, index: Index) -> Callable[[str, str], str]:
        """Return what tells, by its key and last failure, why a trial has no output: also a call that was cut off."""
        uncertain = uncertain_trials(index, running=is_running(self.rundir))

        def why_missing(key: str, error: str) -> str:
            if error.startswith(_UNCERTAIN):
                return error if key in uncertain else ""  # it was settled, and has not continued yet
            return f"{_UNCERTAIN}{uncertain[key]}" if key in uncertain else error

        return why_missing

    def _trial(
        self,
        ref: OutputRef,
        fields: dict[str, Any],
        row_panel: Panel | None,
        verdicts: MutableMapping[str, VerdictRef],
        lines: Iterable[Grade],
    ) -> GradedTrial:
        """Join an output with its verdicts, and with what the lines of the journal say of them."""
        output = read_output(ref)
        panel, judged = self.judge(output.key, ref, row_panel, verdicts)
        recorded: dict[str, Grade] = {}
        for grade in sorted(lines, key=lambda grade: grade.time or 0.0):  # the latest counts, as in the index
            recorded[grade.grade_key] = grade
        grades: dict[int, Grade] = {}
        for number, verdict in judged.verdicts.items():
            if verdict is not None and verdict.recorded is not None:
                place = self.places[number]
                if place.votes:
                    grade = _combined([grades[vote] for vote in place.votes if vote in grades], verdict.score)
                else:
                    key = self.work.grade_key(output.key, ref, number)
                    assert key is not None
                    grade = recorded[key]
                grades[number] = msgspec.structs.replace(
                    grade, grader=place.name, status=verdict.status, score=verdict.score, weight=place.block.weight
                )
        return GradedTrial(fields, output, [*grades.values()], judged.status, judged.score, panel, ref.line)


def _is_of(ref: OutputRef, sample: Sample) -> bool:
    """Return True if an output was graded by the row as it is now, and not only answers the same question."""
    return ref.row is None or ref.row == sample.row


def _combined(votes: list[Grade], score: float | None) -> Grade:
    """Return the grade that stands for several votes, with what each of them says."""
    return msgspec.structs.replace(
        votes[0],
        grade_key="",
        score=score,
        feedback="; ".join(f"{vote.grader}: {vote.feedback}" for vote in votes if vote.feedback),
        details={"votes": {vote.grader: vote.score for vote in votes}},
        seconds=sum(vote.seconds for vote in votes),
        usage=None,
    )


def _read_grade(line: LineRef, data: bytes | None = None) -> Grade:
    grade, lender = decode_line(Grade, line, data), lender_of(line.path)
    return grade if lender is None or grade.source else msgspec.structs.replace(grade, source=lender)


def _named(line: bytes) -> tuple[str, int]:
    try:
        head = _keyed.decode(line)
    except UNREADABLE:
        return "", 0
    return head.sample, head.trial


def _key_words(key: str) -> bytes:
    """Return what lines about a trial begin with."""
    return b'{"key":%b,' % msgspec.json.encode(key)


def _graded_at(line: bytes) -> float | None:
    head = read_grade_head(line)
    return None if head is None else head.time


def _with_rule(place: GraderPlace, rule: Rule) -> GraderPlace:
    values = {name: value for name, value in rule._asdict().items() if name != "combine" or value is not None}
    return msgspec.structs.replace(place, block=place.block.model_copy(update=values))

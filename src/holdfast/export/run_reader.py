"""A run directory's trials, whole and in the dataset's order, from its path alone.

Where the dataset is gone or has changed, the trials still come, in the order in which they finished and without
the row's fields.

Verdicts are found by their keys and judged by the thresholds and weights of the report: a grader that has been renamed,
or whose threshold has moved, since it gave them says here what it says in `metrics.json`.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from holdfast.canonical import digest
from holdfast.data.dataset import Dataset
from holdfast.data.panels import Conditions, Panel
from holdfast.errors import HoldfastError, UsageError
from holdfast.graders.build import GraderPlace, grader_places, revised, threshold
from holdfast.plan.changes import grader_alone
from holdfast.plan.plan import Slot, Work, verdict_key
from holdfast.report.metrics import grading_rules, together
from holdfast.spec.load import eval_of_run
from holdfast.store.index import OutputRef, read_output, read_steps
from holdfast.store.lines import scan
from holdfast.store.records import ErrorRecord, Grade, GradeStatus, Output, status_by

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from holdfast.report.metrics import VerdictNow
    from holdfast.spec.load import Eval
    from holdfast.store.records import Step
    from holdfast.store.rundir import Manifest, RunDir

_grade = msgspec.json.Decoder(Grade)
_error = msgspec.json.Decoder(ErrorRecord)


class _Keyed(msgspec.Struct):
    key: str


_keyed = msgspec.json.Decoder(_Keyed)


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
    """checkpoints' first, by turn; what a grader does not look at is left out"""
    status: GradeStatus
    score: float | None
    panel: Panel
    """the graders that look at it"""


class Pending(NamedTuple):
    """A trial that has no output."""

    sample: str
    trial: int
    error: str
    """why its last attempt failed; empty where there was none"""
    fields: dict[str, Any]
    """the row"""


class RunReader:
    """Reads the trials of one run. Holds where they are, not what they say."""

    def __init__(self, rundir: RunDir) -> None:
        manifest = rundir.read_manifest()
        if manifest is None:
            raise UsageError(f"{rundir.path} is not a run directory: it has no manifest.json")
        self.rundir = rundir
        self.manifest: Manifest = manifest
        self._places = [self._today(place, rules) for place, rules in self._graders()]
        self._work = Work.of_run(manifest, tuple(map(self._slot, self._places)))
        # Without such a mark all rows were sent as texts, also those that would not be now.
        self._typed = "request_values" in manifest.identity["target"]
        index = rundir.load(mend=False)
        self._outputs = {key: ref for key, ref in index.outputs.items() if self._work.fits(ref)}
        self._verdicts = index.verdicts
        self._grades: dict[str, Grade] = {}
        for path in rundir.journals("grades"):
            for line in scan(path):
                if line.sound:
                    grade = _grade.decode(line.data)
                    known = self._grades.get(grade.grade_key)
                    if known is None or (known.time or 0.0) <= (grade.time or 0.0):  # as the index chooses
                        self._grades[grade.grade_key] = grade
        self._take_earlier_keys()
        self._conditions = Conditions(self.spec)
        self.missing_rows = 0
        """outputs whose row the dataset no longer has"""
        self.missing_outputs = max(0, self._counted_outputs() - len(self._outputs))
        """outputs that `metrics.json` counts and the journals no longer hold"""

    @property
    def spec(self) -> Eval:
        """The eval that made the run."""
        manifest = self.manifest
        return eval_of_run(manifest.eval, manifest.folder, manifest.eval_file)

    @property
    def graders(self) -> list[str]:
        """Their names as metrics have them."""
        return [place.name for place in self._places]

    def metrics(self) -> dict[str, Any] | None:
        """What `metrics.json` says; None where the run is not finished."""
        if not self.rundir.finished:
            return None
        return self.rundir.read_metrics()

    def _counted_outputs(self) -> int:
        try:
            counted = self.rundir.read_metrics().get("outputs")
        except (OSError, msgspec.DecodeError):
            return 0
        return counted if isinstance(counted, int) else 0

    def trials(self) -> Iterator[Trial]:
        """Every trial that has an output."""
        for trial in self.everything():
            if isinstance(trial, Trial):
                yield trial

    def everything(self) -> Iterator[Trial | Pending]:
        """Every trial, also those without an output, as far as the dataset can be read."""
        left = dict(self._outputs)
        errors = self._errors()
        try:
            for sample in Dataset(self.spec):
                for number in range(1, self.manifest.trials + 1):
                    typed = self._typed and sample.typed
                    key = self._work.key(sample.digest, number, left, errors, typed=typed)
                    ref = left.pop(key, None)
                    if ref is not None:
                        yield self._trial(ref, dict(sample.fields))
                    else:
                        yield Pending(sample.id, number, errors.get(key, ""), dict(sample.fields))
        except HoldfastError:
            pass  # the dataset cannot be read any more; what follows does not need it
        self.missing_rows = len(left)
        for ref in left.values():
            yield self._trial(ref, {})

    def field_names(self) -> list[str]:
        """Names of all fields that some row of the dataset has; none where it cannot be read any more."""
        names: dict[str, None] = {}
        with suppress(HoldfastError):
            for sample in Dataset(self.spec):
                names |= dict.fromkeys(sample.fields)
        return list(names)

    def steps(self, key: str) -> list[Step]:
        """Return the recorded calls of a trial, in the order in which they were made, where there are any."""
        return read_steps(self._steps.get(key, ()))

    @cached_property
    def _steps(self) -> dict[str, list[tuple[Path, int, int]]]:
        """Where the recorded calls are, by the trial's key; the index forgets them once there is an output."""
        places: dict[str, list[tuple[Path, int, int]]] = {}
        for path in self.rundir.journals("steps"):
            for line in scan(path):
                if line.sound:
                    places.setdefault(_keyed.decode(line.data).key, []).append((path, line.offset, len(line.data)))
        return places

    def _graders(self) -> Iterator[tuple[GraderPlace, _Rules]]:
        """The graders with their thresholds and weights: the report's, and before there is one, the eval's."""
        spec = self.spec
        rules = msgspec.convert(grading_rules(spec), dict[str, _Rules])
        with suppress(OSError, msgspec.DecodeError):
            rules |= msgspec.convert(self.rundir.read_metrics(), _Report).metrics
        for place in grader_places(spec):
            yield place, rules[place.name]

    @staticmethod
    def _today(place: GraderPlace, rules: _Rules) -> GraderPlace:
        changed = {"threshold": rules.threshold, "weight": rules.weight}
        return place._replace(block=place.block.model_copy(update=changed))

    def _slot(self, place: GraderPlace) -> Slot:
        fingerprint = self.manifest.fingerprints.get("graders", {}).get(place.name, "")
        other = None
        if place.block.type == "python" and (identity := self.manifest.identity["graders"].get(place.name)):
            plain = grader_alone(identity)
            fingerprint, other = digest(plain), digest(revised(plain))
        return Slot(fingerprint, place.turn, place.stops, place.block.threshold, place.block.measures, other)

    def _take_earlier_keys(self) -> None:
        """Verdicts on tokens and time that were once kept by the digest of what was said alone, as all others are."""
        for slot in self._work.slots:
            if not slot.measures:
                continue
            plain = slot._replace(measures=())
            for key, ref in self._outputs.items():
                if (moment := ref.at(slot.turn)) is not None and (known := plain.keys(key, moment)[0]) in self._grades:
                    now = slot.keys(key, moment)[0]
                    self._verdicts.setdefault(now, self._verdicts[known])
                    self._grades.setdefault(now, self._grades[known])

    def _panel(self, ref: OutputRef, key: str, fields: dict[str, Any]) -> Panel:
        """The graders that look at a row; of those with a `where`, if the row is gone, the ones that have."""
        if not fields:
            everyone = frozenset(range(len(self._places)))
            reread = self._graded(ref, key, Panel((), reread=everyone))
            plain = self._graded(ref, key, Panel(()))
            looking = (n for n in everyone if self._places[n].block.where is None or n in plain | reread)
            return Panel(tuple(looking), reread=reread)
        panel = self._conditions.of(fields)
        if not panel.reread:
            return panel
        # A run that was graded before lists had a meaning is shown as it was graded.
        earlier = self._graded(ref, key, Panel(())) - self._graded(ref, key, panel)
        return panel._replace(reread=panel.reread - earlier)

    def _graded(self, ref: OutputRef, key: str, panel: Panel) -> frozenset[int]:
        """The graders that have a verdict on an output under the keys that a panel gives them."""
        return frozenset(
            number
            for number in range(len(self._places))
            if any(known in self._grades for known in self._work.grade_keys(key, ref, number, panel))
        )

    def _errors(self) -> dict[str, str]:
        """The last failure of each trial of the target."""
        found: dict[str, str] = {}
        for path in self.rundir.journals("errors"):
            for line in scan(path):
                if line.sound:
                    error = _error.decode(line.data)
                    if error.where == "target":
                        found[error.key] = f"{error.kind}: {error.message}"
        return found

    def _trial(self, ref: OutputRef, fields: dict[str, Any]) -> Trial:
        output = read_output(ref)
        panel = self._panel(ref, output.key, fields)
        verdicts: dict[int, VerdictNow | None] = dict.fromkeys(panel.graders, ("not_reached", None))
        grades = []
        for number, known in self._work.verdicts(output.key, ref, self._verdicts, panel):
            known_by = verdict_key(self._work.grade_keys(output.key, ref, number, panel), self._verdicts)
            if known is None or known_by is None:
                verdicts[number] = None
                continue
            grade = self._judged(self._places[number], self._grades[known_by])
            verdicts[number] = (grade.status, grade.score)
            grades.append(grade)
        status, score = together([self._places[number] for number in verdicts], [*verdicts.values()])
        return Trial(fields, output, grades, status, score, panel)

    @staticmethod
    def _judged(place: GraderPlace, grade: Grade) -> Grade:
        status = status_by(threshold(place.block), grade.status, grade.score)
        return msgspec.structs.replace(grade, grader=place.name, status=status, weight=place.block.weight)

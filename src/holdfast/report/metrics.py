"""`results.json` and `metrics.json`, built from the journals.

Everything is taken in the dataset's order, so a run that was interrupted a hundred times gives the same bytes as one
that was not; what depends on the clock is kept apart under `timing`, last.
"""

from __future__ import annotations

import math
import time
from array import array
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from holdfast.graders.build import grader_places
from holdfast.plan.plan import check_rows, verdict_key
from holdfast.report.agreement import AgreementTally
from holdfast.report.benchmark import benchmark_metrics, missing_metrics, uses_values
from holdfast.report.breakdown import RowsTally
from holdfast.report.notices import without_verdicts
from holdfast.report.stats import pass_at_k, quantile_of
from holdfast.report.tally import UsageTally
from holdfast.report.verdicts import JudgedOutput, grading_rules, judge_output
from holdfast.spec.benchmark_tasks import TASK_FIELD, benchmark_tasks
from holdfast.spec.load import target_name
from holdfast.store.durable import replacing
from holdfast.store.index import TextReader, read_values
from holdfast.store.metrics import GraderMetrics, Metrics, ResultGrade, RunTiming, TrialResult
from holdfast.store.records import SCHEMA_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from msgspec import UnsetType

    from holdfast.data.panels import Panel
    from holdfast.plan.identity import RunIdentity
    from holdfast.report.verdicts import Judged
    from holdfast.spec.benchmark_tasks import BenchmarkTasks, TaskMetric
    from holdfast.store.index import Index
    from holdfast.store.metrics import BenchmarkMetrics
    from holdfast.store.refs import OutputRef
    from holdfast.store.rundir import RunDir


def write_report(identified: RunIdentity, rundir: RunDir, index: Index) -> Metrics:
    """Write results.json, then metrics.json, and return the latter."""
    benchmark = benchmark_tasks(identified.spec.document.data)
    scores = None if benchmark is None else _BenchmarkScores(identified, index, rundir, benchmark)
    if identified.dataset.stamp() != identified.stamp:
        check_rows(identified.dataset, identified.survey)
    report = _Report(identified, index, scores)
    with replacing(rundir.results) as file:
        head = {"schemaVersion": SCHEMA_VERSION, "run": identified.id, "eval": identified.spec.name}
        file.write(msgspec.json.encode(head)[:-1] + b',"trials":[\n')
        separator = b""
        for line in report.entries():
            file.write(separator + line)
            separator = b",\n"
        file.write(b"\n]}\n")
    metrics = report.metrics(rundir.journal_bytes())
    with replacing(rundir.metrics) as file:
        file.write(msgspec.json.format(msgspec.json.encode(metrics.to_dict()), indent=2) + b"\n")
    return metrics


def report_so_far(identified: RunIdentity, index: Index) -> Metrics:
    """Compute the numbers of a run that is not finished, with how many outputs each grader has not graded."""
    report = _Report(identified, index)
    report.count()
    return report.metrics(so_far=True)


class _Trial(NamedTuple):
    """A trial with its verdicts."""

    number: int
    key: str
    ref: OutputRef | None
    judged: JudgedOutput


_NO_OUTPUT: Final = JudgedOutput({}, "error", None)


class _Report:
    """One pass over a run in the dataset's order."""

    def __init__(self, identified: RunIdentity, index: Index, benchmark: _BenchmarkScores | None = None) -> None:
        spec = identified.spec
        self._identified = identified
        self._index = index
        self._benchmark = benchmark
        self._places = grader_places(spec)
        self._numbers = range(1, spec.trials + 1)
        self._whole = RowsTally(self._places, spec.trials)
        groupings = identified.survey.groupings
        self._by = {
            field: [(value, RowsTally(self._places, spec.trials)) for value in groupings[field].values]
            for field in spec.by
        }
        self._agreement = {number: AgreementTally() for number, place in enumerate(self._places) if place.votes}
        self._clusters = None if spec.cluster is None else groupings[spec.cluster]
        self._usage, self._judges = UsageTally(), UsageTally()
        self._seconds = array("d")
        self._outputs = self._graded = 0

    def entries(self) -> Iterator[bytes]:
        """A line of results.json for every trial, counting on the way."""
        encode = msgspec.json.Encoder().encode
        texts = TextReader()
        clusters = [] if self._clusters is None else self._clusters.values
        survey = self._identified.survey
        try:
            for position in range(survey.count):
                by = {field: values[number][0] for field, values, number in self._values_at(position)}
                place = self._cluster_at(position)
                cluster = msgspec.UNSET if place is None else clusters[place]
                for trial in self._trials_of(position):
                    entry = self._entry(survey.ids[position], trial, texts, by, cluster)
                    yield encode(entry)
        finally:
            texts.close()

    def count(self) -> None:
        """Count alone, for which no row and no transcript is read."""
        for position in range(self._identified.survey.count):
            self._trials_of(position)

    def _cluster_at(self, position: int) -> int | None:
        """Return the number of the cluster that a row belongs to."""
        return None if self._clusters is None else self._clusters.number_at(position)

    def _values_at(self, position: int) -> Iterator[tuple[str, list[tuple[str, RowsTally]], int]]:
        """Yield each field of `by` with its values, and the number of the value that a row has."""
        for field, values in self._by.items():
            yield field, values, self._identified.survey.groupings[field].number_at(position)

    def _entry(
        self, sample: str, trial: _Trial, texts: TextReader, by: dict[str, str], cluster: str | UnsetType
    ) -> TrialResult:
        return TrialResult(
            sample=sample,
            trial=trial.number,
            key=trial.key,
            status=trial.judged.status,
            score=trial.judged.score,
            output=None if trial.ref is None else texts.read(trial.ref),
            grades={
                self._places[number].name: ResultGrade(verdict.status, verdict.score)
                for number, verdict in trial.judged.verdicts.items()
                if verdict is not None
            },
            by=by or msgspec.UNSET,
            cluster=cluster,
        )

    def _trials_of(self, position: int) -> list[_Trial]:
        """Judge and count the trials of a sample."""
        identified = self._identified
        survey = identified.survey
        sample, panel = "sha256:" + survey.digest_at(position).hex(), survey.panels.panel_at(position)
        holders, typed = (self._index.outputs, *self._index.begun), survey.is_typed(position)
        keys = [identified.work.key(sample, number, *holders, typed=typed) for number in self._numbers]
        trials = [self._trial(number, key, panel) for number, key in zip(self._numbers, keys, strict=True)]
        outputs = sum(trial.ref is not None for trial in trials)
        judged = [trial.judged for trial in trials]
        cluster = self._cluster_at(position)
        self._whole.add(panel, outputs, judged, cluster)
        for _, values, value in self._values_at(position):
            values[value][1].add(panel, outputs, judged, cluster)
        if self._benchmark is not None:
            self._benchmark.add(position, panel, trials)
        self._graded += sum(each.status != "error" for each in judged)
        return trials

    def _trial(self, number: int, key: str, panel: Panel) -> _Trial:
        ref = self._index.outputs.get(key)
        if ref is None:
            return _Trial(number, key, None, _NO_OUTPUT)
        self._outputs += 1
        self._usage.add(ref.usage)
        self._seconds.append(ref.seconds)
        judged = judge_output(self._identified.work, self._places, key, ref, self._index.verdicts, panel)
        for verdict in judged.verdicts.values():
            if verdict is not None and verdict.recorded is not None and verdict.recorded.usage is not None:
                self._judges.add(verdict.recorded.usage)
        for grader, tally in self._agreement.items():
            tally.add([judged.verdicts.get(vote) for vote in self._places[grader].votes])
        return _Trial(number, key, ref, judged)

    def _by_grader(self, *, so_far: bool) -> dict[str, GraderMetrics]:
        rules, rows = grading_rules(self._identified.spec), self._identified.survey.panels.rows()
        whole = self._whole
        return {
            place.name: msgspec.structs.replace(
                whole.grader_metrics(number),
                rows=None if place.block.where is None else rows[number],
                ungraded=whole.looked_at[number] - whole.decided(number) if so_far else None,
                agreement=self._agreement[number].summary() if place.votes else None,
                **rules[place.name]._asdict(),
            )
            for number, place in enumerate(self._places)
        }

    def metrics(self, sizes: Mapping[str, int] | None = None, *, so_far: bool = False) -> Metrics:
        """Return the numbers, after all entries were taken. `sizes` are those of the journals."""
        identified = self._identified
        spec, total = identified.spec, identified.survey.count * identified.spec.trials
        covered = self._graded if self._places else self._outputs
        overall = self._whole.overall.summary() if self._places else None
        if overall is not None and so_far:
            overall = msgspec.structs.replace(overall, ungraded=self._outputs - self._graded)
        statuses = self._whole.overall.statuses
        decided = statuses["passed"] + statuses["failed"]
        seconds = self._seconds
        graders = self._by_grader(so_far=so_far)
        notices = [*identified.idle_notices, *without_verdicts(self._places, graders)]
        if self._benchmark is not None:
            notices += missing_metrics(self._benchmark.tasks)
        return Metrics(
            run=identified.id,
            eval=spec.name,
            target=target_name(spec.target),
            samples=identified.survey.count,
            trials=spec.trials,
            total=total,
            outputs=self._outputs,
            graded=self._graded if self._places else 0,
            coverage=covered / total,
            score=None if overall is None else overall.score,
            passed=statuses["passed"] / decided if decided else None,
            graders=graders,
            overall=overall,
            by={field: {value: tally.value_metrics() for value, tally in values} for field, values in self._by.items()},
            cluster=spec.cluster,
            benchmark=None if self._benchmark is None else self._benchmark.metrics(),
            notices=notices,
            usage=self._usage.summary(),
            judge_usage=self._judges.summary(),
            timing=RunTiming(
                finished=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                seconds=round(self._index.spent.seconds, 3),
                trial_seconds_p50=quantile_of(seconds, 0.5) if seconds else None,
                trial_seconds_p95=quantile_of(seconds, 0.95) if seconds else None,
                **(sizes or {}),
            ),
        )


class _BenchmarkScores:
    """The contribution of each row of a benchmark to the metrics of its task, in the dataset's order."""

    def __init__(self, identified: RunIdentity, index: Index, rundir: RunDir, tasks: BenchmarkTasks) -> None:
        self.tasks = tasks
        self._identified = identified
        self._index = index
        self._tasks = identified.survey.groupings.get(TASK_FIELD)
        self._names = list(tasks.tasks) if self._tasks is None else self._tasks.values
        self._graders = {place.name: number for number, place in enumerate(grader_places(identified.spec))}
        self._values: dict[tuple[str, str], list[Any]] = {}
        """by task and the metric's key"""
        listed = [metric for task in tasks.tasks.values() for metric in task.metrics]
        graders = {metric.grader for metric in listed if metric.grader is not None and uses_values(metric)}
        self._recorded = read_values(rundir.journals("grades"), graders) if graders else {}

    def add(self, position: int, panel: Panel, trials: Sequence[_Trial]) -> None:
        """Add the trials of one row."""
        name = self._names[0 if self._tasks is None else self._tasks.number_at(position)]
        task = self.tasks.tasks.get(name)
        for metric in [] if task is None else task.metrics:
            if (grader := self._graders.get(metric.grader or "")) is None:
                continue
            if metric.k is not None:
                self._add_pass_at(name, metric, [trial.judged.verdicts.get(grader) for trial in trials])
                continue
            if uses_values(metric):
                values = [self._value(grader, trial, panel) for trial in trials]
            else:
                values = [trial.judged.score_of(grader) for trial in trials]
            present = [value for value in values if value is not None]
            if present:
                # A sample counts once. Values that are not scores cannot be averaged: the first stands for the sample.
                value = present[0] if uses_values(metric) or len(present) == 1 else math.fsum(present) / len(present)
                self._values.setdefault((name, metric.key), []).append(value)

    def _add_pass_at(self, task: str, metric: TaskMetric, verdicts: Sequence[Judged | None]) -> None:
        assert metric.k is not None
        scored = [verdict for verdict in verdicts if verdict is not None and verdict.score is not None]
        if len(scored) >= metric.k:
            passes = sum(verdict.status == "passed" for verdict in scored)
            self._values.setdefault((task, metric.key), []).append(pass_at_k(len(scored), passes, metric.k))

    def _value(self, grader: int, trial: _Trial, panel: Panel) -> Any:
        """Return the value in the details of a grader's verdict on a trial."""
        if trial.ref is None:
            return None
        keys = self._identified.work.grade_keys(trial.key, trial.ref, grader, panel)
        key = verdict_key(keys, self._index.verdicts)
        return None if key is None else self._recorded.get(key)

    def metrics(self) -> BenchmarkMetrics:
        """Return the numbers of the rows so far."""
        return benchmark_metrics(self.tasks, self._values)

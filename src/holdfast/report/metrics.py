"""`results.json` and `metrics.json`, built from the journals.

Everything is taken in the dataset's order, so a run that was interrupted a hundred times gives the same bytes as one
that was not. Values that depend on the clock are kept apart in `timing`, at the end.
"""

from __future__ import annotations

import time
from collections import Counter
from functools import lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from holdfast.graders.build import grader_places
from holdfast.plan.plan import check_rows
from holdfast.report.stats import quantile_of
from holdfast.report.tally import AgreementTally, Row, RowsTally, account_notices, with_thoughts
from holdfast.report.trials import NO_OUTPUT, TextReader, TrialReader, grading_rules
from holdfast.spec.eval import benchmark_tasks
from holdfast.spec.plugins import load_reference
from holdfast.store.files import replacing
from holdfast.store.metrics import Answers, GraderMetrics, Metrics, ResultGrade, RunTiming, TrialResult, count_answers
from holdfast.store.records import SCHEMA_VERSION, class_of_kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from holdfast.data.columns import Grouping
    from holdfast.plan.identity import RunIdentity
    from holdfast.report.benchmark import BenchmarkScores
    from holdfast.report.trial_table import ReportedTable
    from holdfast.report.trials import JudgedOutput, TrialBatch
    from holdfast.store.index import RunIndex
    from holdfast.store.rundir import RunDir

_ELSEWHERE: Final = {
    "benchmark": "holdfast.report.benchmark:BenchmarkScores",
    "table": "holdfast.report.trial_table:ReportedTable",
}
"""what most runs do without"""


def write_report(identified: RunIdentity, rundir: RunDir, index: RunIndex) -> Metrics:
    """Write results.json, then metrics.json, and return the metrics; a large run also gets a table for the viewer."""
    if identified.dataset.stamp() != identified.stamp:
        check_rows(identified.dataset, identified.survey)
    benchmark = benchmark_tasks(identified.spec.document.data)
    scores = None if benchmark is None else load_reference(_ELSEWHERE["benchmark"])(identified, index, benchmark)
    report = _Report(identified, index, scores)
    table: ReportedTable | None = None
    if index.published is not None:
        graders = [place.name for place in grader_places(identified.spec)]
        table = load_reference(_ELSEWHERE["table"])(identified, index, graders)
    with replacing(rundir.results) as file:
        head = {"schemaVersion": SCHEMA_VERSION, "run": identified.id, "eval": identified.spec.name}
        file.write(msgspec.json.encode(head)[:-1] + b',"trials":[\n')
        separator = b""
        for lines in report.lines(table):
            file.write(separator + lines)
            separator = b",\n"
        file.write(b"\n]}\n")
    metrics = report.metrics(rundir.journal_bytes())
    with replacing(rundir.metrics) as file:
        file.write(msgspec.json.format(msgspec.json.encode(metrics.to_dict()), indent=2) + b"\n")
    if table is not None:
        table.publish(rundir, index)
    return metrics


def report_so_far(identified: RunIdentity, index: RunIndex) -> Metrics:
    """Compute the numbers of a run that is not finished, with how many outputs each grader has not graded."""
    report = _Report(identified, index)
    report.count()
    return report.metrics(so_far=True)


_MOST_EQUAL: Final = 1 << 12
"""different rows that are counted before they are added, and different parts of entries that are kept"""


class _Field(NamedTuple):
    """A field of `by`."""

    name: str
    grouping: Grouping
    values: list[str]
    tallies: list[RowsTally]
    """of the rows with each of the values"""


class _Report:
    """One pass over a run in the dataset's order."""

    def __init__(self, identified: RunIdentity, index: RunIndex, benchmark: BenchmarkScores | None = None) -> None:
        spec = identified.spec
        self._identified = identified
        self._index = index
        self._benchmark = benchmark
        self._places = grader_places(spec)
        self._trials = TrialReader(identified, index, self._places)
        self._whole = RowsTally(self._places, spec.trials)
        groupings = identified.survey.groupings
        self._by = [
            _Field(name, groupings[name], values, [RowsTally(self._places, spec.trials) for _ in values])
            for name in dict.fromkeys(spec.by)
            for values in [groupings[name].values]
        ]
        self._agreement = {number: AgreementTally() for number, place in enumerate(self._places) if place.votes}
        self._clusters = None if spec.cluster is None else groupings[spec.cluster]
        self._equal: Counter[tuple[Any, ...]] = Counter()
        """how many rows that are not yet added have a panel, a judged output, and a value of each field of `by`"""
        self._outputs = 0
        self._kinds: Counter[str] = Counter()
        """kinds of answers"""
        self._failed = 0
        """trials without an output that were attempted"""
        self._with_thoughts = 0
        """outputs in whose texts there is reasoning"""
        self._values = lru_cache(_MOST_EQUAL)(self._result_values)
        self._grades = lru_cache(_MOST_EQUAL)(self._result_grades)

    def lines(self, table: ReportedTable | None) -> Iterator[bytes]:
        """Yield the entries of results.json, one per line and many at a time; count them and fill the table."""
        encode = msgspec.json.Encoder().encode_lines
        reader = TextReader()
        clusters = [] if self._clusters is None else self._clusters.values
        try:
            for batch in self._trials.batches():
                self._add(batch)
                texts = reader.read([output.line for output in batch.recorded])
                self._with_thoughts += sum("</think>" in text for text in texts)
                entries = self._entries(batch, texts, clusters)
                if table is not None:
                    table.add(batch, [entry.sample for entry in entries])
                # Every newline ends an entry: newlines in texts are escaped.
                yield encode(entries)[:-1].replace(b"\n", b",\n")
        finally:
            reader.close()
        self._add_equal()

    def count(self) -> None:
        """Count without writing entries, so that no row and no transcript is read."""
        for batch in self._trials.batches():
            self._add(batch)
        self._add_equal()

    def _entries(self, batch: TrialBatch, texts: Sequence[str], clusters: Sequence[str]) -> list[TrialResult]:
        trials, survey = self._identified.spec.trials, self._identified.survey
        outputs = zip(texts, [class_of_kind(output.kind) for output in batch.recorded], strict=True)
        grades = {judged: self._grades(judged) for judged in set(batch.judged)}
        entries = []
        ids = survey.ids.encoded(batch.positions.start, len(batch.positions))
        own = slice(batch.positions.start, batch.positions.stop)
        values = [each.grouping.packed()[own] for each in self._by]
        numbered = zip(*values, strict=True) if values else repeat(())
        firsts = range(0, len(batch.keys), trials)
        for position, first, encoded, numbers in zip(batch.positions, firsts, ids, numbered, strict=False):
            sample, by = encoded.decode("utf-8", "surrogatepass"), self._values(numbers)
            cluster = msgspec.UNSET if self._clusters is None else clusters[self._clusters.number_at(position)]
            for number in range(first, first + trials):
                judged = batch.judged[number]
                output, answer = next(outputs) if batch.outputs[number] is not None else (None, None)
                entries.append(
                    TrialResult(
                        sample,
                        number - first + 1,
                        batch.keys[number],
                        judged.status,
                        judged.score,
                        answer,
                        output,
                        grades[judged],
                        by,
                        cluster,
                    )
                )
        return entries

    def _result_values(self, numbers: tuple[int, ...]) -> dict[str, str] | msgspec.UnsetType:
        """Return the values of the fields of `by` that have these numbers."""
        values = {name: values[number] for (name, _, values, _), number in zip(self._by, numbers, strict=True)}
        return values or msgspec.UNSET

    def _result_grades(self, judged: JudgedOutput) -> dict[str, ResultGrade]:
        return {
            self._places[number].name: ResultGrade(verdict.status, verdict.score)
            for number, verdict in judged.verdicts.items()
            if verdict is not None
        }

    def _add(self, batch: TrialBatch) -> None:
        """Count the trials of a batch."""
        trials, panels = self._identified.spec.trials, self._identified.survey.panels
        recorded = batch.recorded
        self._outputs += len(recorded)
        self._kinds.update([output.kind for output in recorded])
        if len(recorded) < len(batch.keys):
            trials_of_batch = zip(batch.keys, batch.outputs, strict=True)
            tried, uncertain = self._index.attempts, self._index.uncertain
            self._failed += sum(
                output is None and key in tried and key not in uncertain for key, output in trials_of_batch
            )
        for grader, tally in self._agreement.items():
            for judged in batch.judged:
                tally.add([judged.verdicts.get(vote) for vote in self._places[grader].votes])
        if trials == 1 and self._clusters is None and self._benchmark is None:
            # Most rows of a large run are equal in all that counts. Adding each kind of row once, with its number,
            # is much faster than adding row by row.
            rows = slice(batch.positions.start, batch.positions.stop)
            values = [each.grouping.packed()[rows] for each in self._by]
            self._equal.update(zip(panels.packed()[rows], batch.judged, *values, strict=True))
            if len(self._equal) > _MOST_EQUAL:
                self._add_equal()
            return
        for position, first in zip(batch.positions, range(0, len(batch.keys), trials), strict=True):
            own = slice(first, first + trials)
            cluster = None if self._clusters is None else self._clusters.number_at(position)
            outputs = trials - batch.outputs[own].count(None)
            row = Row(panels.panel_at(position), batch.judged[own], outputs, cluster)
            self._add_row(row, [each.grouping.number_at(position) for each in self._by])
            if self._benchmark is not None:
                self._benchmark.add(position, row, batch.keys[own])

    def _add_equal(self) -> None:
        """Add the rows that were counted so far. Sums over rows with one trial do not depend on their order."""
        kinds = self._identified.survey.panels.values
        for (panel, judged, *values), samples in self._equal.items():
            self._add_row(Row(kinds[panel], [judged], int(judged is not NO_OUTPUT)), values, samples)
        self._equal.clear()

    def _add_row(self, row: Row, values: Sequence[int], samples: int = 1) -> None:
        """Add a row with the numbers of its values of the fields of `by`, or several equal rows."""
        self._whole.add(row, samples)
        for field, value in zip(self._by, values, strict=True):
            field.tallies[value].add(row, samples)

    def _by_grader(self, *, so_far: bool) -> dict[str, GraderMetrics]:
        rules, rows = grading_rules(self._identified.spec), self._identified.survey.panels.rows()
        whole = self._whole
        return {
            place.name: msgspec.structs.replace(
                whole.grader_metrics(number, so_far=so_far),
                set_score=whole.set_scores.get(number),
                rows=None if place.block.where is None else rows[number],
                ungraded=whole.looked_at[number] - whole.decided(number) if so_far else None,
                agreement=self._agreement[number].summary() if place.votes else None,
                **rules[place.name]._asdict(),
            )
            for number, place in enumerate(self._places)
        }

    def metrics(self, sizes: Mapping[str, int] | None = None, *, so_far: bool = False) -> Metrics:
        """Return the numbers, after all trials were counted. `sizes` are the sizes of the journals."""
        identified = self._identified
        spec, total = identified.spec, identified.survey.count * identified.spec.trials
        overall = self._whole.overall_metrics(so_far=so_far) if self._places else None
        statuses = self._whole.overall.statuses
        if overall is not None and so_far:
            overall = msgspec.structs.replace(overall, ungraded=self._outputs - statuses.total())
        seconds = self._trials.seconds
        graders = self._by_grader(so_far=so_far)
        kinds = self._kinds
        notices = [*identified.idle_notices, *account_notices(kinds, self._places, graders)]
        notices += with_thoughts(spec, self._with_thoughts, self._outputs)
        if self._benchmark is not None:
            notices += self._benchmark.notices()
        return Metrics(
            run=identified.id,
            eval=spec.name,
            target=spec.target.label,
            samples=identified.survey.count,
            trials=spec.trials,
            total=total,
            outputs=self._outputs,
            answers=self._count_answers(kinds, total, so_far=so_far),
            graded=statuses["passed"] + statuses["failed"],
            coverage=(self._whole.covered if self._places else self._outputs) / total,
            score=None if overall is None else overall.score,
            passed=None if overall is None else overall.pass_at.get(1),
            graders=graders,
            overall=overall,
            by={
                name: {value: tally.value_metrics(so_far=so_far) for value, tally in zip(values, tallies, strict=True)}
                for name, _, values, tallies in self._by
            },
            cluster=spec.cluster,
            benchmark=None if self._benchmark is None else self._benchmark.metrics(),
            notices=notices,
            usage=self._trials.usage.summary(),
            judge_usage=self._trials.judges.summary(),
            timing=RunTiming(
                finished=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                seconds=round(self._index.spent().seconds, 3),
                trial_seconds_p50=quantile_of(seconds, 0.5) if seconds else None,
                trial_seconds_p95=quantile_of(seconds, 0.95) if seconds else None,
                **(sizes or {}),
            ),
        )

    def _count_answers(self, kinds: Mapping[str, int], total: int, *, so_far: bool) -> Answers:
        missing = total - self._outputs
        errors = self._failed if so_far else missing
        return count_answers(kinds, errors=errors, pending=missing - errors)

"""`results.json` and `metrics.json`, built from the journals.

Everything is taken in the dataset's order, so a run that was interrupted a hundred times gives the same bytes as one
that was not; what depends on the clock is kept apart under `timing`, last.
"""

from __future__ import annotations

import time
from array import array
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from holdfast.data.dataset import dataset_changed
from holdfast.graders.build import grader_class, grader_places
from holdfast.report.notices import without_verdicts
from holdfast.report.stats import quantile
from holdfast.report.tally import Tally, UsageTally
from holdfast.report.verdicts import JudgedOutput, grading_rules, judge_output
from holdfast.spec.load import target_name
from holdfast.store.durable import replacing
from holdfast.store.index import TextReader
from holdfast.store.metrics import GraderMetrics, Metrics, ResultGrade, RunTiming, TrialResult
from holdfast.store.records import SCHEMA_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from holdfast.data.panels import Panel
    from holdfast.plan.identity import RunIdentity
    from holdfast.spec.grader_schema import GraderBlock
    from holdfast.store.index import Index, OutputRef, VerdictRef
    from holdfast.store.rundir import RunDir


def write_report(identified: RunIdentity, rundir: RunDir, index: Index) -> Metrics:
    """Write results.json, then metrics.json, and return the latter."""
    report = _Report(identified, index)
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

    def __init__(self, identified: RunIdentity, index: Index) -> None:
        self._identified = identified
        self._index = index
        self._places = grader_places(identified.spec)
        self._numbers = range(1, identified.spec.trials + 1)
        self._tallies = [Tally(identified.spec.trials) for _ in self._places]
        self._overall = Tally(identified.spec.trials)
        self._counts: dict[int, list[int]] = {}
        """sums over the run, by grader, of those that have a number for the whole"""
        self._usage, self._judges = UsageTally(), UsageTally()
        self._seconds = array("d")
        self._outputs = self._graded = 0
        self._looked_at = [0] * len(self._places)
        """outputs that each grader is to look at"""

    def entries(self) -> Iterator[bytes]:
        """A line of results.json for every trial, counting on the way."""
        encode = msgspec.json.Encoder().encode
        texts = TextReader()
        seen = 0
        try:
            for position, sample in enumerate(self._identified.dataset):
                if bytes.fromhex(sample.digest[7:]) != self._identified.survey.digest_at(position):
                    raise dataset_changed(sample.where)
                for trial in self._trials_of(position):
                    yield encode(self._entry(sample.id, trial, texts))
                seen += 1
            if seen != self._identified.survey.count:
                raise dataset_changed(", ".join(self._identified.dataset.source))
        finally:
            texts.close()

    def count(self) -> None:
        """Count alone, for which no row and no transcript is read."""
        for position in range(self._identified.survey.count):
            self._trials_of(position)

    def _entry(self, sample: str, trial: _Trial, texts: TextReader) -> TrialResult:
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
        for grader in panel.graders:
            self._looked_at[grader] += outputs
            verdicts = [trial.judged.verdicts.get(grader) for trial in trials]
            self._tallies[grader].add([(each.status, each.score) for each in verdicts if each is not None])
        graded = [(status, score) for *_, (_, status, score) in trials if status != "error"]
        self._graded += len(graded)
        self._overall.add(graded)
        return trials

    def _trial(self, number: int, key: str, panel: Panel) -> _Trial:
        ref = self._index.outputs.get(key)
        if ref is None:
            return _Trial(number, key, None, _NO_OUTPUT)
        self._outputs += 1
        self._usage.add(ref.usage)
        self._seconds.append(ref.seconds)
        judged = judge_output(self._identified.work, self._places, key, ref, self._index.verdicts, panel)
        for grader, verdict in judged.verdicts.items():
            if verdict is not None and verdict.recorded is not None:
                self._count_grade(grader, verdict.recorded)
        return _Trial(number, key, ref, judged)

    def _count_grade(self, grader: int, recorded: VerdictRef) -> None:
        if recorded.usage is not None:
            self._judges.add(recorded.usage)
        if recorded.counts is not None:
            sums = self._counts.get(grader, [0] * len(recorded.counts))
            self._counts[grader] = [total + count for total, count in zip(sums, recorded.counts, strict=True)]

    def _by_grader(self, *, so_far: bool) -> dict[str, GraderMetrics]:
        rules, rows = grading_rules(self._identified.spec), self._identified.survey.panels.rows()
        return {
            place.name: msgspec.structs.replace(
                tally.summary(),
                totals=self._totals(number, place.block),
                rows=None if place.block.where is None else rows[number],
                ungraded=self._looked_at[number] - tally.decided if so_far else None,
                **rules[place.name]._asdict(),
            )
            for number, (place, tally) in enumerate(zip(self._places, self._tallies, strict=True))
        }

    def _totals(self, grader: int, block: GraderBlock) -> dict[str, float]:
        return grader_class(block).totals(block, self._counts[grader]) if grader in self._counts else {}

    def metrics(self, sizes: Mapping[str, int] | None = None, *, so_far: bool = False) -> Metrics:
        """Return the numbers, after all entries were taken. `sizes` are those of the journals."""
        identified = self._identified
        spec, total = identified.spec, identified.survey.count * identified.spec.trials
        covered = self._graded if self._places else self._outputs
        overall = self._overall.summary() if self._places else None
        if overall is not None and so_far:
            overall = msgspec.structs.replace(overall, ungraded=self._outputs - self._graded)
        statuses = self._overall.statuses
        decided = statuses["passed"] + statuses["failed"]
        seconds = sorted(self._seconds)
        graders = self._by_grader(so_far=so_far)
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
            notices=[*identified.idle_notices, *without_verdicts(self._places, graders)],
            usage=self._usage.summary(),
            judge_usage=self._judges.summary(),
            timing=RunTiming(
                finished=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                seconds=round(self._index.spent.seconds, 3),
                trial_seconds_p50=quantile(seconds, 0.5) if seconds else None,
                trial_seconds_p95=quantile(seconds, 0.95) if seconds else None,
                **(sizes or {}),
            ),
        )

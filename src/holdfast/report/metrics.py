"""`results.json` and `metrics.json`, rebuilt from the journals whenever they are wanted.

Everything is taken in the dataset's order, so a run that was interrupted a hundred times gives the same bytes as one
that was not; what depends on the clock is kept apart under `timing`, last.
"""

from __future__ import annotations

import time
from array import array
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from holdfast.data.dataset import changed_under_us
from holdfast.graders.build import grader_class, grader_places, threshold
from holdfast.report.notices import without_rows, without_verdicts
from holdfast.report.stats import quantile
from holdfast.report.tally import Tally, UsageTally
from holdfast.spec.load import target_name
from holdfast.store.durable import replacing
from holdfast.store.index import TextReader
from holdfast.store.records import SCHEMA_VERSION, status_by

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.data.panels import Panel
    from holdfast.graders.build import GraderPlace
    from holdfast.plan.identity import Identified
    from holdfast.spec.load import Eval
    from holdfast.store.index import Index, OutputRef
    from holdfast.store.records import GradeStatus
    from holdfast.store.rundir import RunDir

VerdictNow = tuple["GradeStatus", "float | None"]


def write_report(found: Identified, rundir: RunDir, index: Index) -> dict[str, Any]:
    """Write results.json, then metrics.json, and return the latter."""
    report = _Report(found, index)
    with replacing(rundir.results) as file:
        head = {"schemaVersion": SCHEMA_VERSION, "run": found.id, "eval": found.spec.name}
        file.write(msgspec.json.encode(head)[:-1] + b',"trials":[\n')
        separator = b""
        for line in report.entries():
            file.write(separator + line)
            separator = b",\n"
        file.write(b"\n]}\n")
    metrics = report.metrics()
    metrics["timing"] |= rundir.journal_bytes()  # here, because the length of lines depends on the clock
    with replacing(rundir.metrics) as file:
        file.write(msgspec.json.format(msgspec.json.encode(metrics), indent=2) + b"\n")
    return metrics


def report_so_far(found: Identified, index: Index) -> dict[str, Any]:
    """The same numbers of a run that is not finished, each grader's with how many outputs are still `ungraded`."""
    report = _Report(found, index)
    report.count()
    return report.metrics(so_far=True)


def grading_rules(spec: Eval) -> dict[str, dict[str, float | None]]:
    """What turns stored scores into the report: not part of any key, and so kept with the numbers."""
    return {
        place.name: {"threshold": threshold(place.block), "weight": place.block.weight} for place in grader_places(spec)
    }


def together(places: Sequence[GraderPlace], verdicts: Sequence[VerdictNow | None]) -> VerdictNow:
    """A trial as a whole: passed when every grader passes, its score the weighted mean of those at the end.

    A checkpoint that fails makes it fail, whatever the end says; one that ended the conversation leaves it no score
    but 0. None is a verdict that is still to come.
    """
    passed, cut_short, scored = True, False, False
    weights: list[float] = []
    weighted: list[float] = []
    for place, verdict in zip(places, verdicts, strict=True):
        if verdict is None or verdict[0] == "error":
            return "error", None
        status, score = verdict
        passed = passed and status != "failed"
        cut_short = cut_short or (status == "not_reached" and place.turn is None)
        if score is not None:
            scored = True
            if place.turn is None:
                weights.append(place.block.weight)
                weighted.append(place.block.weight * score)
    if cut_short and not passed:
        return "failed", 0.0
    if not scored:
        return "skipped", None
    total = sum(weights)
    return "passed" if passed else "failed", sum(weighted) / total if total else None


class _Judged(NamedTuple):
    """A trial with what its graders say of it."""

    trial: int
    key: str
    ref: OutputRef | None
    verdicts: dict[int, VerdictNow | None]
    """of the graders that look at it; None is a verdict that is still to come"""
    status: GradeStatus
    score: float | None


class _Report:
    """One pass over a run in the dataset's order."""

    def __init__(self, found: Identified, index: Index) -> None:
        self._found = found
        self._index = index
        self._places = grader_places(found.spec)
        self._tallies = [Tally(found.spec.trials) for _ in self._places]
        self._overall = Tally(found.spec.trials)
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
            for position, sample in enumerate(self._found.dataset):
                if bytes.fromhex(sample.digest[7:]) != self._found.survey.of(position):
                    raise changed_under_us(sample.where)
                for judged in self._trials_of(position):
                    yield encode(self._entry(sample.id, judged, texts))
                seen += 1
            if seen != self._found.survey.count:
                raise changed_under_us(", ".join(self._found.dataset.source))
        finally:
            texts.close()

    def count(self) -> None:
        """Count alone, for which no row and no transcript is read."""
        for position in range(self._found.survey.count):
            self._trials_of(position)

    def _entry(self, sample: str, judged: _Judged, texts: TextReader) -> dict[str, Any]:
        return {
            "sample": sample,
            "trial": judged.trial,
            "key": judged.key,
            "status": judged.status,
            "score": judged.score,
            "output": None if judged.ref is None else texts.read(judged.ref),
            "grades": {
                self._places[number].name: {"status": verdict[0], "score": verdict[1]}
                for number, verdict in judged.verdicts.items()
                if verdict is not None
            },
        }

    def _trials_of(self, position: int) -> list[_Judged]:
        """Judge and count the trials of a sample."""
        found = self._found
        sample, panel = "sha256:" + found.survey.of(position).hex(), found.survey.panels.of(position)
        known, typed = (self._index.outputs, *self._index.begun), found.survey.is_typed(position)
        keys = [found.work.key(sample, trial, *known, typed=typed) for trial in range(1, found.spec.trials + 1)]
        trials = [self._judge(key, trial, panel) for trial, key in enumerate(keys, 1)]
        made = sum(each.ref is not None for each in trials)
        for number in panel.graders:
            self._looked_at[number] += made
            verdicts = [each.verdicts.get(number) for each in trials]
            self._tallies[number].add([verdict for verdict in verdicts if verdict is not None])
        graded = [(each.status, each.score) for each in trials if each.status != "error"]
        self._graded += len(graded)
        self._overall.add(graded)
        return trials

    def _judge(self, key: str, trial: int, panel: Panel) -> _Judged:
        ref = self._index.outputs.get(key)
        if ref is None:
            return _Judged(trial, key, None, {}, "error", None)
        self._outputs += 1
        self._usage.add(ref.usage)
        self._seconds.append(ref.seconds)
        verdicts = self._verdicts(key, ref, panel)
        places = [self._places[number] for number in verdicts]
        return _Judged(trial, key, ref, verdicts, *together(places, [*verdicts.values()]))

    def _verdicts(self, key: str, ref: OutputRef, panel: Panel) -> dict[int, VerdictNow | None]:
        """What each grader says of an output by the present thresholds; None where it still has to say it."""
        found: dict[int, VerdictNow | None] = dict.fromkeys(panel.graders, ("not_reached", None))
        for number, verdict in self._found.work.verdicts(key, ref, self._index.verdicts, panel):
            if verdict is None:
                found[number] = None
                continue
            if verdict.usage is not None:
                self._judges.add(verdict.usage)
            if verdict.counts is not None:
                sums = self._counts.get(number, [0] * len(verdict.counts))
                self._counts[number] = [total + count for total, count in zip(sums, verdict.counts, strict=True)]
            limit = self._found.work.slots[number].threshold
            found[number] = (status_by(limit, verdict.status, verdict.score), verdict.score)
        return found

    def _by_grader(self, *, so_far: bool) -> dict[str, dict[str, Any]]:
        rules, rows = grading_rules(self._found.spec), self._found.survey.panels.rows()
        return {
            place.name: {
                **tally.summary(),
                **(
                    grader_class(place.block).totals(place.block, self._counts[number])
                    if number in self._counts
                    else {}
                ),
                **({} if place.block.where is None else {"rows": rows[number]}),
                **({"ungraded": self._looked_at[number] - tally.given} if so_far else {}),
                **rules[place.name],
            }
            for number, (place, tally) in enumerate(zip(self._places, self._tallies, strict=True))
        }

    def metrics(self, *, so_far: bool = False) -> dict[str, Any]:
        """The numbers, after all entries were taken."""
        found = self._found
        spec, total = found.spec, found.survey.count * found.spec.trials
        covered = self._graded if self._places else self._outputs
        overall = self._overall.summary()
        decided = self._overall.statuses["passed"] + self._overall.statuses["failed"]
        seconds = sorted(self._seconds)
        metrics, ungraded = self._by_grader(so_far=so_far), self._outputs - self._graded
        notices = [*without_rows(spec, self._places, found.survey.panels), *without_verdicts(self._places, metrics)]
        return {
            "schemaVersion": SCHEMA_VERSION,
            "run": found.id,
            "eval": spec.name,
            "target": target_name(spec.target),
            "samples": found.survey.count,
            "trials": spec.trials,
            "total": total,
            "outputs": self._outputs,
            "graded": self._graded if self._places else 0,
            "coverage": covered / total,
            "score": overall["score"] if self._places else None,
            "passed": self._overall.statuses["passed"] / decided if decided else None,
            "metrics": metrics,
            "overall": {**overall, **({"ungraded": ungraded} if so_far else {})} if self._places else None,
            **({"notices": notices} if notices else {}),
            "usage": self._usage.summary(),
            "judge_usage": self._judges.summary(),
            "timing": {
                "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "seconds": round(self._index.spent.seconds, 3),
                "trial_seconds_p50": quantile(seconds, 0.5) if seconds else None,
                "trial_seconds_p95": quantile(seconds, 0.95) if seconds else None,
            },
        }

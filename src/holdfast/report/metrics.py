"""`results.json` and `metrics.json`, rebuilt from the journals whenever they are wanted.

Everything is taken in the dataset's order, so a run that was interrupted a hundred times gives the same bytes as one
that was not; what depends on the clock is kept apart under `timing`, last.
"""

from __future__ import annotations

import time
from array import array
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.data.dataset import changed_under_us
from holdfast.graders.build import grader_places, stays_away, threshold
from holdfast.report.stats import quantile
from holdfast.report.tally import Tally, UsageTally
from holdfast.spec.load import target_name
from holdfast.store.files import replacing
from holdfast.store.index import TextReader
from holdfast.store.records import SCHEMA_VERSION, status_by

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.data.dataset import Sample
    from holdfast.engine.setup import Identified
    from holdfast.graders.build import GraderPlace
    from holdfast.spec.load import Eval
    from holdfast.store.index import Index, OutputRef
    from holdfast.store.records import GradeStatus
    from holdfast.store.rundir import RunDir

VerdictNow = tuple["GradeStatus", "float | None"]
Verdicts = list[VerdictNow]


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
    with replacing(rundir.metrics) as file:
        file.write(msgspec.json.format(msgspec.json.encode(metrics), indent=2) + b"\n")
    return metrics


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


class _Report:
    """One pass over a run in the dataset's order."""

    def __init__(self, found: Identified, index: Index) -> None:
        self._found = found
        self._index = index
        self._places = grader_places(found.spec)
        self._names = [place.name for place in self._places]
        self._choosy = [number for number, place in enumerate(self._places) if place.block.where is not None]
        """which of them do not look at every row"""
        self._tallies = [Tally(found.spec.trials) for _ in self._places]
        self._overall = Tally(found.spec.trials)
        self._usage, self._judges = UsageTally(), UsageTally()
        self._seconds = array("d")
        self._outputs = self._graded = 0

    def entries(self) -> Iterator[bytes]:
        """A line of results.json for every trial, counting on the way."""
        encode = msgspec.json.Encoder().encode
        texts = TextReader()
        seen = 0
        try:
            for position, sample in enumerate(self._found.dataset):
                if bytes.fromhex(sample.digest[7:]) != self._found.survey.of(position):
                    raise changed_under_us(sample.where)
                by_grader: list[Verdicts] = [[] for _ in self._names]
                overall: Verdicts = []
                for trial in range(1, self._found.spec.trials + 1):
                    yield encode(self._entry(sample, trial, by_grader, overall, texts))
                for tally, verdicts in zip(self._tallies, by_grader, strict=True):
                    tally.add(verdicts)
                self._overall.add(overall)
                seen += 1
            if seen != self._found.survey.count:
                raise changed_under_us(", ".join(self._found.dataset.source))
        finally:
            texts.close()

    def _entry(
        self, sample: Sample, trial: int, by_grader: list[Verdicts], overall: Verdicts, texts: TextReader
    ) -> dict[str, Any]:
        key = self._found.work.key(sample.digest, trial)
        ref = self._index.outputs.get(key)
        entry: dict[str, Any] = {"sample": sample.id, "trial": trial, "key": key}
        if ref is None:
            return {**entry, "status": "error", "score": None, "output": None, "grades": {}}
        self._outputs += 1
        self._usage.add(ref.usage)
        self._seconds.append(ref.seconds)
        verdicts = self._verdicts(key, ref)
        absent = [number for number in self._choosy if stays_away(self._places[number].block, sample.fields)]
        for number in absent:
            verdicts[number] = ("skipped", None)
        grades: dict[str, dict[str, Any]] = {}
        for number, verdict in enumerate(verdicts):
            if verdict is not None and number not in absent:
                by_grader[number].append(verdict)
                grades[self._names[number]] = {"status": verdict[0], "score": verdict[1]}
        status, score = together(self._places, verdicts)
        if status != "error":
            self._graded += 1
            overall.append((status, score))
        return {**entry, "status": status, "score": score, "output": texts.read(ref), "grades": grades}

    def _verdicts(self, key: str, ref: OutputRef) -> list[VerdictNow | None]:
        """What each slot says of an output by the present thresholds; None where it still has to say it."""
        found: list[VerdictNow | None] = [("not_reached", None)] * len(self._places)
        for number, verdict in self._found.work.verdicts(key, ref, self._index.verdicts):
            if verdict is None:
                found[number] = None
                continue
            if verdict.usage is not None:
                self._judges.add(verdict.usage)
            limit = self._found.work.slots[number].threshold
            found[number] = (status_by(limit, verdict.status, verdict.score), verdict.score)
        return found

    def metrics(self) -> dict[str, Any]:
        """The numbers, after all entries were taken."""
        found = self._found
        spec, total = found.spec, found.survey.count * found.spec.trials
        covered = self._graded if self._places else self._outputs
        overall = self._overall.summary()
        rules = grading_rules(spec)
        decided = self._overall.statuses["passed"] + self._overall.statuses["failed"]
        seconds = sorted(self._seconds)
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
            "metrics": {
                name: {**tally.summary(), **rules[name]} for name, tally in zip(self._names, self._tallies, strict=True)
            },
            "overall": overall if self._places else None,
            "usage": self._usage.summary(),
            "judge_usage": self._judges.summary(),
            "timing": {
                "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "seconds": round(self._index.spent.seconds, 3),
                "trial_seconds_p50": quantile(seconds, 0.5) if seconds else None,
                "trial_seconds_p95": quantile(seconds, 0.95) if seconds else None,
            },
        }

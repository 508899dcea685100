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
from holdfast.graders.build import threshold
from holdfast.plan.keys import grade_key
from holdfast.report.stats import quantile
from holdfast.report.tally import Tally, UsageTally
from holdfast.spec.load import target_name
from holdfast.store.files import replacing
from holdfast.store.index import TextReader
from holdfast.store.records import SCHEMA_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.data.dataset import Sample
    from holdfast.engine.setup import Identified
    from holdfast.spec.load import Eval
    from holdfast.store.index import Index, OutputRef
    from holdfast.store.records import GradeStatus
    from holdfast.store.rundir import RunDir

Verdicts = list[tuple["GradeStatus", float | None]]


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


def grading_rules(spec: Eval) -> dict[str, dict[str, float]]:
    """What turns stored scores into the report: not part of any key, and so kept with the numbers."""
    return {block.name: {"threshold": threshold(block), "weight": block.weight} for block in spec.graders}


class _Report:
    """One pass over a run in the dataset's order."""

    def __init__(self, found: Identified, index: Index) -> None:
        self._found = found
        self._index = index
        spec = found.spec
        self._tallies = [Tally(spec.trials) for _ in spec.graders]
        self._overall = Tally(spec.trials)
        self._usage, self._judges = UsageTally(), UsageTally()
        self._seconds = array("d")
        self._outputs = self._graded = 0
        self._thresholds = [threshold(block) for block in spec.graders]
        self._weights = [block.weight for block in spec.graders]
        self._names = [block.name for block in spec.graders]

    def entries(self) -> Iterator[bytes]:
        """A line of results.json for every trial, counting on the way."""
        encode = msgspec.json.Encoder().encode
        texts = TextReader()
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
        for known, verdict in zip(by_grader, verdicts, strict=True):
            if verdict is not None:
                known.append(verdict)
        status, score = self._together(verdicts)
        if status != "error":
            self._graded += 1
            overall.append((status, score))
        grades = {
            name: {"status": verdict[0], "score": verdict[1]}
            for name, verdict in zip(self._names, verdicts, strict=True)
            if verdict is not None
        }
        return {**entry, "status": status, "score": score, "output": texts.read(ref), "grades": grades}

    def _verdicts(self, key: str, ref: OutputRef) -> list[tuple[GradeStatus, float | None] | None]:
        found: list[tuple[GradeStatus, float | None] | None] = []
        for grader, limit in zip(self._found.work.graders, self._thresholds, strict=True):
            verdict = self._index.verdicts.get(grade_key(key, ref.digest, grader))
            if verdict is None:
                found.append(None)
                continue
            if verdict.usage is not None:
                self._judges.add(verdict.usage)
            status = verdict.status
            if verdict.score is not None and status in ("passed", "failed"):
                status = "passed" if verdict.score >= limit else "failed"
            found.append((status, verdict.score))
        return found

    def _together(self, verdicts: list[tuple[GradeStatus, float | None] | None]) -> tuple[GradeStatus, float | None]:
        """A trial as a whole: passed when every grader passes, its score the weighted mean."""
        if any(verdict is None or verdict[0] == "error" for verdict in verdicts):
            return "error", None
        scored = [
            (weight, verdict[0], verdict[1])
            for weight, verdict in zip(self._weights, verdicts, strict=True)
            if verdict is not None and verdict[1] is not None
        ]
        if not scored:
            return "skipped", None
        total = sum(weight for weight, _, _ in scored)
        score = sum(weight * value for weight, _, value in scored) / total if total else None
        passed = all(status == "passed" for _, status, _ in scored)
        return "passed" if passed else "failed", score

    def metrics(self) -> dict[str, Any]:
        """The numbers, after all entries were taken."""
        found = self._found
        spec, total = found.spec, found.survey.count * found.spec.trials
        covered = self._graded if spec.graders else self._outputs
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
            "graded": self._graded if spec.graders else 0,
            "coverage": covered / total,
            "score": overall["score"] if spec.graders else None,
            "passed": self._overall.statuses["passed"] / decided if decided else None,
            "metrics": {
                name: {**tally.summary(), **rules[name]} for name, tally in zip(self._names, self._tallies, strict=True)
            },
            "overall": overall if spec.graders else None,
            "usage": self._usage.summary(),
            "judge_usage": self._judges.summary(),
            "timing": {
                "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "seconds": round(self._index.spent.seconds, 3),
                "trial_seconds_p50": quantile(seconds, 0.5) if seconds else None,
                "trial_seconds_p95": quantile(seconds, 0.95) if seconds else None,
            },
        }

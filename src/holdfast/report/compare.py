"""Finished runs read back for comparing, and what a comparison says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.errors import UsageError
from holdfast.report.paired import Difference, gaps, holm, mcnemar, paired_difference, sign_flip

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.store.rundir import RunDir

Scores = dict[str, list[float]]
"""scores of the trials, by sample"""

OVERALL = "passed"
"""the metric that says whether a trial passes every grader"""


@dataclass(frozen=True)
class Finished:
    """A finished run's verdicts."""

    label: str
    path: str
    metrics: dict[str, Any]
    scores: dict[str, Scores]
    """by grader, and under `passed` whether the trial passes all of them"""
    passes: dict[str, Scores]
    """1 or 0 by whether the grader passes"""
    keys: dict[str, list[str]] = field(default_factory=dict)
    """the outputs' keys by sample"""

    @property
    def samples(self) -> set[str]:
        """All samples with a verdict."""
        return set(self.keys)


def read_finished(rundir: RunDir) -> Finished:
    """Verdicts of a run; refuses one that is not finished, since its numbers are not its numbers yet."""
    if not rundir.finished:
        raise UsageError(
            f"{rundir.path} is not finished: it has no metrics.json",
            remedy="Finish it with the `holdfast eval` command that began it, then compare.",
        )
    try:
        metrics = rundir.read_metrics()
        entries = rundir.read_results()["trials"]
        label = f"{metrics['eval']} · {metrics['target']} · {metrics['run']}"
        found = Finished(label, str(rundir.path), metrics, {}, {})
        for entry in entries:
            found.keys.setdefault(entry["sample"], []).append(entry["key"])
            if entry["status"] in ("passed", "failed"):
                _add(found, OVERALL, entry["sample"], float(entry["status"] == "passed"), entry["status"])
            for grader, verdict in entry["grades"].items():
                if verdict["status"] in ("passed", "failed") and verdict["score"] is not None:
                    _add(found, grader, entry["sample"], verdict["score"], verdict["status"])
    except (OSError, msgspec.DecodeError, KeyError, TypeError) as error:
        raise UsageError(
            f"{rundir.path}: results.json or metrics.json cannot be read ({error!r})",
            remedy="Delete both files and run its `holdfast eval` command: they are made anew.",
        ) from error
    return found


def metric_names(run: Finished) -> list[str]:
    """What to compare: each grader, and where there are several also whether all of them pass."""
    graders = [name for name in run.scores if name != OVERALL]
    return [*graders, OVERALL] if len(graders) > 1 else graders


def shared_names(first: Finished, second: Finished) -> list[str]:
    """What both have: to pass all graders is only the same thing where they have the same ones."""
    same = first.metrics["metrics"].keys() == second.metrics["metrics"].keys()
    return [name for name in metric_names(first) if name in second.scores and (same or name != OVERALL)]


def _add(found: Finished, metric: str, sample: str, score: float, status: str) -> None:
    found.scores.setdefault(metric, {}).setdefault(sample, []).append(score)
    found.passes.setdefault(metric, {}).setdefault(sample, []).append(float(status == "passed"))


@dataclass(frozen=True)
class Flip:
    """A sample on which two runs differ in passing."""

    sample: str
    metric: str
    gained: bool
    """passes in the first and not in the second"""
    keys: tuple[str, str]
    """of the transcripts, first and second"""


@dataclass(frozen=True)
class Compared:
    """One metric of two runs."""

    metric: str
    first: float
    second: float
    difference: Difference
    p_value: float
    adjusted: float
    """after Holm's correction over all metrics compared"""
    test: str

    @property
    def verdict(self) -> str:
        """In words, at the usual 5 %."""
        if self.adjusted >= 0.05:
            return "no evidence of a difference"
        return "higher" if self.difference.mean > 0 else "lower"


@dataclass(frozen=True)
class Comparison:
    """Two runs, metric by metric."""

    first: Finished
    second: Finished
    metrics: tuple[Compared, ...]
    flips: tuple[Flip, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]


def compare(first: Finished, second: Finished) -> Comparison:
    """Compare two runs on the samples both have."""
    shared = first.samples & second.samples
    if not shared:
        raise UsageError(
            f"{first.path} and {second.path} have no sample in common",
            remedy="Comparisons are paired by sample id: both runs need the same dataset.",
        )
    names = shared_names(first, second)
    rows = [row for name in names if (row := _one(name, first, second)) is not None]
    if not rows:
        raise UsageError(
            f"{first.path} and {second.path} have no metric in common",
            remedy="Comparisons are by grader: both runs need verdicts of a grader of the same name.",
        )
    adjusted = holm([row.p_value for row in rows])
    compared = tuple(
        Compared(row.metric, row.first, row.second, row.difference, row.p_value, corrected, row.test)
        for row, corrected in zip(rows, adjusted, strict=True)
    )
    return Comparison(
        first,
        second,
        compared,
        tuple(flip for name in names for flip in _flips(name, first, second)),
        tuple(sorted(first.samples - second.samples)),
        tuple(sorted(second.samples - first.samples)),
    )


def _one(name: str, first: Finished, second: Finished) -> Compared | None:
    ours, theirs = first.scores[name], second.scores[name]
    difference = paired_difference(ours, theirs)
    if difference is None:
        return None
    found = gaps(ours, theirs)
    binary = all(score in (0.0, 1.0) for side in (ours, theirs) for sample in found for score in side[sample])
    single = all(len(side[sample]) == 1 for side in (ours, theirs) for sample in found)
    if binary and single:
        p_value = mcnemar(sum(gap > 0 for gap in found.values()), sum(gap < 0 for gap in found.values()))
        test = "McNemar, exact"
    else:
        p_value, test = sign_flip(list(found.values())), "sign-flip permutation"
    means = [_over(side, found) for side in (ours, theirs)]
    return Compared(name, means[0], means[1], difference, p_value, p_value, test)


def _over(scores: Scores, samples: Sequence[str] | dict[str, float]) -> float:
    """The mean over samples of each sample's mean."""
    means = [sum(scores[sample]) / len(scores[sample]) for sample in samples]
    return sum(means) / len(means)


def _flips(name: str, first: Finished, second: Finished) -> list[Flip]:
    flips = []
    for sample, gap in gaps(first.passes[name], second.passes[name]).items():
        ours, theirs = (sum(side.passes[name][sample]) / len(side.passes[name][sample]) for side in (first, second))
        if gap and (ours >= 0.5) != (theirs >= 0.5):
            flips.append(Flip(sample, name, ours > theirs, (first.keys[sample][0], second.keys[sample][0])))
    return flips

"""Read finished runs for comparison, and compare them.

A grader is compared only if it is exactly the same in both runs. Its name is not enough: a changed tolerance or rubric
would look like a difference between the models.

P-values and intervals of a comparison are corrected together, by Bonferroni's method: all intervals hold at once with
95 % confidence, and each excludes 0 exactly if its p-value is below 5 %. Holm's method, which would find a little more,
has no such intervals.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from msgspec import Struct

from holdfast.display.format import difference_interval, html_table, html_text
from holdfast.errors import UsageError
from holdfast.plan.changes import grader_changes, identity_changes
from holdfast.report.stats import (
    LEVEL,
    Difference,
    cluster_parts,
    gaps,
    mcnemar,
    mcnemar_less,
    p_text,
    paired_difference,
    sign_flip,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from holdfast.report.run_view import RunView
    from holdfast.store.metrics import Metrics
    from holdfast.store.records import GradeStatus
    from holdfast.store.rundir import Identity

Scores = dict[str, list[float]]
"""scores of the trials, by sample"""

COLUMNS: Final = ("metric", "first", "second", "first − second", "95 % interval", "p (corrected)", "test", "verdict")
"""of a comparison, shown as a table"""
BY_COLUMNS: Final = (
    "value",
    "metric",
    "samples",
    "first",
    "second",
    "first − second",
    "95 % interval",
    "p (corrected)",
)
"""of a comparison by a field of the rows, whose name replaces `value`"""

OVERALL = "passed"
"""the metric that says whether a trial passes every grader"""


@dataclass(frozen=True)
class ScoredRun:
    """A finished run with its scores by grader and sample."""

    path: str
    metrics: Metrics
    identity: Identity
    dataset: str
    """digest of the dataset"""
    scores: dict[str, Scores] = field(default_factory=dict)
    """by grader, and under `passed` whether the trial passes all graders"""
    passes: dict[str, Scores] = field(default_factory=dict)
    """1 if the grader passes, else 0"""
    keys: dict[str, list[str]] = field(default_factory=dict)
    """the outputs' keys by sample"""
    answers: dict[str, list[int]] = field(default_factory=dict)
    """by sample, hashes of its outputs' keys and answers, which are equal for the same outputs in one process"""
    by: dict[str, dict[str, str]] = field(default_factory=dict)
    """by field that the report was broken down by: the value of each sample"""
    clusters: dict[str, str] = field(default_factory=dict)
    """the cluster of each sample, if the report was made with clusters"""
    totals: Scores = field(default_factory=dict)
    """the trials' own scores: the weighted mean over their graders"""

    @property
    def label(self) -> str:
        """Eval, target and id of the run."""
        return f"{self.metrics.eval} · {self.metrics.target} · {self.metrics.run}"

    @property
    def samples(self) -> set[str]:
        """The samples of the run."""
        return set(self.keys)

    def _add(self, metric: str, sample: str, score: float, status: GradeStatus) -> None:
        self.scores.setdefault(metric, {}).setdefault(sample, []).append(score)
        self.passes.setdefault(metric, {}).setdefault(sample, []).append(float(status == "passed"))


def read_scores(view: RunView) -> ScoredRun:
    """Read the scores of a finished run."""
    manifest = view.manifest
    run = ScoredRun(str(view.rundir.path), view.final_metrics(), manifest.identity, manifest.dataset.digest)
    for trial in view.results():
        run.keys.setdefault(trial.sample, []).append(trial.key)
        run.answers.setdefault(trial.sample, []).append(hash((trial.key, trial.output)))
        for name, value in ({} if isinstance(trial.by, msgspec.UnsetType) else trial.by).items():
            run.by.setdefault(name, {})[trial.sample] = value
        if not isinstance(trial.cluster, msgspec.UnsetType):
            run.clusters[trial.sample] = trial.cluster
        if trial.status in ("passed", "failed"):
            run._add(OVERALL, trial.sample, float(trial.status == "passed"), trial.status)
            if trial.score is not None:
                run.totals.setdefault(trial.sample, []).append(trial.score)
        for grader, grade in trial.grades.items():
            if grade.status in ("passed", "failed") and grade.score is not None:
                run._add(grader, trial.sample, grade.score, grade.status)
    return run


def metric_title(metric: str) -> str:
    """Return a metric in words."""
    return "passed (all graders)" if metric == OVERALL else metric


def metric_names(run: ScoredRun) -> list[str]:
    """Return the metrics of a run: each grader, and with several graders also whether all of them pass."""
    graders = [name for name in run.scores if name != OVERALL]
    return [*graders, OVERALL] if len(graders) > 1 else graders


def shared_names(first: ScoredRun, second: ScoredRun) -> list[str]:
    """Return the metrics that mean the same in both runs: graders that are the same.

    Passing all graders is the same metric only if all graders and their thresholds are the same.
    """
    changed = changed_graders(first, second)
    same = first.metrics.graders.keys() == second.metrics.graders.keys() and not changed
    same = same and not changed_thresholds(first, second)
    shared = [name for name in metric_names(first) if name in second.scores and name not in changed]
    return [name for name in shared if same or name != OVERALL]


def changed_graders(first: ScoredRun, second: ScoredRun) -> dict[str, list[str]]:
    """Return graders with the same name in both runs that are different graders, each with its differences."""
    ours, theirs = (run.identity.graders for run in (first, second))
    changes = {name: grader_changes(ours[name], theirs[name]) for name in ours if name in theirs}
    for name in changes:
        combines = [run.metrics.graders[name].combine for run in (first, second) if name in run.metrics.graders]
        if len(set(combines)) > 1:
            changes[name].append(f"combine {combines[0]} → {combines[1]}")
    return {name: differences for name, differences in changes.items() if differences}


def changed_thresholds(first: ScoredRun, second: ScoredRun) -> dict[str, tuple[Any, Any]]:
    """Return graders whose thresholds differ: their scores can be compared, but not their passes."""
    ours, theirs = first.metrics.graders, second.metrics.graders
    limits = {name: (ours[name].threshold, theirs[name].threshold) for name in ours if name in theirs}
    return {name: pair for name, pair in limits.items() if pair[0] != pair[1]}


def differences(first: ScoredRun, second: ScoredRun) -> list[str]:
    """List what differs between two runs, from first to second, apart from their verdicts."""
    plain = [msgspec.structs.replace(run.identity, graders={}) for run in (first, second)]
    listed = identity_changes(*plain)
    ours, theirs = (run.metrics.graders.keys() for run in (first, second))
    listed += [f"grader `{name}` only in the first" for name in ours if name not in theirs]
    listed += [f"grader `{name}` only in the second" for name in theirs if name not in ours]
    listed += [f"grader `{name}` ({', '.join(changes)})" for name, changes in changed_graders(first, second).items()]
    for name, (before, after) in changed_thresholds(first, second).items():
        listed.append(f"threshold of `{name}` {before} → {after}")
    if first.dataset != second.dataset:
        listed.append("dataset (samples are paired by id)")
    before, after = (run.metrics for run in (first, second))
    if before.shares["whole"] != after.shares["whole"]:
        counts = (f"{each.answers.whole:,} of {each.total:,}" for each in (before, after))
        listed.append(f"whole answers ({' → '.join(counts)})")
    return listed


@dataclass(frozen=True)
class Flip:
    """A sample on which two runs differ in passing."""

    sample: str
    metric: str
    gained: bool
    """passes in the first and not in the second"""
    keys: tuple[str, str]
    """keys of both transcripts"""


class Measured(NamedTuple):
    """One metric of two runs, before it is corrected for other comparisons."""

    metric: str
    first: float
    second: float
    difference: Difference
    p_value: float
    test: str


class Compared(Struct, frozen=True, kw_only=True):
    """One metric of two runs."""

    metric: str
    first: float
    second: float
    difference: float
    """first minus second"""
    low: float | None
    """lower end of the difference's 95 % interval; the intervals of all comparisons hold at once"""
    high: float | None
    samples: int
    """that both runs have"""
    p_value: float
    adjusted: float
    """the p-value times the number of comparisons"""
    comparisons: int
    """that p-values and intervals are corrected for"""
    test: str
    detectable: float | None
    """the smallest true difference that so many samples would show four times out of five"""
    verdict: str
    """the conclusion in words, at the usual level of 5 %"""

    @property
    def title(self) -> str:
        """The metric in words."""
        return metric_title(self.metric)

    @property
    def interval(self) -> str:
        """The 95 % interval of the difference as text."""
        return difference_interval(self.low, self.high)

    @property
    def p_text(self) -> str:
        """The corrected p-value as text."""
        return p_text(self.p_value, self.adjusted)

    def cells(self) -> tuple[str, ...]:
        """Return both means, the difference, its interval and the adjusted p-value as texts."""
        return f"{self.first:.3f}", f"{self.second:.3f}", f"{self.difference:+.3f}", self.interval, self.p_text


class Breakdown(Struct, frozen=True):
    """Two runs on the samples with each value of a field."""

    field: str
    values: dict[str, tuple[Compared, ...]]
    """by value in the first run's order; corrected together, over all values and metrics of the field"""
    only_first: tuple[str, ...]
    """values of which only the first run has samples"""
    only_second: tuple[str, ...]

    def rows(self, metrics: Sequence[str]) -> list[tuple[str, ...]]:
        """Return a row of texts for each value and each of these metrics, under `BY_COLUMNS`."""
        return [
            (value, row.metric, f"{row.samples:,}", *row.cells())
            for value, compared in self.values.items()
            for row in compared
            if row.metric in metrics
        ]


@dataclass(frozen=True, repr=False)
class Comparison:
    """Two runs, metric by metric."""

    first: ScoredRun
    second: ScoredRun
    metrics: tuple[Compared, ...]
    flips: tuple[Flip, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    differences: tuple[str, ...] = ()
    """what differs between the runs apart from their verdicts"""
    not_compared: tuple[str, ...] = ()
    """graders with the same name in both runs that are different graders"""
    by: tuple[Breakdown, ...] = ()
    """by each field that one of the runs was broken down by"""

    def __getitem__(self, metric: str) -> Compared:
        """Return the comparison of one metric."""
        for row in self.metrics:
            if row.metric == metric:
                return row
        raise KeyError(metric)

    def __repr__(self) -> str:
        rows = ", ".join(f"{row.metric} {row.difference:+.3f}" for row in self.metrics)
        return f"<Comparison of {self.first.metrics.run} with {self.second.metrics.run}: {rows}>"

    def __str__(self) -> str:
        rows = [
            f"{row.metric}: {row.first:.3f} and {row.second:.3f}, difference {row.difference:+.3f} "
            f"({row.interval}), p {'' if row.p_text.startswith('<') else '= '}{row.p_text}: {row.verdict}"
            for row in self.metrics
        ]
        return "\n".join([*self._heads(), *rows])

    def _repr_html_(self) -> str:
        """Return the comparison as a table, for notebooks."""
        return "".join(map(html_text, self._heads())) + html_table(COLUMNS, self.rows())

    def rows(self) -> list[tuple[str, ...]]:
        """Return a row of texts for each metric, under `COLUMNS`."""
        return [(row.title, *row.cells(), row.test, row.verdict) for row in self.metrics]

    def _heads(self) -> list[str]:
        heads = [f"first: {self.first.label}", f"second: {self.second.label}"]
        return [*heads, f"the runs differ in: {'; '.join(self.differences)}"] if self.differences else heads


def compare_scores(first: ScoredRun, second: ScoredRun) -> Comparison:
    """Compare two runs on the samples both have."""
    shared = first.samples & second.samples
    if not shared:
        raise UsageError(
            f"{first.path} and {second.path} have no sample in common",
            remedy="Comparisons are paired by sample id: both runs need the same dataset.",
        )
    names, rows = shared_names(first, second), compare_metrics(first, second)
    changed = changed_graders(first, second)
    if not rows:
        details = "".join(f"; `{name}` differs: {', '.join(changes)}" for name, changes in changed.items())
        raise UsageError(
            f"{first.path} and {second.path} have no metric in common{details}",
            remedy="Both runs need verdicts of the same grader. Grade one with the other's graders: "
            "`holdfast grade RUN EVAL`.",
        )
    moved = changed_thresholds(first, second)
    return Comparison(
        first,
        second,
        rows,
        tuple(flip for name in names if name not in moved for flip in _flips(name, first, second)),
        tuple(sorted(first.samples - second.samples)),
        tuple(sorted(second.samples - first.samples)),
        tuple(differences(first, second)),
        tuple(changed),
        tuple(_breakdown(name, first, second, names) for name in dict.fromkeys([*first.by, *second.by])),
    )


def compare_metrics(first: ScoredRun, second: ScoredRun) -> tuple[Compared, ...]:
    """Compare the metrics that mean the same in both runs, and correct the comparisons together."""
    clusters = shared_clusters(first, second)
    names = shared_names(first, second)
    compared = (compare_metric(name, first.scores[name], second.scores[name], clusters) for name in names)
    return tuple(_correct([row for row in compared if row is not None]))


def _correct(rows: Sequence[Measured]) -> Iterator[Compared]:
    """Correct the p-values and intervals of comparisons that are made together."""
    for metric, first, second, difference, p_value, test in rows:
        corrected, adjusted = difference.corrected(p_value, len(rows)), min(1.0, p_value * len(rows))
        direction = "higher" if difference.mean > 0 else "lower"
        yield Compared(
            metric=metric,
            first=first,
            second=second,
            difference=difference.mean,
            low=corrected.low,
            high=corrected.high,
            samples=difference.samples,
            p_value=p_value,
            adjusted=adjusted,
            comparisons=len(rows),
            test=test,
            detectable=corrected.detectable,
            verdict=direction if adjusted < LEVEL else "no evidence of a difference",
        )


def corrected_for(comparisons: int) -> str:
    """Say what p-values and intervals are corrected for."""
    return f"p-values and intervals are corrected for {comparisons:,} comparisons (Bonferroni)"


def _breakdown(name: str, first: ScoredRun, second: ScoredRun, metrics: Sequence[str]) -> Breakdown:
    """Compare two runs by a field. A sample has the value that the first run recorded, else the second run's."""
    values = {**second.by.get(name, {}), **first.by.get(name, {})}
    members: dict[str, list[str]] = {}
    for sample in dict.fromkeys([*first.keys, *second.keys]):
        if sample in values:
            members.setdefault(values[sample], []).append(sample)
    rows: list[tuple[str, Measured]] = []
    for value, samples in members.items():
        for metric in metrics:
            ours, theirs = (_only(run.scores[metric], samples) for run in (first, second))
            if (measured := compare_metric(metric, ours, theirs, shared_clusters(first, second))) is not None:
                rows.append((value, measured))
    compared: dict[str, list[Compared]] = {}
    for (value, _), row in zip(rows, _correct([row for _, row in rows]), strict=True):
        compared.setdefault(value, []).append(row)
    return Breakdown(
        name,
        {value: tuple(listed) for value, listed in compared.items()},
        tuple(value for value, samples in members.items() if second.samples.isdisjoint(samples)),
        tuple(value for value, samples in members.items() if first.samples.isdisjoint(samples)),
    )


def shared_clusters(first: ScoredRun, second: ScoredRun) -> dict[str, str]:
    """Return the cluster of each sample: the one that the first run recorded, else the second run's."""
    return {**second.clusters, **first.clusters}


def _only(scores: Scores, samples: Sequence[str]) -> Scores:
    return {sample: scores[sample] for sample in samples if sample in scores}


def compare_metric(
    name: str, ours: Scores, theirs: Scores, clusters: Mapping[str, str] = MappingProxyType({})
) -> Measured | None:
    """Compare the scores of two runs on the samples both have, by the test that suits them; None without any."""
    difference = paired_difference(ours, theirs, clusters=clusters)
    if difference is None:
        return None
    by_sample = gaps(ours, theirs)
    p_value, test = _test(ours, theirs, by_sample, clusters)
    means = [mean_over(side, by_sample) for side in (ours, theirs)]
    return Measured(name, means[0], means[1], difference, p_value, test)


def chance_of_loss(ours: Scores, theirs: Scores, by_sample: Mapping[str, float], clusters: Mapping[str, str]) -> float:
    """Return the chance of scores that are so much lower than the others, if both runs were equally good.

    `by_sample` has the differences of the scores.
    """
    return _test(ours, theirs, by_sample, clusters, less=True)[0]


def _test(
    ours: Scores, theirs: Scores, by_sample: Mapping[str, float], clusters: Mapping[str, str], *, less: bool = False
) -> tuple[float, str]:
    """Return the p-value of the test that suits the scores, and its name."""
    binary = all(score in (0.0, 1.0) for side in (ours, theirs) for sample in by_sample for score in side[sample])
    single = all(len(side[sample]) == 1 for side in (ours, theirs) for sample in by_sample)
    if binary and single and not clusters:
        gained, lost = (sum(gap == sign for gap in by_sample.values()) for sign in (1.0, -1.0))
        return (mcnemar_less if less else mcnemar)(gained, lost), "McNemar, exact"
    sums = [total for total, _ in cluster_parts(by_sample, clusters)]
    return sign_flip(sums, less=less), f"sign-flip permutation{' of clusters' if clusters else ''}"


def mean_over(scores: Scores, samples: Iterable[str]) -> float:
    """Return the mean over samples of each sample's mean."""
    means = [sum(scores[sample]) / len(scores[sample]) for sample in samples]
    return sum(means) / len(means)


def _flips(name: str, first: ScoredRun, second: ScoredRun) -> list[Flip]:
    flips = []
    for sample, gap in gaps(first.passes[name], second.passes[name]).items():
        ours, theirs = (sum(side.passes[name][sample]) / len(side.passes[name][sample]) for side in (first, second))
        if gap and (ours >= 0.5) != (theirs >= 0.5):
            flips.append(Flip(sample, name, ours > theirs, (first.keys[sample][0], second.keys[sample][0])))
    return flips

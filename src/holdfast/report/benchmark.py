"""The numbers of a benchmark in lm-eval's words, with lm-eval's arithmetic.

Sums are computed in the dataset's order with the operations of lm-eval, so that equal scores give equal digits. The
standard errors of `perplexity` and `median`, for which lm-eval uses the bootstrap, are `N/A` here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from holdfast.graders.build import grader_places
from holdfast.report.stats import pass_at_k
from holdfast.spec.eval import TASK_FIELD
from holdfast.store.heads import decode_line
from holdfast.store.metrics import BenchmarkMetrics
from holdfast.store.records import Grade

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from holdfast.plan.identity import RunIdentity
    from holdfast.report.tally import Row
    from holdfast.report.trials import Judged
    from holdfast.spec.eval import BenchmarkGroup, BenchmarkTask, BenchmarkTasks, TaskMetric
    from holdfast.store.index import RunIndex

Results = dict[str, Any]
"""the entry of a task or a group among the results"""

UNKNOWN: Final = "N/A"
"""lm-eval's word for a missing number"""


def mean(values: Sequence[float]) -> float:
    """Return the mean, summed from left to right."""
    return sum(values) / len(values)


def mean_stderr(values: Sequence[float]) -> float:
    """Return the standard error of a mean, from the sample's standard deviation."""
    centre = mean(values)
    deviation = math.sqrt(sum([(value - centre) ** 2 for value in values]) / (len(values) - 1))
    return deviation / math.sqrt(len(values))


def median(values: Sequence[float]) -> float:
    """Return the upper median."""
    return sorted(values)[len(values) // 2]


def perplexity(values: Sequence[float]) -> float:
    """Return the perplexity of texts with these log-likelihoods."""
    return math.exp(-mean(values))


def weighted_mean(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the mean of pairs of a sum and its weight."""
    numerators, weights = zip(*pairs, strict=True)
    return float(sum(numerators) / sum(weights))


def weighted_perplexity(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the perplexity per word or byte of texts with these log-likelihoods and lengths."""
    return math.exp(-weighted_mean(pairs))


def bits_per_byte(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the bits that a byte of texts with these log-likelihoods and lengths takes."""
    return -weighted_mean(pairs) / math.log(2)


def pooled_stderr(stderrs: Sequence[float], sizes: Sequence[int]) -> float:
    """Return the standard error of a mean over tasks that is weighted by their sizes."""
    variance = sum([(size - 1) * stderr**2 * size for size, stderr in zip(sizes, stderrs, strict=True)])
    return math.sqrt(variance / (sum(sizes) - len(sizes)) / sum(sizes))


def unweighted_stderr(stderrs: Sequence[float]) -> float:
    """Return the standard error of a mean over tasks that all have the same weight."""
    return math.sqrt(sum(stderr**2 for stderr in stderrs)) / len(stderrs)


AGGREGATIONS: Final[dict[str, Callable[[Any], float]]] = {
    "mean": mean,
    "median": median,
    "perplexity": perplexity,
    "weighted_mean": weighted_mean,
    "weighted_perplexity": weighted_perplexity,
    "bits_per_byte": bits_per_byte,
}
"""by lm-eval's names; `weighted_mean` is what it calls agg_inst_level_acc in IFEval"""


def uses_values(metric: TaskMetric) -> bool:
    """Return True if a metric is computed from the `value` in the details of verdicts, not from their scores."""
    return metric.aggregation != "mean"


def outline(benchmark: BenchmarkTasks) -> BenchmarkMetrics:
    """Return everything about a benchmark that does not depend on scores."""
    tasks, groups = benchmark.tasks, benchmark.groups
    versions = {name: task.version for name, task in tasks.items()}
    versions |= {name: UNKNOWN if group.version is None else str(group.version) for name, group in groups.items()}
    shots = {name: task.n_shot for name, task in tasks.items()}
    directions: dict[str, dict[str, bool | None]] = {
        name: {metric.metric: metric.higher_is_better for metric in task.metrics} for name, task in tasks.items()
    }
    for name, group in groups.items():
        _inherit(name, group, shots, directions)
    return BenchmarkMetrics(
        results={},
        group_subtasks={name: group.tasks for name, group in groups.items()},
        versions=dict(sorted(versions.items())),
        n_shot=dict(sorted(shots.items())),
        higher_is_better=dict(sorted(directions.items())),
    )


def describes(metrics: BenchmarkMetrics | None, benchmark: BenchmarkTasks | None) -> bool:
    """Return True if numbers were computed with the tasks and groups that a benchmark has now."""
    if metrics is None or benchmark is None:
        return False
    current = outline(benchmark)
    names = ("group_subtasks", "versions", "n_shot", "higher_is_better")
    return all(getattr(metrics, name) == getattr(current, name) for name in names)


def benchmark_metrics(benchmark: BenchmarkTasks, values: Mapping[tuple[str, str], Sequence[Any]]) -> BenchmarkMetrics:
    """Return the numbers of a benchmark.

    `values` has a list for each task and metric's key, with one value per row in the dataset's order.
    """
    results: dict[str, Results] = {}
    samples: dict[str, dict[str, int]] = {}
    for name, task in benchmark.tasks.items():
        result = _task_results(name, task, values)
        if not result["sample_len"]:
            continue  # none of its rows were selected
        results[name] = result
        original = result["sample_len"] if task.n_original is None else task.n_original
        samples[name] = {"original": original, "effective": result["sample_len"]}
    groups = {}
    for name in _bottom_up(benchmark):
        results[name] = _group_results(name, benchmark, results)
        if benchmark.groups[name].metrics:
            groups[name] = results[name]
    fixed = outline(benchmark)
    return BenchmarkMetrics(
        results=results,
        groups=groups,
        group_subtasks=fixed.group_subtasks,
        versions=fixed.versions,
        n_shot=fixed.n_shot,
        higher_is_better=fixed.higher_is_better,
        n_samples=samples,
    )


def missing_metrics(benchmark: BenchmarkTasks) -> list[str]:
    """Return a notice about metrics of lm-eval that are not computed here."""
    names = {
        metric.metric: None
        for task in benchmark.tasks.values()
        for metric in task.metrics
        if metric.grader is None or metric.aggregation not in AGGREGATIONS
    }
    return [f"not computed here, and left out: lm-eval's {', '.join(names)}"] if names else []


def _task_results(name: str, task: BenchmarkTask, values: Mapping[tuple[str, str], Sequence[Any]]) -> Results:
    result: Results = {"name": name, "alias": task.alias or name, "sample_len": 0}
    for metric in task.metrics:
        items = values.get((name, metric.key))
        if not items or metric.aggregation not in AGGREGATIONS:
            continue
        result[metric.key] = AGGREGATIONS[metric.aggregation](items)
        exact = metric.aggregation == "mean" and len(items) > 1
        result[metric.stderr_key] = mean_stderr(items) if exact else UNKNOWN
        result["sample_len"] = max(result["sample_len"], len(items))
    return result


def _group_results(name: str, benchmark: BenchmarkTasks, results: Mapping[str, Results]) -> Results:
    group = benchmark.groups[name]
    result: Results = {"alias": group.alias or name, "name": name}
    if not group.metrics:
        return result
    members = [results[leaf] for leaf in benchmark.leaves(name) if leaf in results]
    result["sample_len"] = sum(member["sample_len"] for member in members)
    counts: dict[str, int] = {}
    for metric in group.metrics:
        filters = _filters(metric.metric, members) if metric.filter is None else [metric.filter]
        for filter_name in filters:
            key, stderr_key = f"{metric.metric},{filter_name}", f"{metric.metric}_stderr,{filter_name}"
            scored = [member for member in members if key in member]
            if not scored:
                continue
            sizes = [member["sample_len"] for member in scored]
            weights = sizes if metric.weight_by_size else [1] * len(scored)
            weighted = [member[key] * weight for member, weight in zip(scored, weights, strict=True)]
            result[key] = sum(weighted) / sum(weights)
            counts[key] = sum(sizes)
            stderrs = [member[stderr_key] for member in scored]
            if UNKNOWN in stderrs:
                result[stderr_key] = UNKNOWN
            else:
                weighted_by_size = metric.weight_by_size
                result[stderr_key] = pooled_stderr(stderrs, sizes) if weighted_by_size else unweighted_stderr(stderrs)
    return {**result, "sample_count": counts} if counts else result


def _filters(metric: str, members: Iterable[Results]) -> list[str]:
    """Return the filters that tasks combine with a metric."""
    prefix = f"{metric},"
    return sorted({key.removeprefix(prefix) for member in members for key in member if key.startswith(prefix)})


def _bottom_up(benchmark: BenchmarkTasks) -> Iterator[str]:
    """Yield the groups, inner groups before outer ones."""
    inner = {member for group in benchmark.groups.values() for member in group.tasks}
    seen: set[str] = set()

    def visit(name: str) -> Iterator[str]:
        if name in benchmark.groups and name not in seen:
            seen.add(name)
            for member in benchmark.groups[name].tasks:
                yield from visit(member)
            yield name

    for name in benchmark.groups:
        if name not in inner:
            yield from visit(name)


def _inherit(
    name: str, group: BenchmarkGroup, shots: dict[str, int], directions: dict[str, dict[str, bool | None]]
) -> None:
    """Give a group the shots and directions that its members agree on."""
    numbers = {shots[member] for member in group.tasks if member in shots}
    if len(numbers) == 1:
        shots[name] = numbers.pop()
    merged: dict[str, bool | None] = {}
    for member in group.tasks:
        for metric, higher in directions.get(member, {}).items():
            merged[metric] = higher if merged.get(metric, higher) == higher else None
    if merged:
        directions[name] = merged


class BenchmarkScores:
    """The contribution of each row of a benchmark to the metrics of its task, in the dataset's order."""

    def __init__(self, identified: RunIdentity, index: RunIndex, benchmark: BenchmarkTasks) -> None:
        self._benchmark = benchmark
        self._identified = identified
        self._index = index
        self._tasks = identified.survey.groupings.get(TASK_FIELD)
        self._names = list(benchmark.tasks) if self._tasks is None else self._tasks.values
        self._graders = {place.name: number for number, place in enumerate(grader_places(identified.spec))}
        self._values: dict[tuple[str, str], list[Any]] = {}
        """by task and the metric's key"""

    def add(self, position: int, row: Row, keys: Sequence[str]) -> None:
        """Add the trials of one row, with their keys."""
        name = self._names[0 if self._tasks is None else self._tasks.number_at(position)]
        task = self._benchmark.tasks.get(name)
        for metric in [] if task is None else task.metrics:
            if (grader := self._graders.get(metric.grader or "")) is None:
                continue
            if metric.k is not None:
                self._add_pass_at(name, metric, [judged.verdicts.get(grader) for judged in row.trials])
                continue
            if uses_values(metric):
                values = [self._value(grader, key) for key in keys]
            else:
                values = [judged.score_of(grader) for judged in row.trials]
            present = [value for value in values if value is not None]
            if present:
                # A sample counts once. Values that are not scores cannot be averaged: the first one counts.
                value = present[0] if uses_values(metric) or len(present) == 1 else math.fsum(present) / len(present)
                self._values.setdefault((name, metric.key), []).append(value)

    def _add_pass_at(self, task: str, metric: TaskMetric, verdicts: Sequence[Judged | None]) -> None:
        assert metric.k is not None
        scored = [verdict for verdict in verdicts if verdict is not None and verdict.score is not None]
        if len(scored) >= metric.k:
            passes = sum(verdict.status == "passed" for verdict in scored)
            self._values.setdefault((task, metric.key), []).append(pass_at_k(len(scored), passes, metric.k))

    def _value(self, grader: int, trial: str) -> Any:
        """Return the value in the details of a grader's verdict on a trial, which the index does not hold."""
        ref = self._index.output(trial)
        key = None if ref is None else self._identified.work.verdict_key(ref, grader)
        verdict = None if key is None else self._index.verdicts(trial).get(key)
        if verdict is None or verdict.line is None:
            return None
        details = decode_line(Grade, verdict.line).details
        return details.get("value") if isinstance(details, dict) else None

    def notices(self) -> list[str]:
        """Return what users should know about the numbers."""
        return missing_metrics(self._benchmark)

    def metrics(self) -> BenchmarkMetrics:
        """Return the numbers of the rows so far."""
        return benchmark_metrics(self._benchmark, self._values)

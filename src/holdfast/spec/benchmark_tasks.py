"""`metadata.benchmark` of an eval: the tasks, groups and metrics of a benchmark, in lm-eval's words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

TASK_FIELD = "task"
"""the field of a benchmark's rows that names their task"""


class TaskMetric(Struct, frozen=True, kw_only=True):
    """A metric of a task, and the grader whose scores it is made of."""

    metric: str
    grader: str | None = None
    """None: no grader gives the metric"""
    filter: str = "none"
    aggregation: str = "mean"
    higher_is_better: bool | None = True
    k: int | None = None
    """set for pass@k: the chance that at least one of k trials passes"""

    @property
    def key(self) -> str:
        """The metric's name among results."""
        return f"{self.metric},{self.filter}"

    @property
    def stderr_key(self) -> str:
        """The name of the metric's standard error."""
        return f"{self.metric}_stderr,{self.filter}"


class BenchmarkTask(Struct, frozen=True, kw_only=True):
    """A task: rows with one prompt format and one set of metrics."""

    metrics: list[TaskMetric]
    version: Any = None
    n_shot: int = 0
    n_original: int | None = None
    """rows of the whole task, of which a run may use fewer"""
    alias: str | None = None
    """name in tables"""


class GroupMetric(Struct, frozen=True, kw_only=True):
    """A metric that a group averages over its tasks."""

    metric: str
    filter: str | None = None
    """None: every filter that the tasks have"""
    weight_by_size: bool = True


class BenchmarkGroup(Struct, frozen=True, kw_only=True):
    """A group of tasks and of other groups."""

    tasks: list[str]
    metrics: list[GroupMetric] = []
    alias: str | None = None
    version: Any = None


class BenchmarkTasks(Struct, frozen=True, kw_only=True):
    """The tasks and groups of a benchmark."""

    tasks: dict[str, BenchmarkTask]
    groups: dict[str, BenchmarkGroup] = {}
    name: str | None = None
    provider: str | None = None
    provider_version: str | None = None
    seed: int | None = None
    primary: str | None = None
    """the metric that is the benchmark's score"""

    def leaves(self, group: str) -> Iterator[str]:
        """Yield the tasks of a group and of the groups in it."""
        for member in self.groups[group].tasks:
            if member in self.groups:
                yield from self.leaves(member)
            else:
                yield member


def benchmark_tasks(eval_data: Mapping[str, Any]) -> BenchmarkTasks | None:
    """Return the tasks in an eval's metadata; None if it has no tasks. Anything else in `metadata` is ignored."""
    metadata = eval_data.get("metadata")
    block = metadata.get("benchmark") if isinstance(metadata, dict) else None
    try:
        tasks = msgspec.convert(block, BenchmarkTasks)
    except msgspec.ValidationError:
        return None
    trials = eval_data.get("trials", 1)
    if not isinstance(trials, int) or trials < 2:
        return tasks
    listed = {name: replace(task, metrics=[*_up_to(trials, task.metrics)]) for name, task in tasks.tasks.items()}
    return replace(tasks, tasks=listed)


def _up_to(trials: int, metrics: list[TaskMetric]) -> Iterator[TaskMetric]:
    """Yield metrics, and after pass@1 also pass@k for each k up to the number of trials."""
    for metric in metrics:
        yield metric
        if metric.k == 1:
            for k in range(2, trials + 1):
                yield replace(metric, metric=metric.metric.replace("1", str(k)), k=k)

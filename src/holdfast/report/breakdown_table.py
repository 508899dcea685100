"""Tables of a run's results by field of the rows, and of a benchmark's tasks and groups."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from holdfast.display.format import interval_text, share
from holdfast.display.grid import Column, fit_table
from holdfast.report.stats import wilson
from holdfast.spec.benchmark_tasks import TASK_FIELD

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.table import Table

    from holdfast.store.metrics import BenchmarkMetrics, GraderMetrics, Metrics

MOST_ROWS: Final = 64
"""rows of a table; MMLU has 57 tasks and 5 groups"""


def breakdown_tables(metrics: Metrics, width: int) -> Iterator[tuple[Table, int]]:
    """Yield a table of the benchmark, then one for each field of `by`, each with the number of rows left out.

    A benchmark of one task has no table where the graders' scores are its numbers already.
    """
    rows = [] if metrics.benchmark is None else _benchmark_rows(metrics, metrics.benchmark)
    if len({row.name for row in rows}) > 1 or any(not _is_score(row, metrics.graders) for row in rows):
        yield _benchmark_table(rows[:MOST_ROWS], width), max(0, len(rows) - MOST_ROWS)
    for field in metrics.by:
        if field != TASK_FIELD or metrics.benchmark is None:  # the benchmark's own table has its tasks
            yield _field_table(metrics, field, width), max(0, len(metrics.by[field]) - MOST_ROWS)


def _field_table(metrics: Metrics, field: str, width: int) -> Table:
    graders = list(metrics.graders) if len(metrics.graders) > 1 else []
    columns = [
        Column(field, name=True),
        Column("samples", spare=2),
        Column("score"),
        Column("95 % interval", spare=1),
        *(Column(name, spare=3 + number) for number, name in enumerate(graders)),
    ]
    rows = []
    for value, block in list(metrics.by[field].items())[:MOST_ROWS]:
        # With a single grader the trials as a whole are what it says of them.
        overall = block.overall
        assert overall is not None
        scores = [block.graders[name].score if name in block.graders else None for name in graders]
        rows.append(
            (
                value or '""',
                f"{block.samples:,}",
                share(overall.score),
                interval_text(overall.low, overall.high),
                *map(share, scores),
            )
        )
    return fit_table(columns, rows, width, title=f"by {field}")


def _is_score(row: _BenchmarkRow, graders: Mapping[str, GraderMetrics]) -> bool:
    return any(name in graders and graders[name].score == row.value for name in _grader_names(row.metric, row.filter))


def _grader_names(metric: str, filter_name: str) -> tuple[str, str]:
    """Return the names that the grader of a metric may have."""
    return f"{metric},{filter_name}", metric


class _BenchmarkRow(NamedTuple):
    """A metric of a task or of a group."""

    name: str
    depth: int
    metric: str
    filter: str
    samples: int
    value: float
    stderr: float | None
    low: float | None
    high: float | None


def _benchmark_table(rows: list[_BenchmarkRow], width: int) -> Table:
    several = len({row.filter for row in rows}) > 1
    columns = [
        Column("task", name=True),
        *([Column("filter", word=True, spare=4)] if several else []),
        Column("metric", word=True, spare=3),
        Column("samples", spare=2),
        Column("value"),
        Column("± stderr"),
        Column("95 % interval", spare=1),
    ]
    cells = [
        (
            f"{'  ' * row.depth}{row.name}",
            *([row.filter] if several else []),
            row.metric,
            f"{row.samples:,}",
            f"{row.value:.4f}",
            "–" if row.stderr is None else f"{row.stderr:.4f}",
            interval_text(row.low, row.high),
        )
        for row in rows
    ]
    return fit_table(columns, cells, width, title="as lm-eval reports it")


def _benchmark_rows(metrics: Metrics, benchmark: BenchmarkMetrics) -> list[_BenchmarkRow]:
    """Return the metrics of all groups and tasks, members below their group."""
    inner = {member for members in benchmark.group_subtasks.values() for member in members}
    rows: list[_BenchmarkRow] = []

    def add(name: str, depth: int) -> None:
        if name in benchmark.results:
            rows.extend(_metric_rows(name, depth, metrics, benchmark))
        for member in benchmark.group_subtasks.get(name, ()):
            add(member, depth + 1)

    for name in dict.fromkeys([*benchmark.group_subtasks, *benchmark.results]):
        if name not in inner:
            add(name, 0)
    return rows


def _metric_rows(name: str, depth: int, metrics: Metrics, benchmark: BenchmarkMetrics) -> Iterator[_BenchmarkRow]:
    result = benchmark.results[name]
    for key, value in result.items():
        metric, comma, filter_name = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        stderr = result.get(f"{metric}_stderr,{filter_name}")
        low, high = _interval(name, value, metric, filter_name, metrics, benchmark)
        yield _BenchmarkRow(
            name=result["alias"],
            depth=depth,
            metric=metric,
            filter=filter_name,
            samples=result["sample_len"],
            value=value,
            stderr=stderr if isinstance(stderr, int | float) else None,
            low=low,
            high=high,
        )


def _interval(
    name: str, value: float, metric: str, filter_name: str, metrics: Metrics, benchmark: BenchmarkMetrics
) -> tuple[float | None, float | None]:
    """Return our interval for a metric: that of the task's grader; for a group that of all its rows together."""
    tasks = [task for task in _leaves(name, benchmark.group_subtasks) if task in benchmark.results]
    by_task = metrics.by.get(TASK_FIELD)
    parts: list[GraderMetrics] = []
    for task in tasks:
        graders = metrics.graders if by_task is None else by_task[task].graders if task in by_task else {}
        # A grader that some tasks have in a form of their own is called METRIC@TASK.
        names = [name for name in graders if name.partition("@")[0] in _grader_names(metric, filter_name)]
        if len(names) != 1:
            return None, None
        parts.append(graders[names[0]])
    if len(parts) == 1:
        return parts[0].low, parts[0].high
    count = sum(part.n for part in parts)
    together = sum((part.score or 0.0) * part.n for part in parts) / count if count else math.nan
    if any(part.interval != "wilson" for part in parts) or not math.isclose(together, value, abs_tol=1e-9):
        return None, None  # not a proportion of all rows
    return wilson(value, count)


def _leaves(name: str, groups: Mapping[str, list[str]]) -> Iterator[str]:
    if name not in groups:
        yield name
    for member in groups.get(name, ()):
        yield from _leaves(member, groups)

"""The runs of a suite side by side: scores, which of them differ from the best, and averages.

In each eval the runs are compared with the one that has the best score, by the paired test of `holdfast compare`. The
p-values of the whole table are corrected together, by Holm's method. Only runs with the same graders and the same
samples are compared, and only evals that the suite names are averaged.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from textwrap import indent
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct
from rich.text import Text

from holdfast.display.format import interval_text, share
from holdfast.display.grid import Column, fit_table, fits, make_console
from holdfast.display.terminal import echo_json
from holdfast.errors import BudgetReached, Exit, Fault, HoldfastError, Waiting
from holdfast.plan.changes import format_count
from holdfast.report.compare import changed_graders, compare_metric, compare_metrics, read_scores, shared_clusters
from holdfast.report.outcome import failed_lines, uncertain_lines
from holdfast.report.preview import plan_as_json
from holdfast.report.run_view import RunView
from holdfast.report.stats import LEVEL, Z95, holm, p_text
from holdfast.report.table import print_stop
from holdfast.store.catalog import RunSummary, summarize_run

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from rich.table import Table

    from holdfast.errors import Interrupted
    from holdfast.plan.identity import RunIdentity
    from holdfast.plan.plan import Plan
    from holdfast.report.compare import ScoredRun
    from holdfast.report.outcome import Outcome
    from holdfast.spec.suite import AverageBlock, Cell
    from holdfast.store.metrics import GraderMetrics, Metrics
    from holdfast.store.rundir import RunDir

Place = tuple[str, str]
"""names of an eval and a target"""
_MARK: Final = "*"


@dataclass(frozen=True)
class Against:
    """A run compared with the best run of its eval."""

    best: str
    """name of the best target"""
    p_value: float
    adjusted: float
    """after Holm's correction over the table"""
    test: str

    @property
    def differs(self) -> bool:
        """True if the difference is more than chance."""
        return self.adjusted < LEVEL


@dataclass(frozen=True)
class Comparisons:
    """The runs of a table, compared with the best run of each eval."""

    tested: dict[Place, Against]
    not_compared: dict[Place, str]
    """reasons why a run cannot be compared with the best one"""

    def differs(self, place: Place) -> bool:
        """Return True if a run is marked as different."""
        return place in self.tested and self.tested[place].differs


def compare_with_best(runs: Mapping[Place, ScoredRun]) -> Comparisons:
    """Compare the finished runs of a table with the best run of their eval."""
    p_values: dict[Place, Against] = {}
    reasons: dict[Place, str] = {}
    for row in dict.fromkeys(place[0] for place in runs):
        scored = {place: run for place, run in runs.items() if place[0] == row and run.metrics.score is not None}
        if not scored:
            continue
        best = max(scored, key=lambda place: scored[place].metrics.score or 0.0)
        for place, run in scored.items():
            if place == best:
                continue
            if (reason := _incomparable(run, scored[best])) is not None:
                reasons[place] = f"is not compared with {best[1]}: {reason}"
                continue
            clusters = shared_clusters(run, scored[best])
            if (compared := compare_metric("score", run.totals, scored[best].totals, clusters)) is not None:
                p_values[place] = Against(best[1], compared.p_value, compared.p_value, compared.test)
    adjusted = holm([against.p_value for against in p_values.values()])
    tested = {
        place: Against(against.best, against.p_value, corrected, against.test)
        for (place, against), corrected in zip(p_values.items(), adjusted, strict=True)
    }
    return Comparisons(tested, reasons)


def _incomparable(first: ScoredRun, second: ScoredRun) -> str | None:
    """Return why the scores of two runs cannot be compared; None if they can."""
    changed = changed_graders(first, second)
    if first.metrics.graders.keys() != second.metrics.graders.keys():
        return "they have different graders"
    if changed:
        return "; ".join(f"grader `{name}` differs ({', '.join(what)})" for name, what in changed.items())
    weights = [{name: rule.weight for name, rule in run.metrics.rules.items()} for run in (first, second)]
    if weights[0] != weights[1]:
        return "their graders have different weights"
    return None if first.dataset == second.dataset else "they have different samples"


@dataclass(frozen=True)
class Average:
    """The weighted mean of the scores of several evals, for one target."""

    score: float
    low: float | None
    high: float | None


def average_scores(block: AverageBlock, metrics: Mapping[str, Metrics]) -> Average | None:
    """Average one target's evals as the suite says; None if it lacks one of them, or the metric.

    The interval is the normal one: evals are independent of each other.
    """
    numbers = [_number(block, metrics.get(name)) for name in block.over]
    present = [number for number in numbers if number is not None and number.score is not None]
    if len(present) < len(numbers):
        return None
    weights = [block.weights.get(name, 1.0) for name in block.over]
    total = math.fsum(weights)
    score = math.fsum(w * (number.score or 0.0) for w, number in zip(weights, present, strict=True)) / total
    errors = [number.stderr for number in present]
    if None in errors:
        return Average(score, None, None)
    half = Z95 * math.sqrt(math.fsum((w * (e or 0.0)) ** 2 for w, e in zip(weights, errors, strict=True))) / total
    return Average(score, max(0.0, score - half), min(1.0, score + half))


def _number(block: AverageBlock, metrics: Metrics | None) -> GraderMetrics | None:
    if metrics is None:
        return None
    return metrics.overall if block.metric is None else metrics.graders.get(block.metric)


def print_suite(
    name: str, places: Sequence[Place], outcomes: Mapping[Place, Outcome], average: AverageBlock | None
) -> None:
    """Print the table of a suite and the lines below it. Runs without an outcome did not start."""
    console = make_console()
    runs = {
        place: read_scores(RunView(outcome.rundir))
        for place, outcome in outcomes.items()
        if outcome.metrics is not None
    }
    compared = compare_with_best(runs)
    cells = {place: _cell(outcomes.get(place), mark=compared.differs(place)) for place in places}
    targets = list(dict.fromkeys(target for _, target in places))
    if average is not None:
        label = f"average ({format_count(len(average.over), 'eval')})"
        for target in targets:
            mean = average_scores(
                average, {row: run.metrics for (row, column), run in runs.items() if column == target}
            )
            cells[label, target] = (
                ("–", "–") if mean is None else (share(mean.score), interval_text(mean.low, mean.high))
            )
    console.print(_table(name, cells, targets, console.width))
    if any(against.differs for against in compared.tested.values()):
        console.print(
            f"{_MARK} differs from the best of its eval (paired test, p < {LEVEL} after Holm's correction over "
            f"{format_count(len(compared.tested), 'comparison')})"
        )
    elif compared.tested:
        comparisons = format_count(len(compared.tested), "comparison")
        console.print(f"no score differs from the best of its eval by more than chance ({comparisons}, Holm)")
    for (row, target), reason in compared.not_compared.items():
        console.print(f"{row} · {target} {reason}", soft_wrap=True)


def _cell(outcome: Outcome | None, *, mark: bool) -> tuple[str, str]:
    """Return score and interval of a finished run, or the progress of an unfinished one."""
    if outcome is None:
        return "not started", "–"
    if outcome.metrics is None:
        if outcome.skipped_graders and outcome.exit_code == Exit.FINISHED:
            return "not graded", "–"
        return f"{_percent(outcome.plan.finished / outcome.plan.total)} done", "–"
    metrics = outcome.metrics
    covered = "" if metrics.coverage == 1 else f" ({_percent(metrics.coverage)})"
    low, high = (None, None) if metrics.overall is None else (metrics.overall.low, metrics.overall.high)
    return f"{share(metrics.score)}{covered}{' ' + _MARK if mark else ''}", interval_text(low, high)


def _percent(coverage: float) -> str:
    """Format a coverage below 1, which is never shown as 100 %."""
    return f"{math.floor(coverage * 100)} %"


def _table(name: str, cells: Mapping[Place, tuple[str, str]], targets: Sequence[str], width: int) -> Table:
    """Make a table with a column per target, with intervals if there is room; else one with a row per run."""
    evals = list(dict.fromkeys(row for row, _ in cells))
    blank = ("", "")
    for parts in (2, 1):
        columns = [Column("eval", name=True)]
        columns += [Column(title) for target in targets for title in (target, "95 % interval")[:parts]]
        rows = [
            (row, *(text for target in targets for text in cells.get((row, target), blank)[:parts])) for row in evals
        ]
        if fits(columns, rows, width):
            return fit_table(columns, rows, width, title=name)
    columns = [
        Column("eval", name=True),
        Column("target", name=True),
        Column("score"),
        Column("95 % interval", spare=1),
    ]
    return fit_table(columns, [(*place, *texts) for place, texts in cells.items()], width, title=name)


def print_cell(place: str, cell: Cell, outcome: Outcome | None, error: HoldfastError | None) -> None:
    """Print how one run of a suite ended: a line, and what failed."""
    console = make_console()
    head = f"{place} {cell.name}"
    if outcome is None:
        console.print(Text(f"{head}: {error}", style="bold red"), soft_wrap=True)
        return
    metrics, plan = outcome.metrics, outcome.plan
    if metrics is not None:
        low, high = (None, None) if metrics.overall is None else (metrics.overall.low, metrics.overall.high)
        interval = "" if low is None else f" ({interval_text(low, high)})"
        state = f"{share(metrics.score)}{interval}" if metrics.graders else "nothing was graded"
        state += ", finished before" if outcome.already else ""
        state += "" if metrics.coverage == 1 else f", coverage {_percent(metrics.coverage)}"
    else:
        ungraded = f", {plan.to_grade:,} of them without all their grades" if plan.to_grade else ""
        done = plan.total - plan.to_run
        state = f"not finished, {done:,} of {format_count(plan.total, 'trial')} have an output{ungraded}"
    console.print(f"{head}: {state} · {outcome.rundir.path}", soft_wrap=True)
    for line in _problems(outcome):
        console.print(Text(indent(line, "  "), style="red"), soft_wrap=True)
    for notice in () if metrics is None else metrics.notices:
        console.print(Text(f"  note: {notice}", style="yellow"), soft_wrap=True)


def _problems(outcome: Outcome) -> Iterator[str]:
    yield from failed_lines(outcome.failures, left_out=outcome.metrics is not None)
    yield from uncertain_lines(outcome.failures, shlex.quote(str(outcome.rundir.path)))
    if isinstance(outcome.reason, Fault):
        yield f"stopped: {outcome.reason}"
    elif isinstance(outcome.reason, BudgetReached | Waiting):
        yield outcome.reason.message
    for missed in outcome.missed_gates:
        yield f"gate not met: {missed}"


def print_ending(unfinished: int, reason: BudgetReached | Interrupted | None, command: str) -> None:
    """Print what is left of a suite, and the command that resumes it."""
    console = make_console()
    if not unfinished:
        return
    command = print_stop(console, reason, command)
    are = "is" if unfinished == 1 else "are"
    console.print(f"{format_count(unfinished, 'run')} of the suite {are} not finished. Resume with:")
    console.print(f"  {command}", soft_wrap=True)


def print_side_by_side(first: Outcome, second: Outcome) -> None:
    """Print two finished runs of one eval, grader by grader, with the paired difference. They are never averaged."""
    assert first.metrics is not None and second.metrics is not None
    ours, theirs = (read_scores(RunView(outcome.rundir)) for outcome in (first, second))
    compared = {row.metric: row for row in compare_metrics(ours, theirs)}
    names = [first.metrics.target, second.metrics.target]
    columns = [
        Column("grader", name=True),
        Column(names[0]),
        Column(f"{names[1]} (baseline)"),
        Column("difference"),
        Column("95 % interval", spare=1),
        Column("samples", spare=2),
    ]
    rows = []
    for grader, values in first.metrics.graders.items():
        if (row := compared.get(grader)) is None:
            continue
        rows.append(
            (
                grader,
                share(values.score),
                share(second.metrics.graders[grader].score),
                f"{row.difference:+.3f}",
                row.interval,
                f"{row.samples:,}",
            )
        )
    console = make_console()
    console.print(fit_table(columns, rows, console.width, title="side by side"))


def print_plan(name: str, planned: Sequence[tuple[Cell, RunIdentity, RunDir, Plan]], *, as_json: bool) -> None:
    """Print the plan of a suite: what each run has, what it reuses, and what is left to grade and to run."""
    fields = ("total", "finished", "reused", "to_grade", "to_run")
    totals = {field: sum(getattr(plan, field) for *_, plan in planned) for field in fields}
    if as_json:
        cells: list[dict[str, Any]] = []
        for cell, identity, rundir, plan in planned:
            described = plan_as_json(identity, rundir, plan)
            cells.append({"name": cell.eval, "target": cell.target, **described})
        echo_json(msgspec.json.encode({"suite": name, "totals": totals, "cells": cells}))
        return
    console = make_console()
    columns = [
        Column("eval", name=True),
        Column("target", name=True),
        Column("trials", spare=2),
        Column("finished"),
        Column("reuse", spare=1),
        Column("grade"),
        Column("run"),
    ]
    rows = [
        (cell.eval, cell.target, *(f"{getattr(plan, field):,}" for field in fields)) for cell, _, _, plan in planned
    ]
    rows.append((f"{format_count(len(planned), 'run')}", "", *(f"{totals[field]:,}" for field in fields)))
    console.print(fit_table(columns, rows, console.width, title=name))
    for cell, _, rundir, plan in planned:
        console.print(f"{cell.name}: {rundir.path}{' (finished)' if rundir.finished else ''}", soft_wrap=True)
        for reason in plan.reasons:
            console.print(f"  {reason}", soft_wrap=True)
    notices = (each for _, run, _, _ in planned for each in run.plan_notices)
    for notice in dict.fromkeys(notices):
        console.print(Text(f"note: {notice}", style="yellow"), soft_wrap=True)


_MOST_TRIALS: Final = 100_000
"""trials of all runs up to which their scores are compared"""


class GridCell(Struct, frozen=True, kw_only=True):
    """A run of the grid."""

    run: RunSummary
    best: bool = False
    """the best score of its eval"""
    differs: bool = False
    """differs from the best one by more than chance"""
    adjusted: float | None = None
    """p-value against the best one, after Holm's correction over the grid"""
    p_text: str = ""
    """the p-value as text"""


class GridRow(Struct, frozen=True, kw_only=True):
    """The runs of an eval."""

    eval: str
    cells: list[GridCell | None]
    """by target; None if there is no run"""


class SuiteGrid(Struct, frozen=True, kw_only=True):
    """Evals and targets with their runs."""

    targets: list[str]
    rows: list[GridRow]
    level: float
    """p-values below it are marked"""
    comparisons: int
    """number of scores that were tested against the best one of their eval"""
    not_compared: list[str]
    """runs that cannot be compared with the best one, with the reason"""
    hidden: list[str]
    """ids of older runs with the same eval and target as one that is shown"""
    tested: bool
    """False if there are too many trials to compare scores"""


def suite_grid(rundirs: Iterable[RunDir]) -> SuiteGrid:
    """Arrange runs by eval and target; of several runs with the same ones, the newest is shown."""
    listed = [(summary, rundir) for rundir in rundirs if (summary := summarize_run(rundir)) is not None]
    listed.sort(key=lambda each: -each[0].written)
    places: dict[Place, tuple[RunSummary, RunDir]] = {}
    hidden = []
    for summary, rundir in listed:
        if (summary.name, summary.target) in places:
            hidden.append(summary.id)
        else:
            places[summary.name, summary.target] = summary, rundir
    tested = sum(summary.total for summary, _ in places.values()) <= _MOST_TRIALS
    compared = _compare_finished(places) if tested else None
    targets = sorted({target for _, target in places})
    best = _best_places(places)
    return SuiteGrid(
        targets=targets,
        rows=[
            GridRow(
                eval=name,
                cells=[
                    _grid_cell(places[name, target][0], (name, target), best, compared)
                    if (name, target) in places
                    else None
                    for target in targets
                ],
            )
            for name in sorted({name for name, _ in places})
        ],
        level=LEVEL,
        comparisons=0 if compared is None else len(compared.tested),
        not_compared=[]
        if compared is None
        else [f"{name} · {target} {reason}" for (name, target), reason in compared.not_compared.items()],
        hidden=hidden,
        tested=tested,
    )


def _compare_finished(places: Mapping[Place, tuple[RunSummary, RunDir]]) -> Comparisons:
    runs = {}
    for place, (summary, rundir) in places.items():
        if summary.finished:
            try:
                runs[place] = read_scores(RunView(rundir))
            except HoldfastError:  # damaged since it was listed: its score is shown without a test
                continue
    return compare_with_best(runs)


def _best_places(places: Mapping[Place, tuple[RunSummary, RunDir]]) -> set[Place]:
    """Return the best runs of each eval, unless all its runs are equally good."""
    best: set[Place] = set()
    for name in {name for name, _ in places}:
        scores = {
            place: summary.score
            for place, (summary, _) in places.items()
            if place[0] == name and summary.score is not None
        }
        highest = [place for place, score in scores.items() if score == max(scores.values())]
        best |= set(highest if len(highest) < len(scores) else ())
    return best


def _grid_cell(run: RunSummary, place: Place, best: set[Place], compared: Comparisons | None) -> GridCell:
    if compared is None or (against := compared.tested.get(place)) is None:
        return GridCell(run=run, best=place in best)
    adjusted = against.adjusted
    return GridCell(
        run=run,
        best=place in best,
        differs=against.differs,
        adjusted=adjusted,
        p_text=p_text(against.p_value, adjusted),
    )

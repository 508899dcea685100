"""What a command prints about a run: tables of scores, and the lines below them."""

from __future__ import annotations

import math
import shlex
from typing import TYPE_CHECKING, Final, NamedTuple

from rich.text import Text

from holdfast.display.format import dollars, duration, interval_text, latency, share
from holdfast.display.grid import Column, fit_table, make_console
from holdfast.errors import BudgetReached, Fault, Interrupted, Waiting, with_hint
from holdfast.plan.changes import format_count
from holdfast.report.outcome import failed_lines, first_failed, retried_lines, uncertain_lines
from holdfast.report.stats import wilson
from holdfast.spec.eval import TASK_FIELD
from holdfast.targets.types import batch_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.console import Console, RenderableType
    from rich.table import Table

    from holdfast.report.outcome import Outcome
    from holdfast.store.metrics import BenchmarkMetrics, GraderMetrics, Metrics
    from holdfast.store.records import Spent, Usage

MOST_ROWS: Final = 64
"""rows of a table; MMLU has 57 tasks and 5 groups"""
_SHOWN: Final = 5


def print_outcome(
    outcome: Outcome, command: str, again: str = "Use --fresh to start from scratch.", run: str = ""
) -> None:
    """Print the numbers of a finished run, or how to resume an unfinished one.

    `run` is the name of the run in commands; if given, the last lines show how to look at failures.
    """
    console = make_console()
    if outcome.metrics is not None:
        if outcome.already:
            console.print(f"This run is already finished; nothing was run. {again}")
        _print_metrics(console, outcome, outcome.metrics)
        _print_failures(console, outcome, left_out=True)
        if outcome.already and (outcome.metrics.lacks_outputs or outcome.metrics.lacks_verdicts):
            console.print("Errors were accepted; --retry-failed retries these trials.")
        for missed in outcome.missed_gates:
            console.print(Text(f"gate not met: {missed}", style="bold red"), soft_wrap=True)
        for warning in outcome.gate.warnings if outcome.gate is not None else ():
            console.print(Text(f"gate: {warning}", style="yellow"), soft_wrap=True)
    else:
        _print_unfinished(console, outcome, command, run)
    for line in failure_lines(outcome, run) if run else ():
        console.print(line, soft_wrap=True)
    console.print(f"run: {outcome.rundir.path}", soft_wrap=True)


def _print_unfinished(console: Console, outcome: Outcome, command: str, run: str) -> None:
    """Print the numbers so far, why the command stopped, what is left, and the command that continues."""
    if outcome.so_far is not None:
        _print_metrics(console, outcome, outcome.so_far, so_far=True)
        console.print(Text(missing(outcome.so_far), style="bold yellow"))
    _print_failures(console, outcome)
    if isinstance(outcome.reason, Fault):
        console.print(Text(f"stopped: {outcome.reason}", style="bold red"))
    command = print_stop(console, outcome.reason, command)
    for line in batch_lines(outcome.rundir):
        console.print(line, soft_wrap=True)
    for line in uncertain_lines(outcome.failures, run or shlex.quote(str(outcome.rundir.path))):
        console.print(Text(line, style="bold yellow"), soft_wrap=True)
    plan = outcome.plan
    ungraded = f", {plan.to_grade:,} of them without all their grades" if plan.to_grade else ""
    console.print(f"{plan.total - plan.to_run:,} of {plan.total:,} trials have an output{ungraded}")
    for line in _continuation_lines(outcome, command):
        console.print(line, soft_wrap=True)


def print_stop(console: Console, reason: Fault | BudgetReached | Interrupted | Waiting | None, command: str) -> str:
    """Say that a budget or the user stopped a command; return the command that continues."""
    if isinstance(reason, BudgetReached):
        console.print(Text(with_hint(reason.message, reason.remedy), style="bold yellow"), soft_wrap=True)
        return with_raised_limit(command, reason)
    if isinstance(reason, Interrupted):
        console.print(Text("interrupted; everything that finished is on disk", style="bold yellow"))
    return command


def _continuation_lines(outcome: Outcome, command: str) -> Iterator[str]:
    """Say which command continues, and what it will do; nothing if only a person can continue."""
    plan, reason = outcome.plan, outcome.reason
    if outcome.skipped_graders and plan.to_run == 0:
        yield "Graders were skipped: the same command without --skip-graders grades these outputs."
        return
    if outcome.grade_only and plan.to_run:
        lack = "trial has" if plan.to_run == 1 else "trials have"
        yield f"{plan.to_run:,} {lack} no output yet; `holdfast eval` runs them. Grading never does."
        if reason is None and not plan.to_grade:
            return
    if isinstance(reason, Waiting):
        yield "Collect the results with:"
    elif reason is None:
        main, *workers = outcome.rundir.journals("errors")
        errors = main if main.exists() or not workers else outcome.rundir.workers / "*" / main.name
        uncertain = 0 if outcome.failures is None else len(outcome.failures.uncertain)
        to_run = 0 if outcome.grade_only else plan.to_run - uncertain
        pending = (0 if outcome.skipped_graders else plan.to_grade) + to_run
        if not pending:
            return
        state = "trial has errors and stays pending" if pending == 1 else "trials have errors and stay pending"
        yield f"{pending:,} {state}; every attempt is in {errors}"
        yield "Run the command again to retry only these, or add --accept-errors to finish without them:"
    else:
        yield "Resume with:"
    yield f"  {command}"


def _print_metrics(console: Console, outcome: Outcome, metrics: Metrics, *, so_far: bool = False) -> None:
    for piece in draw_metrics(metrics, console.width, outcome.spent, outcome.wall, so_far=so_far):
        console.print(piece, soft_wrap=isinstance(piece, Text) or None)


def _print_failures(console: Console, outcome: Outcome, *, left_out: bool = False) -> None:
    for line in retried_lines(outcome.failures):
        console.print(line)
    for line in failed_lines(outcome.failures, left_out=left_out):
        console.print(Text(line, style="red"))


def failure_lines(outcome: Outcome, run: str) -> Iterator[str]:
    """Say how many trials failed, with an example and the command that shows them; nothing if none failed."""
    metrics = outcome.metrics or outcome.so_far
    failed = 0 if metrics is None or metrics.overall is None else metrics.overall.failed
    errors = outcome.failures is not None and bool(outcome.failures.pending)
    if metrics is not None and failed:
        example = first_failed(outcome.rundir) if outcome.metrics is not None else None
        counted = f"{failed:,} of {format_count(metrics.graded, 'graded trial')} failed"
        yield from [counted] if example is None else [f"{counted}, for example:", f"  {example}"]
    if failed or errors:
        yield f"look: holdfast show {run} {'--failed' if failed else '--errors'}, or holdfast view {run}"


def with_raised_limit(command: str, reason: BudgetReached) -> str:
    """Return the command with a limit that is high enough to continue."""
    if not reason.option or not command:
        return command
    words = shlex.split(command)
    key = f"limits.{reason.option.removeprefix('--').replace('-', '_')}="
    for number, word in enumerate(words):
        if word == reason.option and number + 1 < len(words):
            words[number + 1] = reason.raised
        elif word.startswith(f"{reason.option}="):
            words[number] = f"{reason.option}={reason.raised}"
        elif word.startswith(key):
            words[number] = key + reason.raised
        else:
            continue
        return shlex.join(words)
    is_eval = words[1:2] == ["eval"]
    return shlex.join([*words, *([reason.option, reason.raised] if is_eval else [key + reason.raised])])


def draw_metrics(
    metrics: Metrics, width: int, spent: Spent | None = None, wall: float | None = None, *, so_far: bool = False
) -> Iterator[RenderableType]:
    """Draw the numbers of a run. `spent` is what the run paid itself, `wall` how long this process took."""
    title = f"{metrics.eval} · {metrics.target}{' · incomplete' if so_far else ''}"
    if metrics.graders:
        yield _scores(metrics, title, width, "ungraded" if so_far else "errors")
        for table, hidden in breakdown_tables(metrics, width):
            yield table
            if hidden:
                yield f"… and {hidden:,} more; {'--display json' if so_far else 'metrics.json'} has them all"
    else:
        yield Text(title, style="bold")
        yield "Nothing was graded: the eval has no graders."
    yield from facts(metrics, spent, wall)
    for notice in metrics.notices:
        yield Text(f"note: {notice}", style="yellow")


def _scores(metrics: Metrics, title: str, width: int, lacking: str) -> Table:
    """Make the table of graders. Graders that apply to no row are named below it."""
    rows = {name: values for name, values in metrics.graders.items() if values.rows != 0}
    skipped = any(values.left_out for values in rows.values())
    extra = [key for key in ("not_reached", lacking) if any(getattr(values, key) for values in rows.values())]
    if len(rows) > 1 and metrics.overall is not None:
        rows["overall"] = metrics.overall
    ks = sorted({1, metrics.trials // 2 or 1, metrics.trials}) if metrics.trials > 1 else []
    columns = [
        Column("grader", name=True),
        Column("score"),
        Column("95 % interval", spare=1),
        Column("passed"),
        Column("graded"),
        *([Column("skipped")] if skipped else []),
        *(Column(key.replace("_", " "), spare=2) for key in extra),
        # pass@1 is the first to go: it is `passed` divided by `graded`.
        *(Column(f"pass@{k}", spare=5 if k == 1 else 3 if k == ks[-1] else 4) for k in ks),
        *(Column(f"pass^{k}", spare=3) for k in ks[-1:]),
    ]
    cells: list[tuple[str | Text, ...]] = [
        (
            name,
            Text(share(values.score), style=_colour(values)),
            interval_text(values.low, values.high),
            f"{values.passed:,}",
            f"{values.n:,}",
            *([f"{values.left_out:,}"] if skipped else []),
            *(f"{getattr(values, key) or 0:,}" for key in extra),
            *(_with_count(values.pass_at.get(k), values.pass_n.get(k)) for k in ks),
            *(_with_count(values.pass_all.get(k), values.pass_n.get(k)) for k in ks[-1:]),
        )
        for name, values in rows.items()
    ]
    return fit_table(columns, cells, width, title=title)


def _with_count(value: float | None, samples: int | None) -> str:
    """Format pass@k with the number of samples that have k verdicts."""
    return share(value) if samples is None else f"{share(value)} ({samples:,})"


def _colour(values: GraderMetrics) -> str:
    """Return green if all passed, red if none did."""
    if not values.n:
        return ""
    return "green" if not values.failed else "red" if not values.passed else "yellow"


def breakdown_tables(metrics: Metrics, width: int) -> Iterator[tuple[Table, int]]:
    """Yield a table of the benchmark, then one for each field of `by`, each with the number of rows left out.

    A benchmark of one task has no table if its numbers are the graders' scores.
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
        # With a single grader, its verdict is the trial's.
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
    """Return our interval for a metric: of a task, its grader's; of a group, the interval over all its rows."""
    tasks = [task for task in _leaves(name, benchmark.group_subtasks) if task in benchmark.results]
    by_task = metrics.by.get(TASK_FIELD)
    parts: list[GraderMetrics] = []
    for task in tasks:
        graders = metrics.graders if by_task is None else by_task[task].graders if task in by_task else {}
        # If tasks have a grader in different forms, it is called METRIC@TASK.
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


def facts(metrics: Metrics, spent: Spent | None, wall: float | None) -> Iterator[str]:
    """List coverage, tokens, cost and time. `spent` is what this run paid itself, `wall` how long this process took."""
    usage, judges = metrics.usage, metrics.judge_usage
    coverage = f"coverage {metrics.coverage:.1%} of {format_count(metrics.total, 'trial')}"
    took = _took(metrics.timing.seconds, wall)
    if judges.requests:
        yield f"{coverage} · {took}"
        yield f"target: {_usage(usage)} · judges: {_usage(judges)}"
    else:
        yield f"{coverage} · {_usage(usage)} · {took}"
    if (paid := _paid(usage, judges, spent)) is not None:
        yield paid
    middle, slow = metrics.timing.trial_seconds_p50, metrics.timing.trial_seconds_p95
    if middle is not None and slow is not None:
        yield f"latency per trial: p50 {latency(middle)}, p95 {latency(slow)}"


def _usage(usage: Usage) -> str:
    tokens = "tokens unknown" if usage.tokens is None else f"{usage.tokens:,} tokens"
    return f"{tokens} · {'cost unknown' if usage.cost is None else dollars(usage.cost)}"


def _took(all_of_it: float, wall: float | None) -> str:
    """Format how long this process took, and how long the whole run took if earlier processes worked on it."""
    if wall is None:
        return duration(all_of_it)
    if all_of_it > wall + max(1.0, wall / 10):
        return f"{duration(wall)} (the whole run: {duration(all_of_it)})"
    return duration(wall)


def _paid(usage: Usage, judges: Usage, spent: Spent | None) -> str | None:
    """Say what this run paid itself, unless that equals the cost of its outputs and grades."""
    if spent is None:
        return None
    if usage.cost is not None and judges.cost is not None:
        worth = usage.cost + judges.cost
        if spent.unpriced:  # failed attempts may cost something as well
            return (
                f"this run paid at least {dollars(spent.cost)}: what {spent.unpriced:,} of its requests cost is unknown"
            )
        if dollars(worth) == dollars(spent.cost) or math.isclose(worth, spent.cost, rel_tol=1e-6):
            return None
        if spent.cost > worth:
            return f"this run paid {dollars(spent.cost)}, {_more_than(dollars(worth))}"
        return f"total {dollars(worth)}, of which this run paid {dollars(spent.cost)}; the rest was reused"
    if usage.tokens is None or judges.tokens is None or spent.unmetered:
        return None
    tokens = usage.tokens + judges.tokens
    if tokens == spent.tokens:
        return None
    if spent.tokens > tokens:
        return f"this run used {spent.tokens:,} tokens, {_more_than(f'{tokens:,}')}"
    return f"of the {tokens:,} tokens this run used {spent.tokens:,} itself; the rest was reused"


def _more_than(worth: str) -> str:
    others = "calls that failed, were repeated or belong to unfinished trials count, too"
    return f"more than the {worth} of its outputs and grades: {others}"


def missing(so_far: Metrics) -> str:
    """Say what the numbers of an unfinished run do not cover."""
    unmade = so_far.total - so_far.outputs
    parts = []
    if unmade:
        parts.append(
            f"{unmade:,} of {format_count(so_far.total, 'trial')} {'has' if unmade == 1 else 'have'} no output"
        )
    counts = {name: grader.ungraded for name, grader in so_far.graders.items() if grader.ungraded}
    if counts:
        most = sorted(counts, key=lambda name: -counts[name])
        named = ", ".join(f"{name} {counts[name]:,}" for name in most[:_SHOWN])
        more = ", …" if len(most) > _SHOWN else ""
        verb = "has" if len(counts) == 1 else "have"
        parts.append(f"{format_count(len(counts), 'grader')} {verb} no verdict on some outputs ({named}{more})")
    return f"incomplete: {'; '.join(parts) or 'trials are missing'}. Scores cover only what was graded."

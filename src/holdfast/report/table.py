"""The table and the lines that a command ends with."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import msgspec
from rich.text import Text

from holdfast.display.format import interval_text, share
from holdfast.display.grid import Column, fit_table, make_console
from holdfast.display.terminal import echo_json
from holdfast.errors import BudgetReached, Fault, Interrupted, Waiting, with_hint
from holdfast.report.breakdown_table import breakdown_tables
from holdfast.report.example import failure_lines
from holdfast.report.preview import preview
from holdfast.report.summary import facts, failed, missing, retried, uncertain, with_raised_limit
from holdfast.report.waiting import batch_lines
from holdfast.spec.redact import without_secrets

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console, RenderableType
    from rich.table import Table

    from holdfast.plan.identity import RunIdentity
    from holdfast.plan.plan import Plan
    from holdfast.report.outcome import Outcome
    from holdfast.store.metrics import GraderMetrics, Metrics
    from holdfast.store.rundir import RunDir
    from holdfast.store.spent import Spent


def print_outcome(
    outcome: Outcome, command: str, again: str = "Use --fresh to start from scratch.", run: str = ""
) -> None:
    """Print the numbers of a finished run, or how to resume an unfinished one.

    `run` is how commands name the run; with it, the end says how to look at failures.
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
    """Make the table of graders. Those that look at no row are named below it."""
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
        # Of all columns pass@1 says the least: it is `passed` by `graded`.
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
    """Choose green where all passed, red where none did."""
    if not values.n:
        return ""
    return "green" if not values.failed else "red" if not values.passed else "yellow"


def _print_metrics(console: Console, outcome: Outcome, metrics: Metrics, *, so_far: bool = False) -> None:
    for piece in draw_metrics(metrics, console.width, outcome.spent, outcome.wall, so_far=so_far):
        console.print(piece, soft_wrap=isinstance(piece, Text) or None)


def _print_failures(console: Console, outcome: Outcome, *, left_out: bool = False) -> None:
    for line in retried(outcome.failures):
        console.print(line)
    for line in failed(outcome.failures, left_out=left_out):
        console.print(Text(line, style="red"))


def print_side_by_side(first: Outcome, second: Outcome) -> None:
    """Two finished runs of one eval, grader by grader, with the paired difference. They are never averaged."""
    from holdfast.report.compare import compare_metrics, read_scores
    from holdfast.report.run_view import RunView

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
                f"{row.difference.mean:+.3f}",
                row.interval,
                f"{row.difference.samples:,}",
            )
        )
    console = make_console()
    console.print(fit_table(columns, rows, console.width, title="side by side"))


def _print_unfinished(console: Console, outcome: Outcome, command: str, run: str) -> None:
    plan, reason = outcome.plan, outcome.reason
    if outcome.so_far is not None:
        _print_metrics(console, outcome, outcome.so_far, so_far=True)
        console.print(Text(missing(outcome.so_far), style="bold yellow"))
    _print_failures(console, outcome)
    if isinstance(reason, Fault):
        console.print(Text(f"stopped: {reason}", style="bold red"))
    elif isinstance(reason, BudgetReached):
        console.print(Text(with_hint(reason.message, reason.remedy), style="bold yellow"), soft_wrap=True)
        command = with_raised_limit(command, reason)
    elif isinstance(reason, Interrupted):
        console.print(Text("interrupted; everything that finished is on disk", style="bold yellow"))
    for line in batch_lines(outcome.rundir):
        console.print(line, soft_wrap=True)
    for line in uncertain(outcome.failures, run or shlex.quote(str(outcome.rundir.path))):
        console.print(Text(line, style="bold yellow"), soft_wrap=True)
    done = plan.total - plan.to_run
    ungraded = f", {plan.to_grade:,} of them without all their grades" if plan.to_grade else ""
    console.print(f"{done:,} of {plan.total:,} trials have an output{ungraded}")
    if outcome.skipped_graders and plan.to_run == 0:
        console.print("Graders were skipped: the same command without --skip-graders grades these outputs.")
        return
    if outcome.grade_only and plan.to_run:
        lack = "trial has" if plan.to_run == 1 else "trials have"
        console.print(f"{plan.to_run:,} {lack} no output yet; `holdfast eval` runs them. Grading never does.")
        if reason is None and not plan.to_grade:
            return
    if isinstance(reason, Waiting):
        console.print("Collect the results with:")
    elif reason is None:
        main, *workers = outcome.rundir.journals("errors")
        errors = main if main.exists() or not workers else outcome.rundir.workers / "*" / main.name
        uncertain_trials = 0 if outcome.failures is None else len(outcome.failures.uncertain)
        to_run = 0 if outcome.grade_only else plan.to_run - uncertain_trials
        pending = (0 if outcome.skipped_graders else plan.to_grade) + to_run
        if not pending:
            return
        state = "trial has errors and stays pending" if pending == 1 else "trials have errors and stay pending"
        console.print(f"{pending:,} {state}; every attempt is in {errors}", soft_wrap=True)
        console.print("Run the command again to retry only these, or add --accept-errors to finish without them:")
    else:
        console.print("Resume with:")
    console.print(f"  {command}", soft_wrap=True)


def print_compiled(planned: Sequence[tuple[RunIdentity, RunDir, Plan]], *, as_json: bool) -> None:
    """Print the compiled eval and the plan of its run, and of its baseline's if it has one."""
    if as_json:
        target, *baseline = [plan_as_json(*each) for each in planned]
        data = {**target, **({"baseline": baseline[0]} if baseline else {})}
        echo_json(msgspec.json.encode(data))
        return
    from io import StringIO

    from ruamel.yaml import YAML

    yaml, text = YAML(), StringIO()
    yaml.dump(_shortened(without_secrets(planned[0][0].spec.document.data)), text)
    console = make_console()
    console.print(text.getvalue().rstrip(), markup=False, soft_wrap=True)
    console.print()
    for (_, rundir, plan), what in zip(planned, ("run", "baseline"), strict=False):
        console.print(f"{what}: {rundir.path}{' (finished)' if rundir.finished else ''}", soft_wrap=True)
        console.print(str(plan), soft_wrap=True)
    for notice in planned[0][0].plan_notices:
        console.print(Text(f"note: {notice}", style="yellow"), soft_wrap=True)


def _shortened(data: dict[str, Any]) -> dict[str, Any]:
    """Return an eval for the eye: of a benchmark with many tasks, only how many there are."""
    about = (data.get("metadata") or {}).get("benchmark")
    if not isinstance(about, dict) or len(about.get("tasks") or ()) < 2:
        return data
    shorter = {**about, "tasks": f"{len(about['tasks'])} tasks", "groups": f"{len(about.get('groups') or ())} groups"}
    shorter["dataset"] = list(dict.fromkeys(each["path"] for each in about.get("dataset") or ()))
    return {**data, "metadata": {**data["metadata"], "benchmark": shorter}}


def plan_as_json(identity: RunIdentity, rundir: RunDir, plan: Plan) -> dict[str, Any]:
    """Describe the plan of a run for programs."""
    return {
        "run": str(rundir.path),
        "already_finished": rundir.finished,
        **{name: getattr(plan, name) for name in ("total", "finished", "reused", "to_grade", "to_run", "uncertain")},
        "lenders": dict(plan.lenders),
        "reasons": plan.reasons,
        "notices": identity.plan_notices,
        "preview": preview(identity, plan, rundir).as_dict(),
        "eval": without_secrets(identity.spec.document.data),
    }

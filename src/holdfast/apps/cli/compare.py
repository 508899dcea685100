"""`holdfast compare`: runs on the same samples, with paired statistics."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from holdfast.apps.cli.errors import command_line
from holdfast.apps.cli.flags import (
    complete_runs,
    env_file_options,
    load_env_file,
    lock_timeout,
    runs_dir_option,
    runs_directory,
)
from holdfast.apps.cli.subjects import fetch_run, open_run
from holdfast.display.displays import make_display
from holdfast.display.grid import Column, fit_table, make_console
from holdfast.display.terminal import echo, echo_json
from holdfast.engine.pairwise import judge_pairs
from holdfast.engine.session import Options
from holdfast.errors import UsageError
from holdfast.plan.changes import format_count
from holdfast.plugins.exporters.html import write_comparison
from holdfast.report.compare import BY_COLUMNS, COLUMNS, compare_scores, corrected_for, read_scores
from holdfast.report.pairwise import bradley_terry
from holdfast.report.table import MOST_ROWS, print_outcome
from holdfast.spec.document import read_document
from holdfast.store.rundir import RunDir

if TYPE_CHECKING:
    from rich.console import Console

    from holdfast.engine.pairwise import Judgement
    from holdfast.report.compare import Comparison


_SHOWN_FLIPS = 10
_SHOWN_VALUES = 10


@click.command("compare")
@click.argument("runs", nargs=-1, required=True, metavar="RUN RUN…", shell_complete=complete_runs)
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON, with every sample that passed in only one of the runs."
)
@click.option(
    "--judge",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    metavar="FILE",
    help="Let a judge model decide which of two answers is better. FILE describes the judge.",
)
@click.option(
    "--to",
    "form",
    type=click.Choice(["html"]),
    help="Write the comparison as one page to send, instead of printing it.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="With --to, the file to write [default: compare-ID-ID.html].",
)
@click.option("--accept-errors", is_flag=True, help="With --judge, finish even if some pairs could not be judged.")
@runs_dir_option
@env_file_options
def command(
    runs: tuple[str, ...],
    as_json: bool,
    judge: Path | None,
    form: str | None,
    output: Path | None,
    accept_errors: bool,
    runs_dir: Path | None,
) -> int:
    """Compare the first RUN (path, id, invocation or HOST:PATH) with each of the others, on the samples they share.

    With --judge, a model judges the answers of every pair of runs in both orders. Its verdicts are stored below the
    runs directory; the same command resumes the comparison and asks nothing twice.
    """
    if len(runs) < 2:
        raise UsageError("compare needs at least two runs", remedy="`holdfast ls` lists them.")
    if form is not None and (as_json or judge is not None):
        raise UsageError("--to cannot be combined with --json or --judge")
    if output is not None and form is None:
        raise UsageError("--output needs --to html")
    if judge is not None:
        load_env_file(judge.parent, Path())
        return _judge_runs(runs, judge, runs_directory(runs_dir), as_json=as_json, accept_errors=accept_errors)
    if accept_errors:
        raise UsageError("--accept-errors needs --judge")
    views = [open_run(run, runs_directory(runs_dir)) for run in runs]
    scored = [read_scores(view) for view in views]
    if form is not None:
        path = output or Path(f"compare-{'-'.join(run.metrics.run for run in scored)}.html")
        write_comparison(views, scored, path)
        echo(path)
        return 0
    first, *others = scored
    comparisons = [compare_scores(first, other) for other in others]
    if as_json:
        echo_json(msgspec.json.encode([_as_json(comparison) for comparison in comparisons]))
        return 0
    for comparison in comparisons:
        _print(comparison)
    return 0


def _as_json(comparison: Comparison) -> dict[str, Any]:
    return {
        "first": comparison.first.path,
        "second": comparison.second.path,
        "metrics": comparison.metrics,
        **({"by": {breakdown.field: breakdown for breakdown in comparison.by}} if comparison.by else {}),
        "differences": comparison.differences,
        "not_compared": comparison.not_compared,
        "flips": comparison.flips,
        "only_first": comparison.only_first,
        "only_second": comparison.only_second,
    }


def _print(comparison: Comparison) -> None:
    console = make_console(piped_width=140)
    console.print(f"first:  {comparison.first.label}\nsecond: {comparison.second.label}", soft_wrap=True)
    if comparison.differences:
        console.print(f"the runs differ in: {'; '.join(comparison.differences)}", soft_wrap=True)
    for name in comparison.not_compared:
        console.print(f"{name}: not compared, because it is not the same grader in both runs", soft_wrap=True)
    spare = {"95 % interval": 1, "p (corrected)": 2, "test": 3}
    texts = ("metric", "test", "verdict")
    columns = [Column(title, name=title in texts, spare=spare.get(title, 0)) for title in COLUMNS]
    console.print(fit_table(columns, comparison.rows(), console.width))
    if len(comparison.metrics) > 1:
        console.print(corrected_for(len(comparison.metrics)))
    _print_breakdowns(console, comparison)
    shared = len(comparison.first.samples & comparison.second.samples)
    for row in comparison.metrics:
        if row.samples < shared:
            console.print(f"{row.metric}: only {row.samples:,} of {shared:,} samples have a verdict in both runs")
        if row.detectable is not None and row.detectable <= 1:
            console.print(
                f"{row.metric}: with {row.samples:,} samples, a real difference of "
                f"{row.detectable:.3f} would be detected 80 % of the time"
            )
    for metric, flips in itertools.groupby(comparison.flips, key=lambda flip: flip.metric):
        gained = [flip.gained for flip in flips]
        console.print(
            f"{metric}: {format_count(sum(gained), 'sample')} passed only in the first run, "
            f"{len(gained) - sum(gained):,} only in the second"
        )
    for flip in comparison.flips[:_SHOWN_FLIPS]:
        console.print(
            f"  {flip.sample}  {flip.metric}: only in the {'first' if flip.gained else 'second'}", soft_wrap=True
        )
    if len(comparison.flips) > _SHOWN_FLIPS:
        console.print(f"… and {len(comparison.flips) - _SHOWN_FLIPS:,} more flips; --json has them all")
    for count, which in ((len(comparison.only_first), "first"), (len(comparison.only_second), "second")):
        if count:
            console.print(f"{count:,} samples are only in the {which} run and are left out")


def _print_breakdowns(console: Console, comparison: Comparison) -> None:
    """Print a table by each field, of the graders that count for the score."""
    weighted = [name for name, grader in comparison.first.metrics.graders.items() if grader.weight]
    spare = {"metric": 4 if len(weighted) < 2 else 0, "samples": 3, "p (corrected)": 2, "95 % interval": 1}
    for breakdown in comparison.by:
        rows = breakdown.rows(weighted)
        columns = [
            Column(title if number else breakdown.field, name=title in ("value", "metric"), spare=spare.get(title, 0))
            for number, title in enumerate(BY_COLUMNS)
        ]
        console.print(fit_table(columns, rows[:MOST_ROWS], console.width, title=f"by {breakdown.field}"))
        console.print(corrected_for(sum(map(len, breakdown.values.values()))))
        if len(rows) > MOST_ROWS:
            console.print(f"… and {len(rows) - MOST_ROWS:,} more; --json has them all")
        for values, which in ((breakdown.only_first, "first"), (breakdown.only_second, "second")):
            if values:
                more = f" and {len(values) - _SHOWN_VALUES:,} more" if len(values) > _SHOWN_VALUES else ""
                named = ", ".join(values[:_SHOWN_VALUES])
                console.print(f"{breakdown.field}: only in the {which} run: {named}{more}", soft_wrap=True)


def _judge_runs(runs: tuple[str, ...], judge: Path, runs_dir: Path, *, as_json: bool, accept_errors: bool) -> int:
    """Judge every pair of runs, print how often each wins, and return the exit code."""
    rundirs = [RunDir(fetch_run(run, runs_dir)) for run in runs]
    options = Options(runs_dir=runs_dir, accept_errors=accept_errors, wait=lock_timeout(wait=False))
    display = make_display("none" if as_json else None)
    comparison = judge_pairs(rundirs, read_document(judge), judge.resolve().parent, options, display)
    outcome = comparison.outcome
    if outcome is not None and outcome.metrics is None:
        print_outcome(outcome, command_line())
        return outcome.exit_code
    report = _judgement_report(comparison)
    if as_json:
        echo_json(msgspec.json.encode(report))
    else:
        _print_judgement(report)
    return 0


def _judgement_report(comparison: Judgement) -> dict[str, Any]:
    outcome, pairs = comparison.outcome, comparison.pairs
    metrics = None if outcome is None else outcome.metrics
    runs = list(dict.fromkeys(name for pair in pairs for name in (pair.first, pair.second)))
    return {
        "runs": runs,
        "judge": comparison.judge,
        "verdicts": None if outcome is None else str(outcome.rundir.path),
        "coverage": 1.0 if metrics is None else metrics.coverage,
        "pairs": [pair.summary() for pair in pairs],
        "bradley_terry": bradley_terry(runs, pairs) if len(runs) > 2 else None,
        "first_shown": comparison.first_shown,
        "left_out": comparison.left_out,
        "usage": None if metrics is None else metrics.usage,
    }


def _print_judgement(report: dict[str, Any]) -> None:
    from rich.table import Table

    console = make_console(140)
    for pair in report["pairs"]:
        console.print(f"first:  {pair['first']}\nsecond: {pair['second']}", soft_wrap=True)
        table = Table()
        for column in ("win rate of the first", "95 % interval", "wins", "ties", "losses", "same in both orders"):
            table.add_column(column, justify="right")
        table.add_row(
            "–" if pair["win_rate"] is None else f"{pair['win_rate']:.3f}",
            f"{pair['low']:.3f} – {pair['high']:.3f}" if pair["low"] is not None else "–",
            *(f"{pair[key]:,}" for key in ("wins", "ties", "losses")),
            "–" if pair["agreement"] is None else f"{pair['agreement']:.0%}",
        )
        console.print(table)
        if pair["identical"]:
            console.print(f"{pair['identical']:,} of the ties are identical answers, not sent to the judge")
    if report["bradley_terry"]:
        console.print("Bradley-Terry ratings, 1000 on average; 400 more means 10 to 1:")
        for run, rating in sorted(report["bradley_terry"].items(), key=lambda item: -item[1]):
            console.print(f"  {rating:6.0f}  {run}", soft_wrap=True)
    if report["first_shown"] is not None:
        console.print(f"the answer shown first won {report['first_shown']:.0%} of its comparisons")
    if report["left_out"]:
        console.print(f"{report['left_out']:,} trials are left out: one run lacks them, or was asked something else")
    if report["coverage"] < 1:
        console.print(f"coverage {report['coverage']:.1%}: the other pairs could not be judged and are excluded")
    if report["verdicts"] is not None:
        echo(f"verdicts: {report['verdicts']}")

"""`holdfast compare`: runs on the same samples, with paired statistics."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.flags import complete_runs, env_file_options, load_env_file
from holdfast.cli.pairwise import judge_runs
from holdfast.cli.runs import runs_dir_option, runs_directory
from holdfast.cli.subjects import open_run
from holdfast.display.grid import Column, fit_table, make_console
from holdfast.display.terminal import echo, echo_json
from holdfast.errors import UsageError
from holdfast.export.html import write_comparison
from holdfast.plan.changes import format_count
from holdfast.report.compare import BY_COLUMNS, COLUMNS, compare_scores, corrected_for, read_scores
from holdfast.report.pairs import metric_pair
from holdfast.report.table import MOST_ROWS

if TYPE_CHECKING:
    from rich.console import Console

    from holdfast.report.compare import Breakdown, Comparison

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
        return judge_runs(runs, judge, runs_directory(runs_dir), as_json=as_json, accept_errors=accept_errors)
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
        import msgspec

        echo_json(msgspec.json.encode([_as_json(comparison) for comparison in comparisons]))
        return 0
    for comparison in comparisons:
        _print(comparison)
    return 0


def _as_json(comparison: Comparison) -> dict[str, Any]:
    return {
        "first": comparison.first.path,
        "second": comparison.second.path,
        "metrics": [metric_pair(row) for row in comparison.metrics],
        **({"by": {breakdown.field: _by_as_json(breakdown) for breakdown in comparison.by}} if comparison.by else {}),
        "differences": comparison.differences,
        "not_compared": comparison.not_compared,
        "flips": comparison.flips,
        "only_first": comparison.only_first,
        "only_second": comparison.only_second,
    }


def _by_as_json(breakdown: Breakdown) -> dict[str, Any]:
    return {
        "values": {value: [metric_pair(row) for row in rows] for value, rows in breakdown.values.items()},
        "only_first": breakdown.only_first,
        "only_second": breakdown.only_second,
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
        if row.difference.samples < shared:
            console.print(
                f"{row.metric}: only {row.difference.samples:,} of {shared:,} samples have a verdict in both runs"
            )
        if row.difference.detectable is not None and row.difference.detectable <= 1:
            console.print(
                f"{row.metric}: with {row.difference.samples:,} samples, a real difference of "
                f"{row.difference.detectable:.3f} would be detected 80 % of the time"
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

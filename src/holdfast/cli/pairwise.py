"""`holdfast compare --judge`: runs judged against each other by a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.cli.errors import command_line
from holdfast.cli.flags import lock_timeout
from holdfast.cli.subjects import fetch_run
from holdfast.display.displays import make_display
from holdfast.display.grid import make_console
from holdfast.display.terminal import echo, echo_json
from holdfast.engine.options import Options
from holdfast.engine.pairwise import judge_pairs
from holdfast.report.pairwise import bradley_terry
from holdfast.report.table import print_outcome
from holdfast.spec.document import read_document
from holdfast.store.rundir import RunDir

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.engine.pairwise import Judgement


def judge_runs(runs: tuple[str, ...], judge: Path, runs_dir: Path, *, as_json: bool, accept_errors: bool) -> int:
    """Judge every pair of runs and print who wins how often; the exit code."""
    rundirs = [RunDir(fetch_run(run, runs_dir)) for run in runs]
    options = Options(runs_dir=runs_dir, accept_errors=accept_errors, wait=lock_timeout(wait=False))
    display = make_display("none" if as_json else None)
    comparison = judge_pairs(rundirs, read_document(judge), judge.resolve().parent, options, display)
    outcome = comparison.outcome
    if outcome is not None and outcome.metrics is None:
        print_outcome(outcome, command_line())
        return outcome.exit_code
    report = _report(comparison)
    if as_json:
        import msgspec

        echo_json(msgspec.json.encode(report))
    else:
        _print(report)
    return 0


def _report(comparison: Judgement) -> dict[str, Any]:
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


def _print(report: dict[str, Any]) -> None:
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

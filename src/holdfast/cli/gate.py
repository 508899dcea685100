"""`holdfast gate`: may this run pass?"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.completion import complete_runs
from holdfast.cli.runs import find_run, runs_dir_option, runs_directory
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from holdfast.report.gate import Check
    from holdfast.report.run_view import RunView
    from holdfast.store.metrics import Metrics


@click.command("gate")
@click.argument("current", metavar="RUN", shell_complete=complete_runs)
@click.option("--baseline", metavar="RUN", help="Run whose metrics must be reached.")
@click.option(
    "--max-regression-pct",
    type=click.FloatRange(0),
    default=0.0,
    metavar="PCT",
    help="How far a metric may fall below the baseline, in percent of its value [default: 0].",
)
@click.option(
    "--min",
    "minima",
    multiple=True,
    metavar="METRIC=VALUE",
    help="Minimum for a grader, score or passed, such as correct=0.8. Repeatable.",
)
@click.option(
    "--golden",
    multiple=True,
    metavar="ID",
    help="Sample that must pass, in addition to rows with `golden: true`. Repeatable.",
)
@click.option("--ignore-golden-rows", is_flag=True, help="Allow rows with `golden: true` to fail.")
@click.option(
    "--new",
    type=click.Choice(["ignore", "must-pass"]),
    default="ignore",
    help="Samples that the baseline lacks [default: ignore].",
)
@click.option(
    "--removed",
    type=click.Choice(["ignore", "warn", "fail"]),
    default="warn",
    help="Samples that only the baseline has [default: warn].",
)
@click.option(
    "--format",
    "shape",
    type=click.Choice(["human", "json", "markdown", "github"]),
    default="human",
    help="Output format [default: human].",
)
@runs_dir_option
def command(current: str, baseline: str | None, minima: tuple[str, ...], golden: tuple[str, ...], **given: Any) -> int:
    """Check the finished RUN (path or id) against minimum scores, a baseline and golden samples.

    A sample is golden if its row has `golden: true` in RUN or in the baseline; a missing golden sample fails. The exit
    code is 0 if all conditions are met, and 1 if not. A run that is not finished is an error, never a pass.
    """
    from holdfast.report.compare import read_scores
    from holdfast.report.gate import Rules, check_gate
    from holdfast.report.run_view import RunView
    from holdfast.store.rundir import RunDir

    root = runs_directory(given["runs_dir"])
    views = [RunView(RunDir(find_run(name, root))) for name in (current, baseline) if name]
    run, *others = map(read_scores, views)
    base = others[0] if others else None
    wanted = dict(_minimum(text, run.metrics) for text in minima)
    must_pass = set(golden)
    if not given["ignore_golden_rows"]:
        for view in views:
            must_pass.update(_golden_rows(view))
    if base is None and not wanted and not must_pass:
        raise UsageError(
            "the gate has nothing to check", remedy="Give --baseline RUN, --min METRIC=VALUE or --golden ID."
        )
    rules = Rules(given["max_regression_pct"], must_pass, wanted, given["new"], given["removed"])
    checks = check_gate(run, base, rules)
    _show(checks, given["shape"])
    return 0 if all(check.passed for check in checks) else 1


def _minimum(text: str, metrics: Metrics) -> tuple[str, float]:
    from holdfast.report.gate import metric_value

    name, equals, value = text.rpartition("=")
    try:
        least = float(value)
    except ValueError:
        equals = ""
        least = 0.0
    if not equals:
        raise UsageError(f"--min {text!r} is not METRIC=VALUE, for example --min correct=0.8")
    if metric_value(metrics, name) is None and name not in metrics.graders:
        names = ", ".join([*metrics.graders, "score", "passed"])
        raise UsageError(f"--min {text!r}: there is no metric {name!r}", remedy=f"This run has: {names}.")
    if not 0 <= least <= 1:  # also refuses NaN
        raise UsageError(f"--min {text!r}: scores are between 0 and 1", remedy="For 80 %, give 0.8.")
    return name, least


def _golden_rows(view: RunView) -> list[str]:
    """Return the samples whose row says `golden: true`, where the dataset is still there."""
    golden, unknown = set(), 0
    for trial in view.trials():
        unknown += not trial.fields
        if trial.fields.get("golden") is True:
            golden.add(trial.output.sample)
    if unknown:  # said, because a gate that silently asks for less is a pass nobody gave
        click.echo(
            f"{view.rundir.path}: the dataset is gone or has changed: which rows say `golden: true` is not known; "
            "name them with --golden",
            err=True,
        )
    return sorted(golden)


def _show(checks: list[Check], shape: str) -> None:
    passed = all(check.passed for check in checks)
    word = "passed" if passed else "failed"
    count = "1 check" if len(checks) == 1 else f"{len(checks)} checks"
    if shape == "json":
        import msgspec

        sys.stdout.write(msgspec.json.encode({"passed": passed, "checks": checks}).decode() + "\n")
    elif shape == "markdown":
        click.echo(_markdown(checks, word))
    elif shape == "github":
        for check in checks:
            if not check.passed or check.warning:
                level = "warning" if check.passed else "error"
                click.echo(f"::{level} title=holdfast gate::{_annotation(check.message)}")
        click.echo(f"::notice title=holdfast gate::gate {word}, {count}")
        if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
            try:
                with Path(summary).open("a", encoding="utf-8") as file:
                    file.write(_markdown(checks, word) + "\n")
            except OSError as error:
                click.echo(f"::warning title=holdfast gate::cannot write the step summary: {_annotation(str(error))}")
    else:
        for check in checks:
            click.echo(f"{_mark(check, 'ok  ', 'warn', 'FAIL')}  {check.message}")
        click.echo(f"gate {word}")


def _mark(check: Check, passed: str, warning: str, failed: str) -> str:
    if not check.passed:
        return failed
    return warning if check.warning else passed


def _markdown(checks: list[Check], word: str) -> str:
    rows = [f"| {_mark(check, '✓', '⚠', '✗')} | {_cell(check.what)} | {_cell(check.message)} |" for check in checks]
    return "\n".join([f"**Gate {word}**", "", "| | check | |", "|---|---|---|", *rows])


def _cell(text: str) -> str:
    """Text in a Markdown table: names of samples are whatever the dataset has."""
    return " ".join(text.split()).replace("|", "\\|")


def _annotation(text: str) -> str:
    """Text in a workflow command of GitHub, which ends at the line's end and reads per cent signs."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")

"""`holdfast gate`: may this run pass?"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.completion import complete_runs
from holdfast.cli.errors import show_note
from holdfast.cli.runs import fetch_run, runs_dir_option, runs_directory
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.report.gate import Check, GateResult


@click.command("gate")
@click.argument("current", metavar="RUN", shell_complete=complete_runs)
@click.option("--baseline", metavar="RUN", help="Run whose metrics must be reached.")
@click.option(
    "--max-regression-pct",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    metavar="PCT",
    help="How far a metric may fall below the baseline, in percent of its value.",
)
@click.option(
    "--min",
    "minima",
    multiple=True,
    metavar="METRIC=VALUE",
    help="Minimum for a grader, GRADER/pass@K, score or passed, such as correct=0.8 or correct/pass@3=0.9. Repeatable.",
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
def command(current: str, baseline: str | None, minima: tuple[str, ...], golden: tuple[str, ...], **flags: Any) -> int:
    """Check the finished RUN (path, id, invocation or HOST:PATH) against minimum scores, a baseline and golden samples.

    A sample is golden if its row has `golden: true` in RUN or in the baseline; a missing golden sample fails. The exit
    code is 0 if all conditions are met, and 1 if not. A run that is not finished is an error, never a pass.
    """
    from holdfast.report.gate import Rules, gate_run
    from holdfast.report.run_view import RunView
    from holdfast.store.rundir import RunDir

    root = runs_directory(flags["runs_dir"])
    view, base = (RunView(RunDir(fetch_run(name, root))) if name else None for name in (current, baseline))
    assert view is not None
    rules = Rules(flags["max_regression_pct"], golden, dict(map(_minimum, minima)), flags["new"], flags["removed"])
    result = gate_run(view, base, rules, golden_rows=not flags["ignore_golden_rows"])
    for notice in result.notices:
        show_note(notice)
    _show(result, flags["shape"])
    return 0 if result else 1


def _minimum(text: str) -> tuple[str, float]:
    name, equals, value = text.rpartition("=")
    try:
        minimum = float(value)
    except ValueError:
        equals, minimum = "", 0.0
    if not equals:
        raise UsageError(f"--min {text!r} is not METRIC=VALUE, for example --min correct=0.8")
    return name, minimum


def _show(result: GateResult, shape: str) -> None:
    checks, word = result.checks, "passed" if result else "failed"
    count = "1 check" if len(checks) == 1 else f"{len(checks)} checks"
    if shape == "json":
        import msgspec

        sys.stdout.write(msgspec.json.encode({"passed": result.passed, "checks": checks}).decode() + "\n")
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
        click.echo(str(result))


def _mark(check: Check, passed: str, warning: str, failed: str) -> str:
    if not check.passed:
        return failed
    return warning if check.warning else passed


def _markdown(checks: Sequence[Check], word: str) -> str:
    rows = [f"| {_mark(check, '✓', '⚠', '✗')} | {_cell(check.what)} | {_cell(check.message)} |" for check in checks]
    return "\n".join([f"**Gate {word}**", "", "| | check | |", "|---|---|---|", *rows])


def _cell(text: str) -> str:
    """Text in a Markdown table: names of samples are whatever the dataset has."""
    return " ".join(text.split()).replace("|", "\\|")


def _annotation(text: str) -> str:
    """Text in a workflow command of GitHub, which ends at the line's end and reads per cent signs."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")

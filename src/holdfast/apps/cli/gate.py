"""`holdfast gate`: may this run pass?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.apps.cli.errors import show_note
from holdfast.apps.cli.flags import complete_runs, runs_dir_option, runs_directory
from holdfast.apps.cli.subjects import open_run
from holdfast.display.terminal import echo, echo_json
from holdfast.errors import Exit, UsageError
from holdfast.report.gate import Rules, gate_run, margin_of

if TYPE_CHECKING:
    from holdfast.report.gate import GateResult
    from holdfast.store.metrics import Check


@click.command("gate")
@click.argument("current", metavar="RUN", shell_complete=complete_runs)
@click.option("--baseline", metavar="RUN", help="Run that this one must not be worse than.")
@click.option(
    "--max-drop",
    metavar="DROP",
    help="How far a metric may fall below the baseline: 2pt or 2 for 2 points, 0.02 for the same [default: 2pt].",
)
@click.option(
    "--confidence",
    type=float,
    default=0.95,
    show_default=True,
    metavar="SHARE",
    help="Confidence of each verdict against the baseline.",
)
@click.option(
    "--inconclusive",
    type=click.Choice(["pass", "fail"]),
    default="pass",
    help="Whether the gate passes, with a warning, if there are too few samples to tell [default: pass].",
)
@click.option(
    "--max-regression-pct",
    type=click.FloatRange(0),
    metavar="PCT",
    help="Instead of --max-drop, allow a metric to fall by so many percent of its value. This tests nothing.",
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

    Against a baseline, each metric is tested on the samples that both runs have: it is worse, not worse, or there are
    too few samples to tell. A system that did not change is worse in at most 5 % of the gates.
    """
    root = runs_directory(flags["runs_dir"])
    if baseline is None and (flags["max_drop"] or flags["max_regression_pct"] is not None):
        raise UsageError("--max-drop and --max-regression-pct need --baseline")
    view, base = (open_run(name, root) if name else None for name in (current, baseline))
    assert view is not None
    allowed = flags["max_regression_pct"]
    rules = Rules(
        margin_of(flags["max_drop"], allowed),
        flags["confidence"],
        flags["inconclusive"],
        allowed,
        golden,
        dict(map(_minimum, minima)),
        flags["new"],
        flags["removed"],
    )
    result = gate_run(view, base, rules, golden_rows=not flags["ignore_golden_rows"])
    for notice in result.notices:
        show_note(notice)
    _show(result, flags["shape"])
    return Exit.FINISHED if result else Exit.GATE_FAILED


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

        echo_json(msgspec.json.encode({"passed": result.passed, "checks": checks}))
    elif shape == "markdown":
        echo(_markdown(result))
    elif shape == "github":
        for check in checks:
            if not check.passed or check.warning:
                level = "warning" if check.passed else "error"
                echo(f"::{level} title=holdfast gate::{_annotation(check.message)}")
        echo(f"::notice title=holdfast gate::gate {word}, {count}")
        if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
            try:
                with Path(summary).open("a", encoding="utf-8") as file:
                    file.write(_markdown(result) + "\n")
            except OSError as error:
                echo(f"::warning title=holdfast gate::cannot write the step summary: {_annotation(str(error))}")
    else:
        echo(str(result))


def _markdown(result: GateResult) -> str:
    """Return a comment for a pull request; by its first line, a later gate finds the comment to replace."""
    name = _cell(result.eval)
    tested = [check for check in result.checks if check.verdict is not None]
    others = [check for check in result.checks if check.verdict is None]
    against = f" (baseline `{_cell(result.baseline)}`)" if result.baseline else ""
    lines = [
        f"<!-- holdfast:{name.replace('-->', '')} -->",
        f"### {'✅' if result else '❌'} {name}: gate {'passed' if result else 'failed'}{against}",
    ]
    if tested:
        lines += ["", "| | metric | baseline | this run | difference | verdict |", "|---|---|---|---|---|---|"]
        lines += map(_tested_row, tested)
    if others:
        lines += ["", "| | check | |", "|---|---|---|"]
        lines += [f"| {_mark(check)} | {_cell(check.what)} | {_cell(check.message)} |" for check in others]
    worse = [check for check in tested if check.verdict == "worse"]
    if worse:
        moved = [f"`{_cell(check.what)}`: {check.fell:,} samples fell, {check.rose:,} rose." for check in worse]
        lines += ["", " ".join(moved)]
    if result.confidence is not None:
        lines += ["", f"A system that did not change is red in at most {100 - 100 * result.confidence:g} % of gates."]
    return "\n".join(lines)


def _tested_row(check: Check) -> str:
    numbers = [check.before, check.value, check.difference, check.low, check.high]
    before, value, difference, low, high = (100 * (number or 0.0) for number in numbers)
    apart = f"{difference:+.1f} ({low:+.1f} – {high:+.1f})".replace("-", "−")
    verdict = "**worse**" if check.verdict == "worse" else f"{check.verdict}"
    if check.verdict == "cannot tell":
        verdict = f"{verdict}: {check.message.partition('; ')[2]}"
    return f"| {_mark(check)} | {_cell(check.what)} | {before:.1f} % | {value:.1f} % | {apart} | {verdict} |"


def _mark(check: Check) -> str:
    return "❌" if not check.passed else "⚠️" if check.warning else "✅"


def _cell(text: str) -> str:
    """Escape a text for a Markdown table: names of samples may contain anything."""
    return " ".join(text.split()).replace("|", "\\|")


def _annotation(text: str) -> str:
    """Escape a text for a workflow command of GitHub, in which line ends and percent signs have a meaning."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")

"""`holdfast eval`: run an eval, or go on with it."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.errors import UsageError
from holdfast.spec.fields import parse_duration
from holdfast.spec.overrides import parse_override

if TYPE_CHECKING:
    from holdfast.display.types import Display
    from holdfast.spec.load import Eval


class _Duration(click.ParamType[float]):
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return float(parse_duration(value))
        except ValueError:
            return self.fail(f"{value!r} is not a duration such as 90s, 5m or 2h", param, ctx)


class _Concurrency(click.ParamType["int | str"]):
    name = "N|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == "auto":
            return "auto"
        if str(value).isdigit() and int(value) > 0:
            return int(value)
        return self.fail(f"{value!r} is neither a number above 0 nor auto", param, ctx)


@click.command("eval")
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]…")
@click.option("-m", "--model", help="Measure this model instead of the file's.")
@click.option("--trials", type=click.IntRange(1), help="Attempts per sample.")
@click.option("--limit", type=click.IntRange(1), help="Only the first N samples.")
@click.option("--concurrency", type=_Concurrency(), help="Requests in flight, or auto.")
@click.option("--fresh", "--force", is_flag=True, help="Set the earlier run aside and start anew.")
@click.option("--retry-failed", is_flag=True, help="Take up the errors of a run finished with --accept-errors.")
@click.option("--accept-errors", is_flag=True, help="Finish although some trials have errors.")
@click.option("--skip-graders", is_flag=True, help="Only generate; grade later.")
@click.option("--max-cost", type=float, metavar="USD", help="Stop starting trials at this cost.")
@click.option("--max-tokens", type=click.IntRange(1), help="Stop starting trials at so many tokens.")
@click.option("--max-time", type=_Duration(), help="Stop starting trials after e.g. 90s, 30m, 2h.")
@click.option("--runs-dir", type=click.Path(path_type=Path), help="Where runs are kept [$HOLDFAST_RUNS_DIR or ./runs].")
@click.option("--wait", is_flag=True, help="Wait for another process that holds this run.")
@click.option("-d", "--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@click.option("--display", type=click.Choice(["rich", "plain", "json", "none"]), help="How to show progress.")
def command(config: Path, overrides: tuple[str, ...], **given: Any) -> int:
    """Run the eval file CONFIG, or go on with it.

    The same command after any interruption continues where it stopped. KEY=VALUE overrides any key of
    the file, for example target.params.temperature=0.7.
    """
    from holdfast.spec.load import load_eval

    spec = load_eval(config, _overrides(overrides, given))
    options = _options(given)
    if given["dry_run"]:
        return _dry_run(spec, options.runs_dir)

    from holdfast.engine.run import run_eval
    from holdfast.report.table import print_outcome

    outcome = run_eval(spec, options, make_display(given["display"]))
    print_outcome(outcome, _command_line())
    return outcome.exit_code


def _overrides(overrides: tuple[str, ...], given: dict[str, Any]) -> list[tuple[tuple[str, ...], Any]]:
    """Options that stand for keys of the file, then KEY=VALUE, which has the last word."""
    named = {
        "model": ("target", "model"),
        "trials": ("trials",),
        "limit": ("dataset", "limit"),
        "concurrency": ("limits", "concurrency"),
        "max_cost": ("limits", "max_cost"),
        "max_tokens": ("limits", "max_tokens"),
        "max_time": ("limits", "max_time"),
    }
    chosen = [(path, given[option]) for option, path in named.items() if given[option] is not None]
    return [*chosen, *map(parse_override, overrides)]


def _options(given: dict[str, Any]) -> Any:
    from holdfast.engine.options import Options

    return Options(
        runs_dir=given["runs_dir"] or Path(os.environ.get("HOLDFAST_RUNS_DIR") or "runs"),
        fresh=given["fresh"],
        retry_failed=given["retry_failed"],
        accept_errors=given["accept_errors"],
        skip_graders=given["skip_graders"],
        wait=_patience(given["wait"]),
    )


def _patience(wait: bool) -> float:
    """Seconds to wait for a run that is held; -1 for as long as it takes."""
    text = os.environ.get("HOLDFAST_LOCK_TIMEOUT")
    if not text:
        return -1 if wait else 0
    try:
        return max(0.0, float(parse_duration(text)))
    except ValueError:
        raise UsageError(f"HOLDFAST_LOCK_TIMEOUT is {text!r}; it is a number of seconds") from None


def make_display(wanted: str | None) -> Display:
    """The display asked for; by default a live one on a terminal, lines elsewhere."""
    from holdfast.display.text import Events, Plain, Quiet

    kind = wanted or ("rich" if sys.stderr.isatty() else "plain")
    if kind == "rich":
        from holdfast.display.live import LiveDisplay

        return LiveDisplay()
    return Events() if kind == "json" else Plain() if kind == "plain" else Quiet()


def _dry_run(spec: Eval, runs_dir: Path) -> int:
    """The compiled eval and the plan, with nothing written."""
    from holdfast.engine.setup import identify
    from holdfast.plan.plan import make_plan
    from holdfast.report.table import print_compiled

    found = identify(spec)
    rundir = found.directory(runs_dir)
    rundir.read_manifest()
    plan = make_plan(found.survey, found.work, rundir.load(mend=False))
    print_compiled(found, rundir, plan)
    return 0


def _command_line() -> str:
    """This command as it can be typed again."""
    return shlex.join(["holdfast", *sys.argv[1:]])

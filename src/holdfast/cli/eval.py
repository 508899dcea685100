"""`holdfast eval`: run an eval, or go on with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.ending import run_shown
from holdfast.cli.export import export_after, export_also
from holdfast.cli.places import command_line, runs_dir_option, runs_directory
from holdfast.errors import UsageError
from holdfast.spec.fields import EXPORTS, parse_duration
from holdfast.spec.overrides import parse_override

if TYPE_CHECKING:
    from holdfast.display.types import Display
    from holdfast.engine.options import Options
    from holdfast.engine.run import Outcome
    from holdfast.spec.load import Eval


class _Duration(click.ParamType[float]):
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return float(parse_duration(value))
        except ValueError:
            return self.fail(f"{value!r} is not a duration such as 90s, 5m or 2h", param, ctx)


class Concurrency(click.ParamType["int | str"]):
    name = "N|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == "auto":
            return "auto"
        if str(value).isdigit() and int(value) > 0:
            return int(value)
        return self.fail(f"{value!r} is neither a number above 0 nor auto", param, ctx)


@click.command("eval")
@click.argument("config", required=False)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]…")
@click.option("-c", "--config", "named", metavar="CONFIG", help="A configuration for a cluster: a name or a path.")
@click.option("-r", "--run", metavar="PROFILE", help="Run CONFIG where this profile of env.toml says, and follow it.")
@click.option("-b", "--batch", metavar="PROFILE", help="The same, and leave it alone.")
@click.option("--force-squash", is_flag=True, help="Make .sqsh files of images anew.")
@click.option("-m", "--model", help="Measure this model instead of the file's.")
@click.option("--trials", type=click.IntRange(1), help="Attempts per sample.")
@click.option(
    "-t",
    "--task",
    "ids",
    multiple=True,
    metavar="GLOB",
    help="Only samples of this id or name; of a configuration only this task.",
)
@click.option("--tags", multiple=True, metavar="GLOB", help="Only samples with such a tag.")
@click.option("--limit", type=click.IntRange(1), help="Only the first N samples.")
@click.option("--concurrency", type=Concurrency(), help="Requests in flight, or auto.")
@click.option("--fresh", "--force", is_flag=True, help="Set the earlier run aside and start anew.")
@click.option("--retry-failed", is_flag=True, help="Take up the errors of a run finished with --accept-errors.")
@click.option("--accept-errors", is_flag=True, help="Finish although some trials have errors.")
@click.option("--accept-drift", is_flag=True, help="Keep outputs although the target's code changed.")
@click.option("--baseline-model", metavar="MODEL", help="Evaluate this model too, and compare.")
@click.option("--log-samples", is_flag=True, help="Also write the transcripts as samples.jsonl into the run.")
@click.option(
    "--output-path", type=click.Path(path_type=Path), metavar="DIR", help="Also write results and samples there."
)
@click.option("--export", "export", multiple=True, type=click.Choice(list(EXPORTS)), help="Also write it as this.")
@click.option("--workers", type=click.IntRange(1), help="Share the work out among so many processes on this machine.")
@click.option("--skip-graders", is_flag=True, help="Only generate; grade later.")
@click.option("--max-cost", type=float, metavar="USD", help="Stop starting trials at this cost.")
@click.option("--max-tokens", type=click.IntRange(1), help="Stop starting trials at so many tokens.")
@click.option("--max-time", type=_Duration(), help="Stop starting trials after e.g. 90s, 30m, 2h.")
@runs_dir_option
@click.option("--wait", is_flag=True, help="Wait for another process that holds this run.")
@click.option("-d", "--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@click.option("--json", is_flag=True, help="With --dry-run: the plan as JSON.")
@click.option("--display", type=click.Choice(["rich", "plain", "json", "none"]), help="How to show progress.")
def command(config: str | None, overrides: tuple[str, ...], **given: Any) -> int:
    """Run the eval file CONFIG, or go on with it.

    The same command after any interruption continues where it stopped. KEY=VALUE overrides any key of
    the file, for example target.params.temperature=0.7.

    With --run or --batch it runs where a profile of env.toml says. CONFIG is then an eval file, or a configuration:
    what to serve, which eval files to run, and where results go. The command shows it compiled, puts everything in
    place there and submits it.
    """
    from holdfast.formats import is_configuration, is_eval, load_any
    from holdfast.spec.document import read_document
    from holdfast.spec.load import baseline_of

    if given["named"] is not None:
        config, overrides = given["named"], (*((config,) if config else ()), *overrides)
    if config is None:
        raise click.MissingParameter(param_hint="'CONFIG'", param_type="argument")
    if given["run"] or given["batch"]:
        return _launch(config, overrides, given)
    if given["named"] is not None:
        from holdfast.cluster.compose import find_config

        config = str(find_config(config, Path(), os.environ))
    document = read_document(Path(config))
    if is_configuration(document) or (given["named"] is not None and not is_eval(document)):
        return _launch(config, overrides, given)
    if given["force_squash"]:
        raise UsageError("--force-squash is for configurations of clusters, with --run or --batch")
    spec = load_any(document, _overrides(overrides, given))
    options = _options(given)
    baseline = baseline_of(spec)
    if given["dry_run"]:
        for message in spec.notices:
            click.echo(message, err=True)
        return _dry_run([spec, *([baseline] if baseline else [])], options, as_json=given["json"])

    outcome = _run(spec, options, given)
    if baseline is None or outcome.exit_code > 4:
        return outcome.exit_code
    beside = _run(baseline, options, given)
    if outcome.metrics is not None and beside.metrics is not None:
        from holdfast.report.table import print_side_by_side

        print_side_by_side(outcome, beside)
    return beside.exit_code if beside.exit_code > 1 else outcome.exit_code


def _launch(config: str, overrides: tuple[str, ...], given: dict[str, Any]) -> int:
    from holdfast.cli.launching import launch_command

    # `-t` means tasks of a configuration; only for an eval file by itself it means samples.
    return launch_command(config, overrides, _overrides((), {**given, "ids": ()}), given)


def _run(spec: Eval, options: Options, given: dict[str, Any]) -> Outcome:
    if given["workers"]:
        return _share(spec, options, given)
    from holdfast.engine.run import run_eval

    return run_shown(
        lambda display: run_eval(spec, options, display),
        given["display"],
        lambda outcome: _hand_on(outcome, spec, given),
    )


def _share(spec: Eval, options: Options, given: dict[str, Any]) -> Outcome:
    """The same with workers."""
    from holdfast.engine.crew import run_workers

    def run(display: Display) -> Outcome:
        return run_workers(
            spec,
            options,
            given["workers"],
            display,
            command=command_line(),
            log_samples=given["log_samples"],
            output_path=given["output_path"],
        )

    return run_shown(run, given["display"], lambda outcome: _hand_on(outcome, spec, given))


def _hand_on(outcome: Outcome, spec: Eval, given: dict[str, Any]) -> None:
    hand_on(
        outcome,
        spec,
        log_samples=given["log_samples"],
        output_path=given["output_path"],
        exports=given["export"],
    )


def hand_on(
    outcome: Outcome,
    spec: Eval,
    *,
    log_samples: bool = False,
    output_path: Path | None = None,
    exports: tuple[str, ...] = (),
) -> None:
    """Transcripts and results for other tools, where they were asked for."""
    if log_samples or output_path or (spec.output.nat and outcome.metrics is not None):
        from holdfast.export.copies import write_copies

        try:
            for path in write_copies(outcome.rundir, spec, log_samples=log_samples, output_path=output_path):
                click.echo(f"wrote {path}")
        except OSError as error:
            remedy = f"The run itself is whole in {outcome.rundir.path}: name another place and run the same command."
            raise UsageError(f"cannot write the copies for other tools: {error}", remedy=remedy) from error
    if outcome.metrics is not None:
        export_after(outcome.rundir, spec)
    if exports and outcome.exit_code <= 4:
        export_also(outcome.rundir, exports)


def _overrides(overrides: tuple[str, ...], given: dict[str, Any]) -> list[tuple[tuple[str, ...], Any]]:
    """Options that stand for keys of the file, then KEY=VALUE, which has the last word."""
    named = {
        "model": ("target", "model"),
        "trials": ("trials",),
        "ids": ("dataset", "ids"),
        "tags": ("dataset", "tags"),
        "limit": ("dataset", "limit"),
        "concurrency": ("limits", "concurrency"),
        "max_cost": ("limits", "max_cost"),
        "max_tokens": ("limits", "max_tokens"),
        "max_time": ("limits", "max_time"),
        "baseline_model": ("baseline", "model"),
    }
    chosen = [(path, _plain(given[option])) for option, path in named.items() if given[option] not in (None, ())]
    return [*chosen, *map(parse_override, overrides)]


def _plain(value: Any) -> Any:
    """As a file would have it."""
    return list(value) if isinstance(value, tuple) else value


def _options(given: dict[str, Any]) -> Options:
    from holdfast.engine.options import Options

    return Options(
        runs_dir=runs_directory(given["runs_dir"]),
        fresh=given["fresh"],
        retry_failed=given["retry_failed"],
        accept_errors=given["accept_errors"],
        skip_graders=given["skip_graders"],
        accept_drift=given["accept_drift"],
        wait=patience(given["wait"]),
    )


def patience(wait: bool) -> float:
    """Seconds to wait for a run that is held; -1 for as long as it takes."""
    text = os.environ.get("HOLDFAST_LOCK_TIMEOUT")
    if not text:
        return -1 if wait else 0
    try:
        return max(0.0, float(parse_duration(text)))
    except ValueError:
        raise UsageError(f"HOLDFAST_LOCK_TIMEOUT is {text!r}; it is a number of seconds") from None


def _dry_run(specs: list[Eval], options: Options, *, as_json: bool) -> int:
    """The compiled eval and the plan, its baseline's too, with nothing written."""
    from holdfast.engine.setup import planned
    from holdfast.report.table import print_compiled

    print_compiled([planned(spec, options) for spec in specs], as_json=as_json)
    return 0

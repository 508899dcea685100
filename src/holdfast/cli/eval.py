"""`holdfast eval`: run an eval, or resume it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from holdfast.cli.completion import complete_files, complete_profiles
from holdfast.cli.ending import run_shown
from holdfast.cli.export import export_after, export_also
from holdfast.cli.runs import command_line, runs_dir_option, runs_directory
from holdfast.errors import UsageError
from holdfast.spec.overrides import parse_override
from holdfast.spec.schema import EXPORTS, parse_duration

if TYPE_CHECKING:
    from holdfast.display.types import Display
    from holdfast.engine.options import Options
    from holdfast.report.outcome import Outcome
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


def _refuse_max_tokens(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise UsageError(
            "--max-tokens is ambiguous",
            remedy=f"For the length of a reply: target.params.max_tokens={value}. "
            f"For a budget of the whole run: --token-budget {value}.",
        )


_GROUPS: Final = {
    "What to run": ("model", "trials", "ids", "tags", "limit", "baseline_model"),
    "How much, how fast": ("concurrency", "workers", "max_cost", "token_budget", "max_time"),
    "Earlier results and errors": ("fresh", "retry_failed", "accept_errors", "accept_drift", "skip_graders", "wait"),
    "Output": ("runs_dir", "dry_run", "json", "display", "log_samples", "output_path", "export"),
    "On a cluster": ("run", "batch", "named", "force_squash"),
}
"""options by name, as --help shows them"""


class _Grouped(click.Command):
    """A command whose many options are shown in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = {
            param.name: param.get_help_record(ctx) for param in self.get_params(ctx) if isinstance(param, click.Option)
        }
        rest = [name for name in options if not any(name in group for group in _GROUPS.values())]
        for title, names in {**_GROUPS, "Other": rest}.items():
            if records := [record for name in names if (record := options.get(name)) is not None]:
                with formatter.section(title):
                    formatter.write_dl(records)


@click.command("eval", cls=_Grouped)
@click.argument("config", required=False, shell_complete=complete_files)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]…")
@click.option("-c", "--config", "named", metavar="CONFIG", help="Name or path of a cluster configuration.")
@click.option(
    "-r",
    "--run",
    metavar="PROFILE",
    shell_complete=complete_profiles,
    help="Submit to this profile of env.toml and follow the logs.",
)
@click.option(
    "-b",
    "--batch",
    metavar="PROFILE",
    shell_complete=complete_profiles,
    help="Like --run, but return once the jobs are submitted.",
)
@click.option("--force-squash", is_flag=True, help="Import container images again even if a .sqsh file exists.")
@click.option("-m", "--model", metavar="MODEL", help="Evaluate this model instead of the file's.")
@click.option("--trials", type=click.IntRange(1), metavar="N", help="Number of trials per sample [default: 1].")
@click.option(
    "-t",
    "--task",
    "ids",
    multiple=True,
    metavar="GLOB",
    help="Only samples with a matching id or name; for a cluster configuration, only this task. Repeatable.",
)
@click.option(
    "--tags",
    multiple=True,
    metavar="GLOB",
    help="Only samples with a matching tag; with -t, both must match. Repeatable.",
)
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Only the first N of the selected samples.")
@click.option(
    "--concurrency",
    type=Concurrency(),
    help="Maximum number of requests in flight, or auto [default: 64; 4 for the embedded model].",
)
@click.option(
    "--fresh", "--force", is_flag=True, help="Archive the earlier run and start from scratch, reusing nothing."
)
@click.option("--retry-failed", is_flag=True, help="Retry the errors of a run that was finished with --accept-errors.")
@click.option("--accept-errors", is_flag=True, help="Finish even if some trials have errors.")
@click.option(
    "--accept-drift", is_flag=True, help="Keep outputs even if the code of the Python or command target has changed."
)
@click.option("--baseline-model", metavar="MODEL", help="Also evaluate this model, and show both side by side.")
@click.option("--log-samples", is_flag=True, help="Also write the transcripts to samples.jsonl in the run directory.")
@click.option(
    "--output-path",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Also write the results and transcripts to this folder.",
)
@click.option(
    "--export",
    "export",
    multiple=True,
    type=click.Choice(list(EXPORTS)),
    metavar="FORMAT",
    help="Also export the run, as with holdfast export --to. Repeatable.",
)
@click.option("--workers", type=click.IntRange(1), metavar="N", help="Run N worker processes on this machine.")
@click.option("--skip-graders", is_flag=True, help="Generate outputs without grading them.")
@click.option(
    "--max-cost",
    type=float,
    metavar="USD",
    help="Start no more trials once the run has cost this much [default: no limit].",
)
@click.option(
    "--token-budget",
    type=click.IntRange(1),
    metavar="N",
    help="Start no more trials once the run has used N tokens [default: no limit].",
)
@click.option("--max-tokens", hidden=True, expose_value=False, callback=_refuse_max_tokens)
@click.option(
    "--max-time",
    type=_Duration(),
    help="Start no more trials after this time, such as 90s, 30m or 2h [default: no limit].",
)
@runs_dir_option
@click.option("--wait", is_flag=True, help="Wait if another process holds the run, instead of exiting with code 4.")
@click.option("-d", "--dry-run", is_flag=True, help="Show the plan and the first prompt without running anything.")
@click.option("--json", is_flag=True, help="With --dry-run, print the plan as JSON.")
@click.option(
    "--display",
    type=click.Choice(["rich", "plain", "json", "none"]),
    help="How to show progress [default: rich on a terminal, else plain].",
)
def command(config: str | None, overrides: tuple[str, ...], **given: Any) -> int:
    """Run the eval file CONFIG, or resume it.

    After any interruption, the same command continues where it stopped. CONFIG may also be a folder with an eval.yaml
    [default: the current folder]. KEY=VALUE overrides any key of the file.

    \b
    holdfast eval gsm8k.yaml --dry-run
    holdfast eval gsm8k.yaml -m my-model target.params.temperature=0.7 --limit 100

    With --run or --batch, CONFIG runs on a profile of env.toml. It is then an eval file, or a cluster configuration
    that says what to serve, which eval files to run, and where results go.
    """
    from holdfast.formats import is_configuration, is_eval, load_any
    from holdfast.spec.document import read_document
    from holdfast.spec.load import baseline_of

    if given["named"] is not None:
        config, overrides = given["named"], (*((config,) if config else ()), *overrides)
    if given["fresh"] and given["retry_failed"]:
        raise UsageError(
            "--fresh and --retry-failed exclude each other: a fresh run has no errors to retry",
            remedy="Use one of them.",
        )
    if given["named"] is None:
        config, overrides = _find_eval(config, overrides)
    assert config is not None
    if given["run"] or given["batch"]:
        return _launch(config, overrides, given)
    if given["named"] is not None:
        from holdfast.cluster.config.compose import find_config

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


_EVAL_FILES: Final = ("eval.yaml", "eval.yml", "holdfast.yaml")
_DATA: Final = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".json")


def _find_eval(config: str | None, overrides: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """The eval file that a command means: a path, a folder's own, or without any the current folder's."""
    if config is not None and "=" in config and not Path(config).exists():
        overrides = (config, *overrides)
        config = None
    folder = Path(config or ".")
    if folder.is_dir():
        here = [folder / name for name in _EVAL_FILES if (folder / name).is_file()]
        if here:
            return str(here[0]), overrides
        others = sorted(path.name for path in folder.glob("*.y*ml"))
        hint = f"Name one of its files: {', '.join(others[:5])}." if others else "`holdfast init` writes an eval file."
        if config is None:
            raise UsageError("name an eval file: there is no eval.yaml here", remedy=hint)
        raise UsageError(f"{config} is a folder without an eval.yaml", remedy=hint)
    assert config is not None
    if folder.suffix.lower() in _DATA and folder.is_file():
        raise UsageError(
            f"{config} is a dataset, not an eval file",
            remedy=f"Write an eval file with `dataset: {{path: {config}}}`; `holdfast init` writes one to start from.",
        )
    return config, overrides


def _launch(config: str, overrides: tuple[str, ...], given: dict[str, Any]) -> int:
    from holdfast.cli.launch import launch_command

    # `-t` means tasks of a configuration; only for an eval file by itself it means samples.
    return launch_command(config, overrides, _overrides((), {**given, "ids": ()}), given)


def _run(spec: Eval, options: Options, given: dict[str, Any]) -> Outcome:
    if given["workers"]:
        return _share(spec, options, given)
    from holdfast.engine.session import run_eval

    return run_shown(
        lambda display: run_eval(spec, options, display),
        given["display"],
        lambda outcome: _hand_on(outcome, spec, given),
    )


def _share(spec: Eval, options: Options, given: dict[str, Any]) -> Outcome:
    """The same with workers."""
    from holdfast.engine.local_workers import run_workers

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
    if spec.output.nat and outcome.metrics is not None:
        from holdfast.export.after_run import write_nat_copy

        for path in write_nat_copy(outcome.rundir, spec, lambda text: click.echo(f"warning: {text}", err=True)):
            click.echo(f"wrote {path}")
    if log_samples or output_path:
        from holdfast.export.after_run import write_copies

        try:
            for path in write_copies(outcome.rundir, log_samples=log_samples, output_path=output_path):
                click.echo(f"wrote {path}")
        except OSError as error:
            remedy = (
                f"The run itself is complete in {outcome.rundir.path}. "
                "Choose another folder and run the same command again."
            )
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
        "token_budget": ("limits", "token_budget"),
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
    from holdfast.engine.session import preview_run
    from holdfast.engine.unseen import unseen_code
    from holdfast.report.table import print_compiled

    for message in dict.fromkeys(message for spec in specs for message in unseen_code(spec)):
        click.echo(message, err=True)
    previews = [preview_run(spec, options) for spec in specs]
    print_compiled(previews, as_json=as_json)
    if not as_json:
        from holdfast.report.preview import preview

        identity, _, plan = previews[0]
        for line in preview(identity, plan).lines():
            click.echo(line)
    return 0

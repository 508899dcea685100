"""`holdfast eval`: run an eval, or resume it."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from holdfast.cli.completion import complete_files, complete_profiles
from holdfast.cli.ending import export_results, run_and_report, run_locally
from holdfast.cli.env_file import env_file_options, load_env_file
from holdfast.cli.errors import show_note
from holdfast.cli.flags import Concurrency, Duration, EvalFlags, ExporterName, Positive
from holdfast.cli.runs import runs_dir_option
from holdfast.display.choice import make_display
from holdfast.display.terminal import echo, notes_to
from holdfast.errors import UsageError
from holdfast.spec.fingerprint import running_nothing

if TYPE_CHECKING:
    from holdfast.report.outcome import Outcome
    from holdfast.spec.eval import Eval
    from holdfast.spec.suite import Suite


def _refuse_max_tokens(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise UsageError(
            "--max-tokens is ambiguous",
            remedy=f"For the length of a reply: target.params.max_tokens={value}. "
            f"For a budget of the whole run: --token-budget {value}.",
        )


_GROUPS: Final = {
    "What to run": ("models", "trials", "ids", "tags", "limit", "baseline_model"),
    "How much, how fast": ("concurrency", "workers", "max_cost", "token_budget", "max_time"),
    "Earlier results and errors": ("fresh", "retry_failed", "accept_errors", "accept_drift", "skip_graders"),
    "Waiting": ("wait", "no_wait"),
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
@click.argument("arguments", nargs=-1, metavar="[EVAL]… [KEY=VALUE]…", shell_complete=complete_files)
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
@click.option(
    "-m",
    "--model",
    "models",
    multiple=True,
    metavar="MODEL",
    help="Evaluate this model instead of the file's. Repeatable.",
)
@click.option("--trials", type=Positive(), metavar="N", help="Number of trials per sample [default: 1].")
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
@click.option("--limit", type=Positive(), metavar="N", help="Only the first N of the selected samples.")
@click.option(
    "--concurrency",
    type=Concurrency(),
    help="Maximum number of requests in flight, or auto [default: auto for models on the internet, else 64].",
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
    type=ExporterName(),
    metavar="FORMAT",
    help="Also export the run, as with holdfast export --to. Repeatable.",
)
@click.option("--workers", type=Positive(), metavar="N", help="Run N worker processes on this machine.")
@click.option("--skip-graders", is_flag=True, help="Generate outputs without grading them.")
@click.option(
    "--max-cost",
    type=float,
    metavar="USD",
    help="Start no more trials, or calls of agents, once the run has cost this much [default: no limit].",
)
@click.option(
    "--token-budget",
    type=Positive(),
    metavar="N",
    help="Start no more trials, or calls of agents, once the run has used N tokens [default: no limit].",
)
@click.option("--max-tokens", hidden=True, expose_value=False, callback=_refuse_max_tokens)
@click.option(
    "--max-time",
    type=Duration(),
    help="Start no more trials, or calls of agents, after this time, such as 90s, 30m or 2h [default: no limit].",
)
@runs_dir_option
@click.option("--wait", is_flag=True, help="Wait if another process holds the run, instead of exiting with code 4.")
@click.option(
    "--no-wait",
    is_flag=True,
    help="Submit and collect batches, and exit with code 5 while they are under way, instead of waiting.",
)
@click.option(
    "-d", "--dry-run", is_flag=True, help="Show the plan and the first prompt. Nothing of the eval is run or imported."
)
@click.option("--json", is_flag=True, help="With --dry-run, print the plan as JSON.")
@env_file_options
@click.option(
    "--display",
    type=click.Choice(["rich", "plain", "json", "none"]),
    help="How to show progress [default: rich on a terminal, else plain].",
)
def command(arguments: tuple[str, ...], **options: Any) -> int:
    """Run the eval file EVAL, or resume it.

    After any interruption, the same command continues where it stopped. EVAL may also be a folder with an eval.yaml
    [default: the current folder], or the name of an installed task. KEY=VALUE overrides any key of the file.

    \b
    holdfast eval gsm8k.yaml --dry-run
    holdfast eval gsm8k.yaml -m my-model target.params.temperature=0.7 --limit 100

    Several EVALs, several models or a suite file run one after the other, and end in one table.

    With --run or --batch, EVAL runs on a profile of env.toml. It may then also be a cluster configuration that says
    what to serve, which eval files to run, and where results go.
    """
    flags = EvalFlags(**options)
    if flags.fresh and flags.retry_failed:
        raise UsageError(
            "--fresh and --retry-failed exclude each other: a fresh run has no errors to retry",
            remedy="Use one of them.",
        )
    with ExitStack() as stack:
        if flags.dry_run:
            stack.enter_context(running_nothing())
        if flags.display == "json":
            stack.enter_context(notes_to(make_display("json").notice))
        return _eval(arguments, flags)


def _eval(arguments: tuple[str, ...], flags: EvalFlags) -> int:
    """Run one eval, or several as a suite."""
    files = map(Path, (flags.named, *arguments) if flags.named is not None else arguments)
    load_env_file(*(file if file.is_dir() else file.parent for file in files if file.exists()), Path())
    if flags.named is not None:
        return _eval_one(flags.named, arguments, flags)
    evals = [argument for argument in arguments if not _is_override(argument)]
    overrides = tuple(argument for argument in arguments if _is_override(argument))
    if len(evals) > 1:
        from holdfast.cli.suite import suite_of

        return _eval_suite(suite_of([_find_eval(each) for each in evals], flags.models), overrides, flags)
    return _eval_one(_find_eval(next(iter(evals), None)), overrides, flags)


def _is_override(argument: str) -> bool:
    """Tell overrides, also `~KEY` of cluster configurations, from evals."""
    return ("=" in argument or argument.startswith("~")) and not Path(argument).exists()


def _eval_one(config: str, overrides: tuple[str, ...], flags: EvalFlags) -> int:
    """Run what one argument names: an eval, a suite file, or a cluster configuration."""
    from holdfast.spec.formats import is_configuration, is_eval, is_suite, load_any, resolve_eval
    from holdfast.spec.load import baseline_of
    from holdfast.spec.overrides import parse_override

    if flags.run or flags.batch:
        return _launch(config, overrides, flags)
    if flags.named is not None:
        from holdfast.cluster.config.compose import find_config

        config = str(find_config(config, Path(), os.environ))
    document = resolve_eval(config)
    if is_suite(document.data):
        from holdfast.spec.suite import read_suite

        return _eval_suite(read_suite(document), overrides, flags)
    if is_configuration(document.data) or (flags.named is not None and not is_eval(document.data)):
        return _launch(config, overrides, flags)
    if len(flags.models) > 1:
        from holdfast.cli.suite import suite_of

        return _eval_suite(suite_of([config], flags.models), overrides, flags)
    if flags.force_squash:
        raise UsageError("--force-squash is for configurations of clusters, with --run or --batch")
    spec = load_any(document, [*flags.overrides(), *map(parse_override, overrides)])  # KEY=VALUE has the last word
    baseline = baseline_of(spec)
    if flags.dry_run:
        for message in spec.notices:
            show_note(message)
        return _dry_run([spec, *([baseline] if baseline else [])], flags)

    outcome = _run(spec, flags)
    if baseline is None or outcome.exit_code > 5:
        return outcome.exit_code
    baseline_outcome = _run(baseline, flags)
    if outcome.metrics is not None and baseline_outcome.metrics is not None:
        from holdfast.report.table import print_side_by_side

        print_side_by_side(outcome, baseline_outcome)
    return baseline_outcome.exit_code if baseline_outcome.exit_code > 1 else outcome.exit_code


_EVAL_FILES: Final = ("eval.yaml", "eval.yml", "holdfast.yaml")
_DATA: Final = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".json")


def _find_eval(config: str | None) -> str:
    """Return the eval file, which may be given as its folder or not at all."""
    if config == "":
        raise UsageError("the name of the eval is empty", remedy="Name an eval file or a task.")
    folder = Path(config or ".")
    if folder.is_dir():
        here = [folder / name for name in _EVAL_FILES if (folder / name).is_file()]
        if here:
            return str(here[0])
        if config is not None and _is_claimed(folder):
            return config
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
    return config


def _is_claimed(folder: Path) -> bool:
    from holdfast.spec.formats import find_reader

    return find_reader(folder) is not None


def _eval_suite(suite: Suite, overrides: tuple[str, ...], flags: EvalFlags) -> int:
    if flags.run or flags.batch:
        return _launch(suite, overrides, flags)
    from holdfast.cli.suite import suite_command

    return suite_command(suite, overrides, flags)


def _launch(config: str | Suite, overrides: tuple[str, ...], flags: EvalFlags) -> int:
    from holdfast.cli.launch import launch_command

    return launch_command(config, overrides, flags)


def _run(spec: Eval, flags: EvalFlags) -> Outcome:
    options = flags.options()
    run = partial(run_locally, spec, options, flags.workers)
    return run_and_report(run, flags.display, lambda outcome: export_results(outcome, spec, options, flags.export))


def _dry_run(specs: list[Eval], flags: EvalFlags) -> int:
    """Print the compiled eval and the plan, its baseline's too, without writing anything."""
    from holdfast.engine.session import preview_run
    from holdfast.engine.unseen import unseen_code
    from holdfast.report.table import print_compiled

    for message in dict.fromkeys(message for spec in specs for message in unseen_code(spec)):
        show_note(message)
    options = flags.options()
    previews = [preview_run(spec, options) for spec in specs]
    print_compiled(previews, as_json=flags.json)
    if not flags.json:
        from holdfast.report.preview import preview

        identity, rundir, plan = previews[0]
        for line in preview(identity, plan, rundir).lines():
            echo(line)
    return 0

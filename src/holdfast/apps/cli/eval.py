"""`holdfast eval`: run an eval, or resume it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click
from msgspec.structs import replace

from holdfast.apps.cli.flags import (
    Concurrency,
    Duration,
    ExporterName,
    Positive,
    accept_errors_option,
    complete_files,
    complete_profiles,
    display_option,
    env_file_options,
    no_wait_option,
    retry_failed_option,
    runs_dir_option,
    wait_option,
)
from holdfast.errors import UsageError
from holdfast.spec.plugins import load_reference
from holdfast.store.rundir import RunPolicy

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.spec.load import Override

_RUN: Final = "holdfast.apps.cli.running:run_evals"
"""imports the engine, which --help does not need"""


class EvalFlags(RunPolicy, frozen=True, kw_only=True):
    """The options of `holdfast eval`. A field has the name of its flag, unless another flag is noted."""

    named: str | None
    """--config"""
    run: str | None
    batch: str | None
    force_squash: bool
    models: tuple[str, ...]
    """--model"""
    trials: int | None
    ids: tuple[str, ...]
    """--task"""
    tags: tuple[str, ...]
    limit: int | None
    concurrency: int | str | None
    baseline_model: str | None
    export: tuple[str, ...]
    workers: int | None
    max_cost: float | None
    token_budget: int | None
    max_time: float | None
    runs_dir: Path | None
    wait: bool
    no_wait: bool
    dry_run: bool
    json: bool
    display: str | None

    def overrides(self) -> list[Override]:
        """Return the flags that stand for keys of the eval file."""
        keys: dict[tuple[str, ...], Any] = {
            ("target", "model"): next(iter(self.models), None),
            ("trials",): self.trials,
            ("dataset", "ids"): list(self.ids) or None,
            ("dataset", "tags"): list(self.tags) or None,
            ("dataset", "limit"): self.limit,
            ("limits", "concurrency"): self.concurrency,
            ("limits", "max_cost"): self.max_cost,
            ("limits", "token_budget"): self.token_budget,
            ("limits", "max_time"): self.max_time,
            ("baseline", "model"): self.baseline_model,
        }
        return [(path, value) for path, value in keys.items() if value is not None]

    def suite_overrides(self) -> list[Override]:
        """Return the flags that stand for keys of every eval file of a suite, which has its own targets and budgets."""
        return replace(self, models=(), max_cost=None, token_budget=None, max_time=None).overrides()


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
@retry_failed_option
@accept_errors_option
@click.option(
    "--accept-drift", is_flag=True, help="Keep outputs even if the code of the Python or command target has changed."
)
@click.option("--baseline-model", metavar="MODEL", help="Also evaluate this model, and show both side by side.")
@click.option("--log-samples", is_flag=True, help="Also write the transcripts to samples.jsonl in the run directory.")
@click.option(
    "--output-path",
    type=click.Path(),
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
@wait_option
@no_wait_option
@click.option(
    "-d", "--dry-run", is_flag=True, help="Show the plan and the first prompt. Nothing of the eval is run or imported."
)
@click.option("--json", is_flag=True, help="With --dry-run, print the plan as JSON.")
@env_file_options
@display_option
def command(arguments: tuple[str, ...], **options: Any) -> int:
    """Run the eval file EVAL, or resume it.

    After any interruption, the same command continues where it stopped. EVAL may also be a folder with an eval.yaml
    [default: the current folder], or the name of an installed task. KEY=VALUE overrides any key of the file.

    \b
    holdfast eval gsm8k.yaml --dry-run
    holdfast eval gsm8k.yaml -m my-model target.params.temperature=0.7 --limit 100

    Several EVALs, several models or a suite file run one after the other, and end in one table.

    With --run or --batch, EVAL runs on a profile of env.toml. It may then also be a cluster configuration with the
    model to serve, the eval files to run, and a place for the results.
    """
    flags = EvalFlags(**options)
    if flags.fresh and flags.retry_failed:
        raise UsageError(
            "--fresh and --retry-failed exclude each other: a fresh run has no errors to retry",
            remedy="Use one of them.",
        )
    status: int = load_reference(_RUN)(arguments, flags)
    return status

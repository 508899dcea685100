"""`holdfast grade`: grade outputs again, or with other graders, without one call to the target."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.apps.cli.flags import (
    accept_errors_option,
    complete_files,
    complete_runs,
    display_option,
    env_file_options,
    find_run,
    find_runs_dir,
    load_env_file,
    lock_timeout,
    runs_dir_option,
    runs_directory,
    wait_option,
)
from holdfast.apps.cli.running import export_results, run_and_report
from holdfast.engine.run import run_eval
from holdfast.engine.session import Options
from holdfast.errors import ResultsError, UsageError
from holdfast.spec.formats import load_any, read_eval
from holdfast.spec.load import eval_of_run, parse_override
from holdfast.store.rundir import RunDir

if TYPE_CHECKING:
    from holdfast.store.metrics import Rule


@click.command("grade")
@click.argument("run", shell_complete=complete_runs)
@click.argument("config", required=False, shell_complete=complete_files)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]…")
@click.option("--again", is_flag=True, help="Also grade outputs that already have their grades.")
@accept_errors_option
@wait_option
@display_option
@runs_dir_option
@env_file_options
def command(
    run: str,
    config: str | None,
    overrides: tuple[str, ...],
    again: bool,
    accept_errors: bool,
    wait: bool,
    display: str | None,
    runs_dir: Path | None,
) -> int:
    """Grade the outputs of RUN (path or id), with the graders of the eval file CONFIG if one is given.

    Nothing is generated. With the same graders, the verdicts go into RUN; with others they go, with copies of the
    outputs, into the run that `holdfast eval CONFIG` would use.
    """
    root = runs_directory(runs_dir)
    rundir = RunDir(find_run(run, root))
    manifest = rundir.read_manifest()
    if manifest is None:
        raise UsageError(f"{rundir.path} has no manifest")
    if config is not None and "=" in config and not Path(config).exists():
        overrides, config = (config, *overrides), None
    changes = [parse_override(text) for text in overrides]
    load_env_file(Path(config).parent if config else Path(manifest.folder), Path())
    spec = (
        load_any(read_eval(Path(config)), changes)
        if config
        else eval_of_run(
            _without_budgets(manifest.eval),
            manifest.folder,
            manifest.eval_file,
            [*_last_rules(manifest.eval, rundir), *changes],
        )
    )
    options = Options(
        runs_dir=find_runs_dir(rundir, manifest, root),
        grade_only=True,
        again=again,
        accept_errors=accept_errors,
        wait=lock_timeout(wait=wait),
        outputs_of=(rundir, manifest),
    )
    outcome = run_and_report(
        lambda display: run_eval(spec, options, display),
        display,
        lambda outcome: export_results(outcome, spec, options),
        again="Use --again to grade it once more.",
    )
    return outcome.exit_code


def _without_budgets(data: dict[str, Any]) -> dict[str, Any]:
    """Return the eval without its budgets, which were set for generating and may be spent."""
    limits = {
        key: value
        for key, value in (data.get("limits") or {}).items()
        if not key.startswith("max_") and key != "token_budget"
    }
    return {**data, "limits": limits} if "limits" in data else data


def _last_rules(data: dict[str, Any], rundir: RunDir) -> list[tuple[tuple[str, ...], float | None]]:
    """Return the thresholds and weights of metrics.json, which may be newer than the manifest, as overrides."""
    rules: dict[str, Rule] = {}
    with suppress(ResultsError):  # the report is written again anyway
        if (metrics := rundir.read_metrics()) is not None:
            rules = metrics.rules
    lists: list[tuple[tuple[str, ...], str, Any]] = [(("graders",), "", data.get("graders"))]
    for number, checkpoint in enumerate(data.get("checkpoints") or []):
        place = ("checkpoints", str(number), "graders")
        lists.append((place, f"checkpoint@{checkpoint['after_turn']}/", checkpoint["graders"]))
    return [
        ((*place, str(number), key), value)
        for place, prefix, graders in lists
        for number, grader in enumerate(graders or [])
        if (rule := rules.get(f"{prefix}{grader.get('name') or grader.get('type')}")) is not None
        for key, value in (("threshold", rule.threshold), ("weight", rule.weight))
    ]

"""`holdfast cache`: locate, list and remove stored runs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.apps.cli.flags import complete_runs, runs_dir_option, runs_directory
from holdfast.apps.cli.ls import run_filters, select_runs, show_runs
from holdfast.display.terminal import echo
from holdfast.errors import RunHeld, UsageError
from holdfast.store.catalog import is_surely_ours
from holdfast.store.run_lock import hold
from holdfast.store.rundir import RunDir

if TYPE_CHECKING:
    from holdfast.store.catalog import RunSummary


@click.group("cache")
def command() -> None:
    """List and remove stored runs."""


@command.command("dir")
@runs_dir_option
def directory(runs_dir: Path | None) -> int:
    """Print the folder that holds the runs."""
    echo(runs_directory(runs_dir).resolve())
    return 0


@command.command("ls")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@run_filters
def listing(as_json: bool, **options: Any) -> int:
    """List the runs, tab-separated if the output is not a terminal."""
    return show_runs(
        select_runs(options),
        ("name", "target", "dataset", "status", "progress", "score", "size", "age", "id"),
        as_json=as_json,
    )


@command.command("rm")
@click.argument("ids", nargs=-1, metavar="[ID]…", shell_complete=complete_runs)
@click.option("--all", "everything", is_flag=True, help="Remove all runs.")
@click.option("-y", "--yes", is_flag=True, help="Remove without asking.")
@run_filters
def remove(ids: tuple[str, ...], everything: bool, yes: bool, **options: Any) -> int:
    """Remove runs by ID (or its beginning), by filters, or all of them. Shows the runs and asks before removing them.

    A run that is being written is refused. Runs that reused another run's outputs hold copies and lose nothing.
    """
    narrowed = [name for name in ("model", "dataset", "status", "older_than") if options[name]]
    if everything and (ids or narrowed):
        raise UsageError(
            "--all cannot be combined with ids or filters",
            remedy="Leave --all out to remove only what the filters choose.",
        )
    if not (everything or ids or narrowed or options["archived"]):
        raise UsageError("name the runs to remove: ids, filters such as --older-than 7d, or --all")

    # A folder that only looks like a run, since it has some `manifest.json`, is removed only by name.
    chosen = _by_id(select_runs(options), ids) if ids else [run for run in select_runs(options) if is_surely_ours(run)]
    if not chosen:
        echo("no runs to remove")
        return 0
    running = [run for run in chosen if run.status == "running"]
    if running:
        raise RunHeld(f"not removed, in use: {', '.join(run.path for run in running)}")
    for run in chosen:
        echo(f"{run.id}  {run.path}  {run.status}  {run.progress}  {run.size_text}")
    if not yes and not _confirmed(f"Remove {len(chosen)} {'run' if len(chosen) == 1 else 'runs'}?"):
        echo("nothing was removed")
        return 0
    for run in chosen:
        _remove(Path(run.path))
    echo(f"removed {len(chosen)}")
    return 0


def _confirmed(question: str) -> bool:
    try:
        return click.confirm(question)
    except click.Abort as stopped:
        if isinstance(stopped.__context__, EOFError):  # nobody is there to answer; Ctrl-C is something else
            raise UsageError(
                "nothing was removed: the input is not a terminal", remedy="Use -y to remove without being asked."
            ) from None
        raise


def _remove(path: Path) -> None:
    """Under the run's lease: a process that has just started to write it keeps it."""
    rundir = RunDir(path)
    lease = hold(rundir)
    try:
        shutil.rmtree(rundir.private_index, ignore_errors=True)
        # Rename it first, so that an interrupted removal leaves no half of a run under its name.
        doomed = path.with_name(f".{path.name}.removed")
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed)
    finally:
        lease.release()


def _by_id(runs: list[RunSummary], ids: tuple[str, ...]) -> list[RunSummary]:
    chosen: dict[str, RunSummary] = {}
    for name in ids:
        # An empty text, such as an unset shell variable, would match every id.
        matches = [
            run
            for run in runs
            if name and (run.id.startswith(name) or Path(run.path).absolute() == Path(name).absolute())
        ]
        if len({run.path for run in matches}) != 1:
            problem = f"is ambiguous: it matches {len(matches)} runs" if matches else "is not a run"
            raise UsageError(f"{name!r} {problem}", remedy="`holdfast ls` lists them with their ids.")
        chosen[matches[0].path] = matches[0]
    return list(chosen.values())

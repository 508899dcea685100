"""`holdfast export`: a run in the formats of other tools, and in the services that keep runs."""

from __future__ import annotations

from pathlib import Path

import click

from holdfast.apps.cli.errors import show_error, show_note
from holdfast.apps.cli.flags import ExporterName, complete_runs, runs_dir_option, runs_directory
from holdfast.apps.cli.subjects import open_run
from holdfast.display.terminal import echo
from holdfast.errors import HoldfastError, UsageError
from holdfast.report.exports import describe, export, export_block, is_done, read_entries
from holdfast.spec.eval_schema import EXPORTERS


@click.command("export")
@click.argument("run", shell_complete=complete_runs)
@click.argument("options", nargs=-1, metavar="[KEY=VALUE]…")
@click.option(
    "--to",
    "exporter",
    type=ExporterName(),
    metavar="FORMAT",
    help=f"Format or service: {', '.join(EXPORTERS)}.",
)
@click.option("--failed", is_flag=True, help="Repeat all exports of the run that failed or are offline.")
@click.option("--if-changed", is_flag=True, help="Skip an export that is up to date with the run and the options.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Folder for files [default: RUN/export/FORMAT].",
)
@runs_dir_option
def command(
    run: str,
    options: tuple[str, ...],
    exporter: str | None,
    failed: bool,
    if_changed: bool,
    output: Path | None,
    runs_dir: Path | None,
) -> int:
    """Export RUN (path, id, invocation or HOST:PATH) in another format, or send it to W&B or MLflow.

    KEY=VALUE sets options of the destination, such as project=x entity=y for wandb, or tracking_uri=URL for mlflow.
    Other options are the last export's, else the eval file's. Exporting again updates the export.
    """
    if (exporter is None) == (not failed):
        raise UsageError(f"give --to {'|'.join(EXPORTERS)}, or --failed")
    if failed and (options or output):
        raise UsageError("--failed repeats exports with their original options; use --to to change them")
    view = open_run(run, runs_directory(runs_dir))
    rundir = view.rundir
    entries = read_entries(rundir)
    names = [exporter] if exporter else [name for name, entry in entries.items() if entry.state != "done"]
    blocks = [export_block(view, name, options, output) for name in names if name in EXPORTERS]
    code = 0
    for block in blocks:
        if if_changed and is_done(rundir, block, entries):
            echo(f"{block.to}: already up to date")
            continue
        try:
            describe(block.to, export(view, block), echo)
        except HoldfastError as error:
            if not failed:
                raise
            show_error(error)
            code = max(code, error.exit_code)
    if not blocks:
        echo("no export has failed")
    if view.missing_rows:
        show_note(f"{view.missing_rows:,} rows are no longer in the dataset; their fields are left out")
    if blocks and not rundir.finished:
        show_note("the run is not finished: exported partial results")
    return code

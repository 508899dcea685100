"""`holdfast export`: a run in the formats of other tools, and in the services that keep runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.completion import complete_runs
from holdfast.cli.errors import show_error
from holdfast.cli.runs import find_run, runs_dir_option, runs_directory
from holdfast.errors import ConfigError, HoldfastError, Problem, UsageError
from holdfast.spec.overrides import apply_override, parse_override
from holdfast.spec.schema import EXPORTS, FileExport

if TYPE_CHECKING:
    from holdfast.export.registry import Exported
    from holdfast.report.run_view import RunView
    from holdfast.spec.load import Eval
    from holdfast.spec.schema import ExportBlock
    from holdfast.store.rundir import RunDir


@click.command("export")
@click.argument("run", shell_complete=complete_runs)
@click.argument("options", nargs=-1, metavar="[KEY=VALUE]…")
@click.option(
    "--to",
    "wanted",
    type=click.Choice(list(EXPORTS)),
    metavar="FORMAT",
    help=f"Format or service: {', '.join(EXPORTS)}.",
)
@click.option("--failed", is_flag=True, help="Repeat all exports of the run that failed.")
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
    wanted: str | None,
    failed: bool,
    if_changed: bool,
    output: Path | None,
    runs_dir: Path | None,
) -> int:
    """Export RUN (path or id) in another format, or send it to W&B or MLflow.

    KEY=VALUE sets options of the destination, such as project=x entity=y for wandb, or tracking_uri=URL for mlflow.
    Options that are not given are those of the last export there, else those of the eval file. Exporting again
    updates the export.
    """
    from holdfast.export.registry import export, is_done, read_entries
    from holdfast.report.run_view import RunView
    from holdfast.store.rundir import RunDir

    if (wanted is None) == (not failed):
        raise UsageError(f"give --to {'|'.join(EXPORTS)}, or --failed")
    if failed and (options or output):
        raise UsageError("--failed repeats exports with their original options; use --to to change them")
    rundir = RunDir(find_run(run, runs_directory(runs_dir)))
    view = RunView(rundir)
    entries = read_entries(rundir)
    names = [wanted] if wanted else [name for name, entry in entries.items() if entry.state == "failed"]
    blocks = [_block(view, name, options, output) for name in names if name in EXPORTS]
    code = 0
    for block in blocks:
        if if_changed and is_done(rundir, block, entries):
            click.echo(f"{block.to}: already up to date")
            continue
        try:
            say(block.to, export(view, block))
        except HoldfastError as error:
            if not failed:
                raise
            show_error(error)
            code = max(code, error.exit_code)
    if not blocks:
        click.echo("no export has failed")
    if view.missing_outputs:
        click.echo(
            f"warning: {view.missing_outputs:,} outputs that metrics.json counts are missing; "
            f"`holdfast repair {rundir.path}` says more",
            err=True,
        )
    if view.missing_rows:
        click.echo(f"{view.missing_rows:,} rows are no longer in the dataset; their fields are left out", err=True)
    if blocks and not rundir.finished:
        click.echo("the run is not finished: this is what there is so far", err=True)
    return code


def export_after(rundir: RunDir, spec: Eval) -> None:
    """What the eval file asks for once a run has finished; a failure is a warning."""
    if spec.exports:
        from holdfast.export.registry import export_finished

        export_finished(rundir, spec, say, lambda message: click.echo(f"warning: {message}", err=True))


def export_also(rundir: RunDir, names: tuple[str, ...]) -> None:
    """What the command line asks for after a run, finished or not."""
    from holdfast.export.registry import export
    from holdfast.report.run_view import RunView

    view = RunView(rundir)
    for name in names:
        say(name, export(view, _block(view, name, (), None)))


def say(name: str, done: Exported) -> None:
    """What was written, or where it went."""
    for place in done.where:
        click.echo(f"wrote {place}" if "://" not in place else f"exported to {name}: {place}")
    for note in done.notes:
        click.echo(note)


def _block(view: RunView, name: str, options: tuple[str, ...], output: Path | None) -> ExportBlock:
    """The destination with its options: the eval file's, over them the last export's, over them what is given.

    A folder is remembered only until the export has worked: without -o the next one goes where it says that it goes.
    """
    from holdfast.export.registry import in_folder, read_entries
    from holdfast.spec.document import Document
    from holdfast.spec.load import read_export

    spec = view.spec
    data: dict[str, Any] = {}
    for block in spec.exports:
        if block.to == name:
            data |= in_folder(block, spec.folder).model_dump(exclude_unset=True)
    entry = read_entries(view.rundir).get(name)
    if entry is not None and (entry.state == "failed" or not issubclass(EXPORTS[name], FileExport)):
        data |= entry.options
    for text in options:
        apply_override(data, *parse_override(text))
    if output is not None:
        if not issubclass(EXPORTS[name], FileExport):
            raise UsageError(f"{name} writes no files, so -o does not apply")
        data["dir"] = str(output)
    data["to"] = name
    problems: list[Problem] = []
    found = read_export(data, (), Document(data), problems)
    if found is None:
        raise ConfigError(problems)
    return found

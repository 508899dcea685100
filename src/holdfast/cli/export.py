"""`holdfast export`: a run in the formats of other tools."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from holdfast.cli.places import find_run, runs_dir_option, runs_directory

if TYPE_CHECKING:
    from holdfast.export.reading import RunReader

FORMATS = ["csv", "parquet", "nat", "flexeval", "samples"]


@click.command("export")
@click.argument("run")
@click.option("--to", "wanted", required=True, type=click.Choice(FORMATS), help="The format.")
@click.option("-o", "--output", type=click.Path(path_type=Path, file_okay=False), help="Folder [RUN/export/FORMAT].")
@runs_dir_option
def command(run: str, wanted: str, output: Path | None, runs_dir: Path | None) -> int:
    """Write RUN (its path or id) as csv, parquet, nat, flexeval, or samples (transcripts as one JSONL)."""
    from holdfast.export.reading import RunReader
    from holdfast.store.files import make_directory
    from holdfast.store.rundir import RunDir

    rundir = RunDir(find_run(run, runs_directory(runs_dir)))
    reader = RunReader(rundir)
    folder = output or rundir.path / "export" / wanted
    make_directory(folder)
    for path in _write(reader, wanted, folder):
        click.echo(f"wrote {path}")
    if reader.missing_rows:
        click.echo(f"{reader.missing_rows:,} rows are no longer in the dataset; their fields are left out", err=True)
    if not rundir.finished:
        click.echo("the run is not finished: this is what there is so far", err=True)
    return 0


def _write(reader: RunReader, wanted: str, folder: Path) -> list[Path]:
    if wanted == "csv":
        from holdfast.export.tables import write_csv

        return write_csv(reader, folder)
    if wanted == "parquet":
        from holdfast.export.tables import write_parquet

        return write_parquet(reader, folder)
    if wanted == "nat":
        from holdfast.export.nat import write_nat

        return write_nat(reader, folder)
    if wanted == "flexeval":
        from holdfast.export.flexeval import write_flexeval

        return write_flexeval(reader, folder)
    from holdfast.export.samples import write_samples

    write_samples(reader.trials(), folder / "samples.jsonl")
    return [folder / "samples.jsonl"]

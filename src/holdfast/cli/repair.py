"""`holdfast repair`: verify a run directory, repair what can be repaired, and say what was done."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from holdfast.errors import Fault, ManifestError, UsageError

if TYPE_CHECKING:
    from holdfast.store.index import Index
    from holdfast.store.rundir import RunDir


@click.command("repair")
@click.argument("run", type=click.Path(path_type=Path, file_okay=False))
@click.option("-n", "--dry-run", is_flag=True, help="Only verify.")
def command(run: Path, dry_run: bool) -> int:
    """Verify every line of the run directory RUN and set damaged ones aside.

    What is set aside counts as not done: the next `holdfast eval` does it again. Exit code 0 when the run
    is sound or was made so, 1 when --dry-run found damage.
    """
    from holdfast.store.rundir import RunDir

    rundir = RunDir(run.resolve())
    if not run.is_dir() or not (rundir.manifest.exists() or (run / "outputs.jsonl").exists()):
        raise UsageError(f"{run} is not a run directory", remedy="Give the path that `holdfast eval` printed as run:")
    try:
        broken, index = (_wrong_with_manifest(rundir), rundir.load(mend=False)) if dry_run else _mend(rundir)
    except OSError as error:
        raise Fault(
            "disk",
            f"cannot repair {run}: {error.strerror or error}",
            remedy="Mend the disk first: what it does not give or take is beyond this command.",
        ) from error
    if broken:
        click.echo(broken)
    for damage in index.damage:
        click.echo(f"{damage.path.name}: {damage.what} at byte {damage.offset}, {damage.length} bytes")
    graded = sum(verdict.status != "error" for verdict in index.verdicts.values())
    click.echo(f"{len(index.outputs):,} outputs and {graded:,} grades are sound")
    if not index.damage and not broken:
        click.echo("nothing to repair")
        return 0
    if not dry_run:
        click.echo(f"set aside in {rundir.aside}; `holdfast eval` does that work again")
    return 1 if dry_run else 0


def _wrong_with_manifest(rundir: RunDir) -> str | None:
    try:
        rundir.read_manifest()
    except ManifestError as error:
        return error.message
    return None


def _mend(rundir: RunDir) -> tuple[str | None, Index]:
    """Set aside all that is damaged; what was wrong."""
    from holdfast.store.holding import hold

    lease = hold(rundir)
    try:
        broken = _wrong_with_manifest(rundir)  # first: what a later version wrote is not ours to mend
        index = rundir.load(mend=True)
        if broken:
            rundir.set_manifest_aside()
        if (index.damage or broken) and rundir.finished:
            rundir.reopen()
            click.echo("took back metrics.json: the next `holdfast eval` completes the run and writes it again")
        return broken, index
    finally:
        lease.release()

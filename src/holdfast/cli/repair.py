"""`holdfast repair`: verify a run directory, repair what can be repaired, and say what was done."""

from __future__ import annotations

from pathlib import Path

import click

from holdfast.errors import ManifestError, UsageError


@click.command("repair")
@click.argument("run", type=click.Path(path_type=Path, file_okay=False))
@click.option("-n", "--dry-run", is_flag=True, help="Only verify.")
def command(run: Path, dry_run: bool) -> int:
    """Verify every line of the run directory RUN and set damaged ones aside.

    What is set aside counts as not done: the next `holdfast eval` does it again. Exit code 0 when the run
    is sound or was made so, 1 when --dry-run found damage.
    """
    from holdfast.store.lease import RunLease
    from holdfast.store.rundir import RunDir

    rundir = RunDir(run)
    if not run.is_dir() or not (rundir.manifest.exists() or any(run.glob("*.jsonl"))):
        raise UsageError(f"{run} is not a run directory", remedy="Give the path that `holdfast eval` printed as run:")
    broken = None
    try:
        rundir.read_manifest()
    except ManifestError as error:
        broken = error.message
    if dry_run:
        index = rundir.load(mend=False)
    else:
        lease = RunLease(rundir.lease, lost=lambda: None)
        lease.acquire(0)
        try:
            index = rundir.load(mend=True)
            if broken:
                rundir.set_manifest_aside()
            if index.damage and rundir.finished:
                rundir.reopen()
                click.echo("took back metrics.json: with lines missing the run is not finished")
        finally:
            lease.release()
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

"""`holdfast repair`: verify a run directory, repair what can be repaired, and say what was done."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from holdfast.apps.cli.flags import find_run, runs_dir_option, runs_directory
from holdfast.display.terminal import echo
from holdfast.errors import Exit, Fault, ManifestError, ResultsError, RunFileError, UsageError, VersionError
from holdfast.store.run_lock import hold
from holdfast.store.rundir import RunDir

if TYPE_CHECKING:
    from holdfast.store.index import RunIndex


@click.command("repair")
@click.argument("run")
@click.option("-d", "-n", "--dry-run", is_flag=True, help="Verify without repairing; exit with 1 if there is damage.")
@runs_dir_option
def command(run: str, dry_run: bool, runs_dir: Path | None) -> int:
    """Verify every line of RUN (path or id) and set damaged lines aside.

    Work that is damaged or missing counts as not done: the next `holdfast eval` does it again. The exit code is 0 if
    the run is sound or was repaired.
    """
    rundir = RunDir(_directory(run, runs_dir).resolve())
    try:
        problems, index = _verify(rundir) if dry_run else _repair(rundir)
    except RunFileError:
        raise
    except OSError as error:
        raise Fault(
            "disk",
            f"cannot repair {error.filename or run}: {error.strerror or error}",
            remedy="Repair the disk first: this command has to read and write it.",
        ) from error
    for problem in problems:
        echo(problem)
    for damage in index.damage:
        echo(f"{damage.path.name}: {damage.what} at byte {damage.offset}, {damage.length} bytes")
    echo(f"{index.count_outputs():,} outputs and {index.count_verdicts():,} grades are sound")
    if not index.damage and not problems:
        echo("nothing to repair")
        return 0
    if not dry_run and rundir.aside.exists():
        echo(f"set aside in {rundir.aside}; `holdfast eval` does that work again")
    return Exit.GATE_FAILED if dry_run else Exit.FINISHED


def _directory(run: str, runs_dir: Path | None) -> Path:
    """Return the run's directory, even if its manifest is missing, unlike other commands."""
    path = Path(run)
    if path.is_dir():
        if any((path / name).exists() for name in ("manifest.json", "outputs.jsonl", "metrics.json")):
            return path
        raise UsageError(f"{run} is not a run directory", remedy="Give the path that `holdfast eval` printed as run:")
    return find_run(run, runs_directory(runs_dir))


def _verify(rundir: RunDir) -> tuple[list[str], RunIndex]:
    broken = _broken_manifest(rundir)
    index = rundir.load(repair=False, verify=True)
    return [*([broken] if broken else []), *_missing(rundir, index)], index


def _broken_manifest(rundir: RunDir) -> str | None:
    try:
        rundir.read_manifest()
    except ManifestError as error:
        return error.message
    return None


def _missing(rundir: RunDir, index: RunIndex) -> list[str]:
    """Describe what a finished run lacks."""
    problems = []
    if not rundir.manifest.exists():
        problems.append("manifest.json is missing; the `holdfast eval` command that made the run writes it again")
    with suppress(VersionError):
        try:
            metrics = rundir.read_metrics()
            if metrics is None:
                return problems
            rundir.read_results()
            rundir.read_gate()
        except ResultsError as error:
            return [*problems, error.message]
        lost = metrics.outputs - index.count_outputs()
        if lost > 0:
            counted = f"{metrics.outputs:,} outputs that metrics.json counts"
            problems.append(f"outputs.jsonl: {lost:,} of the {counted} are missing")
        elif rundir.has_lost_lines(metrics):
            problems.append("the journals are shorter than when metrics.json was written: lines are missing")
    return problems


def _repair(rundir: RunDir) -> tuple[list[str], RunIndex]:
    """Set damaged lines aside, reopen the run if something is missing, and describe the damage."""
    lease = hold(rundir)
    try:
        broken = _broken_manifest(rundir)  # first: what a later version wrote is not ours to repair
        index = rundir.load(repair=True, verify=True)
        if broken:
            rundir.set_manifest_aside()
        missing = _missing(rundir, index) if not broken else []
        if (index.damage or broken or missing) and rundir.finished:
            rundir.reopen()
            echo("removed metrics.json: the next `holdfast eval` completes the run and writes it again")
        return [*([broken] if broken else []), *missing], index
    finally:
        lease.release()

"""The runs directory, and the run that a command names."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from holdfast.apps.cli.errors import show_note
from holdfast.errors import UsageError
from holdfast.store import catalog
from holdfast.store.files import slug
from holdfast.store.rundir import RunDir

if TYPE_CHECKING:
    from holdfast.store.manifest import Manifest

runs_dir_option = click.option(
    "--runs-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder that holds the runs [default: $HOLDFAST_RUNS_DIR or ./runs].",
)


def runs_directory(option: Path | None) -> Path:
    """Return the runs directory: the option's, else the environment's, else ./runs."""
    chosen = option or Path(os.environ.get("HOLDFAST_RUNS_DIR") or "runs")
    if chosen.exists() and not chosen.is_dir():
        raise UsageError(f"{chosen} is a file, not a directory for runs", remedy="Give another one with --runs-dir.")
    return chosen


def find_run(name: str, runs_dir: Path) -> Path:
    """Find a run by its path, its id, or the beginning of its id. Shows a note if a newer Holdfast wrote it."""
    return announce_version(catalog.find_run(name, runs_dir))


def announce_version(path: Path) -> Path:
    """Show a note if a newer Holdfast wrote a run, and return its path."""
    rundir = RunDir(path)
    with suppress(UsageError):  # reported when the run is read
        manifest = rundir.read_manifest()
        if manifest is not None and (newer := rundir.newer(manifest)) is not None:
            show_note(newer)
    return rundir.path


def find_runs_dir(rundir: RunDir, manifest: Manifest, root: Path) -> Path:
    """Return the runs directory that a run is in; `root` for a run that was copied elsewhere, or archived."""
    place = rundir.path if len(rundir.path.parts) > 2 else rundir.path.resolve()
    return place.parent.parent if place.parent.name == slug(manifest.name) else root


def run_name(rundir: RunDir) -> str:
    """Return the shortest argument that names a run: its id, or its path if it is not in the runs directory."""
    manifest = rundir.read_manifest()
    if manifest is not None and rundir.path == runs_directory(None) / slug(manifest.name) / rundir.path.name:
        return manifest.id
    return shlex.quote(str(rundir.path))

"""The runs directory, and the run that a command names."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from holdfast.cli.errors import show_note, show_warning
from holdfast.errors import NoSuchRun, UsageError

if TYPE_CHECKING:
    from holdfast.cluster.watch.find import Subject
    from holdfast.report.run_view import RunView
    from holdfast.store.manifest import Manifest
    from holdfast.store.rundir import RunDir

runs_dir_option = click.option(
    "--runs-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder that holds the runs [default: $HOLDFAST_RUNS_DIR or ./runs].",
)


def runs_directory(option: Path | None) -> Path:
    """The option, else the environment's, else ./runs."""
    chosen = option or Path(os.environ.get("HOLDFAST_RUNS_DIR") or "runs")
    if chosen.exists() and not chosen.is_dir():
        raise UsageError(f"{chosen} is a file, not a directory for runs", remedy="Give another one with --runs-dir.")
    return chosen


def find_run(name: str, runs_dir: Path) -> Path:
    """A run here by its path, its id, or the beginning of its id. Says so where a newer Holdfast wrote it."""
    from holdfast.store import catalog

    return _announce_version(catalog.find_run(name, runs_dir))


def fetch_run(name: str, runs_dir: Path) -> Path:
    """A run to read: one on this machine, as `find_run` finds it, or a copy of the one of a task or `HOST:PATH`."""
    return fetch_runs(name, runs_dir, most=1)[0]


def open_run(name: str, runs_dir: Path) -> RunView:
    """Open a run to read, as `fetch_run` finds it. Warns if its journals no longer hold what its report was made of."""
    from holdfast.report.run_view import RunView
    from holdfast.store.rundir import RunDir

    view = RunView(RunDir(fetch_run(name, runs_dir)))
    if view.metrics is not None and view.rundir.has_lost_lines(view.metrics):
        path = shlex.quote(str(view.rundir.path))
        show_warning(
            f"the journals of {view.rundir.path} have become shorter since its report was made; the numbers are those "
            f"of the report, and `holdfast repair {path} --dry-run` says what is missing"
        )
    return view


def fetch_runs(name: str, runs_dir: Path, most: int | None = None) -> list[Path]:
    """Runs to read, as for `fetch_run`; an invocation has one for each task, of which at most `most` are accepted."""
    try:
        path = find_run(name, runs_dir)
    except NoSuchRun as error:
        no_run = error
    else:
        _refuse_invocation(name, path)
        return [path]
    from holdfast.cluster.watch.copies import fetch_run, find_places
    from holdfast.cluster.watch.find import NotKnown

    try:
        places = find_places(name)
    except NotKnown:
        raise no_run from None
    if most is not None and len(places) > most:
        runs = ", ".join(f"{task} ({place.path})" for task, place in places.items())
        raise UsageError(f"{name} has {len(places)} runs: {runs}", remedy=f"Name one, such as {next(iter(places))}.")
    return [_announce_version(fetch_run(place, show_note)) for place in places.values()]


def _refuse_invocation(name: str, path: Path) -> None:
    """Raise if the beginning of a run's id is also that of an invocation."""
    from holdfast.store.home import home_directory

    if path != Path(name) and (others := sorted((home_directory() / "invocations").glob(f"{name}*.json"))):
        raise UsageError(
            f"{name!r} is ambiguous: it is the beginning of a run, {path}, and of invocation {others[0].stem}",
            remedy="Give more digits.",
        )


def _announce_version(path: Path) -> Path:
    """Show a note if a newer Holdfast wrote a run, and return its path."""
    from holdfast.store.rundir import RunDir

    rundir = RunDir(path)
    with suppress(UsageError):  # reported where the run is read
        manifest = rundir.read_manifest()
        if manifest is not None and (newer := rundir.newer(manifest)) is not None:
            show_note(newer)
    return rundir.path


def find_runs_dir(rundir: RunDir, manifest: Manifest, root: Path) -> Path:
    """Return the runs directory that a run is in; `root` for a run that was copied elsewhere, or archived."""
    from holdfast.store.durable import slug

    place = rundir.path if len(rundir.path.parts) > 2 else rundir.path.resolve()
    return place.parent.parent if place.parent.name == slug(manifest.name) else root


def find_subject(name: str, runs_dir: Path) -> Subject | Path:
    """An invocation or a task of it, by id or path; else a run on this machine, by path or id."""
    from holdfast.cluster.watch.find import NotKnown, find

    try:
        return find(name)
    except NotKnown as error:
        try:
            return find_run(name, runs_dir)
        except UsageError as other:
            raise UsageError(f"{error.message}; {other.message}", remedy=error.remedy) from None


def run_name(rundir: RunDir) -> str:
    """Return the shortest argument that names a run: its id, or its path if it is not where runs are looked for."""
    from holdfast.store.durable import slug

    manifest = rundir.read_manifest()
    if manifest is not None and rundir.path == runs_directory(None) / slug(manifest.name) / rundir.path.name:
        return manifest.id
    return shlex.quote(str(rundir.path))


def command_line() -> str:
    """Return this command as it is typed to resume: without --fresh, which would start from scratch.

    Decisions of --settle are on disk by then. To repeat one would be another decision, if the call was cut off again.
    """
    words = ["holdfast"]
    rest = iter(sys.argv[1:])
    for word in rest:
        if word == "--settle":
            next(rest, None)
        elif word not in ("--fresh", "--force", "--again") and not word.startswith("--settle="):
            words.append(word)
    return shlex.join(words)

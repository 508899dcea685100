"""Runs and invocations that a command names: on this machine, or on a cluster."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.apps.cli.errors import show_note, show_warning
from holdfast.apps.cli.flags import announce_version, find_run
from holdfast.apps.cluster.watch import copies
from holdfast.apps.cluster.watch.find import NotKnown, find
from holdfast.errors import NoSuchRun, UsageError
from holdfast.report.run_view import RunView
from holdfast.store.home import home_directory
from holdfast.store.rundir import RunDir

if TYPE_CHECKING:
    from holdfast.apps.cluster.watch.find import Subject


def find_subject(name: str, runs_dir: Path) -> Subject | Path:
    """Find an invocation or one of its tasks, by id or path, or a run on this machine, by path or id."""
    try:
        return find(name)
    except NotKnown as error:
        try:
            return find_run(name, runs_dir)
        except UsageError as other:
            raise UsageError(f"{error.message}; {other.message}", remedy=error.remedy) from None


def fetch_run(name: str, runs_dir: Path) -> Path:
    """Find a run to read: one on this machine, as with `find_run`, or a copy of a task's run or of `HOST:PATH`."""
    return fetch_runs(name, runs_dir, most=1)[0]


def fetch_runs(name: str, runs_dir: Path, most: int | None = None) -> list[Path]:
    """Find runs to read, as with `fetch_run`; an invocation has one for each task, and may have at most `most`."""
    try:
        path = find_run(name, runs_dir)
    except NoSuchRun as error:
        no_run = error
    else:
        _refuse_invocation(name, path)
        return [path]

    try:
        places = copies.find_places(name)
    except NotKnown:
        raise no_run from None
    if most is not None and len(places) > most:
        runs = ", ".join(f"{task} ({place.path})" for task, place in places.items())
        raise UsageError(f"{name} has {len(places)} runs: {runs}", remedy=f"Name one, such as {next(iter(places))}.")
    return [announce_version(copies.fetch_run(place, show_note)) for place in places.values()]


def _refuse_invocation(name: str, path: Path) -> None:
    """Raise UsageError if the beginning of a run's id is also the beginning of an invocation's."""
    if path != Path(name) and (others := sorted((home_directory() / "invocations").glob(f"{name}*.json"))):
        raise UsageError(
            f"{name!r} is ambiguous: it is the beginning of a run, {path}, and of invocation {others[0].stem}",
            remedy="Give more digits.",
        )


def open_run(name: str, runs_dir: Path) -> RunView:
    """Open a run to read, as `fetch_run` finds it. Warn if its journals are shorter than when its report was made."""
    view = RunView(RunDir(fetch_run(name, runs_dir)))
    if view.metrics is not None and view.rundir.has_lost_lines(view.metrics):
        path = shlex.quote(str(view.rundir.path))
        show_warning(
            f"the journals of {view.rundir.path} have become shorter since its report was made; the numbers come "
            f"from the report, and `holdfast repair {path} --dry-run` says what is missing"
        )
    return view

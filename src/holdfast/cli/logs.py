"""`holdfast logs`: what jobs and runs have said."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import click

from holdfast.cli.completion import complete_runs
from holdfast.cli.runs import runs_dir_option, runs_directory, subject_of
from holdfast.errors import Unreachable, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from holdfast.cluster.watch.find import Subject
    from holdfast.cluster.watch.logs import Lines, Logs

POLL_SECONDS: Final = 1.0
_LOOK_EVERY: Final = 5
"""looks at a log for one at the jobs"""


@click.command("logs")
@click.argument("what", metavar="ID|PATH", shell_complete=complete_runs)
@click.option("-f", "--follow", is_flag=True, help="Follow the log to the end, across jobs.")
@click.option("--deployment", is_flag=True, help="Show the log of the model server.")
@click.option("--server", metavar="NAME", help="Show the log of another server, such as judge.")
@click.option("--worker", metavar="N", help="Show the log of worker N.")
@click.option("--all", "everything", is_flag=True, help="Show the logs of all jobs, not only of the last.")
@runs_dir_option
def command(
    what: str,
    follow: bool,
    deployment: bool,
    server: str | None,
    worker: str | None,
    everything: bool,
    runs_dir: Path | None,
) -> int:
    """Show the log of an invocation's tasks, of one task (`ID.N`), or of a run directory.

    It can be named as for `holdfast status`. Ctrl-C ends the following, and nothing else.
    """
    from holdfast.cluster.watch.find import Subject

    if deployment + (server is not None) + (worker is not None) > 1:
        raise UsageError("--deployment, --server and --worker name different logs; give one of them")
    found = subject_of(what, runs_directory(runs_dir))
    try:
        if isinstance(found, Subject):
            kind = "deployment" if deployment else server or ("main" if worker is None else f"worker-{worker}")
            return _of_invocation(found, kind, follow=follow, everything=everything)
        if deployment or server is not None:
            raise UsageError(f"{found} is a run; only invocations have a server of their own")
        return _of_run(found, worker, follow=follow)
    except KeyboardInterrupt:
        return 130


def _of_invocation(subject: Subject, kind: str, *, follow: bool, everything: bool) -> int:
    from holdfast.cluster.remote.invocation import TaskPlace
    from holdfast.cluster.watch.logs import Lines, Logs
    from holdfast.cluster.watch.status import LIVE, look, read_files

    names = read_files(subject.transport, subject.directory).invocation.tasks
    numbers = range(len(names)) if subject.task is None else [subject.task]
    logs = [Logs(subject.transport, TaskPlace(subject.directory, number).logs, f"{kind}-*.log") for number in numbers]
    leads = [f"[.{number} {names[number]}] " if len(numbers) > 1 else "" for number in numbers]
    if not everything:
        for log in logs:
            log.begin_with_the_newest()

    def over() -> bool:
        tasks = look(subject).tasks
        return all(task.status not in LIVE and task.status != "unknown" for task in tasks)

    _show(list(zip(logs, map(Lines, leads), strict=True)), over if follow else None, f"{kind} log")
    return 0


def _of_run(path: Path, worker: str | None, *, follow: bool) -> int:
    from holdfast.cluster.remote.transport import Here
    from holdfast.cluster.watch.logs import Lines, Logs
    from holdfast.store.processes import holders
    from holdfast.store.rundir import RunDir

    folder = path if worker is None else path / "workers" / worker
    _show(
        [(Logs(Here(), str(folder), "run.log"), Lines())],
        (lambda: not holders(RunDir(path))) if follow else None,
        "run.log",
    )
    return 0


def _show(logs: list[tuple[Logs, Lines]], over: Callable[[], bool] | None, what: str) -> None:
    """Print what is there; with `over`, also what comes, until it says so. A cluster that is silent is waited for."""
    from holdfast.cluster.watch.logs import none_yet

    shown = ""
    looks, silent, last = 0, False, over is None
    while True:
        try:
            for log, lines in logs:
                for piece in log.read():
                    if piece.file != shown and shown and len(logs) == 1:
                        click.echo(f"── {piece.file}", err=True)
                    shown = piece.file
                    for line in lines.add(piece):
                        click.echo(line)
            if silent:
                click.echo("the cluster answers again", err=True)
            silent = False
            if last:
                break
            looks += 1
            last = looks % _LOOK_EVERY == 0 and over is not None and over()
            if last:
                continue  # what was said between the two looks
        except Unreachable as error:
            if over is None:
                raise
            if not silent:
                click.echo(f"{error.message}; trying again until it answers", err=True)
            silent = True
        time.sleep(POLL_SECONDS)
    for _, lines in logs:
        for line in lines.end():
            click.echo(line)
    if not shown:
        raise none_yet(logs[0][0], what)

"""`holdfast logs`: show and follow the logs of jobs and runs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import click

from holdfast.apps.cli.errors import show_warning
from holdfast.apps.cli.flags import complete_runs, runs_dir_option, runs_directory
from holdfast.apps.cli.subjects import find_subject
from holdfast.apps.cluster.remote.invocation import TaskFolder
from holdfast.apps.cluster.remote.transport import Here
from holdfast.apps.cluster.watch.find import Subject
from holdfast.apps.cluster.watch.logs import Logs, repeat, task_prefix
from holdfast.apps.cluster.watch.status import LIVE, look, read_files
from holdfast.display.terminal import echo
from holdfast.errors import Exit, UsageError
from holdfast.store.run_lock import holders
from holdfast.store.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

_LOOKS_PER_QUESTION: Final = 5
"""how often the logs are read for each time that Slurm is asked"""
_COLOURS: Final = re.compile(r"\x1b\[[\d;]*m")
"""which servers give their logs; spelled out they would hide the text"""


@click.command("logs")
@click.argument("what", metavar="ID|PATH", shell_complete=complete_runs)
@click.option("-f", "--follow", is_flag=True, help="Follow the log until the end, across requeued jobs and successors.")
@click.option("--deployment", is_flag=True, help="Show the logs of the model server.")
@click.option("--server", metavar="NAME", help="Show the log of an auxiliary server, such as judge.")
@click.option("--worker", metavar="N", help="Show the log of worker N.")
@click.option("--all", "everything", is_flag=True, help="Show the logs of all jobs, not only of the newest.")
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
    """Show the logs of an invocation, of one task (`ID.N`), or of a run.

    ID and PATH are as for `holdfast status`. Ctrl-C stops following and nothing else.
    """
    if deployment + (server is not None) + (worker is not None) > 1:
        raise UsageError("--deployment, --server and --worker name different logs; give one of them")
    subject = find_subject(what, runs_directory(runs_dir))
    try:
        if isinstance(subject, Subject):
            kind = "deployment" if deployment else server or ("main" if worker is None else f"worker-{worker}")
            return _show_invocation(subject, kind, follow=follow, everything=everything)
        if deployment or server is not None:
            raise UsageError(f"{subject} is a run; only invocations have a server of their own")
        return _show_run(subject, worker, follow=follow)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED


def _show_invocation(subject: Subject, kind: str, *, follow: bool, everything: bool) -> int:
    names = read_files(subject.transport, subject.directory).invocation.tasks
    prefixes = {}
    for number in range(len(names)) if subject.task is None else [subject.task]:
        prefix = task_prefix(names, number) if subject.task is None else ""
        prefixes[TaskFolder(subject.directory, number).logs] = prefix
    logs = Logs(subject.transport, list(prefixes), f"{kind}-*.log")
    if not everything:
        logs.skip_earlier_starts()

    def is_over() -> bool:
        return all(task.status not in LIVE and task.status != "unknown" for task in look(subject).tasks)

    return _show(logs, prefixes, is_over if follow else None, f"{kind} log")


def _show_run(path: Path, worker: str | None, *, follow: bool) -> int:
    folder = path if worker is None else path / "workers" / worker
    logs = Logs(Here(), [str(folder)], "run.log")
    is_over = (lambda: not holders(RunDir(path))) if follow else None
    return _show(logs, {str(folder): ""}, is_over, "run.log")


def _show(logs: Logs, prefixes: Mapping[str, str], is_over: Callable[[], bool] | None, kind: str) -> int:
    """Print logs, with the prefix of each folder's lines; with `is_over`, follow them until it returns True."""
    current, looks = "", 0

    def show() -> bool:
        nonlocal current, looks
        # Asked before reading, so that nothing written in between is missed.
        last = is_over is None or (looks % _LOOKS_PER_QUESTION == 0 and is_over())
        looks += 1
        for folder, file, line in (*logs.read(), *(logs.end() if last else ())):
            if current not in ("", file) and len(prefixes) == 1:
                echo(f"── {file}", err=True)
            current = file
            echo(prefixes[folder] + _COLOURS.sub("", line))
        return last

    if is_over is None:
        show()
    else:
        repeat(show, show_warning)
    if not current:
        raise UsageError(
            f"there is no {kind} in {next(iter(prefixes))} yet",
            remedy="The log begins when the job does; -f waits for it.",
        )
    return 0

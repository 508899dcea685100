"""`holdfast kill`: cancel the jobs of an invocation, or stop the process of a run."""

from __future__ import annotations

import getpass
import os
from typing import TYPE_CHECKING

import click

from holdfast.apps.cli.flags import complete_runs, runs_dir_option, runs_directory
from holdfast.apps.cli.subjects import find_subject
from holdfast.apps.cluster.watch.cleanup import kill
from holdfast.apps.cluster.watch.find import Subject
from holdfast.apps.cluster.watch.status import read_files
from holdfast.display.terminal import echo
from holdfast.errors import ClusterError, UsageError
from holdfast.store.run_lock import holders, stop
from holdfast.store.rundir import RunDir

if TYPE_CHECKING:
    from pathlib import Path

_PATIENCE = 30.0


@click.command("kill")
@click.argument("what", metavar="ID|PATH", shell_complete=complete_runs)
@runs_dir_option
def command(what: str, runs_dir: Path | None) -> int:
    """Cancel the jobs of an invocation or of one task (`ID.N`), or stop the process that holds a run.

    Finished work stays, and `holdfast resume` continues from there. The command can be repeated safely. The exit code
    is 3 if something has not stopped yet.
    """
    subject = find_subject(what, runs_directory(runs_dir))
    return _kill_jobs(subject) if isinstance(subject, Subject) else _kill_process(subject)


def _kill_jobs(subject: Subject) -> int:
    ended, remain = kill(subject, f"{getpass.getuser()}@{os.uname().nodename}", say=echo)
    if remain:
        raise ClusterError(
            f"still stopping: {', '.join(remain)}",
            remedy=f"Slurm was asked to cancel them; check with: holdfast status {subject.name}",
        )
    jobs = "1 job" if len(ended) == 1 else f"{len(ended)} jobs"
    echo(f"cancelled {jobs}" if ended else "no jobs were running")
    files = read_files(subject.transport, subject.directory)
    numbers = range(len(files.invocation.tasks)) if subject.task is None else [subject.task]
    if all(number in files.states and files.states[number].phase == "done" for number in numbers):
        echo(f"{subject.name} is done")
    else:
        echo(f"Resume with: holdfast resume {subject.name}")
    return 0


def _kill_process(path: Path) -> int:
    held = holders(RunDir(path))
    if not held:
        echo(f"no process holds {path}")
        return 0
    elsewhere = [holder for holder in held if not holder.is_here]
    try:
        ended, remain = stop(held, _PATIENCE)
    except PermissionError:
        raise UsageError(
            f"{path} is held by somebody else's process: {', '.join(map(str, held))}",
            remedy="Ask the owner to stop it.",
        ) from None
    for holder in ended:
        echo(f"stopped {holder}")
    if remain or elsewhere:
        raise ClusterError(
            f"still running: {', '.join(map(str, [*remain, *elsewhere]))}",
            remedy="For a process on another machine, run the same command there."
            if elsewhere
            else "It is still stopping; check with `holdfast status`.",
        )
    echo(f"Resume with: holdfast resume {path}")
    return 0

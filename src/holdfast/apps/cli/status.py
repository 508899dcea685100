"""`holdfast status`: show the status of an invocation or a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from holdfast.apps.cli.errors import show_note, show_warning
from holdfast.apps.cli.flags import complete_runs, env_file_options, load_env_file, runs_dir_option, runs_directory
from holdfast.apps.cli.subjects import find_subject
from holdfast.apps.cluster.watch.find import Subject
from holdfast.apps.cluster.watch.status import look, look_at_all
from holdfast.display.format import duration
from holdfast.display.terminal import echo, echo_json
from holdfast.errors import Exit, HoldfastError, RunHeld, UsageError
from holdfast.plugins.batches.collecting import batch_lines, collect_batches
from holdfast.plugins.batches.ledger import waiting_batches
from holdfast.report.exports import unfinished_exports
from holdfast.store.catalog import RunSummary, summarize_run
from holdfast.store.run_lock import holders

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.apps.cluster.remote.slurm import JobState
    from holdfast.apps.cluster.watch.status import Picture, TaskPicture
    from holdfast.plugins.batches.collecting import Collected
    from holdfast.store.rundir import Manifest, RunDir

_SHOWN_TASKS = 3
"""names of tasks in a line of the list"""


class RunPicture(RunSummary, frozen=True, kw_only=True):
    """An ordinary run, as `--json` has it."""

    errors: int
    """trials without an output that were tried, except uncertain ones"""
    held_by: tuple[str, ...] = ()
    batches: tuple[str, ...] = ()
    """batches that are under way, in words"""
    collected: tuple[str, ...] = ()
    """batches whose results were collected just now, in words"""
    exports: tuple[str, ...] = ()
    """exports that failed, or are offline, in words"""


@click.command("status")
@click.argument("what", metavar="[ID|PATH]", required=False, shell_complete=complete_runs)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@runs_dir_option
@env_file_options
def command(what: str | None, as_json: bool, runs_dir: Path | None) -> int:
    """Show the status of an invocation, one of its tasks, or a run; without an argument, list your invocations.

    ID is the id of an invocation or the beginning of it, or `ID.N` for task N. PATH is the directory of an invocation,
    a run directory, or HOST:PATH; anybody who may read the directory sees the same. The exit code is 3 if the cluster
    does not answer.

    For a run that waits for batches, the provider is asked how far they are, and the results of those that have ended
    are stored. `holdfast resume` then finishes the run.
    """
    if what is None:
        return _list(as_json)
    subject = find_subject(what, runs_directory(runs_dir))
    if not isinstance(subject, Subject):
        run = look_at_run(subject)
        echo_json(_json(run)) if as_json else echo("\n".join(_run_lines(run)))
        return 0
    picture = look(subject)
    echo_json(_json(picture)) if as_json else echo("\n".join(_lines(picture, subject.name)))
    return Exit.UNFINISHED if picture.unreachable else 0


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode()


def _list(as_json: bool) -> int:
    """List all invocations."""
    pictures = look_at_all()
    unreachable = [picture.unreachable for picture in pictures if picture.unreachable]
    if as_json:
        echo_json(_json(pictures))
    elif not pictures:
        echo("no invocations; for a run, give its path: holdfast status RUN")
    else:
        rows = [
            (
                picture.id,
                _ago(picture.created),
                picture.profile or picture.executor,
                _names(picture.tasks),
                _summary(picture.tasks),
            )
            for picture in pictures
        ]
        echo("\n".join(_table(("id", "created", "where", "tasks", "status"), rows)))
        for why in dict.fromkeys(unreachable):
            show_warning(f"not reachable: {why}")
    return Exit.UNFINISHED if unreachable else 0


def _names(tasks: Sequence[TaskPicture]) -> str:
    shown = ", ".join(task.name for task in tasks[:_SHOWN_TASKS])
    return shown if len(tasks) <= _SHOWN_TASKS else f"{shown} and {len(tasks) - _SHOWN_TASKS} more"


def _summary(tasks: Sequence[TaskPicture]) -> str:
    words = [task.status for task in tasks]
    return ", ".join(f"{words.count(word)} {word}" if len(words) > 1 else word for word in dict.fromkeys(words))


def _lines(picture: Picture, name: str) -> Iterator[str]:
    facts = [
        picture.id,
        *([picture.profile] if picture.profile else []),
        f"{picture.place}: {picture.directory}",
        *([f"by {picture.user}"] if picture.user else []),
        *([_ago(picture.created)] if picture.created else []),
    ]
    yield " · ".join(facts)
    if picture.unreachable:
        age = f"last known {_ago(picture.looked)}" if picture.looked else "nothing is known yet"
        yield f"unknown (cluster not reachable: {picture.unreachable}); {age}:"
    yield from _table(("", "task", "status", "done", "rate", "errors", "ETA"), list(map(_task_row, picture.tasks)))
    for task in picture.tasks:
        if task.reason and not picture.unreachable:
            yield f"{_number(task)}  {task.status}: {task.reason}"
        if task.run_dir:
            yield f"{_number(task)}  run: {task.run_dir}"
    jobs = [_job_row(task, job) for task in picture.tasks for job in task.jobs if job.active or job is _last_job(task)]
    if jobs:
        yield ""
        yield from _table(("", "job", "id", "state", "node", "elapsed", ""), jobs)
    if any(task.status in ("interrupted", "unsubmitted", "stopped") for task in picture.tasks):
        yield f"Resume with: holdfast resume {name}"


def _number(task: TaskPicture) -> str:
    return f".{task.id.rpartition('.')[2]}"


def _task_row(task: TaskPicture) -> Sequence[str]:
    return (
        _number(task),
        task.name,
        task.status,
        f"{task.done:,}/{'?' if task.total is None else format(task.total, ',')}",
        f"{task.rate:.2g}/s" if task.rate else "–",
        f"{task.errors:,}",
        "–" if task.eta is None else duration(task.eta),
    )


def _job_row(task: TaskPicture, job: JobState) -> Sequence[str]:
    elapsed = duration(job.elapsed) if job.elapsed else "–"
    return _number(task), job.role, job.handle or "?", job.state, job.nodes or "–", elapsed, job.why


def _last_job(task: TaskPicture) -> JobState:
    """Return the last main job that began: a successor that was not needed was cancelled before."""
    began = [job for job in task.jobs if job.state != "cancelled" or job.elapsed]
    return ([job for job in began if job.role.startswith("main")] or began or task.jobs)[-1]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _ago(moment: float | None) -> str:
    if moment is None:
        return "?"
    seconds = max(0.0, time.time() - moment)
    return f"{duration(seconds)} ago" if seconds < 86400 else time.strftime("%Y-%m-%d", time.localtime(moment))


def _collect(rundir: RunDir, manifest: Manifest) -> Collected | None:
    """Ask about the batches of a run that nobody works on, and collect those that have ended; None if that fails."""
    load_env_file(Path(manifest.folder), Path())
    try:
        return collect_batches(rundir, manifest, show_note)
    except RunHeld:
        return None  # by a process that collects them itself
    except (HoldfastError, OSError) as error:
        show_warning(f"batches were not collected: {error}")
        return None


def look_at_run(path: Path) -> RunPicture:
    """Return the status of a run. The permission to read is enough, except to collect batches."""
    from holdfast.store.rundir import RunDir

    rundir = RunDir(path)
    manifest = rundir.read_manifest()  # raises what is wrong with it
    held_by = tuple(map(str, holders(rundir)))
    collected = None
    if manifest is not None and not held_by and not rundir.finished and waiting_batches(rundir):
        collected = _collect(rundir, manifest)
    listed = summarize_run(rundir)
    if listed is None:
        raise UsageError(f"{path} is not a run directory")
    errors = 0
    if listed.status in ("running", "unfinished"):
        index = rundir.load(repair=False)
        uncertain = index.uncertain_trials(running=listed.status == "running")
        errors = sum(key not in uncertain and index.output(key) is None for key in index.attempts)
    return RunPicture(
        **{**msgspec.structs.asdict(listed), "path": str(path.resolve())},
        errors=errors,
        held_by=held_by,
        batches=tuple(batch_lines(rundir, collected.states if collected else {})),
        collected=tuple(collected.news) if collected else (),
        exports=tuple(unfinished_exports(rundir)),
    )


def _run_lines(run: RunPicture) -> Iterator[str]:
    yield f"{run.name} · {run.target} · {run.path}"
    yield from run.collected
    yield from (f"waiting for {batch}" for batch in run.batches)
    errors = f", {run.errors:,} trials have errors" if run.errors else ""
    if run.uncertain:
        errors += f", {run.uncertain:,} uncertain (resume it to see how to settle them)"
    if run.status == "running":
        yield f"running: {run.done:,} of {run.total:,} trials have an output{errors}"
        yield from (f"  {holder}" for holder in run.held_by)
    elif run.status in ("finished", "gate failed"):
        score = "no score" if run.score is None else f"score {run.score:.3f}"
        gate = "; gate failed" if run.status == "gate failed" else ""
        yield f"finished: {score}, coverage {run.coverage or 0:.1%} of {run.total:,} trials{gate}"
    else:
        yield f"not finished: {run.done:,} of {run.total:,} trials have an output{errors}"
        yield f"Resume with: holdfast resume {run.path}"
    yield from run.exports

"""`holdfast resume`: continue an invocation or a run, given only its id or path."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from holdfast.apps.cli.errors import show_note
from holdfast.apps.cli.flags import (
    Concurrency,
    accept_errors_option,
    complete_runs,
    display_option,
    env_file_options,
    find_runs_dir,
    load_env_file,
    lock_timeout,
    no_wait_option,
    retry_failed_option,
    runs_dir_option,
    runs_directory,
    wait_option,
)
from holdfast.apps.cli.running import export_results, run_and_report
from holdfast.apps.cli.subjects import find_subject
from holdfast.apps.cluster.remote.invocation import TaskFolder, remove_stops
from holdfast.apps.cluster.remote.registry import InvocationRegistry
from holdfast.apps.cluster.remote.slurm import JobName
from holdfast.apps.cluster.remote.submit import start_jobs
from holdfast.apps.cluster.watch.find import Subject
from holdfast.apps.cluster.watch.status import jobs_of, read_files
from holdfast.canonical import canonical
from holdfast.display.terminal import echo
from holdfast.engine.run import run_eval
from holdfast.engine.session import Options
from holdfast.errors import RunHeld, UsageError
from holdfast.plan.history import match_outputs
from holdfast.plan.identity import identify
from holdfast.plan.inputs import stale_parts
from holdfast.spec.load import eval_of_run, parse_override
from holdfast.store.rundir import RunDir

if TYPE_CHECKING:
    from holdfast.plan.identity import RunIdentity
    from holdfast.store.rundir import Manifest


@click.command("resume")
@click.argument("what", metavar="ID|PATH", shell_complete=complete_runs)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]…")
@click.option("--concurrency", type=Concurrency(), help="Maximum number of requests in flight, or auto.")
@accept_errors_option
@retry_failed_option
@click.option(
    "--settle",
    multiple=True,
    metavar="SAMPLE/TRIAL=DECISION",
    help="Say what became of a call that was cut off and must not happen twice. DECISION is happened:JSON "
    "(the call's result), again (make the call) or restart (begin the trial again). If a trial has several such calls, "
    "SAMPLE/TRIAL#CALL names one by its id. Can be repeated.",
)
@wait_option
@no_wait_option
@display_option
@runs_dir_option
@env_file_options
def command(
    what: str,
    overrides: tuple[str, ...],
    concurrency: int | str | None,
    accept_errors: bool,
    retry_failed: bool,
    settle: tuple[str, ...],
    wait: bool,
    no_wait: bool,
    display: str | None,
    runs_dir: Path | None,
) -> int:
    """Resume an invocation or a run: submit its unfinished tasks, or run what is left of the run.

    Neither the configuration nor the eval file is needed: an invocation's directory and a run's manifest hold
    everything except secrets. KEY=VALUE changes the limits of a run, such as limits.max_cost=20; a change that would
    make it another run is rejected; all options are for runs. The exit code is 4 if somebody is working on it already.
    """
    root = runs_directory(runs_dir)
    subject = find_subject(what, root)
    if isinstance(subject, Subject):
        flags = {
            "--concurrency": concurrency,
            "--accept-errors": accept_errors,
            "--retry-failed": retry_failed,
            "--wait": wait,
            "--no-wait": no_wait,
        }
        if settle:
            raise UsageError(
                f"{subject.name} is an invocation, and --settle is for runs",
                remedy="Settle the run where it is, on the cluster: holdfast resume RUN_DIR "
                + " ".join(f"--settle {shlex.quote(decision)}" for decision in settle)
                + f". `holdfast status {subject.name}` names its directory; resume the invocation afterwards.",
            )
        if changes := [*overrides, *(flag for flag, value in flags.items() if value)]:
            raise UsageError(
                f"an invocation resumes as it was submitted: {' '.join(changes)} is for runs",
                remedy="Submit it again with `holdfast eval -c`, which finds the same run and what is done.",
            )
        return _resume_invocation(subject)
    if concurrency is not None:
        overrides = (*overrides, f"limits.concurrency={concurrency}")
    wait_seconds = lock_timeout(wait=wait)
    options = Options(
        runs_dir=root,
        accept_errors=accept_errors,
        retry_failed=retry_failed,
        settle=settle,
        wait=wait_seconds,
        wait_for_batches=not no_wait,
    )
    return _resume_run(subject, overrides, options, display)


def _resume_invocation(subject: Subject) -> int:
    files = read_files(subject.transport, subject.directory)
    _check_rights(subject, files.invocation.user)
    numbers = list(range(len(files.invocation.tasks))) if subject.task is None else [subject.task]
    live = {
        name.task: state
        for state in jobs_of(subject.transport, files)
        if state.active and (name := JobName.parse(state.name)) is not None
        # A task needs its main job, which divides the work: workers do not continue without it.
        if name.task in numbers and name.role.startswith("main")
    }
    finished = [n for n in numbers if n in files.states and files.states[n].phase == "done"]
    unfinished = [n for n in numbers if n not in finished and n not in live]
    for number, state in sorted(live.items()):
        show_note(f".{number} {files.invocation.tasks[number]}: job {state.handle} is {state.state}")
    if live and not unfinished:
        raise RunHeld(f"{subject.name} is already running", remedy=f"To stop it first: holdfast kill {subject.name}")
    if not unfinished:
        echo(f"{subject.name}: already finished")
        return 0
    folders = [TaskFolder(subject.directory, number).path for number in unfinished]
    remove_stops(subject.transport, [subject.directory, *folders])
    mirror = InvocationRegistry().mirror(subject.entry.id) if subject.entry else None
    started = start_jobs(subject.transport, subject.directory, tasks=unfinished, mirror=mirror, say=show_note)
    if not started:  # another command was faster
        raise RunHeld(f"{subject.name} is already running", remedy=f"Follow it with: holdfast logs -f {subject.name}")
    for job in started:
        echo(f"submitted {job.intent.name} (job {job.id})")
    echo(f"Follow it with: holdfast logs -f {subject.name}")
    return 0


def _check_rights(subject: Subject, owner: str) -> None:
    script = 'test -w "$1" && { test ! -e "$1/secrets.env" || test -r "$1/secrets.env"; }'
    if subject.transport.run(["sh", "-c", script, "sh", subject.directory]).code != 0:
        raise UsageError(
            f"{subject.name} is {owner}'s: its jobs read secrets that only they can read",
            remedy="Submit the same configuration yourself with `holdfast eval -c`: it reuses all finished work "
            "if both have the same remote_job_dir.",
        )


def _resume_run(path: Path, overrides: tuple[str, ...], options: Options, display: str | None) -> int:
    """Run what is left of a run, given only its manifest."""
    rundir = RunDir(path)
    manifest = rundir.read_manifest()
    if manifest is None:
        raise UsageError(f"{path} has no manifest", remedy="`holdfast eval` with its eval file writes it again.")
    if options.settle and rundir.finished:
        show_note("the run is finished, so there is nothing to settle")
    _refuse_hidden(manifest.eval, manifest.eval_file)
    changes = [parse_override(text) for text in overrides]
    load_env_file(Path(manifest.folder), Path())
    spec = eval_of_run(manifest.eval, manifest.folder, manifest.eval_file, changes)
    if (manifest.eval.get("metadata") or {}) == {"made_by": "holdfast compare --judge"}:
        raise UsageError(
            f"{path} holds verdicts of `holdfast compare --judge`", remedy="Run that command again to resume it."
        )
    identity = match_outputs((rundir, manifest), identify(spec))
    if stale := stale_parts(rundir, identity).parts:
        raise UsageError(
            f"{path} cannot be resumed: {'; '.join(dict.fromkeys(stale.values()))}",
            remedy="Run `holdfast eval` with the eval file, which reuses what still applies and says what changed.",
        )
    if identity.run_path is None and _grades_differently(manifest, identity):
        show_note("this version grades some outputs differently: reusing these outputs in a new run")
    elif identity.run_path is None:
        raise UsageError(
            f"{path} cannot be resumed: its data, code or graders have changed since it was created",
            remedy="Run `holdfast eval` with the eval file, which reuses what still applies and says what changed.",
        )
    options = replace(
        options, runs_dir=find_runs_dir(rundir, manifest, options.runs_dir), outputs_of=(rundir, manifest)
    )
    outcome = run_and_report(
        lambda display: run_eval(spec, options, display, identity=identity),
        display,
        lambda outcome: export_results(outcome, spec, options),
    )
    return outcome.exit_code


def _grades_differently(manifest: Manifest, identity: RunIdentity) -> bool:
    """Return True if only this version's graders make it another run."""

    def plain(graders: dict[str, Any]) -> dict[str, Any]:
        ours = ("revision", "engine")
        return {
            name: {key: value for key, value in identity.items() if key not in ours}
            for name, identity in graders.items()
        }

    same_rows = manifest.fingerprints.dataset == identity.fingerprints["dataset"]
    before, now = (plain(each.graders) for each in (manifest.identity, identity.contents))
    same_size = same_rows and manifest.trials == identity.spec.trials
    return same_size and canonical(before) == canonical(now)


def _refuse_hidden(data: dict[str, Any], eval_file: str | None) -> None:
    import msgspec

    if b"(hidden" in msgspec.json.encode(data):
        raise UsageError(
            "the eval contains a literal secret, and runs never store secrets",
            remedy=f"Resume with: holdfast eval {eval_file or 'FILE'}",
        )

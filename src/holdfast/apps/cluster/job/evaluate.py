"""Evaluate a task in a process of its own, which reads and imports users' code.

    python -m holdfast.apps.cluster.job.evaluate TASK_DIR [--first] [--run-dir RUN_DIR] [--base-url URL …]
    python -m holdfast.apps.cluster.job.evaluate TASK_DIR --copy --run-dir RUN_DIR

The second form writes what the eval file and the command ask for of a finished run. The first does the work:

    prepare   divide what is left of the run among workers, and write a `Prepared` to standard output
    wait      for `BEGIN` on standard input: the main job starts its servers first, and may find that nothing is to do
    work      as the worker `main`, and write a `Worked`

One process does both, because starting Python and importing the engine takes longer than either in a short job. Work on
servers that got other addresses than the run was prepared with takes a new process, for users' code may have read the
variables that hold them.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from holdfast.apps.cluster.job.context import say as say_time
from holdfast.apps.cluster.job.process import BEGIN
from holdfast.apps.cluster.remote import invocation as layout
from holdfast.apps.cluster.remote.bundle import load_sent
from holdfast.apps.cluster.remote.invocation import Prepared, TaskFolder, Worked
from holdfast.apps.cluster.remote.transport import Here
from holdfast.display.displays import Plain, say
from holdfast.engine.attached import Ended, follow_input
from holdfast.engine.session import Options, locate_run
from holdfast.engine.signals import Signals
from holdfast.engine.worker import prepare, run_worker
from holdfast.errors import COMPLETE, Exit, Fault, HoldfastError, RunHeld
from holdfast.report.exports import export_after_run
from holdfast.report.outcome import Outcome
from holdfast.report.table import print_outcome
from holdfast.spec.schema import one_or_all
from holdfast.spec.target_schema import ModelTarget
from holdfast.store.claims import newest_round
from holdfast.store.home import apply_umask
from holdfast.store.run_lock import WorkerLeases
from holdfast.store.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.apps.cluster.config.launch import TaskFile
    from holdfast.engine.worker import SharedRun
    from holdfast.spec.eval import Eval


def main() -> int:
    """Do what the arguments ask for, and return the exit code."""
    parser = argparse.ArgumentParser(prog="holdfast.apps.cluster.job.evaluate")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--base-url", action="append", default=[])
    parser.add_argument("--first", action="store_true")
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--copy", action="store_true")
    options = parser.parse_args()
    try:
        apply_umask()
        if options.copy:
            return copy_task(options.folder, options.run_dir)
        return evaluate_task(options.folder, options.base_url, first=options.first, prepared_run=options.run_dir)
    except HoldfastError as error:
        say_time(str(error))
        return error.exit_code


def evaluate_task(
    folder: Path, base_urls: Sequence[str], *, first: bool = False, prepared_run: Path | None = None
) -> int:
    """Prepare a task's run unless it is `prepared_run`, work on it when asked to, and return the exit code of the work.

    `first` is True at the first start, the only one that --fresh and --retry-failed apply to.
    """
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what users' code prints is for the log

    def report(message: msgspec.Struct) -> None:
        output.write(msgspec.json.encode(message) + b"\n")
        output.flush()

    task = layout.read_task(Here(pauses=()), TaskFolder.of(folder))
    if prepared_run is None:
        try:
            prepared = _prepare(task, base_urls, first=first)
        except HoldfastError as error:
            prepared = Prepared(error=str(error), exit_code=error.exit_code)
        report(prepared)
        if prepared.exit_code is not None or os.read(0, len(BEGIN)) != BEGIN:
            return 0
        prepared_run = Path(prepared.run_dir)
    code, worked = _work(RunDir(prepared_run), base_urls)
    report(worked)
    return code


def _work(rundir: RunDir, base_urls: Sequence[str]) -> tuple[int, Worked]:
    """Work as the worker `main`; return the exit code, and how the work ended."""
    Signals(_interrupt).install()
    Signals.harden()
    options = Options(wait=-1.0, runs_dir=rundir.path.parent.parent)
    follow_input(options)
    try:
        outcome = run_worker(rundir, "main", options, Plain(), base_urls=base_urls)
    except Fault as fault:
        return fault.exit_code, Worked(ended=Ended.of(fault))
    except KeyboardInterrupt:
        return Exit.TERMINATED, Worked()
    # A run that another worker has finished is opened again for its numbers, and one with errors to retry them.
    finished = outcome.finisher is None and not outcome.already and outcome.exit_code in COMPLETE
    described = _describe(replace(outcome, wall=None)) if finished else None
    return outcome.exit_code, Worked(ended=Ended.of(outcome.reason), finished=described)


def _interrupt(_: int) -> None:
    raise KeyboardInterrupt


def _prepare(task: TaskFile, base_urls: Sequence[str], *, first: bool) -> Prepared:
    overrides = list(task.overrides)
    spec = load_sent(Path(task.eval_file), overrides)
    if base_urls and isinstance(spec.target, ModelTarget):
        spec = load_sent(Path(task.eval_file), [*overrides, (("target", "base_url"), one_or_all(base_urls))])
    policy = replace(task.options, log_samples=False, output_path=None)  # `copy_task` does that
    if not first:
        policy = replace(policy, fresh=False, retry_failed=False)
    # Workers of an earlier server stop by themselves, so wait for them; without a server, join running workers.
    patience = -1.0 if task.served or policy.fresh else 0.0
    options = Options(
        runs_dir=Path(task.runs_dir),
        wait=patience,
        command=f"holdfast resume {task.invocation}",
        **policy.policy,
    )
    copies = bool(spec.exports or spec.live_exports or task.options.log_samples or task.options.output_path)
    return replace(_open(spec, options, task.workers), copies=copies)


def _open(spec: Eval, options: Options, workers: int) -> Prepared:
    try:
        return _describe(prepare(spec, options, workers, Plain()))
    except RunHeld:
        identity = locate_run(spec, options)
        rundir = identity.directory(options.runs_dir)
        if newest_round(rundir) is not None and WorkerLeases(rundir).live():
            total = identity.survey.count * spec.trials
            return Prepared(run_dir=str(rundir.path), total=total, slots=identity.survey.panels.mean)
        return _describe(prepare(spec, replace(options, wait=-1.0), workers, Plain()))


def _describe(shared: Outcome | SharedRun) -> Prepared:
    plan, run_dir = shared.plan, str(shared.rundir.path)
    if not isinstance(shared, Outcome):
        done = plan.finished + plan.reused
        return Prepared(run_dir=run_dir, total=plan.total, done=done, slots=shared.identity.survey.panels.mean)
    reason, metrics = shared.reason, shared.metrics
    return Prepared(
        run_dir=run_dir,
        exit_code=shared.exit_code,
        total=plan.total,
        # The plan of a finished run has nothing left to do, also if errors were accepted.
        done=plan.total - plan.to_run if metrics is None else metrics.outputs,
        report="" if metrics is None else _report(shared),
        missed=shared.missed_gates,
        error="" if reason is None or metrics is not None else str(reason),
    )


def _report(outcome: Outcome) -> str:
    """Return the table that `holdfast eval` ends with. Standard output is only for messages to the main job."""
    with redirect_stdout(StringIO()) as text:
        print_outcome(replace(outcome, already=False), command="")
    return text.getvalue()


def copy_task(folder: Path, run_dir: Path) -> int:
    """Write what the eval file and the command ask for of a run; return 3 when some of it failed."""
    task = layout.read_task(Here(pauses=()), TaskFolder.of(folder))
    failures: list[str] = []
    spec = load_sent(Path(task.eval_file), task.overrides)
    place = Path(task.options.output_path) if task.options.output_path else None
    samples = task.options.log_samples
    try:
        export_after_run(RunDir(run_dir), spec, say, failures.append, log_samples=samples, output_path=place)
    except HoldfastError as error:
        failures.append(str(error))
    for failure in failures:
        say(failure)
    return Exit.UNFINISHED if failures else Exit.FINISHED


if __name__ == "__main__":
    gc.set_threshold(100_000, 50, 1000)  # as in every command: starting makes much and drops little
    code = main()
    gc.freeze()
    sys.exit(code)

"""Prepare a run for its workers, in a separate process: it reads and imports users' code."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from holdfast.cluster.remote import invocation as layout
from holdfast.cluster.remote.bundle import load_sent
from holdfast.cluster.remote.invocation import Prepared, TaskFolder
from holdfast.cluster.remote.transport import Here
from holdfast.display.text import Plain, say
from holdfast.engine.options import Options
from holdfast.engine.worker import prepare
from holdfast.errors import HoldfastError, RunHeld
from holdfast.plan.history import accept_drift
from holdfast.plan.identity import identify
from holdfast.report.outcome import Outcome
from holdfast.spec.schema import one_or_all
from holdfast.spec.target_schema import ModelTarget
from holdfast.store.claims import newest_round
from holdfast.store.run_lock import live_workers
from holdfast.store.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.cluster.config.launch import TaskFile
    from holdfast.engine.worker import SharedRun
    from holdfast.spec.load import Eval


def prepare_task(folder: Path, base_urls: Sequence[str], *, first: bool = False) -> int:
    """Divide what is left of a task's run among workers, and write a `Prepared` to standard output.

    `first` is True at the first start, the only one that --fresh and --retry-failed apply to.
    """
    try:
        prepared = _prepare(folder, base_urls, first=first)
    except HoldfastError as error:
        prepared = Prepared(error=str(error), exit_code=error.exit_code)
    sys.stdout.write(msgspec.json.encode(prepared).decode() + "\n")
    return 0


def _prepare(folder: Path, base_urls: Sequence[str], *, first: bool) -> Prepared:
    task = layout.read_task(Here(pauses=()), TaskFolder.of(folder))
    overrides = list(task.overrides)
    spec = load_sent(Path(task.eval_file), overrides)
    if base_urls and isinstance(spec.target, ModelTarget):
        spec = load_sent(Path(task.eval_file), [*overrides, (("target", "base_url"), one_or_all(base_urls))])
    fresh = first and task.options.fresh
    # Workers of an earlier server stop by themselves, so wait for them; without a server, join running workers.
    patience = -1.0 if task.served or fresh else 0.0
    options = Options(
        runs_dir=Path(task.runs_dir),
        fresh=fresh,
        retry_failed=first and task.options.retry_failed,
        accept_errors=task.options.accept_errors,
        accept_drift=task.options.accept_drift,
        skip_graders=task.options.skip_graders,
        wait=patience,
        command=f"holdfast resume {task.invocation}",
    )
    try:
        return _describe(spec, prepare(spec, options, task.workers, Plain()), task)
    except RunHeld:
        identity = identify(spec)
        if options.accept_drift:
            identity = accept_drift(identity, identity.directory(options.runs_dir), options.runs_dir)
        rundir = identity.directory(options.runs_dir)
        if newest_round(rundir) is not None and list(live_workers(rundir)):
            total = identity.survey.count * spec.trials
            return Prepared(run_dir=str(rundir.path), total=total, slots=identity.survey.panels.mean)
        return _describe(spec, prepare(spec, replace(options, wait=-1.0), task.workers, Plain()), task)


def _describe(spec: Eval, shared: Outcome | SharedRun, task: TaskFile) -> Prepared:
    if isinstance(shared, Outcome):
        plan, reason, metrics = shared.plan, shared.reason, shared.metrics
        error = "" if reason is None or metrics is not None else str(reason)
        # The plan of a finished run has nothing left to do, also if errors were accepted.
        done = plan.total - plan.to_run if metrics is None else round(metrics.coverage * metrics.total)
        run_dir = str(shared.rundir.path)
        return Prepared(
            run_dir=run_dir,
            exit_code=shared.exit_code,
            total=plan.total,
            done=done,
            copies=bool(spec.exports or spec.live_exports or task.options.log_samples or task.options.output_path),
            report="" if shared.metrics is None else _report(shared),
            missed=shared.missed_gates,
            error=error,
        )
    plan, slots = shared.plan, shared.identity.survey.panels.mean
    done = plan.finished + plan.reused
    run_dir = str(shared.rundir.path)
    return Prepared(run_dir=run_dir, total=plan.total, done=done, slots=slots)


def _report(outcome: Outcome) -> str:
    """Return the table that `holdfast eval` ends with. Standard output is for the `Prepared` alone."""
    from holdfast.report.table import print_outcome

    with redirect_stdout(StringIO()) as text:
        print_outcome(replace(outcome, already=False), command="")
    return text.getvalue()


def copy_task(folder: Path, run_dir: Path) -> int:
    """Write what the eval file and the command ask for of a run; return 3 when some of it failed."""
    from holdfast.export.after_run import export_after_run

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
    return 3 if failures else 0

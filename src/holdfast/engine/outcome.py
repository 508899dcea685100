"""How a run ended: its report, whether it is finished, which gates it misses, what failed, and the numbers so far."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from holdfast.engine.gates import settle_gate
from holdfast.errors import DataError, Fault, Interrupted, ResultsError, UsageError, VersionError
from holdfast.plan.identity import new_manifest
from holdfast.plan.plan import Plan
from holdfast.report.benchmark import describes
from holdfast.report.failures import read_failures
from holdfast.report.metrics import report_so_far, write_report
from holdfast.report.outcome import Outcome
from holdfast.report.verdicts import grading_rules
from holdfast.spec.benchmark_tasks import benchmark_tasks
from holdfast.store.batches import forget_results
from holdfast.store.claims import end_rounds
from holdfast.store.durable import advice_for

if TYPE_CHECKING:
    from holdfast.engine.brake import Reason
    from holdfast.engine.options import Options
    from holdfast.engine.session import Session
    from holdfast.plan.identity import RunIdentity
    from holdfast.report.failures import Failures
    from holdfast.spec.eval import Eval
    from holdfast.store.index import Index
    from holdfast.store.metrics import Metrics
    from holdfast.store.rundir import RunDir

_QUICK_VERDICTS: Final = 50_000
"""so many are counted in a moment, also for a user who has pressed Ctrl-C"""
_QUICK_BYTES: Final = 8_000_000


def conclude(run: Session, remaining: Plan, reason: Reason | None, started: float) -> Outcome:
    """Return how the work on a run ended, and write its report if it is finished.

    `started` is when the work began, on the clock of `time.monotonic()`.
    """
    options = run.options
    failures = gather_failures(run.rundir, run.identity, run.index, reason)
    # Errors can be accepted. A call that may have happened has to be settled.
    settled = all(key in run.index.outputs for key in run.index.uncertain)
    finished = remaining.complete or (options.accept_errors and reason is None and settled)
    if not finished or (options.skip_graders and run.identity.work.slots and remaining.to_grade):
        return Outcome(
            run.rundir,
            remaining,
            None,
            run.index.spent,
            reason,
            skipped_graders=options.skip_graders,
            grade_only=options.grade_only,
            so_far=None if options.skip_graders else count_so_far(run.identity, run.index, reason),
            failures=failures,
            wall=time.monotonic() - started,
        )
    try:
        metrics = write_report(run.identity, run.rundir, run.index)
        gate = settle_gate(run.spec, run.rundir, metrics, options.runs_dir)
        end_rounds(run.rundir)
        forget_results(run.rundir)
    except (Fault, DataError, OSError) as error:
        return Outcome(run.rundir, remaining, None, run.index.spent, _report_fault(error))
    run.log.write(f"finished score={metrics.score} coverage={metrics.coverage}")
    return Outcome(
        run.rundir,
        remaining,
        metrics,
        run.index.spent,
        gate=gate,
        failures=failures,
        wall=time.monotonic() - started,
    )


def _report_fault(error: Fault | DataError | OSError) -> Fault:
    if isinstance(error, Fault):
        return error
    if isinstance(error, DataError):  # the dataset could be read when the run began
        return Fault("dataset_changed", error.message, remedy=error.remedy)
    return Fault(
        "disk", f"cannot write the report: {error}", remedy="Free some disk space, then run the same command again."
    )


def finished_outcome(identity: RunIdentity, rundir: RunDir, options: Options) -> Outcome | None:
    """Return the outcome of a run that is finished and needs nothing more, else None."""
    if options.fresh or options.again or (metrics := _finished_metrics(identity, rundir, options)) is None:
        return None
    if not rundir.manifest.exists():
        rundir.write_manifest(new_manifest(identity))
    try:
        gate = settle_gate(identity.spec, rundir, metrics, options.runs_dir)
    except OSError as error:
        raise UsageError(
            f"cannot write the outcome of the gate: {rundir.gate}: {error.strerror or error}", remedy=advice_for(error)
        ) from error
    samples, trials = identity.survey.count, identity.spec.trials
    incomplete = metrics.lacks_outputs or metrics.lacks_verdicts
    return Outcome(
        rundir,
        Plan(samples, trials, finished=samples * trials, to_grade=0, to_run=0),
        metrics,
        None,
        already=True,
        gate=gate,
        failures=gather_failures(rundir, identity, rundir.load(repair=False), None) if incomplete else None,
    )


def _finished_metrics(identity: RunIdentity, rundir: RunDir, options: Options) -> Metrics | None:
    try:
        metrics = rundir.read_metrics()
    except (ResultsError, VersionError):
        return None  # not ours, or damaged: it is rebuilt from the journals if the manifest's version is ours
    if metrics is None or rundir.has_lost_lines(metrics) or not _is_current(metrics, identity.spec):
        return None
    incomplete = metrics.lacks_outputs or metrics.lacks_verdicts
    if (options.retry_failed and incomplete) or (options.grade_only and metrics.lacks_verdicts):
        return None
    return metrics


def _is_current(metrics: Metrics, spec: Eval) -> bool:
    """Tell whether a report was made as the eval asks for it: with its thresholds, weights, breakdowns and clusters."""
    return (
        metrics.rules == grading_rules(spec)
        and list(metrics.by) == list(dict.fromkeys(spec.by))
        and metrics.cluster == spec.cluster
        and describes(metrics.benchmark, benchmark_tasks(spec.document.data))
    )


def gather_failures(rundir: RunDir, identity: RunIdentity, index: Index, reason: Reason | None) -> Failures | None:
    """Read what failed from the run's records; after an interruption only if that is quick."""
    limit = {"most_bytes": _QUICK_BYTES} if isinstance(reason, Interrupted) else {}
    try:
        return read_failures(rundir, identity, index, **limit)
    except OSError:
        return None  # a summary of records that stay on disk


def count_so_far(identity: RunIdentity, index: Index, reason: Reason | None) -> Metrics | None:
    """Compute the numbers of an unfinished run that has grades; after an interruption only if that is quick."""
    verdicts = identity.survey.count * identity.spec.trials * max(1, len(identity.work.slots))
    if not index.verdicts or (isinstance(reason, Interrupted) and verdicts > _QUICK_VERDICTS):
        return None
    return report_so_far(identity, index)

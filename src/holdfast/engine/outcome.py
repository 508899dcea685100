"""How a run ended: finished or not, its gate, what failed, and the numbers so far."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from holdfast.errors import (
    Interrupted,
    ResultsError,
    UsageError,
    VersionError,
)
from holdfast.plan.plan import Plan
from holdfast.report.benchmark import describes
from holdfast.report.failures import read_failures
from holdfast.report.metrics import report_so_far
from holdfast.report.outcome import Outcome
from holdfast.report.verdicts import grading_rules
from holdfast.spec.eval import benchmark_tasks
from holdfast.spec.plugins import load_reference
from holdfast.store.files import advice_for
from holdfast.store.rundir import RunDir

if TYPE_CHECKING:
    from holdfast.engine.brake import Reason
    from holdfast.engine.options import Options
    from holdfast.plan.identity import RunIdentity
    from holdfast.report.failures import Failures
    from holdfast.spec.eval import Eval
    from holdfast.store.index import RunIndex
    from holdfast.store.metrics import GateOutcome, Metrics
    from holdfast.store.rundir import RunDir


_QUICK_VERDICTS: Final = 50_000
"""verdicts that can be counted in a moment, even for a user who has pressed Ctrl-C"""
_QUICK_BYTES: Final = 8_000_000
_GATE: Final = "holdfast.engine.gates:evaluate_gate"
"""of evals with a gate"""


def evaluate_gate(spec: Eval, rundir: RunDir, metrics: Metrics, options: Options) -> GateOutcome | None:
    """Check a finished run against the gate of its eval; None without one."""
    if spec.gate is None:
        return None
    gate: GateOutcome = load_reference(_GATE)(spec, rundir, metrics, options.runs_dir)
    return gate


def confirm_finished(identity: RunIdentity, rundir: RunDir, options: Options) -> Outcome | None:
    """Return the same as `finished_outcome`, and store the gate's outcome, since its conditions may have changed."""
    if not rundir.finished or (outcome := finished_outcome(identity, rundir, options)) is None:
        return None
    try:
        rundir.write_gate(outcome.gate)
    except OSError as error:
        raise UsageError(
            f"cannot write the outcome of the gate: {rundir.gate}: {error.strerror or error}", remedy=advice_for(error)
        ) from error
    return outcome


def finished_outcome(identity: RunIdentity, rundir: RunDir, options: Options) -> Outcome | None:
    """Return the outcome of a run that is finished and needs nothing more, else None."""
    # Without a manifest it needs one, which is written under the run's lease.
    if options.fresh or options.again or not rundir.manifest.exists():
        return None
    if (metrics := _finished_metrics(identity, rundir, options)) is None:
        return None
    samples, trials = identity.survey.count, identity.spec.trials
    incomplete = metrics.lacks_outputs or metrics.lacks_verdicts
    return Outcome(
        rundir,
        Plan(samples, trials, finished=samples * trials, to_grade=0, to_run=0),
        metrics,
        None,
        already=True,
        gate=evaluate_gate(identity.spec, rundir, metrics, options),
        failures=gather_failures(rundir, identity, rundir.load(repair=False), None) if incomplete else None,
    )


def _finished_metrics(identity: RunIdentity, rundir: RunDir, options: Options) -> Metrics | None:
    try:
        metrics = rundir.read_metrics()
    except (ResultsError, VersionError):
        return None  # damaged, or of another version: it is rebuilt from the journals if the manifest can be read
    if metrics is None or rundir.has_lost_lines(metrics) or not _is_current(metrics, identity.spec):
        return None
    incomplete = metrics.lacks_outputs or metrics.lacks_verdicts
    if (options.retry_failed and incomplete) or (options.grade_only and metrics.lacks_verdicts):
        return None
    return metrics


def _is_current(metrics: Metrics, spec: Eval) -> bool:
    """Return True if a report has the eval's thresholds, weights, breakdowns and clusters."""
    return (
        metrics.rules == grading_rules(spec)
        and list(metrics.by) == list(dict.fromkeys(spec.by))
        and metrics.cluster == spec.cluster
        and describes(metrics.benchmark, benchmark_tasks(spec.document.data))
    )


def gather_failures(rundir: RunDir, identity: RunIdentity, index: RunIndex, reason: Reason | None) -> Failures | None:
    """Read what failed from the run's records; after an interruption only if that is quick."""
    limit = {"most_bytes": _QUICK_BYTES} if isinstance(reason, Interrupted) else {}
    try:
        return read_failures(rundir, identity, index, **limit)
    except OSError:
        return None  # it only summarizes records that stay on disk


def count_so_far(identity: RunIdentity, index: RunIndex, reason: Reason | None) -> Metrics | None:
    """Compute the numbers of an unfinished run that has grades; after an interruption only if that is quick."""
    verdicts = identity.survey.count * identity.spec.trials * max(1, len(identity.work.slots))
    if not index.has_verdicts or (isinstance(reason, Interrupted) and verdicts > _QUICK_VERDICTS):
        return None
    return report_so_far(identity, index)

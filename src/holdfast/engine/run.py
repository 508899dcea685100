"""Run an eval: the one entry for commands, Python and jobs.

    with open_run(spec, options, display) as run:
        outcome = run.finished or complete(run)

`work` does what is left of an open run; `complete` also writes the report.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from holdfast.engine.admission import check_prices
from holdfast.engine.loop import run_loop
from holdfast.engine.session import Alone, Parts, evaluate_gate, locate_run, open_session
from holdfast.engine.user_code import unseen_code
from holdfast.errors import DataError, Fault, Interrupted
from holdfast.plan.finished import publish_finished
from holdfast.report.metrics import report_so_far, write_report
from holdfast.report.outcome import Outcome, read_failures
from holdfast.spec.plugins import load_reference
from holdfast.spec.target_schema import ModelTarget
from holdfast.targets.prices import Prices

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.display.displays import Display
    from holdfast.engine.admission import Reason
    from holdfast.engine.loop import Supply
    from holdfast.engine.session import Options, Session
    from holdfast.plan.identity import RunIdentity
    from holdfast.plan.plan import Plan
    from holdfast.spec.eval import Eval
    from holdfast.store.index import RunIndex
    from holdfast.store.metrics import Metrics
    from holdfast.targets.types import Target

_ELSEWHERE: Final = {
    "estimate": "holdfast.report.preview:estimate_run",
    "settle": "holdfast.engine.settlement:settle",
}
"""what most runs do without"""
_QUICK_VERDICTS: Final = 50_000
"""verdicts that can be counted in a moment, even for a user who has pressed Ctrl-C"""


def run_eval(
    spec: Eval,
    options: Options,
    display: Display,
    *,
    identity: RunIdentity | None = None,
    target: Target | None = None,
) -> Outcome:
    """Run an eval, or resume it, and return how it ended. Takes the same arguments as `open_run`."""
    with open_run(spec, options, display, identity=identity, target=target) as run:
        return run.finished or complete(run)


@contextmanager
def open_run(
    spec: Eval,
    options: Options,
    display: Display,
    *,
    identity: RunIdentity | None = None,
    target: Target | None = None,
) -> Iterator[Session]:
    """Open the run of an eval for this process only.

    `identity` is the run's, if the caller knows it already. `target` answers instead of the eval's target.
    """
    check_prices(spec, generates=not options.grade_only)
    access = Alone(identity or locate_run(spec, options), options)
    with open_session(access, display, None if target is None else Parts(target)) as run:
        _report_notices(run)
        yield run


def _report_notices(run: Session) -> None:
    """Report warnings about an eval file; before a run, also code that no key covers and graders without rows.

    Each is shown once, and is in the run.log of every run that it concerns.
    """
    spec = run.spec
    messages = [*spec.notices]
    if run.finished is None:
        messages += [*unseen_code(spec), *run.identity.idle_notices, *run.identity.spelling_notices]
    for message in messages:
        if message in run.options.noted:
            run.log.write(f"notice {message}")
        else:
            run.options.noted.add(message)
            run.notice(message)


def complete(run: Session) -> Outcome:
    """Work on a run that this process has to itself, and write the report if it gets finished."""
    started = time.monotonic()
    if run.options.settle:
        load_reference(_ELSEWHERE["settle"])(run)
    if run.rundir.finished:
        run.rundir.reopen()
    remaining, reason = work(run)
    if remaining is not run.plan:  # else nothing was recorded
        run.refresh()
    return _conclude(run, remaining, reason, started)


def _conclude(run: Session, remaining: Plan, reason: Reason | None, started: float) -> Outcome:
    """Return how the work on a run ended, and write its report if it is finished.

    `started` is when the work began, by the monotonic clock.
    """
    options = run.options
    failures = read_failures(run.rundir, run.identity, run.index, quick=isinstance(reason, Interrupted))
    # Errors can be accepted; a call that may have happened has to be settled.
    settled = all(run.index.output(key) is not None for key in run.index.uncertain)
    finished = remaining.complete or (options.accept_errors and reason is None and settled)
    if not finished or (options.skip_graders and run.identity.work.slots and remaining.to_grade):
        return Outcome(
            run.rundir,
            remaining,
            None,
            run.spent,
            reason,
            skipped_graders=options.skip_graders,
            grade_only=options.grade_only,
            so_far=None if options.skip_graders else count_so_far(run.identity, run.index, reason),
            failures=failures,
            wall=time.monotonic() - started,
        )
    try:
        metrics = write_report(run.identity, run.rundir, run.index)
        if remaining.complete:
            identity = run.identity
            publish_finished(identity.survey, identity.work, run.rundir, run.index, b"\x01" * remaining.total)
        gate = evaluate_gate(run.spec, run.rundir, metrics, options)
        run.rundir.write_gate(gate)
        run.rundir.end_rounds()
        shutil.rmtree(run.rundir.batches, ignore_errors=True)  # outputs and grades hold the results
    except (Fault, DataError, OSError) as error:
        return Outcome(run.rundir, remaining, None, run.spent, _report_fault(error))
    run.log.write(f"finished score={metrics.score} coverage={metrics.coverage}")
    return Outcome(
        run.rundir,
        remaining,
        metrics,
        run.spent,
        gate=gate,
        failures=failures,
        wall=time.monotonic() - started,
    )


def count_so_far(identity: RunIdentity, index: RunIndex, reason: Reason | None) -> Metrics | None:
    """Compute the numbers of an unfinished run that has grades; after an interruption only if that is quick."""
    verdicts = identity.survey.count * identity.spec.trials * max(1, len(identity.work.slots))
    if not index.has_verdicts or (isinstance(reason, Interrupted) and verdicts > _QUICK_VERDICTS):
        return None
    return report_so_far(identity, index)


def _report_fault(error: Fault | DataError | OSError) -> Fault:
    if isinstance(error, Fault):
        return error
    if isinstance(error, DataError):  # the dataset could be read when the run began
        return Fault("dataset_changed", error.message, remedy=error.remedy)
    return Fault(
        "disk", f"cannot write the report: {error}", remedy="Free some disk space, then run the same command again."
    )


def work(run: Session, source: Supply | None = None) -> tuple[Plan, Reason | None]:
    """Run trials from `source`, by default all that remain; return what still remains, and why, if known."""
    to_grade = run.plan.to_grade and not run.options.skip_graders
    remaining, reason = run.plan, None
    run.log.open()
    run.display.begin(run.spec.name, run.spec.target.label, str(run.rundir.path), run.plan)
    worker = "" if run.worker is None else f"worker={run.worker} "
    run.log.write(f"begin {worker}pid={os.getpid()} {run.plan}")
    if run.worker is None:
        report_estimate(run)
    try:
        if source is not None or run.generates or to_grade:
            loop = run_loop(run, source)
            remaining, reason = loop.progress.remaining, loop.brake.reason
            if run.worker is None:  # missing grades of a worker are left to the process that writes the report
                reason = reason or next(iter(loop.faults), None)
    except BaseException as error:
        run.log.write(f"end {str(error) or type(error).__name__}")
        raise
    else:
        run.log.write(f"end {reason or 'nothing left to start'}")
    finally:
        run.display.end()
    return remaining, reason


def report_estimate(run: Session) -> None:
    """Report an estimate of the cost, if prices are known, and how many batches the run takes."""
    target = run.spec.target
    if not run.generates or not isinstance(target, ModelTarget):
        return
    if run.rundir.has_batches:
        return  # reported at the start; requests in batches are already paid for
    blocks = [target, *(grader for _, grader in run.spec.placed_graders())]
    in_batches = any(getattr(block, "batch", None) is not None for block in blocks)
    if in_batches or Prices(target.model, run.spec.prices).known:
        for line in load_reference(_ELSEWHERE["estimate"])(run.identity, run.plan, run.rundir).cost_lines():
            run.notice(line)

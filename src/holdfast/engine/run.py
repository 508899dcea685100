"""One call that runs an eval, or goes on with it, and says how it ended."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from holdfast.engine.log import Noting, RunLog
from holdfast.engine.loop import Loop
from holdfast.engine.setup import Parts, located, manifest_of, open_run
from holdfast.engine.signals import Signals
from holdfast.engine.unseen import unseen_code
from holdfast.errors import (
    BudgetReached,
    DataError,
    Fault,
    HoldfastError,
    Interrupted,
    ResultsError,
    UsageError,
    VersionError,
)
from holdfast.graders.build import grader_places
from holdfast.plan.plan import Plan
from holdfast.report.failures import read_failures
from holdfast.report.gate import metric_value
from holdfast.report.metrics import report_so_far, write_report
from holdfast.report.notices import without_rows
from holdfast.report.outcome import Outcome
from holdfast.report.verdicts import grading_rules
from holdfast.spec.load import target_name
from holdfast.spec.schema import CommandTarget, HttpTarget, NatTarget
from holdfast.store.claims import end_rounds
from holdfast.targets.prices import Prices

if TYPE_CHECKING:
    from holdfast.display.types import Display
    from holdfast.engine.options import Options
    from holdfast.engine.setup import Opened
    from holdfast.engine.sources import Supply
    from holdfast.plan.identity import Identified
    from holdfast.report.failures import Failures
    from holdfast.spec.load import Eval
    from holdfast.store.index import Index
    from holdfast.store.metrics import Metrics
    from holdfast.store.rundir import RunDir
    from holdfast.targets.types import Target

_SOON_VERDICTS: Final = 50_000
"""so many are counted in a moment, also for somebody who has pressed Ctrl-C"""
_SOON_BYTES: Final = 8_000_000


def run_eval(spec: Eval, options: Options, display: Display, target: Target | None = None) -> Outcome:
    """Run an eval to its end, or as far as it goes; `target` answers instead of the one that the eval describes."""
    check_prices(spec, generates=not options.grade_only)
    found, rundir = located(spec, options)
    display = Noting(display, RunLog(rundir.log))
    if (done := already_finished(found, rundir, options)) is not None:
        say_notices(spec, display)
        return done
    parts = Parts.build(found, options) if target is None else Parts(target, None, [])
    say_notices(spec, display, found)
    opened = open_run(found, options, display.notice)
    forgotten = False
    try:
        # Looked at again: the process that we waited for may have finished it.
        return already_finished(found, rundir, options) or go_on(opened, parts, options, display)
    except HoldfastError:
        forgotten = opened.new and rundir.forget_if_never_begun()
        raise
    finally:
        opened.lease.release()
        if forgotten:
            with suppress(OSError):  # it holds other runs
                rundir.path.parent.rmdir()


def say_notices(spec: Eval, display: Display, found: Identified | None = None) -> None:
    """Report what was noticed in the eval file; before a run, also code that no key covers and graders without rows."""
    idle = [] if found is None else without_rows(spec, grader_places(spec), found.survey.panels)
    for message in (*spec.notices, *(unseen_code(spec) if found is not None else ()), *idle):
        display.notice(message)


def go_on(opened: Opened, parts: Parts, options: Options, display: Noting) -> Outcome:
    """Do what is left of a run that this process has for itself, and make the report if that was all."""
    found, rundir, begun = opened.identified, opened.rundir, time.monotonic()
    if rundir.finished:
        rundir.reopen()
    log = display.log
    log.open()
    reason: Fault | BudgetReached | Interrupted | None = None
    left = opened.plan
    work = (opened.plan.to_run and not options.grade_only) or (opened.plan.to_grade and not options.skip_graders)
    display.begin(found.spec.name, target_name(found.spec.target), str(rundir.path), opened.plan)
    log.write(f"begin pid={os.getpid()} {opened.plan}")
    try:
        if work:
            loop, reason = run_loop(opened, parts, options, display)
            left, reason = loop.progress.left, reason or next(iter(loop.faults), None)
    except BaseException as error:
        log.write(f"end {str(error) or type(error).__name__}")
        raise
    else:
        log.write(f"end {reason or 'nothing left to start'}")
    finally:
        display.end()
    spent, failures = opened.index.spent, failures_of(opened.rundir, found, opened.index, reason)
    finished = left.complete or (options.accept_errors and reason is None)
    if not finished or (options.skip_graders and found.work.slots and left.to_grade):
        skipped, only = options.skip_graders, options.grade_only
        so_far = None if skipped else so_far_of(found, opened.index, reason)
        return Outcome(
            rundir,
            left,
            None,
            spent,
            reason,
            skipped_graders=skipped,
            grade_only=only,
            so_far=so_far,
            failures=failures,
            wall=time.monotonic() - begun,
        )
    try:
        metrics = write_report(found, rundir, opened.index)
        end_rounds(rundir)
    except Fault as changed:
        return Outcome(rundir, left, None, spent, changed)
    except DataError as error:  # it could be read when the run began
        fault = Fault("dataset_changed", error.message, remedy=error.remedy)
        return Outcome(rundir, left, None, spent, fault)
    except OSError as error:
        fault = Fault("disk", f"cannot write the report: {error}", remedy="Make room, then run the same command again.")
        return Outcome(rundir, left, None, spent, fault)
    log.write(f"finished score={metrics.score} coverage={metrics.coverage}")
    gates, wall = _gates(found.spec, metrics), time.monotonic() - begun
    return Outcome(rundir, left, metrics, spent, missed_gates=gates, failures=failures, wall=wall)


def failures_of(
    rundir: RunDir, found: Identified, index: Index, reason: Fault | BudgetReached | Interrupted | None
) -> Failures | None:
    """Read what went wrong from the run's records; after an interruption only where that takes a moment."""
    most = {"most_bytes": _SOON_BYTES} if isinstance(reason, Interrupted) else {}
    try:
        return read_failures(rundir, found, index, **most)
    except OSError:
        return None  # a summary of records that stay on disk


def so_far_of(found: Identified, index: Index, reason: Fault | BudgetReached | Interrupted | None) -> Metrics | None:
    """Compute the numbers of an unfinished run that has grades; after an interruption only where that is quick."""
    many = found.survey.count * found.spec.trials * max(1, len(found.work.slots)) > _SOON_VERDICTS
    if not index.verdicts or (isinstance(reason, Interrupted) and many):
        return None
    return report_so_far(found, index)


def run_loop(
    opened: Opened, parts: Parts, options: Options, display: Display, supply: Supply | None = None
) -> tuple[Loop, Fault | BudgetReached | Interrupted | None]:
    """Work on an opened run; the loop as it ended, and why it stopped early if it did."""

    async def main() -> Loop:
        loop, events = Loop(opened, parts, options, display, supply), asyncio.get_running_loop()

        def stop(number: int) -> None:  # called between any two steps of Python code, so it only leaves a note
            events.call_soon_threadsafe(loop.interrupt, Interrupted(number))

        with Signals(stop):
            await loop.run()
        return loop

    import uvloop

    _allow_many_connections()
    thresholds = gc.get_threshold()
    # A run makes few cycles and keeps much: looking for garbage as often as by default costs a tenth of the time.
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)
    try:
        loop = uvloop.run(main())
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
    return loop, loop.brake.reason


def _allow_many_connections() -> None:
    """Each request in flight is a file descriptor, and the usual soft limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def already_finished(found: Identified, rundir: RunDir, options: Options) -> Outcome | None:
    """How a run ended that is finished and wants nothing more."""
    if options.fresh or options.again or (metrics := _finished(found, rundir, options)) is None:
        return None
    if not rundir.manifest.exists():
        rundir.write_manifest(manifest_of(found))
    total = found.survey.count * found.spec.trials
    plan = Plan(found.survey.count, found.spec.trials, total, 0, 0)
    incomplete = metrics.coverage < 1
    failures = failures_of(rundir, found, rundir.load(mend=False), None) if incomplete else None
    gates = _gates(found.spec, metrics)
    return Outcome(rundir, plan, metrics, None, already=True, missed_gates=gates, failures=failures)


def _finished(found: Identified, rundir: RunDir, options: Options) -> Metrics | None:
    """The numbers of a run that is finished and wants nothing more."""
    try:
        metrics = rundir.read_metrics()
    except (ResultsError, VersionError):
        return None  # not ours or damaged: it is rebuilt from the journals, where the manifest is of our version
    if metrics is None or rundir.has_lost_lines(metrics) or metrics.rules != grading_rules(found.spec):
        return None
    ungraded = bool(metrics.graders) and metrics.graded < metrics.outputs
    if (options.retry_failed and metrics.coverage < 1) or (options.grade_only and ungraded):
        return None
    return metrics


def _gates(spec: Eval, metrics: Metrics) -> tuple[str, ...]:
    """The gates that are not met, in words."""
    missed = []
    for name, least in spec.gate.items():
        value = metric_value(metrics, name)
        if value is None or value < least:
            missed.append(f"{name} is {'unknown' if value is None else format(value, '.4g')}, below {least:g}")
    return tuple(missed)


def check_prices(spec: Eval, *, generates: bool) -> None:
    """A budget in dollars can only be kept where prices are known."""
    if spec.limits.max_cost is None:
        return
    target = spec.target
    unpriced = isinstance(target, HttpTarget | NatTarget) or (isinstance(target, CommandTarget) and not target.proxy)
    if generates and unpriced:
        raise UsageError(
            f"max_cost cannot be enforced: {target_name(spec.target)} does not report its cost",
            remedy="Leave max_cost out, or use --max-time; a Python target can report its cost with its reply.",
        )
    for model in spec.models():
        if not Prices(model, spec.prices).known:
            raise UsageError(
                f"max_cost cannot be enforced: the price of {model} is unknown",
                remedy=f"Add to the eval file:  prices: {{{model}: {{input: 0.15, output: 0.60}}}}  "
                "(dollars per million tokens), or use --token-budget.",
            )

"""One entry to a run.

    with open_run(spec, options, display) as run:
        outcome = run.finished or run.complete()

`open_run` identifies the run, checks all that can be checked before anything is written, takes the run's lease, and
reads what the run and other runs have already done. Inside the block, `run.plan` says what is left; `run.complete`
does it and writes the report. Leaving the block releases the lease.

Nothing is held for a run that is finished and needs nothing more: `run.finished` is then its outcome. That is looked
up twice, since the process that we waited for may have finished the run.
"""

from __future__ import annotations

import os
import shlex
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import msgspec

from holdfast.engine.budget import check_prices
from holdfast.engine.log import RunLog
from holdfast.engine.loop import run_loop
from holdfast.engine.parameters import check_parameters
from holdfast.engine.unseen import unseen_code
from holdfast.errors import Fault, HoldfastError, Interrupted, ResultsError, VersionError
from holdfast.export.live import live_exporters
from holdfast.graders.build import build_graders
from holdfast.plan.history import accept_drift, match_outputs, other_runs, plan_with_reuse
from holdfast.plan.identity import RunIdentity, identify, new_manifest
from holdfast.plan.inputs import choose_run
from holdfast.plan.reuse import adopt
from holdfast.spec.load import target_name
from holdfast.spec.target_schema import ModelTarget
from holdfast.store.durable import advice_for, make_directory
from holdfast.store.index import Index
from holdfast.store.lease import RunLease
from holdfast.store.run_lock import hold
from holdfast.targets.build import build_target
from holdfast.targets.prices import Prices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from holdfast.conversation.simulated_user import Player
    from holdfast.display.types import Display
    from holdfast.engine.brake import Reason
    from holdfast.engine.options import Options
    from holdfast.engine.sources import Supply
    from holdfast.export.live import LiveExporter
    from holdfast.graders.types import InstantGrader, WaitingGrader
    from holdfast.plan.plan import Plan
    from holdfast.report.outcome import Outcome
    from holdfast.spec.eval import Eval
    from holdfast.store.rundir import RunDir
    from holdfast.store.tail import Follower
    from holdfast.targets.types import Target


class Parts(msgspec.Struct, frozen=True):
    """The target, simulated user and graders of a run, built but not opened."""

    target: Target | None = None
    """None: nothing is generated"""
    player: Player | None = None
    """the simulated user, if there is one"""
    graders: list[InstantGrader | WaitingGrader] = []
    """in the order of the plan's slots"""

    @classmethod
    def build(cls, identity: RunIdentity, options: Options) -> Parts:
        """Build the parts of a run; raise ConfigError for what is wrong with them."""
        spec = identity.spec
        if options.grade_only:
            parts = cls(graders=build_graders(spec))
        else:
            player = None
            if spec.responder is not None:
                from holdfast.conversation.simulated_user import build_player  # which few evals need

                player = build_player(spec)
            parts = cls(build_target(spec), player, build_graders(spec))
        check_parameters(identity, parts.target, parts.player, parts.graders)
        return parts


class Loaded(msgspec.Struct, frozen=True):
    """The records of a run, and what is left to do."""

    index: Index
    plan: Plan
    new: bool = False
    """this process has created the run directory"""
    follower: Follower | None = None
    """reads what other workers record, where there are any"""


class Session(msgspec.Struct):
    """A run that this process works on, alone or as one of several workers."""

    identity: RunIdentity
    rundir: RunDir
    options: Options
    display: Display
    log: RunLog
    parts: Parts
    lease: RunLease
    index: Index
    plan: Plan
    lost: threading.Event = msgspec.field(default_factory=threading.Event)
    """set when another process has taken over the lease"""
    finished: Outcome | None = None
    """the outcome of a run that is finished and needs nothing more"""
    worker: str | None = None
    """the id of this worker; None: this process has the run to itself"""
    follower: Follower | None = None
    """reads what the other workers record"""

    @property
    def spec(self) -> Eval:
        """The eval."""
        return self.identity.spec

    @property
    def journals(self) -> Path:
        """The folder of the journals to which this process appends."""
        return self.rundir.path if self.worker is None else self.rundir.workers / self.worker

    @property
    def generates(self) -> bool:
        """True if this process asks the target."""
        return self.plan.to_run > 0 and not self.options.grade_only

    def notice(self, message: str) -> None:
        """Show a message to the user, and write it to run.log."""
        show_notice(self.display, self.log, message)

    def warn(self, message: str) -> None:
        """Show a failure that does not end the run, and write it to run.log."""
        self.display.warning(message)
        self.log.write(f"warning {message}")

    def report_estimate(self) -> None:
        """Say about what the run will cost, where that is known, and how many batches it will take."""
        target = self.spec.target
        if not self.generates or not isinstance(target, ModelTarget):
            return
        if self.rundir.has_batches:
            return  # it was said at the start, and what is in batches already is paid for
        blocks = [target, *(grader for _, grader in self.spec.placed_graders())]
        in_batches = any(getattr(block, "batch", None) is not None for block in blocks)
        if in_batches or Prices(target.model, self.spec.prices).known:
            from holdfast.report.estimate import estimate_run  # which other runs need not import

            for line in estimate_run(self.identity, self.plan, self.rundir).cost_lines():
                self.notice(line)

    def live_exporters(self) -> list[LiveExporter]:
        """Return the exporters that follow this process's work. Those of several workers follow from outside."""
        if self.worker is not None or not self.generates:
            return []
        return live_exporters(self.identity, self.rundir, self.warn)

    def work(self, source: Supply | None = None) -> tuple[Plan, Reason | None]:
        """Run trials from `source`, by default all that remain; return what still remains, and why, if known."""
        to_grade = self.plan.to_grade and not self.options.skip_graders
        remaining, reason = self.plan, None
        self.log.open()
        self.display.begin(self.spec.name, target_name(self.spec.target), str(self.rundir.path), self.plan)
        worker = "" if self.worker is None else f"worker={self.worker} "
        self.log.write(f"begin {worker}pid={os.getpid()} {self.plan}")
        if self.worker is None:
            self.report_estimate()
        try:
            if source is not None or self.generates or to_grade:
                loop = run_loop(self, source)
                remaining, reason = loop.progress.remaining, loop.brake.reason
                if self.worker is None:  # missing grades of a worker are left to the process that writes the report
                    reason = reason or next(iter(loop.faults), None)
        except BaseException as error:
            self.log.write(f"end {str(error) or type(error).__name__}")
            raise
        else:
            self.log.write(f"end {reason or 'nothing left to start'}")
        finally:
            self.display.end()
        return remaining, reason

    def complete(self) -> Outcome:
        """Finish a run that this process has to itself, as far as possible, and write the report if it is finished."""
        started = time.monotonic()
        if self.options.settle:
            from holdfast.engine.settlement import settle  # which few commands need

            settle(self)
        if self.rundir.finished:
            self.rundir.reopen()
        remaining, reason = self.work()

        from holdfast.engine.outcome import conclude  # after the work: starting it needs no reports

        outcome = conclude(self, remaining, reason, started)
        self._cache_index(remaining, reason, finished=outcome.metrics is not None)
        return outcome

    def _cache_index(self, remaining: Plan, reason: Reason | None, *, finished: bool) -> None:
        """Cache the index of a large run, so that neither its next start nor a run that reuses it is late."""
        with suppress(OSError):
            if self.rundir.keep_index(self.index):
                if remaining.complete and self.index.origin:
                    from holdfast.plan.done import write_done  # of large runs

                    write_done(self.identity, self.rundir, self.index, b"\x01" * remaining.total)
                return
            if finished or isinstance(reason, Interrupted):
                return  # reading everything would take too long
            self.index = Index()  # two indexes of a large run take too much memory
            for damage in self.rundir.cache_index():
                self.notice(str(damage))


def show_notice(display: Display, log: RunLog, message: str) -> None:
    """Show a message to the user, and write it to a log."""
    display.notice(message)
    log.write(f"notice {message}")


def run_eval(
    spec: Eval,
    options: Options,
    display: Display,
    *,
    identity: RunIdentity | None = None,
    target: Target | None = None,
) -> Outcome:
    """Run an eval, or resume it, and return how that ended. The arguments are those of `open_run`."""
    with open_run(spec, options, display, identity=identity, target=target) as run:
        return run.finished or run.complete()


@contextmanager
def open_run(
    spec: Eval,
    options: Options,
    display: Display,
    *,
    identity: RunIdentity | None = None,
    target: Target | None = None,
) -> Iterator[Session]:
    """Open the run of an eval for this process alone.

    `identity` is that of the run, where the caller knows it already. `target` answers instead of the eval's target.
    """
    check_prices(spec, generates=not options.grade_only)
    identity = identity or locate_run(spec, options)
    log = RunLog(identity.directory(options.runs_dir).log)
    parts = None if target is None else Parts(target)

    def acquire(rundir: RunDir, notice: Callable[[str], None], lost: Callable[[], None]) -> RunLease:
        make_directory(rundir.path.parent)
        return hold(rundir, options.wait, notice, lost)

    with open_session(identity, options, display, log, acquire, load_run, parts=parts) as run:
        report_notices(run)
        yield run


@contextmanager
def open_session(
    identity: RunIdentity,
    options: Options,
    display: Display,
    log: RunLog,
    acquire: Callable[[RunDir, Callable[[str], None], Callable[[], None]], RunLease],
    load: Callable[[RunIdentity, Options, Callable[[str], None]], Loaded],
    *,
    parts: Parts | None = None,
    worker: str | None = None,
) -> Iterator[Session]:
    """Open a run with a lease that `acquire` takes and records that `load` reads."""
    rundir, lost = identity.directory(options.runs_dir), threading.Event()

    def notice(message: str) -> None:
        show_notice(display, log, message)

    def session(parts: Parts, lease: RunLease, loaded: Loaded, finished: Outcome | None = None) -> Session:
        return Session(
            identity=identity,
            rundir=rundir,
            options=options,
            display=display,
            log=log,
            parts=parts,
            lease=lease,
            index=loaded.index,
            plan=loaded.plan,
            lost=lost,
            finished=finished,
            worker=worker,
            follower=loaded.follower,
        )

    outcome = _finished_outcome(identity, rundir, options)
    if outcome is not None:
        yield session(Parts(), RunLease(rundir.lease), Loaded(Index(), outcome.plan), outcome)
        return
    parts = parts or Parts.build(identity, options)
    try:
        lease = acquire(rundir, notice, lost.set)
    except OSError as error:
        raise _unusable(rundir, error) from error
    new = forgotten = False
    try:
        if (outcome := _finished_outcome(identity, rundir, options)) is not None:
            yield session(Parts(), RunLease(rundir.lease), Loaded(Index(), outcome.plan), outcome)
            return
        try:
            loaded = load(identity, options, notice)
        except OSError as error:
            raise _unusable(rundir, error) from error
        new, run = loaded.new, session(parts, lease, loaded)
        del loaded  # the session drops its index at the end
        yield run
    except HoldfastError:
        forgotten = new and rundir.forget_if_never_begun()
        raise
    finally:
        lease.release()
        if forgotten:
            with suppress(OSError):  # it contains other runs
                rundir.path.parent.rmdir()


def _finished_outcome(identity: RunIdentity, rundir: RunDir, options: Options) -> Outcome | None:
    """Return the outcome of a run that is finished and needs nothing more, else None."""
    if not rundir.finished:
        return None
    from holdfast.engine.outcome import finished_outcome

    return finished_outcome(identity, rundir, options)


def locate_run(spec: Eval, options: Options) -> RunIdentity:
    """Identify the run of an eval, as the options say: with another run's outputs, or in spite of changed code."""
    if spec.gate is not None and spec.gate.baseline is not None:
        from holdfast.engine.gates import find_baseline

        find_baseline(spec, options.runs_dir)  # while nothing is done
    identity = identify(spec)
    if options.accept_drift:
        identity = msgspec.structs.replace(identity, accepts_drift=True)
    if options.outputs_of is not None:
        identity = match_outputs(options.outputs_of, identity)
    if options.accept_drift:
        identity = accept_drift(identity, identity.directory(options.runs_dir), options.runs_dir)
    if identity.code and not options.fresh:
        identity = choose_run(identity, options.runs_dir)
    problem = identity.survey.unsendable
    if problem is not None and not options.grade_only and not _has_begun(identity, options):
        raise problem
    return identity


def _has_begun(identity: RunIdentity, options: Options) -> bool:
    """Return True if an earlier version may have begun the run, which can then still be shown, graded and exported."""
    return not options.fresh and identity.directory(options.runs_dir).read_manifest() is not None


def preview_run(spec: Eval, options: Options) -> tuple[RunIdentity, RunDir, Plan]:
    """Return what a run would do, and where, without writing anything."""
    check_prices(spec, generates=not options.grade_only)
    identity = locate_run(spec, options)
    rundir = identity.directory(options.runs_dir)
    rundir.read_manifest()
    if not options.fresh:
        _check_journals(rundir)
    others = [] if options.fresh else other_runs(identity, rundir, options.runs_dir)
    index = Index() if options.fresh else rundir.load(repair=False)
    _, plan = plan_with_reuse(identity, index, options.runs_dir, others)
    return identity, rundir, plan


def report_notices(run: Session) -> None:
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


def load_run(identity: RunIdentity, options: Options, notice: Callable[[str], None]) -> Loaded:
    """Read the records of a run, write its manifest if it is new, and borrow what other runs have done."""
    rundir = identity.directory(options.runs_dir)
    if options.fresh and (archived := rundir.set_aside()):
        notice(f"the earlier run was archived to {archived}")
    manifest = rundir.read_manifest()
    new = False
    if manifest is None:
        manifest = new_manifest(identity, fresh=options.fresh)
        new = not rundir.path.exists()
        rundir.write_manifest(manifest)
    if (newer := rundir.newer(manifest)) is not None:
        notice(newer)
    _check_journals(rundir)
    index = rundir.load(repair=True)
    identity.work.drop_unfit(index)
    for damage in index.damage:
        notice(str(damage))
    if options.again:
        index.verdicts.clear()
    others = [] if manifest.fresh else other_runs(identity, rundir, options.runs_dir)
    if options.outputs_of is not None:
        others.insert(0, options.outputs_of)
    known_done = b""
    if index.origin and not options.again:
        from holdfast.plan.done import read_done  # of large runs

        known_done = read_done(identity, rundir, index)
    borrowed, plan = plan_with_reuse(
        identity, index, options.runs_dir, others, grades=not options.again, known_done=known_done
    )
    index.reserve(plan.total, len(identity.work.slots))
    if borrowed:
        adopt(borrowed, rundir, index)
    if index.origin and not options.again and plan.done != known_done:
        from holdfast.plan.done import write_done

        write_done(identity, rundir, index, plan.done)
    return Loaded(index, plan, new)


def _check_journals(rundir: RunDir) -> None:
    """Refuse to continue a finished run that has lost lines: doing that work again costs money."""
    with suppress(ResultsError, VersionError):
        if (metrics := rundir.read_metrics()) is not None and rundir.has_lost_lines(metrics):
            run = shlex.quote(str(rundir.path))
            raise Fault(
                "disk",
                f"{rundir.path} is finished, and its journals have become shorter: work is missing that was done",
                remedy="Restore outputs.jsonl and grades.jsonl from a backup. Or, to do the missing work again, run "
                f"`holdfast repair {run}`, then the same command. With --dry-run, repair only says what is missing.",
            )


def _unusable(rundir: RunDir, error: OSError) -> Fault:
    return Fault(
        "disk",
        f"cannot use {rundir.path}: {error.strerror or error}",
        remedy=f"{advice_for(error)} Or choose another place with --runs-dir.",
    )

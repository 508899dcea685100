"""A run that this process works on, and three ways to take it.

    with open_session(Alone(identity, options), display) as run:
        ...

`open_session` checks all that can be checked before anything is written, takes the run's lease, and reads what the run
and other runs have already done. Inside the block, `run.plan` says what is left. Leaving the block releases the lease.

Nothing is held for a run that is finished and needs nothing more: `run.finished` is then its outcome. That is looked
up twice, since the process that we waited for may have finished the run.

Who takes the run, and what it reads:

`Alone`      one process that has the run to itself; it repairs the journals, and borrows from other runs
`Worker`     one of several workers; it repairs its own journals, and follows the others' records
`Finisher`   the worker that writes the report, once nothing is left for the others
"""

from __future__ import annotations

import os
import shlex
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.display.terminal import printable
from holdfast.engine.admission import check_prices
from holdfast.engine.user_code import check_parameters
from holdfast.errors import Fault, HoldfastError, ResultsError, UsageError, VersionError
from holdfast.graders.build import build_graders
from holdfast.plan.finished import publish_finished, read_finished
from holdfast.plan.history import accept_drift, match_outputs, other_runs, plan_with_reuse
from holdfast.plan.identity import identify, new_manifest
from holdfast.plan.inputs import choose_run
from holdfast.plan.plan import Plan, make_plan
from holdfast.plan.reuse import adopt, choose_set
from holdfast.report.outcome import Outcome, read_failures
from holdfast.report.trials import grading_rules
from holdfast.spec.eval import benchmark_tasks
from holdfast.spec.plugins import load_reference
from holdfast.store.files import advice_for, make_directory, open_file
from holdfast.store.index import RunIndex
from holdfast.store.lease import RunLease
from holdfast.store.lines import cut_damage
from holdfast.store.records import Spent
from holdfast.store.run_lock import hold, join
from holdfast.store.rundir import RunPolicy
from holdfast.targets.build import build_target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.conversation.simulated_user import Player
    from holdfast.display.displays import Display
    from holdfast.graders.types import InstantGrader, WaitingGrader
    from holdfast.plan.identity import RunIdentity
    from holdfast.spec.eval import Eval
    from holdfast.store.metrics import GateOutcome, Metrics
    from holdfast.store.rundir import Manifest, RunDir
    from holdfast.targets.types import Target

_ELSEWHERE: Final = {
    "baseline": "holdfast.engine.gates:find_baseline",
    "gate": "holdfast.engine.gates:evaluate_gate",
    "player": "holdfast.conversation.simulated_user:build_player",
    "benchmark": "holdfast.report.benchmark:describes",
}
"""what most runs do without"""


class Options(RunPolicy, frozen=True):
    """How to go about a run, from the command line or from Python."""

    runs_dir: Path = Path("runs")
    grade_only: bool = False
    """grade the outputs that exist, and never ask the target"""
    outputs_of: tuple[RunDir, Manifest] | None = None
    """the run whose outputs are graded"""
    again: bool = False
    """also grade outputs that have all their verdicts"""
    cancelled: threading.Event = msgspec.field(default_factory=threading.Event)
    """set from another thread to stop the run as Ctrl-C does"""
    finishing: threading.Event = msgspec.field(default_factory=threading.Event)
    """set from another thread to start nothing new, and let what is in flight finish"""
    abandon_hint: str = ""
    """how the user abandons requests in flight, for the message about them"""
    wait: float = 0
    """seconds to wait for another process that holds the run; negative: as long as it takes"""
    settle: tuple[str, ...] = ()
    """decisions about calls that were cut off, as `SAMPLE/TRIAL=happened:JSON|again|restart`"""
    wait_for_batches: bool = True
    """False: submit and collect batches, and exit while they are under way"""
    noted: set[str] = msgspec.field(default_factory=set)
    """notices that were already shown: the runs of a suite have many in common"""
    command: str = ""
    """what to type to resume the run"""


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
            player = None if spec.responder is None else load_reference(_ELSEWHERE["player"])(spec)
            parts = cls(build_target(spec), player, build_graders(spec))
        check_parameters(identity, parts.target, parts.player, parts.graders)
        return parts


class Loaded(msgspec.Struct, frozen=True):
    """The records of a run, and what is left to do."""

    index: RunIndex
    plan: Plan
    new: bool = False
    """this process has created the run directory"""


class RunLog:
    """A log file. Nothing depends on its lines, so they are not synced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._early: list[str] | None = []
        """lines that wait until this process may write to the run; None afterwards"""

    def open(self) -> None:
        """Write the lines that have waited, since this process may now write to the run."""
        early, self._early = self._early or [], None
        self._append("".join(early))

    def write(self, message: str) -> None:
        """Write a line, with the time in front."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        line = f"{stamp} {printable(' '.join(message.split()), '')}\n"
        if self._early is None:
            self._append(line)
        else:
            self._early.append(line)

    def _append(self, text: str) -> None:
        if text:
            with suppress(OSError):
                fd = open_file(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
                with os.fdopen(fd, "ab", buffering=0) as file:
                    file.write(text.encode())


class Alone:
    """Takes a run for this process only."""

    worker: str | None = None
    """the id of this worker; None: this process has the run to itself"""

    def __init__(self, identity: RunIdentity, options: Options) -> None:
        self.identity = identity
        self.options = options
        self.rundir = identity.directory(options.runs_dir)
        self.log = RunLog(self.rundir.log)

    def take(self, notice: Callable[[str], None], lost: Callable[[], None]) -> RunLease:
        """Take the lease; `lost` is called if another process takes it over."""
        make_directory(self.rundir.path.parent)
        return hold(self.rundir, self.options.wait, notice, lost)

    def load(self, notice: Callable[[str], None]) -> Loaded:
        """Read the records, and plan what is left."""
        return load_run(self.identity, self.options, notice)


class Worker(Alone):
    """Joins a run as one of several workers."""

    def __init__(self, identity: RunIdentity, options: Options, worker: str) -> None:
        super().__init__(identity, options)
        self.worker = worker
        self.log = RunLog(self.rundir.workers / worker / "run.log")

    def take(self, notice: Callable[[str], None], lost: Callable[[], None]) -> RunLease:
        """Take this worker's lease; raise RunBeingFinished if all trials are finished."""
        assert self.worker is not None
        return join(self.rundir, self.worker, self.options.wait, notice, lost)

    def load(self, notice: Callable[[str], None]) -> Loaded:
        """Read all records of the run. Only this worker's are repaired: the others' owners may be writing theirs."""
        worker, workers = self.worker, self.rundir.workers
        own = RunIndex(
            lambda name: [workers / f"{worker}/{name}.jsonl", *sorted(workers.glob(f"{worker}+*/{name}.jsonl"))]
        )
        own.read(durable=True)
        torn = [spot for spot in own.damage if spot.torn]  # others may refer to our lines by position: none may move
        cut_damage(torn, workers / f"{worker}/set-aside")
        for damage in torn:
            notice(f"{worker}: {damage}")
        index = self.rundir.load(repair=False)
        self.identity.work.drop_unfit(index)
        return Loaded(index, _plan(self.identity, index))


class Finisher(Alone):
    """Writes the report of a run whose chunks are all done, under a lease that the caller holds and releases."""

    def __init__(self, identity: RunIdentity, options: Options, lease: RunLease) -> None:
        policy = {"grade_only": True, "fresh": False, "retry_failed": False, "again": False}
        super().__init__(identity, msgspec.structs.replace(options, **policy))
        self._lease = lease

    def take(self, notice: Callable[[str], None], lost: Callable[[], None]) -> RunLease:
        """Return the lease that was taken before."""
        return self._lease


class Session(msgspec.Struct):
    """An open run."""

    identity: RunIdentity
    options: Options
    rundir: RunDir
    log: RunLog
    worker: str | None
    """the id of this worker; None: this process has the run to itself"""
    display: Display
    lease: RunLease
    plan: Plan
    parts: Parts = Parts()
    index: RunIndex = msgspec.field(default_factory=lambda: no_records())
    lost: threading.Event = msgspec.field(default_factory=threading.Event)
    """set when another process has taken over the lease"""
    finished: Outcome | None = None
    """the outcome of a run that is finished and needs nothing more"""
    spent: Spent = msgspec.field(default_factory=Spent)
    """what the run has spent so far, with what this process spends"""

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

    def refresh(self) -> None:
        """Read what was recorded since the run was opened."""
        self.index = self.rundir.refresh(self.index)
        choose_set(self.index)

    def warn(self, message: str) -> None:
        """Show a failure that does not end the run, and write it to run.log."""
        self.display.warning(message)
        self.log.write(f"warning {message}")


def no_records() -> RunIndex:
    """Return the index of a run that has no journals."""
    return RunIndex(lambda _: ())


def show_notice(display: Display, log: RunLog, message: str) -> None:
    """Show a message to the user, and write it to a log."""
    display.notice(message)
    log.write(f"notice {message}")


@contextmanager
def open_session(access: Alone, display: Display, parts: Parts | None = None) -> Iterator[Session]:
    """Open a run; `parts` are built unless the caller has them."""
    identity, options, rundir, lost = access.identity, access.options, access.rundir, threading.Event()
    common = identity, options, rundir, access.log, access.worker, display

    def notice(message: str) -> None:
        show_notice(display, access.log, message)

    def session_of(outcome: Outcome) -> Session:
        return Session(*common, RunLease(rundir.lease), outcome.plan, finished=outcome)

    outcome = confirm_finished(identity, rundir, options)
    if outcome is not None:
        yield session_of(outcome)
        return
    parts = parts or Parts.build(identity, options)
    try:
        lease = access.take(notice, lost.set)
    except OSError as error:
        raise _unusable(rundir, error) from error
    new = forgotten = False
    try:
        if (outcome := confirm_finished(identity, rundir, options)) is not None:
            yield session_of(outcome)
            return
        try:
            loaded = access.load(notice)
        except OSError as error:
            raise _unusable(rundir, error) from error
        new = loaded.new
        run = Session(*common, lease, loaded.plan, parts, loaded.index, lost, spent=loaded.index.spent())
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


def evaluate_gate(spec: Eval, rundir: RunDir, metrics: Metrics, options: Options) -> GateOutcome | None:
    """Check a finished run against the gate of its eval; None without one."""
    if spec.gate is None:
        return None
    gate: GateOutcome = load_reference(_ELSEWHERE["gate"])(spec, rundir, metrics, options.runs_dir)
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
        failures=read_failures(rundir, identity, rundir.load(repair=False)) if incomplete else None,
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
    """Return True if a report has the eval's thresholds, weights, breakdowns, clusters and benchmark."""
    tasks, numbers = benchmark_tasks(spec.document.data), metrics.benchmark
    return (
        metrics.rules == grading_rules(spec)
        and list(metrics.by) == list(dict.fromkeys(spec.by))
        and metrics.cluster == spec.cluster
        and ((numbers is None and tasks is None) or load_reference(_ELSEWHERE["benchmark"])(numbers, tasks))
    )


def locate_run(spec: Eval, options: Options) -> RunIdentity:
    """Identify the run of an eval, with another run's outputs or in spite of changed code if the options say so."""
    if spec.gate is not None:
        load_reference(_ELSEWHERE["baseline"])(spec, options.runs_dir)  # while nothing is done
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
    if problem is not None and not options.grade_only:
        raise problem
    return identity


def preview_run(spec: Eval, options: Options) -> tuple[RunIdentity, RunDir, Plan]:
    """Return the plan of a run and its directory, without writing anything."""
    check_prices(spec, generates=not options.grade_only)
    identity = locate_run(spec, options)
    rundir = identity.directory(options.runs_dir)
    rundir.read_manifest()
    if not options.fresh:
        _check_journals(rundir)
    others = [] if options.fresh else other_runs(identity, rundir, options.runs_dir)
    index = no_records() if options.fresh else rundir.load(repair=False)
    _, plan = plan_with_reuse(identity, index, options.runs_dir, others)
    return identity, rundir, plan


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
        index.ignore_verdicts()
    others = [] if manifest.fresh else other_runs(identity, rundir, options.runs_dir)
    if options.outputs_of is not None:
        others.insert(0, options.outputs_of)
    known_done = b"" if options.again else read_finished(identity.survey, identity.work, rundir, index)
    borrowed, plan = plan_with_reuse(
        identity, index, options.runs_dir, others, grades=not options.again, known_done=known_done
    )
    if plan.done != known_done and not options.again:
        publish_finished(identity.survey, identity.work, rundir, index, plan.done)
    if borrowed:
        adopt(borrowed, rundir)
        if borrowed.shared is None:
            index.read()
        else:
            index = rundir.load(repair=True)
            if options.again:
                index.ignore_verdicts()
            choose_set(index)
    return Loaded(index, plan, new)


def _plan(identity: RunIdentity, index: RunIndex) -> Plan:
    """Estimate what is left of a run, without looking up each trial while outputs are missing."""
    survey, work = identity.survey, identity.work
    total, outputs = survey.count * work.trials, index.count_outputs()
    if outputs >= total:
        return make_plan(survey, work, index)
    graded = index.count_so_far(total, survey.panels.mean).graded
    return Plan(survey.count, work.trials, finished=graded, to_grade=max(0, outputs - graded), to_run=total - outputs)


def _check_journals(rundir: RunDir) -> None:
    """Raise Fault for a finished run that has lost lines: repeating that work costs money."""
    with suppress(ResultsError, VersionError):
        if (metrics := rundir.read_metrics()) is not None and rundir.has_lost_lines(metrics):
            run = shlex.quote(str(rundir.path))
            raise Fault(
                "disk",
                f"{rundir.path} is finished, and its journals have become shorter: finished work is missing",
                remedy="Restore outputs.jsonl and grades.jsonl from a backup. Or, to do the missing work again, run "
                f"`holdfast repair {run}`, then the same command. With --dry-run, repair only says what is missing.",
            )


def _unusable(rundir: RunDir, error: OSError) -> Fault:
    return Fault(
        "disk",
        f"cannot use {rundir.path}: {error.strerror or error}",
        remedy=f"{advice_for(error)} Or choose another place with --runs-dir.",
    )

"""Keep a window of trials in flight.

There are no batches and no barriers: a coroutine takes the next trial as soon as its last one is on disk. Its place in
the window is occupied until the output is synced, so that a kill repeats at most the requests that were in flight.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import sys
import time
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any, Final

from holdfast.data.dataset import dataset_changed
from holdfast.data.survey import make_survey
from holdfast.display.format import rate_limit_text
from holdfast.engine.admission import Brake, Budget, Halted, Machine, SpareCores, Window
from holdfast.engine.grading import Grading, Sets
from holdfast.engine.recorder import Recorder
from holdfast.engine.retry import Retrier
from holdfast.engine.signals import Signals, describe_stopping
from holdfast.engine.trial import Trials
from holdfast.errors import AttemptError, BudgetReached, DataError, Fault, HoldfastError, Interrupted, Waiting
from holdfast.graders.build import grader_places
from holdfast.http.response import REPLY_BYTES
from holdfast.plan.plan import pending_trials
from holdfast.plan.progress import GraderProgress, Progress
from holdfast.spec.grader_schema import is_judge
from holdfast.spec.plugins import load_reference
from holdfast.spec.redact import Secrets, secret_variables
from holdfast.spec.schema import is_embedded
from holdfast.spec.target_schema import ModelTarget
from holdfast.spec.trial_limits import is_agent, time_beside_target
from holdfast.store.journal import Journal
from holdfast.store.records import describe_answers
from holdfast.targets.build import DEFAULT_CONCURRENCY, concurrency_of, usable_cores
from holdfast.targets.types import open_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from holdfast.conversation.simulated_user import Player
    from holdfast.engine.hooks import Hooks
    from holdfast.engine.inputs import InputRecorder
    from holdfast.engine.session import Session
    from holdfast.graders.types import Grader
    from holdfast.plan.plan import PendingTrial
    from holdfast.report.exports import LiveExporter
    from holdfast.targets.types import BatchHub, Target

_ELSEWHERE: Final = {
    "exporters": "holdfast.report.exports:live_exporters",
    "hooks": "holdfast.engine.hooks:Hooks",
    "inputs": "holdfast.engine.inputs:observe_inputs",
    "containment": "holdfast.containment.program:find_kind",
    "isolation": "holdfast.containment.program:requested_kind",
}
"""what most runs do without"""
BATCH_WINDOW: Final = 50_000
"""trials that may wait for batches at once"""
_LOOK_SECONDS: Final = 0.25
_DATASET_SECONDS: Final = 2.0
_PATIENCE_SECONDS: Final = 10.0
"""how long a rate limit may last before it is reported"""
_GRACE_SECONDS: Final = 10.0
"""grace period for in-flight trials after a fatal fault"""


class Supply:
    """The trials of a process that has the run to itself."""

    def __init__(self, trials: Iterator[PendingTrial]) -> None:
        self._trials = trials
        self.arrived: Callable[[], None] = lambda: None
        """called when trials have arrived"""

    def next(self) -> PendingTrial | None:
        """Return the next trial; None if no trial is available at the moment."""
        return next(self._trials, None)

    def ended(self, pending: PendingTrial) -> None:
        """Note that a trial is on disk, or given up."""

    @property
    def settled(self) -> bool:
        """True if no more trials are about to arrive."""
        return True

    async def more(self, brake: Brake) -> bool:
        """Wait for more trials while none is in flight; return False if none will come or the brake is pulled."""
        return False

    async def close(self) -> None:
        """Release what was not started."""


class Loop:
    """The work of one process on one run."""

    def __init__(self, session: Session, source: Supply | None = None) -> None:
        identity, plan, options = session.identity, session.plan, session.options
        self._session = session
        self._graders = [] if options.skip_graders else session.parts.graders
        self._display = session.display
        self._spec = identity.spec
        concurrency = concurrency_of(self._spec)
        self._window = Window(self._batch_window() or concurrency)
        by_cores = self._spec.limits.concurrency is None and is_agent(self._spec)  # which says nothing about judges
        self._grades_at_once = DEFAULT_CONCURRENCY if concurrency is None or by_cores else concurrency
        pending = pending_trials(identity.dataset, identity.survey, identity.work, session.index, plan.done)
        if options.grade_only:
            pending = (trial for trial in pending if trial.output is not None)
        self._source = source or Supply(pending)
        self._workers: set[asyncio.Task[None]] = set()
        self.brake = Brake()
        self.progress = Progress(
            plan,
            session.spent,
            outputs=plan.total - plan.to_run,
            graded=plan.finished + plan.reused,
            generates=not options.grade_only,
            grades=not (options.skip_graders and identity.work.slots),
            graders={} if options.skip_graders else {p.name: GraderProgress() for p in grader_places(self._spec)},
        )
        self._partial_reported = False
        self._spare_cores, self._usable_cores = SpareCores(), usable_cores()
        self._budget = Budget(self._spec.limits, self.progress, session.notice)
        self._batches: BatchHub | None = None
        self._collector: asyncio.Task[None] | None = None
        """submits batches and collects their results"""
        self._crash: BaseException | None = None
        self._final_notices: set[str] = set()
        self._opening: asyncio.Task[None] | None = None
        self._hooks: Hooks | None = None
        if session.generates and self._spec.hooks is not None:
            self._hooks = load_reference(_ELSEWHERE["hooks"])(self._spec.hooks, self._spec, session.warn)
        self.faults: list[Fault] = []
        """why graders became unavailable"""

    def _batch_window(self) -> int | None:
        """Return how many trials may be in flight if they wait for batches; None if they do not.

        A budget is checked when a trial starts. To keep it, no more trials start than fit into one batch.
        """
        target, limits = self._spec.target, self._spec.limits
        if not isinstance(target, ModelTarget) or target.batch is None or not self._session.generates:
            return None
        prepared = self._spec.hooks is not None and self._spec.hooks.before_task
        if prepared or any(tool.mcp is not None and tool.per == "trial" for tool in target.tools):
            return DEFAULT_CONCURRENCY  # each trial starts its own processes
        budget = limits.max_cost is not None or limits.token_budget is not None
        return min(BATCH_WINDOW, target.batch.size or BATCH_WINDOW) if budget else BATCH_WINDOW

    def _input_recorder(self) -> InputRecorder | None:
        """Return the recorder of files that users' code reads; None if no such code is loaded."""
        session = self._session
        if "holdfast.functions.observing" not in sys.modules or not session.identity.code:
            return None
        recorder: InputRecorder = load_reference(_ELSEWHERE["inputs"])(session)
        return recorder

    async def run(self) -> None:
        """Work until nothing is left or the brake is pulled. All results are on disk when this returns."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._source.close)  # last: the next owner of a chunk reads what is on disk
            for exporter in self._live_exporters():
                exporter.start()
                stack.push_async_callback(asyncio.to_thread, exporter.close)  # after the journal has been closed
            journal = Journal(
                self._session.journals,
                notice=self._session.notice,
                failed=self.brake.pull,
                held=self._session.lease.still_held,
                worker=self._session.worker is not None,
            )
            stack.push_async_callback(journal.close)
            if not await self._open(stack):
                return
            recorder = Recorder(
                journal,
                self._session.index,
                self.progress,
                self._display,
                nothing_to_grade=not self._session.identity.work.slots,
                inputs=self._input_recorder(),
                secrets=Secrets(secret_variables(self._spec.document.data), self._session.notice),
            )
            in_batches = self._batches is not None
            retrier = Retrier(
                self._spec.limits,
                self.brake,
                self._window,
                recorder,
                self.progress,
                grading=time_beside_target(self._spec),
                batches=in_batches,
            )
            self._grading = Grading(
                self._graders,
                self._session.identity.work,
                self._session.index,
                retrier,
                recorder,
                self._grades_at_once,
                self._session.notice,
                BATCH_WINDOW if in_batches else None,
            )
            self._trials = Trials(
                self._session,
                recorder,
                retrier,
                self._grading,
                self._hooks,
                stopping=self._stopping,
                calls_stopped=self._calls_stopped,
            )
            stack.push_async_callback(self._grading.close)
            for watcher in (self._tick(), self._watch_dataset()):
                self._start(watcher, stack)
            if self._batches is not None:
                self._batches.open()
                self._collector = self._start(self._batches.run(), stack)
            self._source.arrived = self._admit
            self._admit()
            while self._workers or await self._more():
                if self._workers:
                    await asyncio.wait(self._workers)
                self._admit()
            await self._grading.finish()
            await self._grade_sets(recorder, retrier)
            if self._batches is not None:
                await self._batches.settle()
            self.faults = list(self._grading.down.values())
            if isinstance(self.brake.reason, BudgetReached):
                self.brake.reason = self._budget.reached()  # trials in flight have spent more since
        self._display.tick(self.progress)
        if self._crash is not None:
            raise self._crash

    def _live_exporters(self) -> list[LiveExporter]:
        """Return the exporters that follow this process's work. With several workers, they follow from outside."""
        session = self._session
        if session.worker is not None or not session.generates or not self._spec.live_exports:
            return []
        exporters: list[LiveExporter] = load_reference(_ELSEWHERE["exporters"])(
            session.identity, session.rundir, session.warn
        )
        return exporters

    async def _more(self) -> bool:
        """Wait for trials; return False if none come and none is in flight."""
        return (not self.brake.pulled and await self._source.more(self.brake)) or bool(self._workers)

    def _start(self, watcher: Coroutine[Any, Any, None], stack: AsyncExitStack) -> asyncio.Task[None]:
        """Start a background task, which is cancelled when the run is over."""
        task = asyncio.create_task(watcher)
        task.add_done_callback(self._ended)
        stack.callback(task.cancel)
        return task

    async def _grade_sets(self, recorder: Recorder, retrier: Retrier) -> None:
        """Ask the graders that look at all outputs together, unless another process finishes the run."""
        if self.brake.pulled or self._session.worker is not None or not self._grading.set_graders:
            return
        task = asyncio.create_task(Sets(self._session, self._grading, recorder, retrier).grade())
        self._workers.add(task)  # an interruption cancels it
        task.add_done_callback(self._workers.discard)
        try:
            await task
        except Fault as fault:
            self.brake.pull(fault)
        except asyncio.CancelledError:
            if not self.brake.pulled:
                raise

    async def _open(self, stack: AsyncExitStack) -> bool:
        """Run hooks, then open the target and graders, which may start servers; return False if stopped meanwhile."""
        self._opening = asyncio.current_task()
        REPLY_BYTES.set(self._spec.limits.reply_bytes)
        try:
            if self._session.generates:
                await self._report_containment()
            if self._hooks is not None:
                await self._hooks.before_run()
                stack.push_async_callback(self._hooks.after_run)
            for model in filter(is_embedded, self._asked_models()):
                self._session.notice(f"starting {model} on this machine …")
            target = self._session.parts.target if self._session.generates else None
            self._batches = self._make_batches(target)
            if target is not None:
                target.limit_requests(lambda: self._window.limit)
            for part in (target, self._session.parts.player, *self._graders):
                if part is not None:
                    if self._batches is not None:
                        getattr(part, "use_batches", lambda _: None)(self._batches)
                    await part.__aenter__()
                    stack.push_async_callback(self._close, part)
                    for message in getattr(part, "notices", ()):
                        self._session.notice(message)
        except asyncio.CancelledError:
            if not self.brake.pulled:
                raise
        self._opening = None
        return not self.brake.pulled

    async def _report_containment(self) -> None:
        """Report how the processes of programs are ended, if this process starts programs."""
        target = self._spec.target
        programs = [getattr(target, "command", None), getattr(target, "agent", None), self._hooks]
        programs += [tool.mcp.command for tool in getattr(target, "tools", ()) if tool.mcp is not None]
        if not any(programs):
            return
        kind = await load_reference(_ELSEWHERE["containment"])()
        self._session.log.write(f"programs contained by {kind}")
        if kind != "pid" and load_reference(_ELSEWHERE["isolation"])() == "auto":
            self._session.notice(
                "this system allows no PID namespaces, so the processes of programs are "
                + ("looked for and killed after them" if kind == "reaper" else "killed with their process group only")
                + " (docs/agents.md#what-ends-with-a-program)"
            )

    def _make_batches(self, target: Target | None) -> BatchHub | None:
        """Return the batches of the run, if it asks in batches or did so before."""
        session = self._session
        blocks = [*([] if target is None else [self._spec.target]), *(grader.block for grader in self._graders)]
        asked = any(getattr(block, "batch", None) is not None for block in blocks)
        if not asked and not session.rundir.has_batches:
            return None
        return open_batches(
            session.rundir,
            session.journals,
            notice=session.notice,
            held=session.lease.still_held,
            idle=lambda: not self.progress.busy and self._source.settled,
            stopping=lambda: self.brake.pulled,
            stop=self.interrupt,
            wait=session.options.wait_for_batches,
            live_limit=self._grades_at_once,
            forget=session.options.again,
        )

    async def _close(self, part: Target | Player | Grader) -> None:
        """Close a part. All results are on disk by then, so a failure is only reported."""
        try:
            await part.__aexit__(None, None, None)
        except Exception as error:
            self._session.warn(f"{error if isinstance(error, HoldfastError) else repr(error)}")
        for message in getattr(part, "final_notices", ()):
            if message not in self._final_notices:  # votes of one judge share them
                self._final_notices.add(message)
                self._session.notice(message)

    def _asked_models(self) -> list[str]:
        """Return the models that this process will ask."""
        blocks = [grader.block for grader in self._graders]
        judges = [block.model for block in blocks if is_judge(block)]
        return [model for model in self._spec.models() if self._session.generates or model in judges]

    def finish(self, reason: Interrupted, hint: str = "") -> None:
        """Start no further request, and let those in flight finish; `hint` says how to abandon them."""
        if self.brake.halted:
            return
        self.brake.halt(reason)
        if self._opening is not None:
            self._opening.cancel()
            return
        self._grading.halt()
        if self._batches is not None:
            self._batches.leave()
        if count := self.progress.asking:
            self._session.notice(describe_stopping(count, hint))
        else:
            self._session.log.write("stopping")

    def interrupt(self, reason: Interrupted | Fault | Waiting) -> None:
        """Stop admission and cancel the trials in flight; those that finished are on disk."""
        self.brake.pull(reason)
        if self._opening is not None:
            self._opening.cancel()
            return
        for worker in self._workers:
            worker.cancel()
        self._grading.abandon()
        if self._collector is not None:
            self._collector.cancel()

    def _admit(self) -> None:
        """Start a worker if the window has room; it starts the next one.

        Each starts in its own iteration of the event loop, so the first request is sent before the last trial of the
        window is prepared.
        """
        if len(self._workers) < self._window.limit and (pending := self._next()) is not None:
            worker = asyncio.create_task(self._work(pending))
            self._workers.add(worker)
            worker.add_done_callback(self._leave)

    def _leave(self, worker: asyncio.Task[None]) -> None:
        self._workers.discard(worker)
        self._ended(worker)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Stop the run if a task ended with an exception, which is a bug."""
        if not task.cancelled() and (crash := task.exception()) is not None:
            self._crash = crash
            self.interrupt(Fault("rejected", f"internal error: {crash!r}"))

    async def _work(self, pending: PendingTrial | None) -> None:
        while pending is not None:
            self._admit()
            try:
                try:
                    await self._trials.run(pending)
                except AttemptError as error:
                    self.progress.given_up += 1  # the failure is recorded, and the trial stays pending
                    self.progress.uncertain += error.kind == "uncertain"
                self._source.ended(pending)
            except Fault as fault:
                self.brake.pull(fault)
            except Halted:
                pass  # in the middle of a conversation, whose turns are recorded
            finally:
                self.progress.end()
            if len(self._workers) > self._window.limit:
                # Removed at once: others that wake in the same iteration must not leave for the same excess.
                task = asyncio.current_task()
                assert task is not None
                self._workers.discard(task)
                return
            pending = self._next()

    def _next(self) -> PendingTrial | None:
        """Return the next trial, which counts as in flight from now on: a batch waits for trials that are starting.

        Return None if no trial is available, or the run is stopping.
        """
        if self._stopping():
            return None
        try:
            if (pending := self._source.next()) is not None:
                self.progress.begin()
            return pending
        except Fault as fault:
            self.brake.pull(fault)
        except DataError as error:
            self.brake.pull(Fault("dataset_changed", error.message, remedy=error.remedy))
        return None

    def _stopping(self) -> bool:
        """Check the budget; return True if nothing new may start."""
        self._check_budget()
        return self.brake.pulled

    def _calls_stopped(self) -> bool:
        """Check the budget; return True if no call may start, not even inside a trial."""
        self._check_budget()
        return self.brake.halted or isinstance(self.brake.reason, BudgetReached)

    def _check_budget(self) -> None:
        if not self.brake.pulled and (reached := self._budget.reached()) is not None:
            self.brake.pull(reached)

    async def _tick(self) -> None:
        faulted, cancelled = 0.0, False
        while True:
            self.progress.limit = self._window.limit
            self.progress.mark()
            if self._batches is not None:
                if self.brake.halted:
                    self._batches.leave()
                self.progress.batches = self._batches.summary()
            self._display.tick(self.progress)
            self._report_rate_limits()
            self._report_partial_answers()
            self._suggest_workers()
            self._check_budget()
            if self._session.lost.is_set() and not self.brake.pulled:
                self.interrupt(Fault("lease_lost", "another process has taken over this run"))
            if self._session.options.finishing.is_set():
                self.finish(Interrupted(signal.SIGINT), self._session.options.abandon_hint)
            if self._session.options.cancelled.is_set() and not cancelled:
                cancelled = True
                self.interrupt(Interrupted(signal.SIGINT))
            if isinstance(self.brake.reason, Fault):
                faulted = faulted or time.monotonic()
                if time.monotonic() - faulted > _GRACE_SECONDS:
                    self.interrupt(self.brake.reason)  # they would fail in the same way, or never end
                    faulted = time.monotonic()  # give them time to close their resources
            await asyncio.sleep(_LOOK_SECONDS)

    def _report_rate_limits(self) -> None:
        """Report each rate limit that lasts long, once."""
        for where, limited in self.progress.rate_limits.items():
            if limited.waiting and not limited.reported and limited.seconds >= _PATIENCE_SECONDS:
                limited.reported = True
                self._session.notice(f"{rate_limit_text(where, limited)}. The run continues when the server answers.")

    def _report_partial_answers(self) -> None:
        """Report once that answers are not whole: the user may want to stop the run and correct it."""
        if not self._partial_reported and (described := describe_answers(self.progress.kinds)) is not None:
            self._partial_reported = True
            self._session.notice(f"so far {described}")

    def _suggest_workers(self) -> None:
        """Suggest workers if this process has the run to itself and limits its speed."""
        if self._session.worker is not None or not self._session.generates:
            return
        cores = os.cpu_count() or 1
        now = Machine(time.monotonic(), time.process_time(), os.getloadavg()[0], cores, self._usable_cores)
        if (suggestion := self._spare_cores.look(now)) is not None:
            self._session.notice(suggestion)

    async def _watch_dataset(self) -> None:
        """Stop the run if the dataset changes. Its rows are read again only if its files look modified."""
        identity = self._session.identity
        stamp = identity.stamp
        while True:
            await asyncio.sleep(_DATASET_SECONDS)
            if identity.dataset.stamp() == stamp:
                continue
            stamp = identity.dataset.stamp()
            try:
                same = (await asyncio.to_thread(make_survey, identity.dataset)).digest == identity.survey.digest
            except HoldfastError:
                same = False
            if not same:
                self.brake.pull(dataset_changed(", ".join(identity.dataset.source)))
                return


def run_loop(session: Session, source: Supply | None = None) -> Loop:
    """Work on an opened run until nothing is left or it has to stop; return the loop as it ended."""

    async def main() -> Loop:
        loop, events = Loop(session, source), asyncio.get_running_loop()

        # Called between any two bytecodes, so they only schedule the work.
        def finish(number: int) -> None:
            hint = "; Ctrl-C again to abandon them" if number == signal.SIGINT else ""
            events.call_soon_threadsafe(loop.finish, Interrupted(number), hint)

        def stop(number: int) -> None:
            events.call_soon_threadsafe(loop.interrupt, Interrupted(number))

        with Signals(stop, finish, lambda: loop.brake.halted):
            await loop.run()
        return loop

    import uvloop

    _allow_many_connections()
    thresholds = gc.get_threshold()
    # A run makes few cycles and keeps much: the default thresholds of garbage collection cost a tenth of the time.
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)
    try:
        return uvloop.run(main())
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def _allow_many_connections() -> None:
    """Raise the limit of open files: each request in flight needs one, and the usual soft limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))

"""Workers on this machine: started, watched and, when we are told to stop, told to stop.

They are processes of their own, as on a cluster. Each reads its standard input and drains when that ends, which is
when we do, however we go.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.engine.ended import Ended
from holdfast.engine.log import Noting, RunLog
from holdfast.engine.loop import mirror_of
from holdfast.engine.run import already_finished, failures_of, so_far_of
from holdfast.engine.setup import Opened
from holdfast.engine.signals import Signals
from holdfast.engine.worker import finish_run, prepare, shared_eval
from holdfast.errors import BudgetReached, Fault, Interrupted
from holdfast.graders.build import grader_places, place_name
from holdfast.plan.plan import make_plan
from holdfast.plan.progress import GraderProgress, Progress
from holdfast.report.outcome import Outcome
from holdfast.spec.load import target_name
from holdfast.store.claims import Claims
from holdfast.store.index import Index
from holdfast.store.lease import RunLease
from holdfast.store.records import ErrorRecord
from holdfast.store.tail import Follower

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.display.types import Display
    from holdfast.engine.options import Options
    from holdfast.engine.worker import Shared
    from holdfast.spec.load import Eval

WORKER: Final = "HOLDFAST_WORKER"
"""the variable by which a worker, and whatever it imports or starts, knows which one it is"""
_LOOK_SECONDS: Final = 0.25
_LAST_WORDS_SECONDS: Final = 5.0


def run_workers(
    spec: Eval,
    options: Options,
    count: int,
    display: Display,
    *,
    command: str = "",
    log_samples: bool = False,
    output_path: Path | None = None,
) -> Outcome:
    """Run an eval, or go on with it, with so many workers."""
    shared = prepare(spec, options, count, display, command=command, log_samples=log_samples, output_path=output_path)
    if isinstance(shared, Outcome):
        return shared
    crew = _Crew(shared, count, display)
    crew.watch(options)
    return crew.outcome(options)


class _Crew:
    def __init__(self, shared: Shared, count: int, display: Display) -> None:
        self._found, self._rundir, self._plan = shared
        self._display = display
        self._begun = time.monotonic()
        self._followed = Index()
        """what the journals hold, as far as they were read on the way"""
        self._said: list[Ended] = []
        self._told: int | None = None
        self._readers: list[threading.Thread] = []
        self._workers = [self._start(f"w{number}") for number in range(1, count + 1)]

    def _start(self, worker: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "holdfast", "work", str(self._rundir.path)),
                *("--worker", worker, "--attached", "--display", "none"),
            ],
            env={**os.environ, WORKER: worker},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is ours to pass on
        )
        for reader in (self._listen, self._hear):
            self._readers.append(threading.Thread(target=reader, args=(worker, process), daemon=True))
            self._readers[-1].start()
        return process

    def _listen(self, worker: str, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        with process.stderr as said:
            for line in said:
                self._display.notice(f"{worker}: {line.decode(errors='replace').rstrip()}")

    def _hear(self, _: str, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as said, suppress(msgspec.DecodeError):
            self._said.append(msgspec.json.decode(said.read(), type=Ended))

    def watch(self, options: Options) -> None:
        """Show how far they are until all have left."""
        found, plan, index = self._found, self._plan, self._followed
        follower = Follower(self._rundir, index)
        follower.refresh()
        slots = found.survey.panels.mean
        places = [] if options.skip_graders else grader_places(found.spec)
        progress = Progress(
            plan,
            index.spent,
            outputs=plan.total - plan.to_run,
            graded=plan.finished + plan.reused,
            grades=not (options.skip_graders and found.work.slots),
            graders={place.name: GraderProgress() for place in places},
        )
        self._display.begin(found.spec.name, target_name(found.spec.target), str(self._rundir.path), plan)
        mirror = mirror_of(found, self._rundir, self._display.notice)
        if mirror is not None:
            mirror.start()
        with Signals(self._tell, self._kill):
            while any(worker.poll() is None for worker in self._workers):
                if options.cancelled.is_set() and self._told is None:
                    self._tell(signal.SIGINT)
                time.sleep(_LOOK_SECONDS)
                with suppress(OSError):
                    news = follower.read()
                    follower.apply(news)
                    for name, line in news:
                        self._show(name, line.head, progress)
                progress.outputs = min(plan.total, len(index.outputs))
                progress.graded = min(progress.outputs, int(len(index.verdicts) / slots) if slots else plan.total)
                progress.mark()
                self._display.tick(progress)
        with suppress(OSError):
            follower.refresh()
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.close()
            if worker.returncode < 0 and self._told is None:
                name = signal.Signals(-worker.returncode).name
                self._display.notice(f"a worker was killed ({name}); its finished trials are on disk")
        if mirror is not None:
            mirror.close()
        self._display.end()

    def _show(self, name: str, head: Any, progress: Progress) -> None:
        """Count a new line of a worker, and show it if it is a failure."""
        if name == "grades" and head.status != "error":
            progress.grade(place_name(head.grader, head.turn), head.score)
        elif name == "steps":
            progress.step(head.kind)
        elif name == "errors" and not head.final:
            progress.retried[head.kind] += 1
        elif name == "errors":
            if head.where == "target":
                progress.given_up += 1
            else:
                progress.failed_grades[head.where] += 1
            self._display.error(
                ErrorRecord(
                    key=head.key,
                    sample=head.sample,
                    trial=head.trial,
                    attempt=0,
                    where=head.where,
                    kind=head.kind,
                    message=head.message,
                    status=None,
                    time=head.time,
                    seconds=head.seconds,
                    final=True,
                    row=head.row,
                )
            )

    def _tell(self, number: int) -> None:
        self._told = number
        for worker in self._workers:
            with suppress(ProcessLookupError):
                worker.send_signal(number)

    def _kill(self) -> None:
        for worker in self._workers:
            worker.kill()

    def _finished(self, done: Outcome) -> Outcome:
        """Add what the workers took, and what failed, to the report that one of them made."""
        failures = failures_of(self._rundir, self._found, self._followed, None)
        wall = time.monotonic() - self._begun
        return replace(done, already=False, spent=self._followed.spent, failures=failures, wall=wall)

    def outcome(self, options: Options) -> Outcome:
        """How it ended for all of them."""
        for reader in self._readers:
            reader.join(_LAST_WORDS_SECONDS)
        found, rundir = self._found, self._rundir
        options = replace(options, fresh=False, retry_failed=False)  # which were about the run as it was before
        if (done := already_finished(found, rundir, options)) is not None:
            return self._finished(done)
        index = rundir.load(mend=False)
        plan = make_plan(found.survey, found.work, index)
        reason: Fault | BudgetReached | Interrupted | None = None
        for ended in self._said:
            reason = reason or ended.reason
        if self._told is not None:
            reason = Interrupted(self._told)
        codes = [worker.returncode for worker in self._workers]
        if reason is None and not {1, 3} & set(codes) and (any(codes) or not options.skip_graders):
            # Nobody says that it made the report, or why there is none.
            _, shared, place = shared_eval(rundir)
            if Claims(place, len(shared.chunks), "", rundir).all_done:
                opened = Opened(found, rundir, RunLease(rundir.lease), index, plan)
                done = finish_run(opened, options, Noting(self._display, RunLog(rundir.log)))
                if done.finisher is None or (done := already_finished(found, rundir, options)) is not None:
                    return self._finished(done)
            reason = Fault(
                "rejected",
                f"workers exited before all trials were done (exit codes {', '.join(map(str, codes))})",
                remedy="Their finished trials are on disk.",
            )
        return Outcome(
            rundir,
            plan,
            None,
            index.spent,
            reason,
            skipped_graders=options.skip_graders,
            so_far=so_far_of(found, index, reason),
            failures=failures_of(rundir, found, index, reason),
            wall=time.monotonic() - self._begun,
        )

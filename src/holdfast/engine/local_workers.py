"""Start, monitor and stop worker processes on this machine.

They are the same processes as on a cluster. Each worker drains when its standard input ends, so none outlives this
process, however it dies. A killed worker is replaced by one of the same name, which continues its work, unless three in
a row recorded nothing, as when some trial crashes every worker.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.structs import replace

from holdfast.engine.attached import WORKER, Ended
from holdfast.engine.run import count_so_far
from holdfast.engine.session import finished_outcome
from holdfast.engine.signals import Signals, describe_stopping, read_stopping
from holdfast.engine.worker import finish_run, prepare, shared_eval
from holdfast.errors import Fault, Interrupted
from holdfast.graders.build import grader_places, place_name
from holdfast.plan.plan import make_plan
from holdfast.plan.progress import GraderProgress, Progress
from holdfast.report.exports import live_exporters
from holdfast.report.outcome import Outcome, read_failures
from holdfast.store.claims import Claims
from holdfast.store.records import ErrorRecord
from holdfast.store.shared import journal_size

if TYPE_CHECKING:
    from holdfast.display.displays import Display
    from holdfast.engine.admission import Reason
    from holdfast.engine.session import Options
    from holdfast.engine.worker import SharedRun
    from holdfast.spec.eval import Eval

_LOOK_SECONDS: Final = 0.25
_LAST_WORDS_SECONDS: Final = 5.0
_MOST_IDLE_DEATHS: Final = 3
"""workers of one name that may be killed in a row without having recorded anything"""
_COUNT_SECONDS: Final = 2.0
"""how long workers may take to say how many requests they have in flight"""


def run_workers(spec: Eval, options: Options, count: int, display: Display) -> Outcome:
    """Run an eval, or resume it, with `count` worker processes."""
    shared = prepare(spec, options, count, display)
    if isinstance(shared, Outcome):
        return shared
    workers = _LocalWorkers(shared, count, display, () if options.wait_for_batches else ("--no-wait",))
    workers.watch(options)
    return workers.outcome(options)


class _LocalWorkers:
    """Worker processes on this machine, started at construction."""

    def __init__(self, shared: SharedRun, count: int, display: Display, flags: tuple[str, ...]) -> None:
        """Start `count` workers with additional flags."""
        self._flags = flags
        self._identity, self._rundir, self._plan = shared
        self._display = display
        self._started = time.monotonic()
        self._followed = self._rundir.load(repair=False)
        """the records of the run that were read so far"""
        self._ended: list[Ended] = []
        self._abandon_hint = "; Ctrl-C again to abandon them"
        self._signal_sent: int | None = None
        """the signal that this process received and passed on"""
        self._in_flight: dict[str, int] = {}
        """by worker that was asked to finish: its requests in flight"""
        self._count_until: float | None = None
        """when to report their sum, by the monotonic clock; None: there is nothing to report"""
        self._given_up: set[str] = set()
        """workers that are no longer replaced"""
        self._readers: list[threading.Thread] = []
        self._deaths = {f"w{number}": (0, self._recorded(f"w{number}")) for number in range(1, count + 1)}
        """by worker: how many of its name were killed in a row without recording anything, and its bytes by then"""
        self._workers = [self._start(worker) for worker in self._deaths]

    def _start(self, worker: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "holdfast", "work", str(self._rundir.path)),
                *("--worker", worker, "--attached", "--display", "none", *self._flags),
            ],
            env={**os.environ, WORKER: worker},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches only this process, which passes it on
        )
        for reader in (self._relay_stderr, self._read_ending):
            self._readers.append(threading.Thread(target=reader, args=(worker, process), daemon=True))
            self._readers[-1].start()
        return process

    def _recorded(self, worker: str) -> int:
        """Return how many bytes of results a worker and its predecessors of the same name have recorded."""
        folders = [self._rundir.workers / worker, *self._rundir.workers.glob(f"{worker}+*")]
        paths = [folder / f"{name}.jsonl" for folder in folders for name in ("outputs", "grades", "steps")]
        return sum(map(journal_size, paths))

    def _replace_killed(self) -> bool:
        """Replace workers that were killed; return False once none is left.

        Every worker is polled: a dead one is a zombie until then, and the others cannot take over its lease.
        """
        for number, worker in enumerate(self._deaths):
            process = self._workers[number]
            code = process.poll()
            if code is None or code >= 0 or self._signal_sent is not None or worker in self._given_up:
                continue
            if -code in (signal.SIGINT, signal.SIGTERM):  # somebody stopped this worker
                self._given_up.add(worker)
                continue
            idle, before = self._deaths[worker]
            recorded = self._recorded(worker)
            idle = 1 if recorded > before else idle + 1
            self._deaths[worker] = idle, recorded
            killed = f"{worker} was killed ({signal.Signals(-code).name}); its finished trials are saved"
            if idle < _MOST_IDLE_DEATHS:
                self._display.warning(f"{killed}, and another worker takes its place")
                assert process.stdin is not None
                process.stdin.close()
                self._workers[number] = self._start(worker)
            else:
                self._given_up.add(worker)
                self._display.warning(f"{killed}. It finished nothing {idle} times in a row, and is not replaced again")
        return None in [worker.poll() for worker in self._workers]

    def _relay_stderr(self, worker: str, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        with process.stderr as lines:
            for line in lines:
                label, _, message = line.decode(errors="replace").rstrip().partition(": ")
                if label == "note" and (requests := read_stopping(message)) is not None:
                    self._in_flight[worker] = requests
                elif label in ("note", "warning"):  # the display adds it again
                    show = self._display.warning if label == "warning" else self._display.notice
                    show(f"{worker}: {message}")
                else:
                    self._display.notice(f"{worker}: {label}: {message}" if message else f"{worker}: {label}")

    def _read_ending(self, _: str, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as stdout, suppress(msgspec.DecodeError):
            self._ended.append(msgspec.json.decode(stdout.read(), type=Ended))

    def watch(self, options: Options) -> None:
        """Show the workers' progress until all have ended."""
        identity, plan, index = self._identity, self._plan, self._followed
        graders_per_trial = identity.survey.panels.mean
        places = [] if options.skip_graders else grader_places(identity.spec)
        progress = Progress(
            plan,
            index.spent(),
            outputs=plan.total - plan.to_run,
            graded=plan.finished + plan.reused,
            grades=not (options.skip_graders and identity.work.slots),
            graders={place.name: GraderProgress() for place in places},
        )
        self._display.begin(identity.spec.name, identity.spec.target.label, str(self._rundir.path), plan)
        exporters = live_exporters(identity, self._rundir, self._display.warning)
        for exporter in exporters:
            exporter.start()
        cancelled = False
        with Signals(self._stop, self._finish_requests, leave=self._kill):
            while self._replace_killed():
                if options.finishing.is_set() and self._signal_sent is None:
                    self._abandon_hint = options.abandon_hint
                    self._finish_requests(signal.SIGINT)
                if options.cancelled.is_set() and not cancelled:
                    cancelled = True
                    self._stop(signal.SIGTERM)
                self._say_in_flight()
                time.sleep(_LOOK_SECONDS)
                with suppress(OSError):
                    index = self._followed = self._rundir.follow(index, partial(self._show, progress))
                    progress.spent.become(index.spent())
                _, progress.outputs, progress.graded = index.count_so_far(plan.total, graders_per_trial)
                progress.mark()
                self._display.tick(progress)
        with suppress(OSError):
            self._followed = self._rundir.follow(index)
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.close()
        for exporter in exporters:
            exporter.close()
        self._display.end()

    def _show(self, progress: Progress, name: str, head: Any) -> None:
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
                progress.uncertain += head.kind == "uncertain"
            else:
                progress.failed_grades[head.where] += 1
            self._display.error(ErrorRecord(**msgspec.structs.asdict(head), attempt=0, status=None))

    def _finish_requests(self, number: int) -> None:
        """Ask the workers to finish what they have in flight, after a signal."""
        self._signal_sent, self._count_until = number, time.monotonic() + _COUNT_SECONDS
        self._send(signal.SIGINT)

    def _say_in_flight(self) -> None:
        """Say how many requests the workers wait for, once all have reported, or time is up."""
        if self._count_until is None:
            return
        running = {f"w{number}" for number, worker in enumerate(self._workers, 1) if worker.poll() is None}
        if running <= self._in_flight.keys() or time.monotonic() >= self._count_until:
            self._count_until = None
            if requests := sum(count for worker, count in self._in_flight.items() if worker in running):
                self._display.notice(describe_stopping(requests, self._abandon_hint))

    def _stop(self, number: int) -> None:
        """Ask the workers to stop at once, after a signal."""
        self._signal_sent, self._count_until = number, None
        self._send(number)

    def _send(self, number: int) -> None:
        for worker in self._workers:
            with suppress(ProcessLookupError):
                worker.send_signal(number)

    def _kill(self) -> None:
        for worker in self._workers:
            worker.kill()

    def outcome(self, options: Options) -> Outcome:
        """Return how the run ended, from its records and from what the workers reported."""
        for reader in self._readers:
            reader.join(_LAST_WORDS_SECONDS)
        identity, rundir = self._identity, self._rundir
        options = replace(options, fresh=False, retry_failed=False)  # they applied to the run as it was at the start
        if (finished := finished_outcome(identity, rundir, options)) is not None:
            return self._with_totals(finished)
        reason: Reason | None = next((ended.reason for ended in self._ended if ended.reason is not None), None)
        if self._signal_sent is not None:
            reason = Interrupted(self._signal_sent)
        codes = [worker.returncode for worker in self._workers]
        if reason is None and not {1, 3} & set(codes) and (any(codes) or not options.skip_graders):
            # No worker says that it wrote the report, or why not.
            if (finished := self._finish(options)) is not None:
                return self._with_totals(finished)
            reason = Fault(
                "rejected",
                f"workers exited before all trials were done (exit codes {', '.join(map(str, codes))})",
                remedy=f"Their finished trials are saved. If a trial crashes workers, {rundir.workers} has their logs.",
            )
        index = rundir.load(repair=False)
        return Outcome(
            rundir,
            make_plan(identity.survey, identity.work, index),
            None,
            index.spent(),
            reason,
            skipped_graders=options.skip_graders,
            so_far=count_so_far(identity, index, reason),
            failures=read_failures(rundir, identity, index, quick=isinstance(reason, Interrupted)),
            wall=time.monotonic() - self._started,
        )

    def _finish(self, options: Options) -> Outcome | None:
        """Write the report if all chunks are done; None if there is no report in the end."""
        identity, rundir = self._identity, self._rundir
        _, claim_round, folder = shared_eval(rundir)
        if not Claims(folder, len(claim_round.chunks), "", rundir).all_done:
            return None
        outcome = finish_run(identity, rundir, options, self._display, self._display.notice)
        return outcome if outcome.finisher is None else finished_outcome(identity, rundir, options)

    def _with_totals(self, outcome: Outcome) -> Outcome:
        """Add what all workers spent, and what failed, to the outcome of the worker that wrote the report."""
        failures = read_failures(self._rundir, self._identity, self._followed)
        wall = time.monotonic() - self._started
        return replace(outcome, already=False, spent=self._followed.spent(), failures=failures, wall=wall)

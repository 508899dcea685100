"""The main job of a task: serve the model, divide the work, do a part of it, and end so that nothing is lost.

Before it starts servers, the job queues its successor. The successor starts only if this job fails. So when the task
must not continue (a fault, a budget, no progress) the job exits with 0, and state.json has the reason.

    waiting     the start of the job is recorded, and the successor is queued
    deploying   servers start
    running     the work is offered to all workers, of which this job is one; worker jobs are queued
    draining    asked to stop: near the time limit, requests in flight finish if they can; the others, and all
                requests at any other stop, are cancelled, and repeated by the next job
    finishing   exports, hooks, report
    done, stopped; or waiting again, in the next job

One child process prepares the run and works on it. Both repeat in another one until nothing is left, or a round makes
no progress.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from holdfast.apps.cluster.job.context import POLL_SECONDS, StopRequested, say
from holdfast.apps.cluster.job.process import (
    BEGIN,
    EvaluationProcess,
    child_workers,
    evaluate_command,
    export_run,
    run_hook,
)
from holdfast.apps.cluster.job.servers import RETURN_SECONDS, ServerFailed, Servers
from holdfast.apps.cluster.job.successor import QueuedJobs
from holdfast.apps.cluster.remote import invocation as layout
from holdfast.apps.cluster.remote.executor import active_main_jobs
from holdfast.apps.cluster.remote.invocation import Begin, End, EndpointFile, Prepared, TaskFolder, Worked
from holdfast.apps.cluster.remote.ledger import Ledger
from holdfast.apps.cluster.remote.transport import Here
from holdfast.display.terminal import echo
from holdfast.errors import Exit, HoldfastError, with_hint
from holdfast.store.lines import scan
from holdfast.store.records import ErrorRecord
from holdfast.store.run_lock import holders
from holdfast.store.rundir import RunDir
from holdfast.store.shared import journal_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from holdfast.apps.cluster.job.context import JobContext
    from holdfast.apps.cluster.remote.invocation import StartRecord
    from holdfast.store.lease import Holder

_STATE_SECONDS: Final = 2.0
_QUEUE_SECONDS: Final = 60.0
"""how often the job checks that its successor and its workers exist, at most"""
_DEAD_STARTS: Final = 3
"""consecutive starts that were killed without progress, after which the job gives up"""
_SIGNAL_SECONDS: Final = 5.0
"""how much later than its child this process may get a signal to the whole job"""
_CUT_OFF: Final = ("connection", "refused")
"""kinds of errors of requests whose server has ended"""


def run_main(job: JobContext) -> int:
    """Run the job once if it has a successor; else again and again, until nothing continues."""
    if job.executor.queues_successors:
        return JobRun(job).run()
    await_turn(job)
    with child_workers(job):
        while True:
            code = JobRun(job).run()
            if code != Exit.CONTINUES or job.signal is not None:
                return code


def await_turn(job: JobContext) -> None:
    """Wait for the tasks before this one, unless all are to run at once."""
    if job.task.mode != "sequential":
        return
    transport = Here(pauses=())
    ledger = Ledger(transport, job.place.invocation)
    for number in range(job.task.number):
        earlier = TaskFolder(job.place.invocation, number)
        while layout.read_state(transport, earlier).phase not in layout.OVER and number in active_main_jobs(
            job.executor, ledger, job.task.invocation
        ):
            if job.must_stop:
                return
            time.sleep(4 * POLL_SECONDS)


class Ending(NamedTuple):
    """How a run of the job ends."""

    phase: layout.Phase
    """`done` or `stopped`: nothing continues by itself; `waiting`: the next job continues"""
    reason: str
    exit_code: int | None = Exit.UNFINISHED
    """of the run"""


def _stopped(reason: str) -> Ending:
    return Ending("stopped", reason)


class Patience:
    """How long a target that refuses connections is asked again. Progress renews it."""

    def __init__(self) -> None:
        self._size = -1
        self._since = 0.0
        self._pauses = 0

    def lasts(self, size: int, now: float) -> bool:
        """Return True if the target is to be asked again; `size` is the current size of the run's journals."""
        if size != self._size:
            self._size, self._since, self._pauses = size, now, 0
        return now - self._since < RETURN_SECONDS

    def pause(self) -> float:
        """Return the seconds until the target is asked again, which grow."""
        self._pauses += 1
        return min(60.0, 2.0**self._pauses)


class JobRun:
    """One run of a task's main job, from its start to its end."""

    def __init__(self, job: JobContext) -> None:
        self._job = job
        self._task = job.task
        self._place = job.place
        self._state = layout.read_state(Here(pauses=()), job.place)
        self._starts = layout.read_starts(Here(pauses=()), job.place)
        self._number = max(self._state.attempt, sum(isinstance(record, Begin) for record in self._starts)) + 1
        self._queued = QueuedJobs(job) if job.executor.queues_successors else None
        self._servers = Servers(job)
        self._evaluation: EvaluationProcess | None = None
        self._progress: JobProgress | None = None
        self._rounds = 0
        self._size = _recorded_bytes(self._state.run_dir)
        """of the run's journals when the job began: more is progress"""

    def run(self) -> int:
        """Do the work, and return the exit code of the job."""
        if reason := self._not_needed():
            say(f"nothing to do: {reason}")
            return 0
        if self._task.served:
            Path(self._place.endpoint).unlink(missing_ok=True)  # of a killed job, whose server is gone
        if reason := starts_exhausted(self._starts, self._task.walltime, self._task.max_walltime, self._size):
            self._set(phase="stopped", reason=reason, exit_code=Exit.UNFINISHED)
            return 0
        self._begin()
        try:
            return self._end(self._run_phases())
        finally:
            Path(self._place.endpoint).unlink(missing_ok=True)
            if self._evaluation is not None:
                self._evaluation.drain(20)
            self._servers.stop()

    def _not_needed(self) -> str | None:
        """Return why this job has nothing to do, or None."""
        if self._state.phase in layout.OVER:
            return f"the task is {self._state.phase}"
        if self._job.kill_requested:
            self._set(phase="stopped", reason="stopped by `holdfast kill`", exit_code=Exit.UNFINISHED)
            return "stopped by `holdfast kill`"
        if self._queued is None:
            return None
        if self._queued.is_disowned():
            return "another process has taken over this submission"
        begun = any(isinstance(record, Begin) and record.job == self._job.id for record in self._starts)
        if not begun and (job := self._queued.cancelled_predecessor()):
            self._set(phase="stopped", reason=self._cancelled(job), exit_code=Exit.UNFINISHED)
            return f"job {job} was cancelled"
        return None

    def _begin(self) -> None:
        begin = Begin(
            attempt=self._number,
            job=self._job.id,
            restart=self._job.restart,
            node=self._job.node,
            time=time.time(),
            done=self._state.done,
            records=self._size,
        )
        layout.append_start(self._place, begin)
        say(f"start {self._number}: job {self._job.id} on {self._job.node}, Holdfast of {sys.prefix}")
        self._set(phase="waiting", reason="", attempt=self._number, job=self._job.id, exit_code=None)
        if self._queued is not None:
            self._queued.ensure()

    def _run_phases(self) -> Ending:
        try:
            run_hook(self._job, self._task.pre_cmd, "pre_cmd")
            return self._run_rounds()
        except StopRequested:
            return self._after_stop_request()
        except ServerFailed as error:
            return self._after_stop_request() if self._killed_with_job() else self._after_server_failure(error)
        except HoldfastError as error:
            return _stopped(str(error))
        except Exception as error:
            echo(traceback.format_exc(), err=True, nl=False)
            return _stopped(f"internal error: {error!r}; see {self._job.log('main')}")

    def _run_rounds(self) -> Ending:
        """Prepare, serve and work until nothing is left."""
        last_size = -1
        patience = Patience()
        while True:
            prepared = self._prepare()
            if prepared.error:
                return _stopped(prepared.error)
            if prepared.exit_code is not None:
                return self._finish(prepared)
            size = _recorded_bytes(self._state.run_dir)
            if size == last_size:
                return _stopped(f"no progress in this job: {last_error(self._state.run_dir)}")
            self._serve()
            worked, code = self._work(prepared)
            if worked.finished is not None:
                return self._finish(msgspec.structs.replace(worked.finished, copies=prepared.copies))
            self._check_exit(code)
            ended = worked.ended
            if ended.away and self._await_target(ended.message, patience):
                last_size = -1
                continue
            if ended.kind and ended.kind != "lease_lost":
                return _stopped(with_hint(ended.message, ended.remedy))
            last_size = size
            if code == Exit.HELD or ended.kind == "lease_lost":  # another process worked, not this one
                last_size = -1
                self._pause(5)

    # Prepare

    def _prepare(self) -> Prepared:
        """Open the run and divide what is left, in a child process that can then work on it."""
        process = self._start_evaluation(*(("--first",) if self._state.run_dir is None else ()))
        while (line := process.receive()) is None:
            if self._job.must_stop:
                process.terminate()
                raise StopRequested
        self._check_exit(process.exit_code or 0)
        try:
            prepared = msgspec.json.decode(line, type=Prepared)
        except msgspec.DecodeError:
            where = f" in {self._task.container.image}" if self._task.container is not None else ""
            raise HoldfastError(
                f"the run could not be prepared{where} (exit code {process.drain()}); see {self._job.log('main')}"
            ) from None
        if prepared.run_dir:
            self._set(run_dir=prepared.run_dir, total=prepared.total, done=max(prepared.done, self._state.done))
        return prepared

    def _start_evaluation(self, *options: str) -> EvaluationProcess:
        command = evaluate_command(self._task, self._place, *options)
        self._evaluation = EvaluationProcess(self._job, "main", command, *self._servers.addresses("127.0.0.1"))
        return self._evaluation

    # Serve

    def _serve(self) -> None:
        """Start the servers, if there are any and they do not run yet."""
        if self._servers.started or not self._servers.spots:
            return
        self._servers.start(lambda reason: self._set(phase="deploying", reason=reason))

    # Work

    def _work(self, prepared: Prepared) -> tuple[Worked, int]:
        """Offer the work to all workers, and be one of them."""
        self._rounds += 1
        self._offer(prepared)
        self._set(phase="running", reason="")
        progress = self._progress = JobProgress(prepared)
        process = self._begin_work(prepared)
        updated = time.monotonic()
        queued = -math.inf if self._task.workers > 1 else updated  # workers at once; the successor is queued already
        # Workers that began before this job end before it, so even a short job must queue new ones in time.
        queue_seconds = min(_QUEUE_SECONDS, self._task.walltime / 8)
        try:
            while not process.has_ended():
                self._job.check_stop()
                self._servers.check()
                now = time.monotonic()
                if now - updated > _STATE_SECONDS:
                    updated = now
                    self._set(**progress.read())
                if self._queued is not None and now - queued > queue_seconds:
                    queued = now
                    self._queued.ensure(workers=True)
        except (StopRequested, ServerFailed) as stop:
            finish = self._job.finish_seconds if isinstance(stop, StopRequested) else 0.0
            end = time.monotonic() + finish
            kept = "finish, if they can" if finish else "are repeated later"
            self._set(phase="draining", reason=f"stopping; requests in flight {kept}")
            Path(self._place.endpoint).unlink(missing_ok=True)
            process.drain(20, finish=finish)
            self._await_workers(prepared, end)
            raise
        finally:
            self._set(**progress.read())
        return process.last_message(Worked()), process.drain()

    def _begin_work(self, prepared: Prepared) -> EvaluationProcess:
        """Start the work in the process that prepared the run, or in a new one if the addresses of servers changed."""
        process = self._evaluation
        assert process is not None
        if process.addresses == self._servers.addresses("127.0.0.1"):
            process.send(BEGIN)
            return process
        process.drain()
        return self._start_evaluation("--run-dir", prepared.run_dir)

    def _await_workers(self, prepared: Prepared, end: float) -> None:
        """Keep the servers for workers that finish their requests, until the time is up."""
        while self._servers.started and time.monotonic() < end and _holders(prepared.run_dir):
            time.sleep(POLL_SECONDS)

    def _await_target(self, message: str, patience: Patience) -> bool:
        """Pause while the target refuses connections, as while a server is restarted; False if it is given up.

        A server of this job is polled. Any other target is asked again after a while, if it has answered before: a
        wrong address in a new configuration is reported at once.
        """
        size = _recorded_bytes(self._state.run_dir)
        if not (size or self._servers.started) or not patience.lasts(size, time.monotonic()):
            return False
        reason = f"paused: {message}; continuing when it answers"
        say(reason)
        self._set(reason=reason)
        Path(self._place.endpoint).unlink(missing_ok=True)  # so that all workers pause
        self._pause(patience.pause())
        if not self._servers.await_return(lambda: self._job.must_stop):
            raise StopRequested
        return True

    def _offer(self, prepared: Prepared) -> None:
        """Write endpoint.json, which offers work to worker jobs and names the model's address."""
        host, deployment = os.uname().nodename, self._task.deployment
        urls, env = self._servers.addresses(host)
        endpoint = EndpointFile(
            serial=self._number * 1000 + self._rounds,
            job=self._job.id,
            run_dir=prepared.run_dir,
            host=host,
            port=None if deployment is None else self._servers.spots[0].port,
            model=None if deployment is None else deployment.model,
            base_url=urls[0] if len(urls) == 1 else urls or None,
            env=env,
        )
        layout.write(Path(self._place.endpoint), endpoint)

    def _pause(self, seconds: float) -> None:
        for _ in range(int(seconds / POLL_SECONDS)):
            self._job.check_stop()
            time.sleep(POLL_SECONDS)

    # Finish

    def _finish(self, prepared: Prepared) -> Ending:
        """Export the finished run, run the last hook, and report."""
        accepted_errors = prepared.total - prepared.done
        self._set(phase="finishing", reason="", done=prepared.done, total=prepared.total, errors=accepted_errors)
        failures = export_run(self._job, prepared)
        try:
            run_hook(self._job, self._task.post_cmd, "post_cmd")
        except HoldfastError as error:
            say(str(error))
        metrics = Path(prepared.run_dir) / "metrics.json"
        if prepared.report:
            if not self._rounds:
                say("this run is already finished; nothing was run. Use --fresh to start from scratch.")
            echo(prepared.report, err=True, nl=False)
        ungraded = f"not graded, as asked: `holdfast grade {prepared.run_dir}` grades it"
        say(f"finished: {metrics}" if metrics.exists() else ungraded)
        gates = [f"gate not met: {'; '.join(prepared.missed)}"] if prepared.missed else []
        return Ending("done", "; ".join([*gates, *failures]), prepared.exit_code or 0)

    # End

    def _after_stop_request(self) -> Ending:
        """Stop, or let the next job continue: after the time limit and after preemption."""
        if self._task.served and self._progress is not None:
            self._set(errors=self._progress.count_errors(_errors(self._state.run_dir)))
        if self._job.kill_requested:
            return _stopped("stopped by `holdfast kill`")
        name = f"signal {signal.Signals(self._job.signal or signal.SIGTERM).name}"
        if self._queued is None:
            return _stopped(f"{name}; `holdfast resume {self._task.invocation}` continues")
        if self._job.was_cancelled:
            return _stopped(self._cancelled(self._job.id))
        if self._job.signal != signal.SIGUSR2:
            return self._continue(name)
        if self._servers.port_reason:  # this job has not begun: the next one may find the port free
            return self._continue(f"the time limit is near, and {self._servers.port_reason}")
        if not self._has_progressed():
            return _stopped(self._why_no_progress())
        return self._continue("the time limit is near")

    def _why_no_progress(self) -> str:
        """Describe what took the whole time of a job."""
        if self._state.phase == "deploying":
            return f"no progress in this job: its time was up before the server answered ({self._state.reason})"
        if not self._rounds:
            others = _holders(self._state.run_dir)
            waited = f"it waited for {', '.join(map(str, others))}, which holds the run" if others else "see its log"
            return f"no progress in this job: its time was up before the run could be prepared; {waited}"
        error = last_error(self._state.run_dir)
        return f"no progress in this job: no trial was finished in all its time; last error: {error}"

    def _after_server_failure(self, error: ServerFailed) -> Ending:
        if not self._has_progressed():
            return _stopped(f"no progress in this job: {error}")
        say(str(error))
        return self._continue(error.message.splitlines()[0])

    def _continue(self, reason: str) -> Ending:
        """Let the next job continue, if one is queued."""
        queued = self._queued is None or self._queued.ensure()
        if self._job.kill_requested:
            return _stopped("stopped by `holdfast kill`")
        if not queued:
            return _stopped(
                f"{reason}, and no further job is queued; `holdfast resume {self._task.invocation}` continues"
            )
        return Ending("waiting", reason, None)

    def _end(self, ending: Ending) -> int:
        """Record the end, and return the exit code by which Slurm starts the successor, or not."""
        continues = ending.phase == "waiting"
        end = End(
            attempt=self._number,
            job=self._job.id,
            time=time.time(),
            done=self._state.done,
            records=_recorded_bytes(self._state.run_dir),
            why="finished" if ending.phase == "done" else ending.reason,
            goes_on=continues,
        )
        layout.append_start(self._place, end)
        reason = f"continues in the next job: {ending.reason}" if continues else ending.reason
        if reason:  # in the log before state.json says that this was all: whoever follows the log stops then
            say(reason if continues else f"{ending.phase}: {reason}")
        self._set(phase=ending.phase, reason=reason, exit_code=ending.exit_code)
        if continues:
            return Exit.CONTINUES
        if self._queued is not None:
            self._queued.cancel_waiting()
        layout.remove_secrets(self._place)
        return 0

    def _cancelled(self, job: str) -> str:
        return f"job {job} was cancelled; `holdfast resume {self._task.invocation}` continues"

    def _has_progressed(self) -> bool:
        return _recorded_bytes(self._state.run_dir) != self._size

    def _check_exit(self, code: int) -> None:
        """Raise StopRequested if a child ended because of a signal that this process gets as well."""
        if (code < 0 or code > 128) and self._killed_with_job():
            raise StopRequested

    def _killed_with_job(self) -> bool:
        """Return True if a child died because the whole job was asked to stop.

        Slurm signals the processes of a job one after the other: on a busy node, this process may be seconds late.
        """
        end = time.monotonic() + _SIGNAL_SECONDS
        while not self._job.must_stop and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        return self._job.must_stop

    def _set(self, **changes: object) -> None:
        self._state = msgspec.structs.replace(self._state, **changes)
        if not self._is_superseded():
            layout.write_state(self._place, self._state)

    def _is_superseded(self) -> bool:
        """Return True if another main job of the task has gone further, so that this job must not set the state back.

        Two main jobs run after Slurm has given up a node that still works, for example.
        """
        current = layout.read_state(Here(pauses=()), self._place)
        return current.attempt > self._number or (current.phase == "done" and current.job != self._job.id)


def starts_exhausted(
    starts: Sequence[StartRecord], walltime: float, max_walltime: float | None, size: int
) -> str | None:
    """Return why the job does not start again, or None. `size` is the current size of the run's journals."""
    used = time_used(starts, walltime, time.time())
    if max_walltime is not None and used >= max_walltime:
        return f"max_walltime: all jobs together took {used:.0f} s of {max_walltime:.0f} s"
    ended = {record.attempt for record in starts if isinstance(record, End)}
    dead = 0
    for record in reversed([record for record in starts if isinstance(record, Begin)]):
        if record.attempt in ended or record.records != size:
            break
        dead += 1
    if dead >= _DEAD_STARTS:
        return f"the last {dead} jobs were killed before they made any progress; see their logs"
    return None


def time_used(starts: Sequence[StartRecord], walltime: float, now: float) -> float:
    """Return the seconds of all starts. A killed job lasted until the next one began, `walltime` at most."""
    ends = {record.attempt: record.time for record in starts if isinstance(record, End)}
    begins = [record for record in starts if isinstance(record, Begin)]
    later = [*(begin.time for begin in begins[1:]), now]
    return sum(
        min(ends.get(begin.attempt, after) - begin.time, walltime) for begin, after in zip(begins, later, strict=False)
    )


def _holders(run_dir: str | None) -> list[Holder]:
    """List the processes that hold a run."""
    return [] if run_dir is None else holders(RunDir(Path(run_dir)))


def _recorded_bytes(run_dir: str | None) -> int:
    """Return the size of a run's journals, which grow with progress. Errors do not count."""
    if run_dir is None:
        return 0
    rundir = RunDir(Path(run_dir))
    return sum(journal_size(path) for name in ("outputs", "steps", "grades") for path in rundir.journals(name))


def last_error(run_dir: str | None) -> str:
    """Describe the last error of a run."""
    last = max(_errors(run_dir), key=lambda record: record.time, default=None)
    return "no trial failed" if last is None else f"{last.where}: {last.kind}: {last.message}"


def _errors(run_dir: str | None) -> Iterator[ErrorRecord]:
    for path in [] if run_dir is None else RunDir(Path(run_dir)).journals("errors"):
        yield from (msgspec.json.decode(line.data, type=ErrorRecord) for line in scan(path) if line.sound)


class JobProgress:
    """The progress of all workers of a run together."""

    def __init__(self, prepared: Prepared) -> None:
        self._total = prepared.total
        self._slots = prepared.slots
        self._rundir = RunDir(Path(prepared.run_dir))
        self._index = self._rundir.load(repair=False)
        self._samples: list[tuple[float, int]] = []
        """times and numbers of outputs, for the rate"""

    def read(self) -> dict[str, object]:
        """Return the numbers of state.json."""
        with suppress(OSError):
            self._index = self._rundir.follow(self._index)
        _, outputs, done = self._index.count_so_far(self._total, self._slots)
        failed = self._index.count_failed()
        now = time.monotonic()
        self._samples = [*self._samples[-30:], (now, outputs)]
        then, count = self._samples[0]
        rate = max(0.0, (outputs - count) / (now - then)) if now > then else 0.0
        return {"done": done, "total": self._total, "errors": failed, "rate": round(rate, 3)}

    def count_errors(self, records: Iterable[ErrorRecord]) -> int:
        """Count the trials that failed for another reason than that the job's server ended with the job."""
        failed = (record for record in records if record.where == "target")
        last = {record.key: record.kind for record in sorted(failed, key=lambda record: record.time)}
        return sum(self._index.output(key) is None and kind not in _CUT_OFF for key, kind in last.items())

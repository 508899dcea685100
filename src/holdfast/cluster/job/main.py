"""The main job of a task: serve the model, share out the work, do one's part of it, and end so that nothing is lost.

Before anything else its successor is queued, which goes on if this job ends in any other way than well. So an end that
must not be gone on from is a good one for Slurm, with the reason in state.json: a fault that would hit every trial, a
budget, an attempt that added nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.cluster.job.after_run import hand_on
from holdfast.cluster.job.node import GOES_ON, LOOK_SECONDS, Working, first_url, run_hook, say, url_words
from holdfast.cluster.job.servers import (
    Server,
    ServerFailed,
    Spot,
    await_ready,
    has_pyxis,
    job_nodes,
    plain,
    spots,
    stop_all,
)
from holdfast.cluster.job.successor import Neighbours
from holdfast.cluster.remote import invocation as layout
from holdfast.cluster.remote.invocation import Begin, End, EndpointFile, Prepared
from holdfast.cluster.remote.transport import Here
from holdfast.errors import HoldfastError
from holdfast.store.index import Index
from holdfast.store.lines import scan
from holdfast.store.records import ErrorRecord
from holdfast.store.rundir import RunDir
from holdfast.store.tail import Follower

if TYPE_CHECKING:
    from holdfast.cluster.job.node import NodeJob
    from holdfast.engine.ended import Ended

_STATE_SECONDS: Final = 1.0
_QUEUE_SECONDS: Final = 60.0
"""how often it is looked whether the successor and the workers are there, at the latest"""
_DEAD_ENDS: Final = 3
"""attempts in a row that were killed without having added anything, before there are no more"""
_HELD: Final = 4


class _Told(Exception):
    """We are to stop now."""


def run_attempts(job: NodeJob) -> int:
    """One attempt in a Slurm job; on this machine, where there is nobody to start a successor, all of them."""
    if job.task.executor == "slurm":
        return MainJob(job).run()
    from holdfast.cluster.job.local import await_turn, workers_beside

    await_turn(job)
    with workers_beside(job):
        while True:
            code = MainJob(job).run()
            if code != GOES_ON or job.told is not None:
                return code


class MainJob:
    """One attempt."""

    def __init__(self, job: NodeJob) -> None:
        self._job = job
        self._task = job.task
        self._place = job.place
        self._here = Here(pauses=())
        self._state = layout.read_state(self._here, job.place)
        self._attempts = layout.read_attempts(self._here, job.place)
        self._number = sum(isinstance(record, Begin) for record in self._attempts) + 1
        self._servers: list[Server] = []
        self._rounds = 0
        self._jobs: Neighbours | None = None

    def run(self) -> int:
        """The attempt, from its beginning to the exit code of the job."""
        self._jobs = Neighbours(self._job) if self._task.executor == "slurm" else None
        if why := self._not_wanted():
            say(f"nothing to do: {why}")
            return 0
        self._began = time.time()
        self._records = self._count_records()
        if self._task.served:
            Path(self._place.endpoint).unlink(missing_ok=True)  # a killed attempt's: its server is gone
        if why := self._no_more():
            self._set(phase="stopped", reason=why, exit_code=3)
            return 0
        begin = Begin(
            attempt=self._number,
            job=self._job.id,
            restart=self._job.restart,
            node=self._job.node,
            time=self._began,
            done=self._state.done,
            records=self._records,
        )
        layout.append_attempt(self._place, begin)
        say(f"attempt {self._number}: job {self._job.id} on {self._job.node}, Holdfast of {sys.prefix}")
        self._set(phase="waiting", reason="", attempt=self._number, job=self._job.id, exit_code=None)
        if self._jobs is not None:
            self._jobs.ensure()
        try:
            return self._attempt()
        except _Told:
            return self._drained()
        except ServerFailed as error:
            return self._drained() if self._is_told() else self._failed(error)
        except HoldfastError as error:
            return self._end("stopped", str(error), code=3)
        except Exception as error:
            traceback.print_exc()
            return self._end("stopped", f"a bug in Holdfast: {error!r}; see {self._job.log('main')}", code=3)
        finally:
            Path(self._place.endpoint).unlink(missing_ok=True)
            stop_all(self._servers)

    def _not_wanted(self) -> str | None:
        if self._state.phase in layout.OVER:
            return f"the task is {self._state.phase}"
        if self._job.stopped:
            self._set(phase="stopped", reason="told to stop", exit_code=3)
            return "told to stop"
        if self._jobs is not None and self._jobs.disowned():
            return "another process has taken over this submission"
        begun = any(isinstance(record, Begin) and record.job == self._job.id for record in self._attempts)
        if self._jobs is not None and not begun and (job := self._jobs.cancelled_predecessor()):
            self._set(phase="stopped", reason=self._cancelled(job), exit_code=3)
            return f"job {job} was cancelled"
        return None

    def _cancelled(self, job: str) -> str:
        return f"job {job} was cancelled; `holdfast resume {self._task.invocation}` continues"

    def _no_more(self) -> str | None:
        """Why there are no more attempts."""
        limit, used = self._task.max_walltime, self._used()
        if limit is not None and used >= limit:
            return f"max_walltime: all jobs together took {used:.0f} s of {limit:.0f} s"
        ends = {record.attempt for record in self._attempts if isinstance(record, End)}
        dead = 0
        for record in reversed([record for record in self._attempts if isinstance(record, Begin)]):
            if record.attempt in ends or record.records != self._records:
                break
            dead += 1
        if dead >= _DEAD_ENDS:
            return f"the last {dead} attempts were killed before they added anything; see their logs"
        return None

    def _used(self) -> float:
        """Seconds of all attempts; of one that was killed until the next began, its time limit at most."""
        ends = {record.attempt: record.time for record in self._attempts if isinstance(record, End)}
        begins = [record for record in self._attempts if isinstance(record, Begin)]
        later = [*(begin.time for begin in begins[1:]), self._began]
        return sum(
            min(ends.get(begin.attempt, after) - begin.time, self._task.walltime)
            for begin, after in zip(begins, later, strict=False)
        )

    def _attempt(self) -> int:
        run_hook(self._job, self._task.pre_cmd, "pre_cmd")
        first, before = True, 0
        while True:
            prepared = self._prepare()
            if prepared.error:
                return self._end("stopped", prepared.error, code=3)
            if prepared.exit_code is not None:
                return self._finish(prepared)
            records = self._count_records()
            if not first and records == before:
                return self._end("stopped", f"an attempt added nothing: {self._last_error()}", code=3)
            before, first = records, False
            self._serve()
            ended, code = self._work(prepared)
            if ended.kind == "refused":
                self._await_death()
            if ended.kind and ended.kind != "lease_lost":
                remedy = f"\nhint: {ended.remedy}" if ended.remedy else ""
                return self._end("stopped", f"{ended.message}{remedy}", code=3)
            first = code == _HELD or ended.kind == "lease_lost"  # no round of ours, so it needs to have added nothing
            if first:
                self._pause(5)

    def _prepare(self) -> Prepared:
        urls, env = self._served("127.0.0.1")
        process = subprocess.Popen(
            [
                *(self._task.python, "-m", "holdfast.cluster.job.node", self._place.path, "--role", "prepare"),
                *url_words(urls),
                *(("--first",) if self._state.run_dir is None else ()),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=self._job.env(self._task.env, **first_url(urls), **env),
            start_new_session=True,
        )
        said: list[bytes] = []
        assert process.stdout is not None
        reader = threading.Thread(target=lambda out: said.append(out.read()), args=(process.stdout,), daemon=True)
        reader.start()
        while process.poll() is None:
            time.sleep(LOOK_SECONDS / 5)
            if self._job.must_go:
                process.terminate()
                process.wait()
                raise _Told
        reader.join(5)
        if process.returncode < 0 and self._is_told():
            raise _Told
        try:
            prepared = msgspec.json.decode(said[0], type=Prepared)
        except (msgspec.DecodeError, IndexError):
            how = f"exit code {process.returncode}"
            raise HoldfastError(f"the run could not be prepared ({how}); see {self._job.log('main')}") from None
        if prepared.run_dir:
            self._set(run_dir=prepared.run_dir, total=prepared.total, done=max(prepared.done, self._state.done))
        return prepared

    def _serve(self) -> None:
        """Start the servers, if there are to be some and they do not run yet."""
        if self._servers or not self._spots:
            return
        logs = [self._job.log(spot.deployment.name, spot.instance) for spot in self._spots]
        what = "the server starts" if len(logs) == 1 else f"{len(logs)} servers start"
        self._set(phase="deploying", reason=f"{what}; see {logs[0]}")
        for spot, log in zip(self._spots, logs, strict=True):
            deployment = spot.deployment
            if not (deployment.image and has_pyxis()):
                deployment = plain(deployment)
            server = Server(replace(spot, deployment=deployment), log, self._job.env(deployment.env))
            self._servers.append(server)  # to be stopped whatever happens
            if not server.start(say, lambda: self._job.must_go):
                raise _Told
        if not await_ready(self._servers, self._task.walltime, lambda: self._job.must_go):
            raise _Told
        for spot in self._spots:
            say(f"{spot} answers at {spot.url(spot.deployment.base_path)}")

    @cached_property
    def _spots(self) -> list[Spot]:
        nodes = job_nodes() if self._task.executor == "slurm" and self._task.served else []
        return spots(self._task.served, nodes, self._job.node)

    def _served(self, near: str) -> tuple[tuple[str, ...], dict[str, str]]:
        """Where the model is, and variables that say where the rest is; for those who call this node `near`."""
        urls: list[str] = []
        env: dict[str, str] = {}
        for spot in self._spots:
            deployment, name = spot.deployment, spot.deployment.prefix
            url = spot.url(deployment.base_path, near)
            if not name:
                urls.append(url)
            elif spot.instance:
                env[f"{name}_URL"] += f",{url}"
            else:
                env |= {f"{name}_URL": url, f"{name}_MODEL_ID": deployment.model or ""}
                for kind, path in deployment.endpoints.items():
                    env[f"{name}_{kind.upper()}_URL"] = spot.url(path, near)
        return tuple(urls), env

    def _work(self, prepared: Prepared) -> tuple[Ended, int]:
        """Open the run for all workers and be one of them."""
        self._rounds += 1
        host, deployment = os.uname().nodename, self._task.deployment
        urls, env = self._served(host)
        offered = EndpointFile(
            serial=self._number * 1000 + self._rounds,
            job=self._job.id,
            run_dir=prepared.run_dir,
            host=host,
            port=None if deployment is None else deployment.port,
            model=None if deployment is None else deployment.model,
            base_url=urls[0] if len(urls) == 1 else urls or None,
            env=env,
        )
        layout.write(Path(self._place.endpoint), offered)
        self._set(phase="running", reason="")
        seen = _Progress(prepared)
        working = Working(self._job, prepared.run_dir, "main", *self._served("127.0.0.1"))
        looked = queued = time.monotonic()
        # Workers that began before us leave before us: in a short job too there must be time left for the next ones.
        queue_seconds = min(_QUEUE_SECONDS, self._task.walltime / 8)
        try:
            while working.code is None:
                time.sleep(LOOK_SECONDS)
                self._check()
                now = time.monotonic()
                if now - looked > _STATE_SECONDS:
                    looked = now
                    self._set(**seen.look())
                if self._jobs is not None and now - queued > queue_seconds:
                    queued = now
                    self._jobs.ensure()
        except (_Told, ServerFailed):
            self._set(phase="draining", reason="finishing trials in flight")
            Path(self._place.endpoint).unlink(missing_ok=True)
            working.drain(20)
            raise
        finally:
            self._set(**seen.look())
        return working.ended, working.code

    def _is_told(self) -> bool:
        """Whether what has died was killed with the whole job: Slurm tells all processes at once."""
        time.sleep(4 * LOOK_SECONDS)
        return self._job.must_go

    def _check(self) -> None:
        """Raise when this attempt cannot go on."""
        if self._job.must_go:
            raise _Told
        for server in self._servers:
            server.check()

    def _await_death(self) -> None:
        """A server that refuses connections may be about to be seen dead."""
        for _ in range(8 if self._servers else 0):
            time.sleep(LOOK_SECONDS)
            for server in self._servers:
                server.check()

    def _pause(self, seconds: float) -> None:
        for _ in range(int(seconds / LOOK_SECONDS)):
            if self._job.must_go:
                raise _Told
            time.sleep(LOOK_SECONDS)

    def _finish(self, prepared: Prepared) -> int:
        """All is done: exports, which may fail, and the end of the chain."""
        missing = prepared.total - prepared.done  # errors that were accepted
        self._set(phase="finishing", reason="", done=prepared.done, total=prepared.total, errors=missing)
        hand_on(self._job, prepared)
        try:
            run_hook(self._job, self._task.post_cmd, "post_cmd")
        except HoldfastError as error:
            say(str(error))
        numbers = Path(prepared.run_dir) / "metrics.json"
        if prepared.report:
            if not self._rounds:
                say("this run is already finished; nothing was run. Use --fresh to start from scratch.")
            sys.stderr.write(prepared.report)
        ungraded = f"not graded, as asked: `holdfast grade {prepared.run_dir}` grades it"
        say(f"finished: {numbers}" if numbers.exists() else ungraded)
        missed = f"gate not met: {'; '.join(prepared.missed)}" if prepared.missed else ""
        return self._end("done", missed, code=prepared.exit_code or 0, why="finished")

    def _drained(self) -> int:
        """Told to stop: by whoever stops the invocation, by the time limit, or by somebody who takes the node."""
        if self._job.stopped:
            return self._end("stopped", "told to stop", code=3)
        told = f"signal {signal.Signals(self._job.told or signal.SIGTERM).name}"
        if self._task.executor != "slurm":
            return self._end("stopped", f"{told}; `holdfast resume {self._task.invocation}` continues", code=3)
        if self._job.cancelled:
            return self._end("stopped", self._cancelled(self._job.id), code=3)
        if self._job.told != signal.SIGUSR2:
            return self._go_on(told)
        if self._count_records() == self._records:
            return self._end("stopped", "an attempt added nothing in the whole time of its job", code=3)
        return self._go_on("the time limit is near")

    def _failed(self, error: ServerFailed) -> int:
        if self._count_records() == self._records:
            return self._end("stopped", f"an attempt added nothing: {error}", code=3)
        say(str(error))
        return self._go_on(error.message.splitlines()[0])

    def _go_on(self, why: str) -> int:
        """End so that the successor begins."""
        queued = self._jobs is None or self._jobs.ensure()
        if self._job.stopped:
            return self._end("stopped", "told to stop", code=3)
        if not queued:
            reason = f"{why}, and no further job is queued; `holdfast resume {self._task.invocation}` continues"
            return self._end("stopped", reason, code=3)
        self._note_end(why, goes_on=True)
        self._set(phase="waiting", reason=f"continues in the next job: {why}")
        say(f"continues in the next job: {why}")
        return GOES_ON

    def _end(self, phase: layout.Phase, reason: str, *, code: int, why: str = "") -> int:
        """End so that nothing goes on by itself; what was queued is taken back."""
        self._note_end(why or reason, goes_on=False)
        if reason:
            say(f"{phase}: {reason}")  # before the state says that this was all: whoever follows leaves then
        self._set(phase=phase, reason=reason, exit_code=code)
        if self._jobs is not None:
            self._jobs.take_back()
        return 0

    def _note_end(self, why: str, *, goes_on: bool) -> None:
        end = End(
            attempt=self._number,
            job=self._job.id,
            time=time.time(),
            done=self._state.done,
            records=self._count_records(),
            why=why,
            goes_on=goes_on,
        )
        layout.append_attempt(self._place, end)

    def _set(self, **changes: object) -> None:
        self._state = msgspec.structs.replace(self._state, **changes)
        layout.write_state(self._place, self._state)

    def _count_records(self) -> int:
        """Bytes of the run's journals but that of errors: ground that was gained."""
        if self._state.run_dir is None:
            return 0
        rundir = RunDir(Path(self._state.run_dir))
        paths = [path for name in ("outputs", "steps", "grades") for path in rundir.journals(name)]
        return sum(path.stat().st_size for path in paths if path.exists())

    def _last_error(self) -> str:
        """What the trials that are left died of, by the last one's word."""
        last: ErrorRecord | None = None
        if self._state.run_dir is not None:
            for path in RunDir(Path(self._state.run_dir)).journals("errors"):
                for line in scan(path):
                    if line.sound:
                        record = msgspec.json.decode(line.data, type=ErrorRecord)
                        last = record if last is None or record.time >= last.time else last
        return "no trial failed" if last is None else f"{last.where}: {last.kind}: {last.message}"


class _Progress:
    """How far all workers of a run are together."""

    def __init__(self, prepared: Prepared) -> None:
        self._total = prepared.total
        self._slots = prepared.slots
        self._index = Index()
        self._follower = Follower(RunDir(Path(prepared.run_dir)), self._index)
        self._marks: list[tuple[float, int]] = []

    def look(self) -> dict[str, object]:
        """The numbers of state.json."""
        with suppress(OSError):
            self._follower.refresh()
        outputs = min(self._total, len(self._index.outputs))
        done = min(outputs, int(len(self._index.verdicts) / self._slots)) if self._slots else outputs
        failed = sum(key not in self._index.outputs for key in self._index.attempts)
        now = time.monotonic()
        self._marks = [*self._marks[-30:], (now, outputs)]
        then, count = self._marks[0]
        rate = (outputs - count) / (now - then) if now > then else 0.0
        return {"done": done, "total": self._total, "errors": failed, "rate": round(rate, 3)}

"""Lock a run for one process, or for several workers, but never for both.

A worker creates its own lease, `workers/<id>/lease`, and then takes the run's lease for an instant, which shows that
no other process holds the whole run. A process that wants the whole run takes the run's lease and then looks for leases
of workers. So the later of the two sees the earlier, whatever the order; if each sees the other, both step back.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from holdfast.errors import RunBeingFinished, RunHeld
from holdfast.store.files import make_directory
from holdfast.store.lease import HELD_REMEDY, RunLease, describe_silence, is_held, take_leases

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from holdfast.store.lease import Holder
    from holdfast.store.rundir import RunDir

_INSTANT: Final = 5.0
"""Seconds to wait for processes that take the run's lease for an instant only: many workers may start at once."""
_LOOK_SECONDS: Final = 0.1


def worker_lease(rundir: RunDir, worker: str) -> Path:
    """Return the path of a worker's lease."""
    return rundir.workers / worker / "lease"


def hold(
    rundir: RunDir,
    wait: float = 0,
    notice: Callable[[str], None] = lambda _: None,
    lost: Callable[[], None] = lambda: None,
) -> RunLease:
    """Take the whole run, waiting up to `wait` seconds for other processes, or forever if `wait` is negative."""
    lease, workers = RunLease(rundir.lease, lost=lost), WorkerLeases(rundir)
    end, notified = time.monotonic() + wait, False
    while True:
        lease.acquire(wait if wait < 0 else max(0.0, end - time.monotonic()), notice)
        try:
            busy = ", ".join(workers.live(notice))
        except BaseException:
            lease.release()
            raise
        if not busy:
            return lease
        lease.release()
        if wait >= 0 and time.monotonic() >= end:
            raise RunHeld(f"workers hold this run: {busy}", remedy=HELD_REMEDY)
        if not notified:
            notice(f"waiting for workers, which hold this run: {busy}")
            notified = True
        time.sleep(10 * _LOOK_SECONDS)


def finish(rundir: RunDir) -> RunLease | None:
    """Take a run whose trials are finished, to write its report; None if another process is doing so."""
    lease = RunLease(rundir.lease, finishing=True)
    while True:
        try:
            lease.acquire(0)
            return lease
        except RunHeld:
            if is_being_finished(rundir) or rundir.finished:
                return None
        time.sleep(_LOOK_SECONDS)


def stand_by(rundir: RunDir, stopped: Callable[[], bool], notice: Callable[[str], None]) -> RunLease | None:
    """Wait while another process writes the report; return its lease if it died meanwhile, None if it exited.

    The caller must hold no worker's lease, since the process that writes the report waits for all workers to exit.
    """
    lease = RunLease(rundir.lease, finishing=True)
    notified, notice_time = False, time.monotonic() + _INSTANT
    while not (rundir.finished or stopped()):
        holder = lease.holder  # a process that exits removes its lease, one that is killed does not
        if holder is None:  # or another process that stands by is just replacing it
            time.sleep(_LOOK_SECONDS)
            holder = lease.holder
        if holder is None or not holder.finishing:
            return None
        if lease.take_if_dead():
            if rundir.finished or not lease.inherited:  # it has exited since we looked
                lease.release()
                return None
            notice(f"{holder} stopped without a report; writing it here")
            return lease
        if not notified and time.monotonic() > notice_time:
            notice(f"all trials are done; waiting for {holder} to write the report")
            notified = True
        time.sleep(5 * _LOOK_SECONDS)
    return None


def is_being_finished(rundir: RunDir) -> bool:
    """Return True if a process is writing the run's report, or died doing so: its lease may outlive it for a while."""
    holder = RunLease(rundir.lease).holder
    return holder is not None and holder.finishing


def await_workers(rundir: RunDir) -> None:
    """Wait until every worker has exited or is dead. No trial may be left for them when this is called."""
    workers = WorkerLeases(rundir)
    while workers.live():
        time.sleep(_LOOK_SECONDS)


class WorkerLeases:
    """The leases of a run's workers, watched from one look to the next."""

    def __init__(self, rundir: RunDir) -> None:
        self._folder = rundir.workers
        self._leases: dict[str, RunLease] = {}

    def live(self, notice: Callable[[str], None] = lambda _: None) -> list[str]:
        """Describe the live workers. Leases of dead ones are removed, so that a suspended one notices when it wakes up.

        Leases are checked by taking them: directory listings of network file systems may be half a minute old, unless
        this process has just created a name there.
        """
        if not self._folder.is_dir():
            return []
        probe = self._folder / f".{os.getpid()}-{secrets.token_hex(4)}"
        probe.mkdir()
        probe.rmdir()
        names = sorted(path.name for path in self._folder.iterdir() if path.is_dir() and path.name[0] != ".")
        leases = {name: self._leases.get(name) or RunLease(self._folder / name / "lease") for name in names}
        held = take_leases(leases.values(), notice)
        for lease in leases.values():
            if lease not in held:
                lease.release()
        self._leases = leases
        return [f"{name} ({lease.describe()})" for name, lease in leases.items() if lease in held]


def join(
    rundir: RunDir,
    worker: str,
    wait: float = 0,
    notice: Callable[[str], None] = lambda _: None,
    lost: Callable[[], None] = lambda: None,
) -> RunLease:
    """Join a run as a worker; raise RunBeingFinished if its trials are finished."""
    path = worker_lease(rundir, worker)
    make_directory(path.parent)
    lease, run_lease = RunLease(path, lost=lost), RunLease(rundir.lease)
    end, notified = time.monotonic() + max(wait, _INSTANT), False
    while True:
        if is_being_finished(rundir):  # not to be taken even for an instant: those who stand by would miss the note
            raise RunBeingFinished(f"its report is being written: {run_lease.describe()}", remedy=HELD_REMEDY)
        try:
            lease.acquire(_INSTANT / 5)
        except RunHeld:
            raise RunHeld(f"worker {worker} is already running: {lease.describe()}", remedy="Use another id.") from None
        if run_lease.take_if_dead():
            run_lease.release()
            return lease
        lease.release()  # not held while waiting: the holder of the run may be waiting for workers to exit
        alive = run_lease.shows_life()
        if wait >= 0 and time.monotonic() > end and alive and not is_being_finished(rundir):
            raise RunHeld(f"another process holds this run: {run_lease.describe()}", remedy=HELD_REMEDY)
        if not notified and not alive and run_lease.is_overdue:
            notice(describe_silence([run_lease]))
            notified = True
        time.sleep(_LOOK_SECONDS)


def holders(rundir: RunDir) -> list[Holder]:
    """List the processes that hold a run: a single one, or its workers."""
    leases = [rundir.lease, *sorted(rundir.workers.glob("*/lease"))]
    candidates = [RunLease(path).holder for path in leases if is_held(path)]
    return [holder for holder in candidates if holder is not None]


def stop(processes: Collection[Holder], patience: float) -> tuple[list[Holder], list[Holder]]:
    """Ask processes on this machine to stop. Return those that ended within `patience` seconds, and those that did not.

    Raises PermissionError if one of them belongs to another user.
    """
    local = [holder for holder in processes if holder.is_here]
    for holder in local:
        with suppress(ProcessLookupError):
            os.kill(holder.pid, signal.SIGTERM)
    end = time.monotonic() + patience
    while any(holder.is_here for holder in local) and time.monotonic() < end:
        time.sleep(0.05)
    ended = [holder for holder in local if not holder.is_here]
    return ended, [holder for holder in local if holder not in ended]

"""Exclusive and shared use of a run: one process alone, or workers side by side, and never both.

A worker makes its own lease, `workers/<id>/lease`, and then takes the run's lease for an instant, which shows that
nobody has the run alone. Whoever wants it alone takes the run's lease and then looks for leases of workers. So of
the two the second sees the first, whatever the order; where each sees the other, both step back.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from holdfast.errors import RunBeingFinished, RunHeld
from holdfast.store.durable import make_directory
from holdfast.store.lease import HELD_REMEDY, RunLease, is_held

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path

    from holdfast.store.lease import Holder
    from holdfast.store.rundir import RunDir

_INSTANT: Final = 5.0
"""seconds to wait for processes that take the run's lease for an instant, such as many workers that start at once"""
_LOOK_SECONDS: Final = 0.1


def worker_lease(rundir: RunDir, worker: str) -> Path:
    """Return the file that shows that a worker is alive."""
    return rundir.workers / worker / "lease"


def hold(
    rundir: RunDir,
    wait: float = 0,
    notice: Callable[[str], None] = lambda _: None,
    lost: Callable[[], None] = lambda: None,
) -> RunLease:
    """Take a run for oneself, waiting up to `wait` seconds for those who are at work, for ever when it is negative."""
    lease = RunLease(rundir.lease, lost=lost)
    end, reported = time.monotonic() + wait, False
    while True:
        lease.acquire(wait if wait < 0 else max(0.0, end - time.monotonic()), notice)
        try:
            busy = ", ".join(live_workers(rundir, notice))
        except BaseException:
            lease.release()
            raise
        if not busy:
            return lease
        lease.release()
        if wait >= 0 and time.monotonic() >= end:
            raise RunHeld(f"workers hold this run: {busy}", remedy=HELD_REMEDY)
        if not reported:
            notice(f"waiting for workers, which hold this run: {busy}")
            reported = True
        time.sleep(10 * _LOOK_SECONDS)


def finish(rundir: RunDir) -> RunLease | None:
    """Take a run whose work is done, to make its report; None where another process does so already."""
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
    """Stay while another process makes the report: its lease, where it died over that; None where it has left.

    Needs that we hold no lease of a worker: whoever makes the report waits until these are gone.
    """
    lease = RunLease(rundir.lease, finishing=True)
    reported, patience = False, time.monotonic() + _INSTANT
    while not (rundir.finished or stopped()):
        holder = lease.holder  # of one that has left there is no note any more, of one that died there is
        if holder is None or not holder.finishing:
            return None
        if lease.take_if_dead():
            if rundir.finished or not lease.inherited:  # it has left since we looked
                lease.release()
                return None
            notice(f"{holder} stopped without a report; writing it here")
            return lease
        if not reported and time.monotonic() > patience:
            notice(f"all trials are done; waiting for {holder} to write the report")
            reported = True
        time.sleep(5 * _LOOK_SECONDS)
    return None


def is_being_finished(rundir: RunDir) -> bool:
    """Tell whether a process is writing the run's report."""
    holder = RunLease(rundir.lease).holder
    return holder is not None and holder.finishing and is_held(rundir.lease)


def await_workers(rundir: RunDir) -> None:
    """Return when every worker has left or is dead. They have nothing more to begin when this is called."""
    while list(live_workers(rundir)):
        time.sleep(_LOOK_SECONDS)


def live_workers(rundir: RunDir, notice: Callable[[str], None] = lambda _: None) -> Iterator[str]:
    """The workers at work, in words. What the dead have left of a lease is removed, so that they notice if they wake.

    One that is silent is watched for a whole lease. A lease is looked for by taking it: what network file systems say
    of names may be half a minute old, unless one makes a name there oneself.
    """
    if not rundir.workers.is_dir():
        return
    probe = rundir.workers / f".{os.getpid()}-{secrets.token_hex(4)}"
    probe.mkdir()
    probe.rmdir()
    for folder in sorted(path for path in rundir.workers.iterdir() if path.is_dir() and path.name[0] != "."):
        lease = RunLease(folder / "lease")
        try:
            lease.acquire(0, notice)
        except RunHeld:
            yield f"{folder.name} ({lease.describe()})"
        else:
            lease.release()


def join(
    rundir: RunDir,
    worker: str,
    wait: float = 0,
    notice: Callable[[str], None] = lambda _: None,
    lost: Callable[[], None] = lambda: None,
) -> RunLease:
    """Become one of a run's workers; raise RunBeingFinished if its work is done."""
    path = worker_lease(rundir, worker)
    make_directory(path.parent)
    lease, alone = RunLease(path, lost=lost), RunLease(rundir.lease)
    end = time.monotonic() + max(wait, _INSTANT)
    while True:
        try:
            lease.acquire(_INSTANT / 5)
        except RunHeld:
            raise RunHeld(f"worker {worker} is already running: {lease.describe()}", remedy="Use another id.") from None
        try:
            alone.acquire(0, notice)
        except RunHeld as held:
            lease.release()  # never kept while waiting: who has the run may be waiting for workers to leave
            if is_being_finished(rundir):
                raise RunBeingFinished(held.message, remedy=held.remedy) from held
            if wait >= 0 and time.monotonic() > end:
                raise
        else:
            alone.release()
            return lease
        time.sleep(_LOOK_SECONDS)


def holders(rundir: RunDir) -> list[Holder]:
    """List the processes that hold a run: one alone, or its workers."""
    leases = [rundir.lease, *sorted(rundir.workers.glob("*/lease"))]
    candidates = [RunLease(path).holder for path in leases if is_held(path)]
    return [holder for holder in candidates if holder is not None]


def stop(asked: Collection[Holder], patience: float) -> tuple[list[Holder], list[Holder]]:
    """Ask processes on this machine to stop. Return those that ended within `patience` seconds, and those that did not.

    Raises PermissionError if one of them belongs to another user.
    """
    local = [holder for holder in asked if holder.is_here]
    for holder in local:
        with suppress(ProcessLookupError):
            os.kill(holder.pid, signal.SIGTERM)
    end = time.monotonic() + patience
    while any(holder.is_here for holder in local) and time.monotonic() < end:
        time.sleep(0.05)
    ended = [holder for holder in local if not holder.is_here]
    return ended, [holder for holder in local if holder not in ended]

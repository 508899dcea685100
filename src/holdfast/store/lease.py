"""The right to write a run: a lease file with a heartbeat, which also works between machines.

The lease is held for as long as the process lives and touches the file. A holder on this machine that is known to be
dead is replaced at once, and so is one whose Slurm job has ended; any other holder on another machine once its
heartbeat has been missing for a whole lease. That is observed, never computed: a change of the file's time within a
lease by this process's own clock is a heartbeat, whatever the clock of the other machine says.
Nothing here relies on `flock`, which network file systems do not share between machines.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import filelock
import msgspec
from filelock import LeaseSettingsMismatch, SoftFileLease, Timeout

from holdfast.errors import RunHeld, UsageError
from holdfast.store.processes import is_running, start_token
from holdfast.store.run_files import UNREADABLE, read_file
from holdfast.store.slurm_jobs import SlurmJob, this_slurm_job, which_ended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path


def _lease_seconds() -> float:
    text = os.environ.get("HOLDFAST_LEASE_SECONDS") or "30"
    try:
        if (seconds := float(text)) >= 1:
            return seconds
    except ValueError:
        pass
    raise UsageError(f"HOLDFAST_LEASE_SECONDS is {text!r}; expected a number of seconds, at least 1")


LEASE_SECONDS: Final = _lease_seconds()
"""Seconds that a holder on another machine keeps the run without a heartbeat; equal for all processes on a run."""
HELD_REMEDY: Final = "Wait for it with --wait (or HOLDFAST_LOCK_TIMEOUT=seconds), or stop it first."
_BY_CLOCK: Final = int(filelock.__version__.partition(".")[0]) < 4
"""filelock 3 judges a lease by the age of its file, which depends on the clocks of two machines."""
_NAMELESS_SECONDS: Final = 2.0
"""Seconds that a lease may name no holder, since it may be in the middle of being written."""
_ASK_SECONDS: Final = 10.0
"""Seconds between two questions to Slurm about the jobs of holders, at least."""


class Holder(msgspec.Struct, frozen=True):
    """The process that holds a run."""

    host: str
    pid: int
    since: float
    finishing: bool = False
    """all trials are finished, and the process writes the report"""
    start: str = ""
    """the process's start token; empty in leases of earlier versions"""
    job: SlurmJob | None = None
    """the Slurm job that the process belongs to"""

    @property
    def is_here(self) -> bool:
        """True if the process runs on this machine."""
        return self.host == os.uname().nodename and is_running(self.pid, self.start)

    @property
    def is_dead(self) -> bool:
        """True if this is the holder's machine and the process has ended."""
        return self.host == os.uname().nodename and not is_running(self.pid, self.start)

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {since}"


class RunLease:
    """The right to write one run directory, or one worker's part of it."""

    def __init__(self, path: Path, *, lost: Callable[[], None] = lambda: None, finishing: bool = False) -> None:
        self._path = path
        self._finishing = finishing
        self._info = path.with_suffix(".holder")
        self._identity = (0, 0)
        self.inherited = False
        """the holder before us did not release the lease: its note was still there"""
        self._seen: tuple[int, int] | None = None
        """the file and its time when this object last looked"""
        self._seen_since = math.inf
        self._alive_at = -math.inf
        """when a heartbeat was last observed"""
        self._lock = SoftFileLease(
            path,
            lease_duration=LEASE_SECONDS,
            on_compromise=lambda _: lost(),
            thread_local=False,
        )

    def acquire(self, wait: float, notice: Callable[[str], None] = lambda _: None) -> None:
        """Take the lease, waiting up to `wait` seconds for a live holder, or forever if `wait` is negative."""
        self._spoil_if_empty()
        if take_leases([self], notice, wait=wait):
            raise RunHeld(f"another process holds this run: {self.describe()}", remedy=HELD_REMEDY)

    def take_if_dead(self) -> bool:
        """Take the lease if it is free or its holder is known to be dead; never wait.

        A holder without a heartbeat is known to be dead once this object has been asked over a whole lease.
        """
        if not self._try():
            return False
        self._sign()
        return True

    def _try(self) -> bool:
        if _BY_CLOCK and not self._may_be_dead():
            return False
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            return False
        except LeaseSettingsMismatch as error:
            raise UsageError(f"HOLDFAST_LEASE_SECONDS must be the same for all processes on a run: {error}") from error
        return True

    def _may_be_dead(self) -> bool:
        """Return False for a holder that was not watched for a whole lease, and remove the lease of one that was.

        filelock 4 watches by itself.
        """
        holder = self.holder
        if self._lock.pid is None or holder is None or holder.is_dead:
            return True
        self._look()
        if self._silent_seconds >= LEASE_SECONDS:
            self.discard()
        return self._seen is None

    def _look(self) -> None:
        """Observe the lease: a change since the last look is a heartbeat, or another holder."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            self._seen = None
            return
        state = status.st_ino, status.st_mtime_ns
        if state != self._seen:
            now = time.monotonic()
            if self._seen is not None:
                self._alive_at = now
            self._seen, self._seen_since = state, now

    @property
    def _silent_seconds(self) -> float:
        return time.monotonic() - self._seen_since

    @property
    def is_overdue(self) -> bool:
        """True if this object has looked for half a lease and seen no heartbeat: there are three in a lease."""
        return self._seen is not None and self._silent_seconds >= LEASE_SECONDS / 2

    def shows_life(self) -> bool:
        """Return True if a live process holds the lease, as far as is known; False while that is being watched.

        A holder that outlasts the whole watch counts as alive: its lease is not one that can be taken over.
        """
        self._look()
        holder = self.holder
        if self._lock.pid is None:
            return self._silent_seconds > 2 * _NAMELESS_SECONDS
        if holder is not None and holder.is_here:  # so the time of the file is that of this machine
            with suppress(FileNotFoundError):
                if time.time() - self._path.stat().st_mtime < LEASE_SECONDS / 2:
                    return True
        return time.monotonic() - self._alive_at < LEASE_SECONDS / 2 or self._silent_seconds > LEASE_SECONDS + 2

    def discard(self) -> None:
        """Remove the lease that this object has watched, whose holder is dead. Another process may be faster."""
        aside = self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}.dead")
        with suppress(FileNotFoundError):
            if self._seen is None or self._path.stat().st_ino != self._seen[0]:
                return
            self._path.rename(aside)
            if aside.stat().st_ino != self._seen[0]:  # taken over since: its holder gets it back
                with suppress(FileExistsError):
                    os.link(aside, self._path)
            aside.unlink()
        self._seen = None

    def _sign(self) -> None:
        pid = os.getpid()
        host = os.uname().nodename
        holder = Holder(host, pid, time.time(), self._finishing, start_token(pid), this_slurm_job())
        note = self._info.with_name(f".{self._info.name}.{pid}.tmp")
        try:
            status = self._path.stat()
            self._identity = status.st_dev, status.st_ino
            self.inherited = self._info.exists()
            note.write_bytes(msgspec.json.encode(holder))
            note.replace(self._info)  # so that nobody ever reads half a note
        except OSError:
            with suppress(OSError):
                note.unlink()
            self.release()
            raise

    def still_held(self) -> bool:
        """True if the lease file is still that of this process. A contender may move it away for an instant."""
        for pause in (0.0, 0.02, 0.1, 0.3):
            time.sleep(pause)
            try:
                status = self._path.stat()
            except OSError:
                continue
            if (status.st_dev, status.st_ino) == self._identity:
                return True
        return False

    def release(self) -> None:
        """Release the lease. If the disk prevents that, the end of this process releases it: see `acquire`."""
        if self._lock.is_locked:
            if self.still_held():  # otherwise the note belongs to the new holder
                with suppress(OSError):
                    self._info.unlink()
            with suppress(OSError):
                self._lock.release()

    def _spoil_if_empty(self) -> None:
        """Write into an empty lease file, as a power cut leaves it: `filelock` never takes over an empty one."""
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            deadline = time.monotonic() + _NAMELESS_SECONDS
            while (status := os.fstat(fd)).st_size == 0 and status.st_nlink:
                if time.monotonic() > deadline:
                    os.write(fd, b"lost\n")
                    return
                time.sleep(0.05)
        finally:
            os.close(fd)

    @property
    def holder(self) -> Holder | None:
        """The current holder, if it can be read."""
        with suppress(OSError, *UNREADABLE):
            return msgspec.json.decode(read_file(self._info), type=Holder)
        return None

    def describe(self) -> str:
        """Describe the holder, for messages."""
        return str(self.holder or f"process {self._lock.pid or 'unknown'} ({self._path})")


def take_leases(
    leases: Iterable[RunLease], notice: Callable[[str], None] = lambda _: None, *, wait: float = 0
) -> list[RunLease]:
    """Take all leases that are free or whose holders are dead, and return those that live processes hold.

    All are watched at the same time, and Slurm is asked once about the jobs of all, so many dead holders take no longer
    than one. Waits up to `wait` seconds for live holders, or forever if `wait` is negative.
    """
    held = [lease for lease in leases if not lease.take_if_dead()]
    end = time.monotonic() + (wait if wait >= 0 else math.inf)
    if held and wait != 0:
        notice(f"waiting for {', '.join(lease.describe() for lease in held)}, which holds this run")
    asked, warned = -math.inf, False
    while held:
        silent = [lease for lease in held if not lease.shows_life()]
        now = time.monotonic()
        if not silent and now >= end:
            break
        if not warned and wait == 0 and (overdue := [lease for lease in silent if lease.is_overdue]):
            warned = True
            notice(describe_silence(overdue))
        if silent and now - asked >= _ASK_SECONDS:
            asked = now
            _discard_ended(silent)
        else:
            time.sleep(0.1)
        held = [lease for lease in held if not lease.take_if_dead()]
    return held


def describe_silence(overdue: Sequence[RunLease]) -> str:
    """Announce that leases without a heartbeat will be taken over."""
    first, more = overdue[0].describe(), len(overdue) - 1
    who = f"{first}, which holds this run, has" if not more else f"{first} and {more} more, which hold this run, have"
    return f"{who} no heartbeat; taking over unless it returns within {LEASE_SECONDS / 2:.0f} s"


def _discard_ended(leases: Iterable[RunLease]) -> None:
    """Remove the leases whose holders' Slurm jobs have ended."""
    jobs = {lease: holder.job for lease in leases if (holder := lease.holder) is not None and holder.job is not None}
    ended = which_ended(jobs.values())
    for lease, job in jobs.items():
        if job in ended:
            lease.discard()


def is_held(path: Path) -> bool:
    """True if a process seems to hold the lease, as far as can be told at once. This is for display.

    For a holder on another machine it depends on that machine's clock; `take_leases` does not.
    """
    try:
        if time.time() - path.stat().st_mtime > LEASE_SECONDS:
            return False
        holder = msgspec.json.decode(read_file(path.with_suffix(".holder")), type=Holder)
    except FileNotFoundError:
        return path.exists()
    except (OSError, *UNREADABLE):
        return True
    return not holder.is_dead

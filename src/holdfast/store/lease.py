"""The right to write a run: a lease file with a heartbeat, which also works between machines.

The lease is held for as long as the process lives and touches the file. A holder on this machine that is known to be
dead is replaced at once; a holder on another machine once its heartbeat has been missing for a whole lease.
Nothing here relies on `flock`, which network file systems do not share between machines.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import filelock
import msgspec
from filelock import LeaseSettingsMismatch, SoftFileLease, Timeout

from holdfast.errors import RunHeld, UsageError
from holdfast.store.processes import is_running, start_token

if TYPE_CHECKING:
    from collections.abc import Callable
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


class Holder(msgspec.Struct, frozen=True):
    """The process that holds a run."""

    host: str
    pid: int
    since: float
    finishing: bool = False
    """all trials are finished, and the process writes the report"""
    start: str = ""
    """the process's start token; empty in leases of earlier versions"""

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
        self._watched: tuple[tuple[int, int], float] | None = None
        self._lock = SoftFileLease(
            path,
            lease_duration=LEASE_SECONDS,
            on_compromise=lambda _: lost(),
            thread_local=False,
        )

    def acquire(self, wait: float, notice: Callable[[str], None] = lambda _: None) -> None:
        """Take the lease, waiting up to `wait` seconds for a live holder, or forever if `wait` is negative."""
        self._spoil_if_empty()
        if not self._try() and not self._await(wait, notice) and not self._take_over_if_silent(notice):
            raise RunHeld(f"another process holds this run: {self.describe()}", remedy=HELD_REMEDY)
        self._sign()

    def take_if_dead(self) -> bool:
        """Take the lease if it is free or its holder is known to be dead; never wait.

        A holder without a heartbeat is known to be dead once this object has been asked over a whole lease.
        """
        if not self._try():
            return False
        self._sign()
        return True

    def _try(self) -> bool:
        if _BY_CLOCK and self._only_looks_expired():
            return False
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            return False
        except LeaseSettingsMismatch as error:
            raise UsageError(f"HOLDFAST_LEASE_SECONDS must be the same for all processes on a run: {error}") from error
        return True

    def _only_looks_expired(self) -> bool:
        """True if a lease is old by the clock but was not watched for a whole lease. filelock 4 checks this itself."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return False
        if time.time() - status.st_mtime < LEASE_SECONDS or self._lock.pid is None:  # a lease without a holder
            return False
        holder = self.holder
        if holder is not None and holder.is_dead:
            return False
        state = status.st_ino, status.st_mtime_ns
        if self._watched is None or self._watched[0] != state:
            self._watched = state, time.monotonic()
        return time.monotonic() - self._watched[1] < LEASE_SECONDS

    def _poll(self, seconds: float, pause: float) -> bool:
        """Try repeatedly to take the lease, forever if `seconds` is negative."""
        end = time.monotonic() + seconds
        while not self._try():
            if seconds >= 0 and end <= time.monotonic():
                return False
            time.sleep(pause)
        return True

    def _sign(self) -> None:
        pid = os.getpid()
        holder = Holder(os.uname().nodename, pid, time.time(), self._finishing, start_token(pid))
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

    def _await(self, wait: float, notice: Callable[[str], None]) -> bool:
        if wait == 0:
            return False
        notice(f"waiting for {self.describe()}, which holds this run")
        return self._poll(wait, 0.1)

    def _take_over_if_silent(self, notice: Callable[[str], None]) -> bool:
        """Take over from a holder without a heartbeat, after watching it long enough to be sure that it is dead."""
        try:
            overdue = time.time() - self._path.stat().st_mtime >= LEASE_SECONDS / 2
        except FileNotFoundError:
            overdue = True
        if self._lock.pid is None:
            patience = 2 * _NAMELESS_SECONDS
        elif overdue:
            patience = LEASE_SECONDS + 2
            notice(
                f"{self.describe()}, which holds this run, has no heartbeat; "
                f"taking over unless it returns within {patience:.0f} s"
            )
        else:
            return False
        return self._poll(patience, 0.5)

    @property
    def holder(self) -> Holder | None:
        """The current holder, if it can be read."""
        with suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode(self._info.read_bytes(), type=Holder)
        return None

    def describe(self) -> str:
        """Describe the holder, for messages."""
        return str(self.holder or f"process {self._lock.pid or 'unknown'} ({self._path})")


def is_held(path: Path) -> bool:
    """True if a process seems to hold the lease, as far as can be told without taking it."""
    try:
        if time.time() - path.stat().st_mtime > LEASE_SECONDS:
            return False
        holder = msgspec.json.decode(path.with_suffix(".holder").read_bytes(), type=Holder)
    except FileNotFoundError:
        return path.exists()
    except (OSError, msgspec.DecodeError):
        return True
    return not holder.is_dead

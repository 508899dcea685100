"""Who may write a run: a lease file with a heartbeat, so that it also works between machines.

The file is held for as long as the process lives and touches it. A holder that is provably dead on this
machine is replaced at once; one on another machine once its heartbeat has been missing for a whole lease.
Nothing here relies on `flock`, which network file systems do not share between machines.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec
from filelock import SoftFileLease, Timeout

from holdfast.errors import RunHeld

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LEASE_SECONDS: Final = 30.0
"""How long a silent holder on another machine keeps the run."""


class Holder(msgspec.Struct, frozen=True):
    """Who holds a run."""

    host: str
    pid: int
    since: float


class RunLease:
    """The right to write one run directory."""

    def __init__(self, path: Path, *, lost: Callable[[], None]) -> None:
        self._path = path
        self._info = path.with_suffix(".holder")
        self._lock = SoftFileLease(
            path,
            lease_duration=LEASE_SECONDS,
            on_compromise=lambda _: lost(),
            thread_local=False,
        )

    def acquire(self, wait: float) -> None:
        """Take the run, waiting up to `wait` seconds for a holder that is alive."""
        try:
            self._lock.acquire(timeout=wait, poll_interval=0.1)
        except Timeout:
            if not self._take_over_if_silent():
                raise RunHeld(
                    f"another process holds this run: {self._describe()}",
                    remedy="Wait for it with --wait (or HOLDFAST_LOCK_TIMEOUT=seconds), or stop it first.",
                ) from None
        holder = Holder(os.uname().nodename, os.getpid(), time.time())
        self._info.write_bytes(msgspec.json.encode(holder))

    def release(self) -> None:
        """Let the next process have the run."""
        if self._lock.is_locked:
            with suppress(FileNotFoundError):
                self._info.unlink()
            self._lock.release()

    def _take_over_if_silent(self) -> bool:
        """A heartbeat that already looks overdue is watched for one lease; a live one is left alone."""
        try:
            silent = time.time() - self._path.stat().st_mtime
        except FileNotFoundError:
            silent = LEASE_SECONDS
        if silent < LEASE_SECONDS / 2:
            return False
        with suppress(Timeout):
            self._lock.acquire(timeout=LEASE_SECONDS + 2, poll_interval=0.5)
            return True
        return False

    def _describe(self) -> str:
        try:
            holder = msgspec.json.decode(self._info.read_bytes(), type=Holder)
        except (OSError, msgspec.DecodeError):
            return f"process {self._lock.pid or 'unknown'} ({self._path})"
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since))
        return f"process {holder.pid} on {holder.host}, since {since}"

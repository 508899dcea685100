"""Who is at work on a run, and telling them to stop.

A lease names a process by host, id and time. Process ids are used again, so the process that has the id now is the one
that signed only if it was there before it signed.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from holdfast.store.lease import RunLease, is_held

if TYPE_CHECKING:
    from collections.abc import Collection

    from holdfast.store.lease import Holder
    from holdfast.store.rundir import RunDir

_CLOCKS_DIFFER: Final = 2.0
"""seconds by which the kernel's start of a process may be off"""


def holders(rundir: RunDir) -> list[Holder]:
    """The processes that hold a run: one alone, or its workers."""
    leases = [rundir.lease, *sorted(rundir.workers.glob("*/lease"))]
    found = [RunLease(path).holder for path in leases if is_held(path)]
    return [holder for holder in found if holder is not None]


def is_here(holder: Holder) -> bool:
    """Whether that very process is alive on this machine."""
    if holder.host != os.uname().nodename:
        return False
    try:
        fields = Path(f"/proc/{holder.pid}/stat").read_text().rpartition(")")[2].split()
        booted = next(
            float(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime ")
        )
    except OSError:
        return False
    started = booted + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return fields[0] not in "ZX" and started <= holder.since + _CLOCKS_DIFFER


def stop(asked: Collection[Holder], patience: float) -> tuple[list[Holder], list[Holder]]:
    """Tell processes on this machine to stop in good order; those that have ended in time, and those that have not.

    PermissionError where one of them is somebody else's.
    """
    mine = [holder for holder in asked if is_here(holder)]
    for holder in mine:
        with suppress(ProcessLookupError):
            os.kill(holder.pid, signal.SIGTERM)
    end = time.monotonic() + patience
    while any(map(is_here, mine)) and time.monotonic() < end:
        time.sleep(0.05)
    ended = [holder for holder in mine if not is_here(holder)]
    return ended, [holder for holder in mine if holder not in ended]

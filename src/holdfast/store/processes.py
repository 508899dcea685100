"""Identify processes on this machine.

Process ids are reused, so a record that names a process also holds a start token: the time at which the process was
started, as the system counts it. On Linux that is the number of clock ticks since boot in `/proc/PID/stat`; elsewhere
the start in seconds, from `ps`.
"""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

_PROC: Final = Path("/proc")


class _Status(msgspec.Struct, frozen=True):
    ended: bool
    """a zombie: it has ended, and its parent has not noticed"""
    token: str


def this_system() -> str:
    """Identify the boot of this machine and the namespace that its process ids belong to; empty without `/proc`."""
    with suppress(OSError):
        boot = (_PROC / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
        return f"{boot}/{(_PROC / 'self' / 'ns' / 'pid').stat().st_ino}"
    return ""


def start_token(pid: int) -> str:
    """Return the start token of a process; empty if there is no such process, or the system does not report it."""
    status = _status(pid)
    return "" if status is None else status.token


def is_running(pid: int, token: str) -> bool:
    """Return True if the process with this id and start token runs on this machine.

    Only the id is compared if the system did not report the start, then or now.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    status = _status(pid)
    return status is None or (not status.ended and _is_same(token, status.token))


def _is_same(token: str, current: str) -> bool:
    """Compare start tokens. Some systems compute the start from the uptime, so seconds may be off by one."""
    return not token or abs(int(token) - int(current)) <= 1


def _status(pid: int) -> _Status | None:
    """Look up a process; None if the system reports nothing about it."""
    if (_PROC / "self").exists():
        with suppress(OSError):
            # The name, in parentheses, may contain anything.
            fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
            return _Status(fields[0] in "ZX", fields[19])
        return None
    import calendar  # which Linux does not need

    try:
        process = subprocess.run(
            ["ps", "-o", "stat=,lstart=", "-p", str(pid)],  # noqa: S607 - where it is differs
            env={**os.environ, "LC_ALL": "C", "TZ": "UTC"},
            capture_output=True,
            text=True,
            check=False,
        )
        state, _, start = process.stdout.strip().partition(" ")
        seconds = calendar.timegm(time.strptime(start.strip(), "%a %b %d %H:%M:%S %Y"))
    except (OSError, ValueError):
        return None
    return _Status(state.startswith("Z"), str(seconds))

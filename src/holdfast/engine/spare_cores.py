"""Notices when one process is the limit of a run while other cores are idle, and suggests workers."""

from __future__ import annotations

from typing import Final

import msgspec

_SECONDS: Final = 10.0
"""how long the process has to be busy"""
_BUSY: Final = 0.9
"""share of a core from which the process counts as busy: Python code uses one at most"""


class Machine(msgspec.Struct, frozen=True):
    """The work that a machine does, by clocks that begin anywhere."""

    wall: float
    """seconds"""
    cpu: float
    """seconds of CPU that this process has used"""
    load: float
    """processes that want to run, on average over the last minute"""
    cores: int
    """all cores of the machine"""
    usable: float
    """cores that this process may use"""


class SpareCores:
    """Suggests workers once, where they would help."""

    def __init__(self) -> None:
        self._before: Machine | None = None
        self._suggested = False

    def look(self, now: Machine) -> str | None:
        """Return a suggestion if the process was busy since the last look, which was at least ten seconds ago."""
        before = self._before
        if before is not None and now.wall - before.wall < _SECONDS:
            return None
        self._before = now
        if before is None or self._suggested:
            return None
        busy = (now.cpu - before.cpu) / (now.wall - before.wall)
        idle = int(min(now.usable - busy, now.cores - max(now.load, busy)))
        if busy < _BUSY or idle < 1:
            return None
        self._suggested = True
        cores = "another core is" if idle == 1 else f"{idle} other cores are"
        return (
            f"this process uses a whole core, which limits the run, and {cores} idle. To use more of them, press "
            f"Ctrl-C and run the same command with --workers {1 + idle}: it continues from here."
        )

"""The number of trials in flight at once, and a suggestion to use more cores."""

from __future__ import annotations

import time
from typing import Final

import msgspec

START: Final = 8
MAXIMUM: Final = 1024
_GROWTH: Final = 1.1
"""a round counts as faster if it beats the best one by this factor"""
_STRAY_SHARE: Final = 0.1
"""share of recent replies up to which refusals are stray: gateways refuse single requests for reasons of their own, and
refused requests wait, which already relieves the server"""
_FEW: Final = 5
"""refusals that are stray at any share"""
_RECENT: Final = 100
"""number of recent replies, or twice the window if that is more; older ones count half, then a quarter …"""


class Window:
    """An adaptive limit of trials in flight.

    A rate limit reduces it by a fifth, at most once per second: requests that were already in flight belong to the
    same overload. Stray refusals and other failures leave it unchanged.

    A round is as many successes as the limit. With a fixed maximum, the limit grows back by a quarter each round.
    `auto` doubles the limit after each round that is faster than the best so far; after the first slower round, it
    grows by a twentieth.
    """

    def __init__(self, concurrency: int | None) -> None:
        self.limit = START if concurrency is None else concurrency
        self._maximum = concurrency
        self._doubling = True
        self._best = 0.0
        self._last_cut = 0.0
        self._replies = 0
        self._refusals = 0
        """of the recent replies"""
        self._begin_round()

    @property
    def crowded(self) -> bool:
        """True if the server refuses so many requests that the window is too large."""
        return self._refusals >= _FEW and self._refusals > _STRAY_SHARE * self._replies

    def _count_reply(self) -> None:
        self._replies += 1
        if self._replies > _RECENT and self._replies > 2 * self.limit:
            self._replies //= 2
            self._refusals //= 2

    def succeeded(self) -> None:
        """Count an answer."""
        self._count_reply()
        if self.limit != self._maximum:
            self._count += 1
            if self._count >= self.limit:
                self._end_round()

    def overloaded(self) -> None:
        """Count a refusal, and shrink unless refusals are stray."""
        self._refusals += 1
        self._count_reply()
        now = time.monotonic()
        if self.crowded and now - self._last_cut > 1.0:
            self._last_cut = now
            self._doubling = False
            self._best = 0.0
            self.limit = max(1, int(self.limit * 0.8))
            self._begin_round()

    def strained(self) -> None:
        """Restart the round after any other failure, which distorts its speed."""
        self._begin_round()

    def _begin_round(self) -> None:
        self._count = 0
        self._since = time.monotonic()

    def _end_round(self) -> None:
        if self._maximum is not None:
            self.limit = min(self._maximum, self.limit + max(1, self.limit // 4))
        else:
            self._adapt()
        self._begin_round()

    def _adapt(self) -> None:
        rate = self._count / max(1e-6, time.monotonic() - self._since)
        if rate > self._best * _GROWTH:
            self._best = rate
            step = self.limit if self._doubling else max(1, self.limit // 20)
            self.limit = min(MAXIMUM, self.limit + step)
        elif self._doubling:
            self._doubling = False
            self.limit = max(START, self.limit // 2)


_SECONDS: Final = 10.0
"""how long the process must have been busy"""
_BUSY: Final = 0.9
"""minimum share of a core for a process to count as busy: Python code uses at most one core"""


class Machine(msgspec.Struct, frozen=True):
    """The load of a machine at one moment; clocks start anywhere."""

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
    """Suggests workers once, if they would help."""

    def __init__(self) -> None:
        self._before: Machine | None = None
        self._suggested = False

    def look(self, now: Machine) -> str | None:
        """Return a suggestion if the process was busy since the last look, at least ten seconds ago."""
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

"""How many trials are in flight at once: a fixed number, or as many as the server keeps up with."""

from __future__ import annotations

import time
from typing import Final

START: Final = 8
MOST: Final = 1024
_GROWTH: Final = 1.1
"""a round counts as better when it was this much faster than the best before"""


class Window:
    """A limit that can move.

    `auto` doubles after every round (as many successes as the limit) that was faster than the best so far, until a
    round is not; from then on it feels its way up by a twentieth. A 429 takes a fifth off, at most once per second:
    the requests that were already under way belong to the same overload. Other failures only hold it still.
    """

    def __init__(self, concurrency: int | None) -> None:
        self.auto = concurrency is None
        self.limit = START if concurrency is None else concurrency
        self._doubling = True
        self._best = 0.0
        self._last_cut = 0.0
        self._begin()

    def succeeded(self) -> None:
        """An answer came."""
        if self.auto:
            self._count += 1
            if self._count >= self.limit:
                self._end_round()

    def overloaded(self) -> None:
        """The server said that it was too much."""
        now = time.monotonic()
        if self.auto and now - self._last_cut > 1.0:
            self._last_cut = now
            self._doubling = False
            self._best = 0.0
            self.limit = max(1, int(self.limit * 0.8))
            self._begin()

    def strained(self) -> None:
        """Something failed otherwise: this round says nothing."""
        if self.auto:
            self._begin()

    def _begin(self) -> None:
        self._count = 0
        self._since = time.monotonic()

    def _end_round(self) -> None:
        rate = self._count / max(1e-6, time.monotonic() - self._since)
        if rate > self._best * _GROWTH:
            self._best = rate
            step = self.limit if self._doubling else max(1, self.limit // 20)
            self.limit = min(MOST, self.limit + step)
        elif self._doubling:
            self._doubling = False
            self.limit = max(START, self.limit // 2)
        self._begin()

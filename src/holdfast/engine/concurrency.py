"""How many trials are in flight at once: at most a fixed number, or as many as the server keeps up with."""

from __future__ import annotations

import time
from typing import Final

START: Final = 8
MOST: Final = 1024
_GROWTH: Final = 1.1
"""a round counts as better when it was this much faster than the best before"""


class Window:
    """A limit that can move.

    A rate limit takes a fifth off, at most once per second: the requests that were already under way belong to the
    same overload. Other failures only hold the window still.

    A fixed number is the most: after a rate limit the window grows back to it by a quarter with every round (as many
    successes as the limit). `auto` doubles after every round that was faster than the best so far, until a round is
    not; from then on it grows by a twentieth.
    """

    def __init__(self, concurrency: int | None) -> None:
        self.limit = START if concurrency is None else concurrency
        self._most = concurrency
        self._doubling = True
        self._best = 0.0
        self._last_cut = 0.0
        self._begin()

    def succeeded(self) -> None:
        """Count an answer."""
        if self.limit != self._most:
            self._count += 1
            if self._count >= self.limit:
                self._end_round()

    def overloaded(self) -> None:
        """Shrink: the server said that it was too much."""
        now = time.monotonic()
        if now - self._last_cut > 1.0:
            self._last_cut = now
            self._doubling = False
            self._best = 0.0
            self.limit = max(1, int(self.limit * 0.8))
            self._begin()

    def strained(self) -> None:
        """Begin the round again: something failed otherwise, so it says nothing about speed."""
        self._begin()

    def _begin(self) -> None:
        self._count = 0
        self._since = time.monotonic()

    def _end_round(self) -> None:
        if self._most is not None:
            self.limit = min(self._most, self.limit + max(1, self.limit // 4))
        else:
            self._look_for_more()
        self._begin()

    def _look_for_more(self) -> None:
        rate = self._count / max(1e-6, time.monotonic() - self._since)
        if rate > self._best * _GROWTH:
            self._best = rate
            step = self.limit if self._doubling else max(1, self.limit // 20)
            self.limit = min(MOST, self.limit + step)
        elif self._doubling:
            self._doubling = False
            self.limit = max(START, self.limit // 2)

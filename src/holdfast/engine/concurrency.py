"""The number of trials in flight at once: a fixed maximum, or as many as the server keeps up with."""

from __future__ import annotations

import time
from typing import Final

START: Final = 8
MAXIMUM: Final = 1024
_GROWTH: Final = 1.1
"""a round counts as better if it was this much faster than the best before"""


class Window:
    """A limit that adapts.

    A rate limit reduces it by a fifth, at most once per second: requests that were already in flight belong to the
    same overload. Other failures leave it unchanged.

    With a fixed maximum, the limit grows back by a quarter with every round, which is as many successes as the limit.
    `auto` doubles the limit after every round that was faster than the best so far, until a round is not; from then on
    it grows by a twentieth.
    """

    def __init__(self, concurrency: int | None) -> None:
        self.limit = START if concurrency is None else concurrency
        self._maximum = concurrency
        self._doubling = True
        self._best = 0.0
        self._last_cut = 0.0
        self._begin_round()

    def succeeded(self) -> None:
        """Count an answer."""
        if self.limit != self._maximum:
            self._count += 1
            if self._count >= self.limit:
                self._end_round()

    def overloaded(self) -> None:
        """Shrink after a rate limit."""
        now = time.monotonic()
        if now - self._last_cut > 1.0:
            self._last_cut = now
            self._doubling = False
            self._best = 0.0
            self.limit = max(1, int(self.limit * 0.8))
            self._begin_round()

    def strained(self) -> None:
        """Restart the round after another failure, which says nothing about speed."""
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

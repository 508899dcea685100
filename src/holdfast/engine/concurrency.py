"""The number of trials in flight at once: a fixed maximum, or as many as the server keeps up with."""

from __future__ import annotations

import time
from typing import Final

START: Final = 8
MAXIMUM: Final = 1024
_GROWTH: Final = 1.1
"""a round counts as better if it was this much faster than the best before"""
_STRAY_SHARE: Final = 0.1
"""up to this share of the recent replies, refusals say nothing about the number of requests in flight: gateways refuse
single requests for reasons of their own, and a server that refuses few is asked less often already, since the refused
requests wait"""
_FEW: Final = 5
"""refusals that are stray whatever their share"""
_RECENT: Final = 100
"""replies, or twice as many as may be in flight if that is more: older ones count half, then a quarter …"""


class Window:
    """A limit that adapts.

    A rate limit reduces it by a fifth, at most once per second: requests that were already in flight belong to the
    same overload. Stray refusals and other failures leave it unchanged.

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
        self._replies = 0
        self._refusals = 0
        """of the recent replies"""
        self._begin_round()

    @property
    def crowded(self) -> bool:
        """True if the server refuses so many requests that there are too many of them."""
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
        """Count a refusal, and shrink unless it is a stray one."""
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

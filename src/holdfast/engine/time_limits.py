"""Time limits of many attempts at once, with one timer for all of them.

asyncio.timeout() makes a timer for each attempt, and takes several times as long as everything that is done here. The
meaning is the same: the task is cancelled, and the cancellation becomes a TimeoutError at the end of the block.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from types import TracebackType

_PRECISION: Final = 0.001
"""of uvloop's clock, in seconds: a timer may be early by as much"""


class TimeLimits:
    """The limits that are in force in one event loop, whose clock counts."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._limits: set[TimeLimit] = set()
        self._timer: asyncio.Handle | None = None
        self._timer_at = math.inf
        """the earliest limit, or an earlier one that has been lifted"""

    def at(self, when: float | None) -> TimeLimit:
        """Return a block that is cancelled at a time, or with None only by `expire`."""
        return TimeLimit(self, when)

    def enforce(self, limit: TimeLimit) -> None:
        """Begin to watch a limit, or note that it has changed."""
        if limit.when is None:
            self._limits.discard(limit)
            return
        self._limits.add(limit)
        if limit.when < self._timer_at:
            self._set_timer(limit.when)

    def lift(self, limit: TimeLimit) -> None:
        """Stop watching a limit."""
        self._limits.discard(limit)

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = self.loop.call_at(when, self._look), when

    def _look(self) -> None:
        """Cancel what is over its limit, and wait for the next one."""
        self._timer, self._timer_at = None, math.inf
        now = self.loop.time() + _PRECISION
        for limit in [limit for limit in self._limits if limit.when is not None and limit.when <= now]:
            self._limits.discard(limit)
            limit.expire()
        if self._limits:
            self._set_timer(min(limit.when for limit in self._limits if limit.when is not None))


class TimeLimit:
    """A block with a time limit, for `with`."""

    __slots__ = ("_cancelling", "_expired", "_limits", "_task", "when")

    def __init__(self, limits: TimeLimits, when: float | None) -> None:
        self._limits = limits
        self.when = when
        """by the clock of the event loop; None: it is suspended"""
        self._expired = False

    @property
    def expired(self) -> bool:
        """True if the block was cancelled."""
        return self._expired

    def reschedule(self, when: float | None) -> None:
        """Move the limit, or suspend it with None."""
        if not self._expired:
            self.when = when
            self._limits.enforce(self)

    def expire(self) -> None:
        """Cancel the block."""
        if not self._expired:
            self._expired = True
            self._limits.lift(self)
            self._task.cancel()

    def __enter__(self) -> Self:
        task = asyncio.current_task(self._limits.loop)
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._limits.enforce(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._limits.lift(self)
        # A cancellation from elsewhere, such as Ctrl-C, that came at the same time is not a time-out.
        if self._expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

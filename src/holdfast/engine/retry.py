"""Attempts: time-outs, retries by class of error, back-off, and noticing that every attempt fails alike.

A rate limit is no failure: it uses up neither retries nor the trial's time, and is waited out however long it lasts.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Final, TypeVar

from msgspec import UNSET

from holdfast.engine.replay import RestartTrial
from holdfast.errors import AttemptError, Fault
from holdfast.store.records import ErrorRecord

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from holdfast.engine.brake import Brake
    from holdfast.engine.concurrency import Window
    from holdfast.engine.recorder import Recorder
    from holdfast.plan.plan import PendingTrial
    from holdfast.plan.progress import Progress
    from holdfast.spec.schema import Limits

T = TypeVar("T")

_FIRST_DELAY: Final[dict[str, float]] = {"rate_limit": 1.0, "bad_reply": 0.25, "agent": 0.25}
_LONGEST_DELAY: Final = 30.0
_SHORTEST_PAUSE: Final = 0.05
"""before the first retry of a server that asks for a shorter one, or none; it doubles as the server keeps refusing"""
_ALIKE: Final = 20
"""so many refusals before the first success, or trials given up in a row, mean that all will fail"""

_jitter: Final = random.Random()  # noqa: S311 - spreads retries, decides nothing


def delay_before(retry: int, error: AttemptError) -> float:
    """Return the seconds before the nth retry: what the server asks for, else exponential; jittered to spread clients.

    A server that keeps refusing after the pause it asked for is asked less and less often.
    """
    doubled = 2.0 ** min(retry - 1, 30)
    if error.retry_after is not None:
        shortest = min(_LONGEST_DELAY, _SHORTEST_PAUSE * doubled)
        return max(error.retry_after, shortest) * (1 + _jitter.random() / 4)
    longest = min(_LONGEST_DELAY, _FIRST_DELAY.get(error.kind, 0.5) * doubled)
    return longest * (0.5 + _jitter.random() / 2)


class Deadline:
    """The moment at which a trial is given up. Waiting for a rate limit postpones it."""

    def __init__(self, at: float) -> None:
        self.at = at
        """by the monotonic clock"""

    def postpone(self, seconds: float) -> None:
        """Allow the trial that much longer."""
        self.at += seconds


class Streak:
    """Failures in a row. Enough of them, with not one success between, and the rest would fail too."""

    def __init__(self, *, proven: bool) -> None:
        self._given_up = 0
        self._refused = 0
        self._ever = proven
        """something has worked, now or in an earlier process"""

    def as_seen(self, fault: Fault) -> AttemptError | Fault:
        """Once something has worked, a 403 or 404 is about one request (a filter, a missing page), not about all."""
        if self._ever and fault.status in (403, 404):
            return AttemptError("bad_request", fault.message, status=fault.status, retry=False)
        return fault

    def success(self) -> None:
        """Something worked."""
        self._given_up = self._refused = 0
        self._ever = True

    def failure(self, error: AttemptError, final: bool, limit: int) -> Fault | None:
        """Count a failed attempt; a Fault when it is time to stop."""
        self._given_up += final
        self._refused += error.kind in ("bad_request", "agent") or (error.kind == "bad_reply" and not error.retry)
        if not self._ever and self._refused >= _ALIKE:
            return Fault(
                "rejected",
                f"all of the first {self._refused} attempts failed: {error.message}",
                remedy=error.remedy or "Fix the target or its parameters, then rerun the same command.",
            )
        if self._given_up >= max(_ALIKE, limit):
            return Fault(
                "rejected",
                f"{self._given_up} trials in a row failed after all their retries: {error.message}",
                remedy=error.remedy or "When the target works again, rerun the same command to resume from here.",
            )
        return None


class Retrier:
    """Calls things that may fail, until they do not or it is time to give up."""

    def __init__(self, limits: Limits, brake: Brake, window: Window, recorder: Recorder, progress: Progress) -> None:
        self._limits = limits
        self._brake = brake
        self._window = window
        self._recorder = recorder
        self._progress = progress
        self._streak = Streak(proven=progress.outputs > 0)

    async def target(
        self,
        call: Callable[[], Awaitable[T]],
        pending: PendingTrial,
        deadline: Deadline,
        progress: Callable[[], int] = lambda: 0,
    ) -> T:
        """Ask the target; its failures steer the window and can stop the run.

        A call that got further than the last time, by `progress`, has all its retries again.
        """
        return await self._until_it_works(call, pending, "target", deadline, progress)

    async def grader(
        self, call: Callable[[], Awaitable[T]], pending: PendingTrial, name: str, streak: Streak | None = None
    ) -> T:
        """Ask a grader that waits for something. Its failures are its own; a `streak` of them is a Fault of it."""
        deadline = Deadline(time.monotonic() + self._limits.trial_timeout)
        return await self._until_it_works(call, pending, name, deadline, lambda: 0, streak)

    def begin_work(self) -> None:
        """Count the time from now on as time with work in hand."""
        self._progress.begin_work()

    def end_work(self) -> None:
        """End what `begin_work` began."""
        self._progress.end_work()

    async def _until_it_works(
        self,
        call: Callable[[], Awaitable[T]],
        pending: PendingTrial,
        where: str,
        deadline: Deadline,
        progress: Callable[[], int],
        streak: Streak | None = None,
    ) -> T:
        seconds, retry, refusals, so_far = self._limits.turn_timeout, 0, 0, progress()
        while True:
            begun = time.monotonic()
            try:
                async with asyncio.timeout_at(min(begun + seconds, deadline.at)):
                    result = await call()
            except TimeoutError as late:
                error: AttemptError | Fault = _too_late(seconds, begun, deadline.at, late)
            except RestartTrial as cut:  # no failure of the target: the trial goes on from its beginning
                self.failed(cut, pending, where, begun, final=False)
                raise
            except AttemptError as raised:
                error = raised
            except Fault as raised:
                error = self._streak.as_seen(raised) if where == "target" else raised
            else:
                if where == "target":
                    self._streak.success()
                    self._window.succeeded()
                elif streak is not None:
                    streak.success()
                self._progress.answered(where)
                return result
            if progress() > so_far:
                so_far, retry, refusals = progress(), 0, 0
            limited = error.kind == "rate_limit"
            refusals = refusals + 1 if limited else 0
            retry += not limited
            delay = self._delay(error, refusals or retry, deadline)
            if where == "target" and self._alarmed(error, pending, delay is None):
                delay = None
            fault = None
            if streak is not None and isinstance(error, AttemptError):
                fault = streak.failure(error, delay is None, self._window.limit)
            self.failed(error, pending, where, begun, final=delay is None or fault is not None)
            if fault is not None:
                raise fault
            if delay is None:
                raise error
            await self._back_off(error, delay, where)
            if limited:
                deadline.postpone(time.monotonic() - begun)

    def _alarmed(self, error: AttemptError | Fault, pending: PendingTrial, final: bool) -> bool:
        """Steer by a failure of the target; True when it is one too many."""
        if error.kind == "rate_limit":
            self._window.overloaded()
        else:
            self._window.strained()
        return self._one_too_many(error, pending, final)

    def _one_too_many(self, error: AttemptError | Fault, pending: PendingTrial, final: bool) -> bool:
        """Count a failure among those in a row; True when that stops the run."""
        # Trials known to fail tell nothing of the others: with only them left, a streak would never let the run end.
        if isinstance(error, Fault) or self._recorder.failed_before(pending.key):
            return False
        fault = self._streak.failure(error, final, self._window.limit)
        if fault is not None:
            self._brake.pull(fault)
        return fault is not None

    def _delay(self, error: AttemptError | Fault, retry: int, deadline: Deadline) -> float | None:
        """Return how long to wait before the nth retry; None when there is none."""
        if isinstance(error, Fault) or not error.retry or self._brake.pulled:
            return None
        if error.kind == "rate_limit":
            return delay_before(retry, error)
        delay = delay_before(retry, error)
        return None if retry > self._limits.retries or time.monotonic() + delay > deadline.at else delay

    def never_asked(self, error: AttemptError, pending: PendingTrial, begun: float) -> None:
        """Record that a trial failed before the target was asked. Where the first ones all do, the rest would too."""
        self._one_too_many(error, pending, final=False)  # later on it is a matter of single rows
        self.failed(error, pending, "target", begun, final=True)

    def failed(
        self, error: AttemptError | Fault, pending: PendingTrial, where: str, begun: float, *, final: bool
    ) -> None:
        """Record a failed attempt."""
        self._recorder.error(
            ErrorRecord(
                key=pending.key,
                sample=pending.sample.id,
                trial=pending.trial,
                attempt=self._recorder.failed_attempts(pending.key, where) + 1,
                where=where,
                kind=error.kind,
                message=error.message,
                status=getattr(error, "status", None),
                time=round(time.time(), 3),
                seconds=round(time.monotonic() - begun, 6),
                final=final,
                usage=getattr(error, "usage", None),
                traceback=getattr(error, "traceback", None) or UNSET,
                row=pending.sample.where if pending.sample.is_nameless else UNSET,
            )
        )

    async def _back_off(self, error: AttemptError | Fault, delay: float, where: str) -> None:
        """Wait before the next attempt; raise the error if the run is stopped meanwhile."""
        limited = error.kind == "rate_limit"
        self._progress.wait(where, limited=limited)
        try:
            if await self._brake.sleep(delay):
                raise error
        finally:
            self._progress.waited(where, limited=limited)


def _too_late(seconds: float, begun: float, deadline: float, late: TimeoutError) -> AttemptError:
    which = "turn_timeout" if begun + seconds <= deadline else "trial_timeout"
    notes = getattr(late.__cause__, "__notes__", [])  # what the target has added to its cancellation
    return AttemptError("timeout", "; ".join([f"no answer within {time.monotonic() - begun:.0f} s ({which})", *notes]))

"""Retries: time-outs, back-off by class of error, and detection of failures that hit every trial.

A rate limit is not a failure: it costs neither retries nor the trial's time, and is waited out however long it lasts.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from msgspec import UNSET

from holdfast.engine.admission import Halted
from holdfast.errors import AttemptError, Fault, RestartTrial, Uncertain
from holdfast.store.records import ErrorRecord, to_microseconds, to_milliseconds
from holdfast.targets.types import ASKER

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator
    from types import TracebackType

    from holdfast.engine.admission import Brake, Window
    from holdfast.engine.recorder import Recorder
    from holdfast.plan.plan import PendingTrial
    from holdfast.plan.progress import Progress
    from holdfast.spec.eval_schema import Limits


T = TypeVar("T")

_FIRST_DELAY: Final[dict[str, float]] = {"rate_limit": 1.0, "bad_reply": 0.25, "agent": 0.25}
_LONGEST_DELAY: Final = 30.0
_SHORTEST_PAUSE: Final = 0.05
"""minimum before the first retry, whatever the server asks for; it doubles while the server keeps refusing"""
_STRAY_HASTE: Final = 4.0
"""how much sooner to repeat a stray refusal, of a server that answers nearly all requests"""
_ALIKE: Final = 20
"""refusals before the first success, or trials given up in a row, that stop the run"""

_jitter: Final = random.Random()  # noqa: S311 - only spreads retries


def delay_before(retry: int, error: AttemptError) -> float:
    """Return the seconds before the nth retry: what the server asks for, else exponential, both with jitter.

    If the server keeps refusing after the pause that it asked for, pauses grow.
    """
    doubled = 2.0 ** min(retry - 1, 30)
    if error.retry_after is not None:
        shortest = min(_LONGEST_DELAY, _SHORTEST_PAUSE * doubled)
        return max(error.retry_after, shortest) * (1 + _jitter.random() / 4)
    longest = min(_LONGEST_DELAY, _FIRST_DELAY.get(error.kind, 0.5) * doubled)
    return longest * (0.5 + _jitter.random() / 2)


class Deadline:
    """The time at which a trial is given up. Waiting for a rate limit postpones it."""

    def __init__(self, at: float) -> None:
        self.at = at
        """by the monotonic clock"""
        self.in_batches = 0.0
        """seconds that requests of the trial have waited for batches"""

    def postpone(self, seconds: float) -> None:
        """Allow the trial that much longer."""
        self.at += seconds


class _Asker:
    """An attempt whose requests may be made in batches. Waiting for a batch does not count as its time."""

    def __init__(self, key: str, where: str, limit: TimeLimit, deadline: Deadline, progress: Progress) -> None:
        self.key = key
        self.where = where
        self._limit = limit
        self._deadline = deadline
        self._progress = progress
        self._requests = 0
        """number of requests that wait for a batch"""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Suspend the attempt's time limit, and do not count the attempt as work."""
        self._requests += 1
        if self._requests > 1:  # another request of the same attempt has suspended it
            try:
                yield
            finally:
                self._requests -= 1
            return
        began, left = time.monotonic(), (self._limit.when or 0.0) - time.monotonic()
        self._limit.reschedule(None)
        self._progress.end_work()
        try:
            yield
        finally:
            self._requests -= 1
            self._progress.begin_work()
            waited = time.monotonic() - began
            self._deadline.postpone(waited)
            self._deadline.in_batches += waited
            self._limit.reschedule(time.monotonic() + left)


class Streak:
    """Counts failures in a row, to detect failures that all other trials would share."""

    def __init__(self, *, proven: bool) -> None:
        self._given_up = 0
        self._refused = 0
        self._ever = proven
        """there was a success, in this process or an earlier one"""

    def classify(self, fault: Fault) -> AttemptError | Fault:
        """Downgrade a 403 or 404 after a success: it concerns one request (a filter, a missing page), not all."""
        if self._ever and fault.status in (403, 404):
            return AttemptError("bad_request", fault.message, status=fault.status, retry=False)
        return fault

    def success(self) -> None:
        """Note a success."""
        self._given_up = self._refused = 0
        self._ever = True

    def failure(self, error: AttemptError, final: bool, limit: int) -> Fault | None:
        """Count a failed attempt; return a Fault if the run should stop."""
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
    """Repeats calls of targets and graders until they succeed or have to be given up."""

    def __init__(
        self,
        limits: Limits,
        brake: Brake,
        window: Window,
        recorder: Recorder,
        progress: Progress,
        *,
        grading: tuple[float, float] | None = None,
        batches: bool = False,
    ) -> None:
        """`grading`: time limits of a grader's reply and of a grade. `batches`: some requests are made in batches."""
        self._limits = limits
        self._grading = grading or (limits.turn_timeout, limits.trial_timeout)
        self._batches = batches
        self._brake = brake
        self._window = window
        self._recorder = recorder
        self._progress = progress
        self._streak = Streak(proven=progress.outputs > 0)
        self._time_limits = TimeLimits()

    def target(
        self,
        call: Callable[[], Awaitable[T]],
        pending: PendingTrial,
        deadline: Deadline,
        progress: Callable[[], int] = lambda: 0,
        *,
        timed: bool = True,
    ) -> Coroutine[Any, Any, T]:
        """Ask the target. Its failures adjust the window, and can stop the run.

        An attempt that got further than the last one, by `progress`, has all its retries again. `timed` is False for a
        call with its own time limit.
        """
        return self._retry(call, pending, "target", deadline, progress, timed=timed)

    def within(self, seconds: float | None) -> TimeLimit:
        """Return a block that is cancelled after a time, or with None only by `expire`."""
        return self._time_limits.at(None if seconds is None else time.monotonic() + seconds)

    def deadline(self) -> Deadline:
        """Return the time at which a grade that begins now is given up."""
        return Deadline(time.monotonic() + self._grading[1])

    def grader(
        self,
        call: Callable[[], Awaitable[T]],
        pending: PendingTrial,
        name: str,
        deadline: Deadline,
        streak: Streak | None = None,
    ) -> Coroutine[Any, Any, T]:
        """Ask a grader. Its failures do not stop the run; a `streak` of them is a Fault of this grader."""
        return self._retry(call, pending, name, deadline, lambda: 0, streak)

    @property
    def halted(self) -> bool:
        """True if no request may start."""
        return self._brake.halted

    def begin_work(self) -> None:
        """Begin to count time as busy."""
        self._progress.begin_work()

    def end_work(self) -> None:
        """Stop counting time as busy."""
        self._progress.end_work()

    async def _retry(
        self,
        call: Callable[[], Awaitable[T]],
        pending: PendingTrial,
        where: str,
        deadline: Deadline,
        progress: Callable[[], int],
        streak: Streak | None = None,
        *,
        timed: bool = True,
    ) -> T:
        seconds = self._limits.turn_timeout if where == "target" else self._grading[0]
        retry, refusals, so_far = 0, 0, progress()
        while True:
            if self._brake.halted:
                raise Halted
            started, waited = time.monotonic(), deadline.in_batches
            try:
                with self._time_limits.at(min(started + seconds, deadline.at) if timed else None) as limit:
                    if self._batches:
                        ASKER.set(_Asker(pending.key, where, limit, deadline, self._progress))
                    result = await call()
            except TimeoutError as late:
                error: AttemptError | Fault = self._timeout(seconds, started, deadline.at, late)
            except (RestartTrial, Uncertain) as cut:  # not a failure of the target: the trial restarts, or stops
                self.failed(cut, pending, where, started, final=isinstance(cut, Uncertain))
                raise
            except AttemptError as raised:
                error = raised
            except Fault as raised:
                error = self._streak.classify(raised) if where == "target" else raised
            else:
                if where == "target":
                    self._streak.success()
                    self._window.succeeded()
                elif streak is not None:
                    streak.success()
                self._progress.answered(where)
                return result
            error.message = self._recorder.secrets.hide(error.message)
            started += deadline.in_batches - waited
            if progress() > so_far:
                so_far, retry, refusals = progress(), 0, 0
            limited = error.kind == "rate_limit"
            refusals = refusals + 1 if limited else 0
            retry += not limited
            if where == "target":
                self._adjust_window(error)
            delay = self._delay(error, refusals or retry, deadline, where)
            if where == "target" and self._count_failure(error, pending, delay is None):
                delay = None
            fault = None
            if streak is not None and isinstance(error, AttemptError):
                fault = streak.failure(error, delay is None, self._window.limit)
            self.failed(error, pending, where, started, final=delay is None or fault is not None)
            if fault is not None:
                raise fault
            if delay is None:
                raise error
            await self._back_off(error, delay, where)
            if limited:
                deadline.postpone(time.monotonic() - started)

    def _adjust_window(self, error: AttemptError | Fault) -> None:
        """Adjust the window after a failure of the target."""
        if error.kind == "rate_limit":
            self._window.overloaded()
        else:
            self._window.strained()

    def _count_failure(self, error: AttemptError | Fault, pending: PendingTrial, final: bool) -> bool:
        """Count a failure in a row; return True if that stops the run."""
        # Trials that failed before are no evidence of an outage: if only such remain, the run could never end.
        if isinstance(error, Fault) or self._recorder.failed_before(pending.key):
            return False
        fault = self._streak.failure(error, final, self._window.limit)
        if fault is not None:
            self._brake.pull(fault)
        return fault is not None

    def _delay(self, error: AttemptError | Fault, retry: int, deadline: Deadline, where: str) -> float | None:
        """Return how long to wait before the nth retry; None if there is no retry."""
        if isinstance(error, Fault) or not error.retry or self._brake.pulled:
            return None
        if error.kind == "rate_limit":
            stray = where == "target" and retry == 1 and error.retry_after is None and not self._window.crowded
            return delay_before(retry, error) / (_STRAY_HASTE if stray else 1.0)
        delay = delay_before(retry, error)
        return None if retry > self._limits.retries or time.monotonic() + delay > deadline.at else delay

    def never_asked(self, error: AttemptError, pending: PendingTrial, started: float) -> None:
        """Record that a trial failed before the target was asked. If the first trials all do, the run stops."""
        self._count_failure(error, pending, final=False)  # later ones concern single rows
        self.failed(error, pending, "target", started, final=True)

    def failed(
        self, error: AttemptError | Fault, pending: PendingTrial, where: str, started: float, *, final: bool
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
                time=to_milliseconds(time.time()),
                seconds=to_microseconds(time.monotonic() - started),
                final=final,
                usage=getattr(error, "usage", None),
                traceback=getattr(error, "traceback", None) or UNSET,
                row=pending.sample.where if pending.sample.is_nameless else UNSET,
            )
        )

    async def _back_off(self, error: AttemptError | Fault, delay: float, where: str) -> None:
        """Wait before the next attempt; raise the error, or Halted, if the run is stopped meanwhile."""
        limited = error.kind == "rate_limit"
        self._progress.wait(where, limited=limited)
        try:
            if await self._brake.sleep(delay):
                raise Halted if self._brake.halted else error
        finally:
            self._progress.waited(where, limited=limited)

    def _timeout(self, seconds: float, started: float, deadline: float, late: TimeoutError) -> AttemptError:
        which = "turn_timeout" if started + seconds <= deadline else "trial_timeout"
        if which not in self._limits.model_fields_set:
            which += f": {getattr(self._limits, which):g} s by default"
        notes = getattr(late.__cause__, "__notes__", [])  # the target may have added notes to its cancellation
        return AttemptError(
            "timeout", "; ".join([f"no answer within {time.monotonic() - started:.0f} s ({which})", *notes])
        )


_PRECISION: Final = 0.001
"""of uvloop's clock, in seconds: timers may fire this early"""


class TimeLimits:
    """The time limits of all attempts in one event loop, with a single timer.

    asyncio.timeout() makes a timer for each attempt, which takes several times as long as everything here. The meaning
    is the same: the task is cancelled, and the cancellation becomes a TimeoutError at the end of the block.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._limits: set[TimeLimit] = set()
        self._timer: asyncio.Handle | None = None
        self._timer_at = math.inf
        """the earliest limit, or an earlier one that was lifted"""

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
        """Cancel blocks that are over their limits, and set the timer for the next one."""
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
        # A simultaneous cancellation from elsewhere, such as Ctrl-C, is not a time-out.
        if self._expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

"""How many trials are in flight at once, and what stops a run early.

The window grows and shrinks with what the server takes. The brake stops admission, because of a fault, a budget or the
user: nothing new starts, and requests in flight may end. A fault stops admission: trials in flight are completed, with
their grades. A budget also stops further calls of trials that make several, which later resume in the middle. A user
who stops the process halts the run: no request starts, not even inside a trial or for a grade.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from holdfast.errors import BudgetReached, Fault, Interrupted, UsageError, Waiting
from holdfast.spec.target_schema import ModelTarget
from holdfast.targets.prices import Prices

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.plan.progress import Progress
    from holdfast.spec.eval import Eval
    from holdfast.spec.eval_schema import Limits

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


Reason = Fault | BudgetReached | Interrupted | Waiting


class Halted(Exception):
    """No request may start: another process continues the trial or grade from its record."""


class Brake:
    """Stops admission once, and keeps the first reason."""

    def __init__(self) -> None:
        self.reason: Reason | None = None
        self.halted = False
        """no request may start"""
        self._event = asyncio.Event()

    @property
    def pulled(self) -> bool:
        """True once nothing new may start."""
        return self.reason is not None

    def pull(self, reason: Reason) -> None:
        """Stop admission for a reason."""
        if self.reason is None:
            self.reason = reason
            self._event.set()

    def halt(self, reason: Reason) -> None:
        """Stop admission, and further requests of trials in flight."""
        self.halted = True
        self.pull(reason)

    async def sleep(self, seconds: float) -> bool:
        """Sleep; return True if the brake was pulled meanwhile."""
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
            return True
        except TimeoutError:
            return False

    async def wait_for(self, task: asyncio.Task[None]) -> None:
        """Wait until a task has ended or the brake is pulled."""
        pulled = asyncio.create_task(self._event.wait())
        try:
            await asyncio.wait([task, pulled], return_when=asyncio.FIRST_COMPLETED)
        finally:
            pulled.cancel()


BudgetName = Literal["max_cost", "token_budget", "max_time"]
"""a key of `limits`, and with hyphens an option"""


def check_prices(spec: Eval, *, generates: bool) -> None:
    """Raise UsageError for a budget in dollars if a price is unknown."""
    limit = spec.limits.trial
    if generates and limit is not None and limit.cost is not None and isinstance(spec.target, ModelTarget):
        _check_price("limits.trial.cost", spec.target.model, spec)
    if spec.limits.max_cost is None:
        return
    if generates and not spec.target.reports_cost:
        raise UsageError(
            f"max_cost cannot be enforced: {spec.target.label} does not report its cost",
            remedy="Leave max_cost out, or use --max-time; a Python target can report its cost with its reply.",
        )
    for model in spec.models():
        _check_price("max_cost", model, spec)


def _check_price(limit: str, model: str, spec: Eval) -> None:
    if not Prices(model, spec.prices).known:
        tokens = "--token-budget" if limit == "max_cost" else "limits.trial.tokens"
        raise UsageError(
            f"{limit} cannot be enforced: the price of {model} is unknown",
            remedy=f"Add to the eval file:  prices: {{{model}: {{input: 0.15, output: 0.60}}}}  "
            f"(dollars per million tokens), or use {tokens}.",
        )


class Budget:
    """Compares the limits of a run with what all its processes have spent."""

    def __init__(self, limits: Limits, progress: Progress, notice: Callable[[str], None]) -> None:
        self._limits = limits
        self._progress = progress
        self._spent = progress.spent
        self._seconds_before = 0.0 if limits.max_time is None else progress.spent.seconds
        self._notice = notice
        self._warned: set[str] = set()
        self._unlimited = limits.max_cost is None and limits.token_budget is None and limits.max_time is None

    def reached(self) -> BudgetReached | None:
        """Return the first limit that is reached; warn of limits that cannot be enforced."""
        if self._unlimited:
            return None
        limits, spent = self._limits, self._spent
        if limits.max_cost is not None:
            if spent.unpriced:
                self._warn("max_cost cannot be enforced: the target does not report its cost")
            if spent.cost >= limits.max_cost:
                return self._at("max_cost", limits.max_cost, spent.cost)
        if limits.token_budget is not None:
            if spent.unmetered:
                self._warn("token_budget cannot be enforced: the target does not report its tokens")
            if spent.tokens >= limits.token_budget:
                return self._at("token_budget", limits.token_budget, spent.tokens)
        if limits.max_time is not None:
            seconds = self._seconds_before + self._progress.busy_seconds
            if seconds >= limits.max_time:
                return self._at("max_time", limits.max_time, seconds)
        return None

    def _at(self, name: BudgetName, limit: float, used: float) -> BudgetReached:
        total, outputs = self._progress.plan.total, self._progress.outputs
        return budget_reached(name, limit, used, outputs / total if total else 0.0)

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            self._notice(message)


def budget_reached(name: BudgetName, limit: float, used: float, done: float) -> BudgetReached:
    """Describe a limit that is reached, and suggest a higher one; `done` is the share of trials that are done."""
    show, option = _SHOWN[name], f"--{name.replace('_', '-')}"
    raised = show(_round_up(max(2 * limit, 1.2 * used / done if done else 0.0)))[0]
    return BudgetReached(
        f"budget reached: {option} {show(limit)[0]} ({show(used)[1]} used)",
        f"Resume with a higher limit, e.g. {option} {raised}.",
        option,
        raised,
    )


def _round_up(value: float) -> float:
    """Round up to two significant digits."""
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(value / step - 1e-9) * step


def _cost(dollars: float) -> tuple[str, str]:
    """Format a cost, once to be typed and once to be read, with three significant digits and at least cents."""
    digits = max(2, 2 - math.floor(math.log10(dollars))) if dollars > 0 else 2
    return f"{dollars:.10g}", f"${dollars:,.{digits}f}"


def _tokens(count: float) -> tuple[str, str]:
    return f"{count:.0f}", f"{count:,.0f} tokens"


def _time(seconds: float) -> tuple[str, str]:
    if seconds >= 7200:
        text = f"{seconds / 3600:.3g}h"
    elif seconds >= 120:
        text = f"{seconds / 60:.3g}m"
    else:
        text = f"{seconds:.3g}s"
    return text, text


_SHOWN: Final = {"max_cost": _cost, "token_budget": _tokens, "max_time": _time}

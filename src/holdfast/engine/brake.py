"""Stop a run early, because of a fault, a budget or the user: nothing new starts, and requests in flight may end.

A fault stops admission: trials in flight are completed, with their grades. A budget also stops further calls of trials
that make several, which later resume in the middle. A user who stops the process halts the run: no request starts,
not even inside a trial or for a grade.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Final, Literal

from holdfast.errors import BudgetReached, Fault, Interrupted, UsageError, Waiting
from holdfast.spec.target_schema import ModelTarget
from holdfast.targets.prices import Prices

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.plan.progress import Progress
    from holdfast.spec.eval import Eval
    from holdfast.spec.eval_schema import Limits


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

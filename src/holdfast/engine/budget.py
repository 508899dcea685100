"""The limits of cost, tokens and time that a user set for a run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Literal

from holdfast.errors import BudgetReached, UsageError
from holdfast.spec.load import target_name
from holdfast.spec.target_schema import ModelTarget
from holdfast.targets.prices import Prices

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.plan.progress import Progress
    from holdfast.spec.eval import Eval
    from holdfast.spec.eval_schema import Limits

BudgetName = Literal["max_cost", "token_budget", "max_time"]
"""a key of `limits`, and with hyphens an option"""


def check_prices(spec: Eval, *, generates: bool) -> None:
    """Refuse a budget in dollars where prices are not known."""
    limit = spec.limits.trial
    if generates and limit is not None and limit.cost is not None and isinstance(spec.target, ModelTarget):
        _check_price("limits.trial.cost", spec.target.model, spec)
    if spec.limits.max_cost is None:
        return
    if generates and not spec.target.reports_cost:
        raise UsageError(
            f"max_cost cannot be enforced: {target_name(spec.target)} does not report its cost",
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
    """Compares what a run may spend with what all its processes have spent."""

    def __init__(self, limits: Limits, progress: Progress, notice: Callable[[str], None]) -> None:
        self._limits = limits
        self._progress = progress
        self._spent = progress.spent
        self._seconds_before = 0.0 if limits.max_time is None else progress.spent.seconds
        self._notice = notice
        self._warned: set[str] = set()
        self._unlimited = limits.max_cost is None and limits.token_budget is None and limits.max_time is None

    def reached(self) -> BudgetReached | None:
        """Return the first limit that is reached, with what was used; warn of limits that cannot be enforced."""
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
    """Word that a limit is reached, with a higher one that should be enough; `done` is the share of trials done."""
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
    """Format a cost for typing and for reading; the latter with three significant digits and at least cents."""
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

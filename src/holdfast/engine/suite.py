"""Run the cells of a suite one after the other: each is an ordinary run, and all share one budget.

A cell that fails does not stop the others. An interruption does, and so does a spent budget, except that finished cells
are still looked up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from holdfast.display.displays import Result, SuiteCell
from holdfast.engine.admission import budget_reached
from holdfast.engine.session import confirm_finished, locate_run, preview_run
from holdfast.engine.signals import Signals
from holdfast.errors import BudgetReached, HoldfastError, Interrupted, worst_exit_code
from holdfast.report.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.display.displays import Display
    from holdfast.engine.admission import BudgetName
    from holdfast.engine.session import Options
    from holdfast.plan.identity import RunIdentity
    from holdfast.spec.eval import Eval
    from holdfast.spec.suite import Cell, SuiteLimits
    from holdfast.store.records import Spent

_BUDGETS: Final[tuple[BudgetName, ...]] = ("max_cost", "token_budget", "max_time")


@dataclass(frozen=True)
class CellOutcome:
    """How a cell of a suite ended: with an outcome, or an error that kept it from starting."""

    cell: Cell
    outcome: Outcome | None = None
    error: HoldfastError | None = None

    @property
    def exit_code(self) -> int:
        """The exit code of the cell's run."""
        if self.error is not None:
            return self.error.exit_code
        assert self.outcome is not None
        return self.outcome.exit_code

    @property
    def result(self) -> Result:
        """The outcome in a form for programs."""
        if self.error is not None:
            return Result(exit_code=self.exit_code, reason="failed", message=str(self.error))
        assert self.outcome is not None
        return self.outcome.result


@dataclass(frozen=True)
class SuiteOutcome:
    """How a suite ended."""

    cells: tuple[CellOutcome, ...]
    """in order, without those that an interruption left out"""
    reason: BudgetReached | Interrupted | None = None
    """why it stopped before all cells had their turn"""

    @property
    def exit_code(self) -> int:
        """The exit code that matters most: interrupted, wrong usage, not finished, held, gate not met, finished."""
        if isinstance(self.reason, Interrupted):
            return self.reason.exit_code
        return worst_exit_code(cell.exit_code for cell in self.cells)

    @property
    def result(self) -> Result:
        """The outcome in a form for programs."""
        if isinstance(self.reason, Interrupted):
            return Result(exit_code=self.exit_code, reason="interrupted", message=str(self.reason))
        worst = next(cell.result for cell in self.cells if cell.exit_code == self.exit_code)
        return Result(exit_code=self.exit_code, reason=worst.reason, message=worst.message)


def run_suite(
    cells: Sequence[Cell],
    limits: SuiteLimits,
    options: Options,
    display: Display,
    run: Callable[[Cell, RunIdentity], Outcome],
    after: Callable[[int, CellOutcome], None],
) -> SuiteOutcome:
    """Run all cells, or resume them.

    All cells are identified before the first one runs, so that mistakes are found before any work. `run` runs
    one cell, whose identity has the limits that are left for it; `after` is called with each cell's place and outcome.
    """
    identities = [locate_run(cell.spec, options) for cell in cells]
    totals = [identity.survey.count * identity.spec.trials for identity in identities]
    ledger = _Ledger(limits, identities, options)
    ended: list[CellOutcome] = []
    done = 0
    reached: BudgetReached | None = None
    for number, (cell, identity) in enumerate(zip(cells, identities, strict=True)):
        display.cell(SuiteCell(number + 1, len(cells), cell.eval, cell.target, done, sum(totals)))
        reached = reached or ledger.reached(done / sum(totals))
        try:
            if reached is None:
                outcome = run(cell, replace(identity, spec=ledger.limit(number, cell.spec)))
            else:
                outcome = _look_up(cell, identity, options, reached)
        except HoldfastError as error:
            ended.append(CellOutcome(cell, error=error))
        else:
            ledger.note(number, outcome.spent)
            done += outcome.plan.finished
            if reached is None and isinstance(outcome.reason, BudgetReached):
                reached = ledger.reached(done / sum(totals), outcome.reason)
                outcome = outcome if reached is None else replace(outcome, reason=reached)
            ended.append(CellOutcome(cell, outcome))
        display.cell_result(ended[-1].result)
        after(number, ended[-1])
        if ended[-1].outcome is not None and isinstance(ended[-1].outcome.reason, Interrupted):
            return SuiteOutcome(tuple(ended), ended[-1].outcome.reason)
        if (received := Signals.received()) is not None and len(ended) < len(cells):
            return SuiteOutcome(tuple(ended), Interrupted(received))  # what was in flight completed this cell
    return SuiteOutcome(tuple(ended), reached)


def _look_up(cell: Cell, identity: RunIdentity, options: Options, reason: BudgetReached) -> Outcome:
    """Return the outcome of a cell for which no budget is left."""
    if (finished := confirm_finished(identity, identity.directory(options.runs_dir), options)) is not None:
        return finished
    _, rundir, plan = preview_run(cell.spec, options)
    return Outcome(rundir, plan, None, None, reason)


class _Ledger:
    """The budget of a suite: the limits of all its cells together, and their spending over all processes."""

    def __init__(self, limits: SuiteLimits, identities: Sequence[RunIdentity], options: Options) -> None:
        self._limits: dict[BudgetName, float] = {
            name: limit for name in _BUDGETS if (limit := getattr(limits, name)) is not None
        }
        self._spent: list[dict[BudgetName, float]] = [dict.fromkeys(_BUDGETS, 0.0) for _ in identities]
        if self._limits and not options.fresh:
            for number, identity in enumerate(identities):
                self.note(number, identity.directory(options.runs_dir).load(repair=False).spent())
        self._lent: dict[str, float] = {}
        """limits of the last cell that come from the suite"""

    def note(self, number: int, spent: Spent | None) -> None:
        """Note what a cell has spent; None: nothing new."""
        if spent is not None and self._limits:
            self._spent[number] = {"max_cost": spent.cost, "token_budget": spent.tokens, "max_time": spent.seconds}

    def limit(self, number: int, spec: Eval) -> Eval:
        """Return the eval of a cell with its limits lowered to the suite's remaining budget."""
        self._lent = {}
        for name, limit in self._limits.items():
            others = sum(spent[name] for place, spent in enumerate(self._spent) if place != number)
            own = getattr(spec.limits, name)
            if own is None or limit - others < own:
                self._lent[name] = limit - others
        return replace(spec, limits=spec.limits.model_copy(update=self._lent)) if self._lent else spec

    def reached(self, done: float, stopped: BudgetReached | None = None) -> BudgetReached | None:
        """Return the first limit of the suite that is reached; `stopped` is why the last cell stopped, if by a limit.

        `done` is the share of all trials that are done.
        """
        for name, limit in self._limits.items():
            used = sum(spent[name] for spent in self._spent)
            lent = stopped is not None and name in self._lent and stopped.option == f"--{name.replace('_', '-')}"
            if lent or used >= limit:
                return budget_reached(name, limit, used, done)
        return None

"""The outcome of a command that runs an eval."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from holdfast.display.types import Result
from holdfast.errors import BudgetReached, Fault, Interrupted, Waiting

if TYPE_CHECKING:
    from holdfast.plan.plan import Plan
    from holdfast.report.failures import Failures
    from holdfast.store.gate import GateOutcome
    from holdfast.store.metrics import Metrics
    from holdfast.store.rundir import RunDir
    from holdfast.store.spent import Spent


class Outcome(msgspec.Struct, frozen=True):
    """How far a run is when a command ends, and why the command stopped."""

    rundir: RunDir
    plan: Plan
    """the trials that are not finished"""
    metrics: Metrics | None
    """None when the run is not finished"""
    spent: Spent | None
    reason: Fault | BudgetReached | Interrupted | Waiting | None = None
    """why it stopped before all was done"""
    already: bool = False
    """it was finished before we came"""
    skipped_graders: bool = False
    grade_only: bool = False
    gate: GateOutcome | None = None
    """the outcome of its gate, of a finished run that has one"""
    so_far: Metrics | None = None
    """the same numbers of a run that is not finished, where it has grades; they are in no file"""
    failures: Failures | None = None
    """what failed and is missing, and what was retried; None where that was not looked at"""
    wall: float | None = None
    """seconds that this process worked on it"""
    finisher: str | None = None
    """the worker that was to write the report, where this process is another one of several workers"""

    @property
    def missed_gates(self) -> tuple[str, ...]:
        """The conditions of the gate that are not met, in words."""
        return () if self.gate is None else self.gate.missed

    @property
    def exit_code(self) -> int:
        """As documented: 0 finished, 1 gate not met, 3 not finished, 5 waiting, 130/143 interrupted."""
        if isinstance(self.reason, Interrupted):
            return self.reason.exit_code
        if isinstance(self.reason, Waiting):
            return 5
        if self.metrics is None:
            ungraded_on_purpose = self.reason is None and self.plan.to_run == 0 and self.skipped_graders
            reported = self.finisher is not None and self.rundir.finished
            return 0 if ungraded_on_purpose or reported else 3
        return 1 if self.missed_gates else 0

    @property
    def result(self) -> Result:
        """The outcome in a form for programs."""
        reason: str
        match self.reason:
            case Interrupted():
                reason = "interrupted"
            case BudgetReached():
                reason = "budget"
            case Fault():
                reason = "fault"
            case Waiting():
                reason = "waiting"
            case None if self.metrics is not None:
                reason = "gate" if self.missed_gates else "finished"
            case None:
                reason = "errors" if self.exit_code else "ungraded"
        message = "; ".join(self.missed_gates) or None
        if self.reason is not None:
            plain = isinstance(self.reason, BudgetReached | Waiting)
            message = self.reason.message if plain else str(self.reason)
        return Result(
            exit_code=self.exit_code,
            reason=reason,
            message=message,
            run=str(self.rundir.path),
            metrics=None if self.metrics is None else self.metrics.to_dict(),
            so_far=None if self.so_far is None else self.so_far.to_dict(),
            left={
                "to_run": self.plan.to_run,
                "to_grade": self.plan.to_grade,
                "uncertain": 0 if self.failures is None else len(self.failures.uncertain),
            },
        )

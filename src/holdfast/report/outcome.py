"""The outcome of a command that runs an eval."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from holdfast.display.types import Result
from holdfast.errors import BudgetReached, Exit, Fault, Interrupted, Waiting

if TYPE_CHECKING:
    from holdfast.plan.plan import Plan
    from holdfast.report.failures import Failures
    from holdfast.store.metrics import GateOutcome, Metrics
    from holdfast.store.rundir import RunDir
    from holdfast.store.spent import Spent


class Outcome(msgspec.Struct, frozen=True):
    """The state of a run when a command ends, and why the command stopped."""

    rundir: RunDir
    plan: Plan
    """what is left to do"""
    metrics: Metrics | None
    """None if the run is not finished"""
    spent: Spent | None
    reason: Fault | BudgetReached | Interrupted | Waiting | None = None
    """why it stopped before all was done"""
    already: bool = False
    """the run was already finished"""
    skipped_graders: bool = False
    grade_only: bool = False
    gate: GateOutcome | None = None
    """the outcome of the gate, if the run is finished and has a gate"""
    so_far: Metrics | None = None
    """the numbers so far of an unfinished run with grades; they are in no file"""
    failures: Failures | None = None
    """what failed and is missing, and what was retried; None if it was not looked up"""
    wall: float | None = None
    """seconds that this process worked on it"""
    finisher: str | None = None
    """the other worker that was to write the report"""

    @property
    def missed_gates(self) -> tuple[str, ...]:
        """The conditions of the gate that are not met, in words."""
        return () if self.gate is None else self.gate.missed

    @property
    def interrupted(self) -> bool:
        """True if a signal stopped the command."""
        return isinstance(self.reason, Interrupted)

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        if isinstance(self.reason, Interrupted):
            return self.reason.exit_code
        if isinstance(self.reason, Waiting):
            return Exit.WAITING
        if self.metrics is None:
            ungraded_on_purpose = self.reason is None and self.plan.to_run == 0 and self.skipped_graders
            reported = self.finisher is not None and self.rundir.finished
            return Exit.FINISHED if ungraded_on_purpose or reported else Exit.UNFINISHED
        return Exit.GATE_FAILED if self.missed_gates else Exit.FINISHED

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

"""The message in which a worker reports why it stopped. Imports little, for processes that only supervise workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from holdfast.errors import BudgetReached, Fault, Interrupted

if TYPE_CHECKING:
    from holdfast.errors import FaultKind


class Ended(msgspec.Struct):
    """What an attached worker says on its standard output when it leaves."""

    kind: str | None = None
    """of what stopped it: a fault's kind, `budget`, or nothing"""
    message: str = ""
    remedy: str = ""
    option: str = ""
    raised: str = ""

    @classmethod
    def of(cls, reason: Fault | BudgetReached | Interrupted | None) -> Ended:
        """Why a worker's part ended."""
        if isinstance(reason, BudgetReached):
            return cls("budget", reason.message, reason.remedy, reason.option, reason.raised)
        return cls(reason.kind, reason.message, reason.remedy or "") if isinstance(reason, Fault) else cls()

    @property
    def reason(self) -> Fault | BudgetReached | None:
        """The same as it stopped the worker."""
        if self.kind == "budget":
            return BudgetReached(self.message, self.remedy, self.option, self.raised)
        kind: FaultKind | Literal[""] = self.kind or ""  # type: ignore[assignment]  # written by `of`
        return Fault(kind, self.message, remedy=self.remedy or None) if kind else None

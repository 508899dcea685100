"""The messages between a worker and the process that started it: when to finish, and how the worker ended."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from holdfast.errors import BudgetReached, Fault, Waiting

if TYPE_CHECKING:
    from holdfast.engine.admission import Reason
    from holdfast.engine.session import Options
    from holdfast.errors import FaultKind

WORKER: Final = "HOLDFAST_WORKER"
"""the variable that tells a worker, and whatever it imports or starts, its name"""
FINISH: Final = b"finish\n"
"""sent to an attached worker on its standard input: start nothing new. At the end of the input it stops at once"""


class Ended(msgspec.Struct, frozen=True):
    """The message that an attached worker writes to its standard output when it ends."""

    kind: str | None = None
    """a fault's kind, `budget`, `waiting`, or None if nothing stopped the worker"""
    message: str = ""
    remedy: str = ""
    option: str = ""
    raised: str = ""
    away: bool = False
    """True if a server could not be reached, which may be temporary"""

    @classmethod
    def of(cls, reason: Reason | None) -> Ended:
        """Make the message for a reason."""
        if isinstance(reason, Waiting):
            return cls("waiting", reason.message)
        if isinstance(reason, BudgetReached):
            return cls("budget", reason.message, reason.remedy, reason.option, reason.raised)
        if isinstance(reason, Fault):
            return cls(reason.kind, reason.message, reason.remedy or "", away=reason.away)
        return cls()

    @property
    def reason(self) -> Fault | BudgetReached | Waiting | None:
        """The reason that stopped the worker, rebuilt from the message."""
        if self.kind == "waiting":
            return Waiting(self.message)
        if self.kind == "budget":
            return BudgetReached(self.message, self.remedy, self.option, self.raised)
        kind: FaultKind | Literal[""] = self.kind or ""  # type: ignore[assignment]  # written by `of`
        return Fault(kind, self.message, remedy=self.remedy or None, away=self.away) if kind else None


def follow_input(options: Options) -> None:
    """Start nothing new once `FINISH` arrives on standard input, and stop the work when that ends."""

    def watch() -> None:
        while os.read(0, 1024):  # not `sys.stdin`, whose lock Python takes at exit
            options.finishing.set()  # `FINISH` is all that is ever sent
        options.cancelled.set()

    threading.Thread(target=watch, daemon=True).start()

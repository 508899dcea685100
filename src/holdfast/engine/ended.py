"""How an attached worker is asked to stop, and the messages in which it reports what it waits for, and why it stopped.

Imports little, for processes that only supervise workers.
"""

from __future__ import annotations

import os
import re
import threading
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from holdfast.errors import BudgetReached, Fault, Waiting

if TYPE_CHECKING:
    from holdfast.engine.brake import Reason
    from holdfast.engine.options import Options
    from holdfast.errors import FaultKind


FINISH: Final = b"finish\n"
"""what an attached worker reads on its standard input to start nothing new; at the end of the input it stops at once"""


def describe_stopping(requests: int, hint: str = "") -> str:
    """Say how many requests in flight a run waits for before it stops; `hint` says how to abandon them."""
    return f"stopping; {requests:,} request{'s' * (requests != 1)} in flight{hint}"


def read_stopping(message: str) -> int | None:
    """Return the number of requests in such a message; None for any other message."""
    match = re.match(r"stopping; ([\d,]+) requests? in flight", message)
    return None if match is None else int(match[1].replace(",", ""))


class Ended(msgspec.Struct, frozen=True):
    """The message that an attached worker writes to its standard output when it ends."""

    kind: str | None = None
    """a fault's kind, `budget`, `waiting`, or None if nothing stopped the worker"""
    message: str = ""
    remedy: str = ""
    option: str = ""
    raised: str = ""
    away: bool = False
    """True if a server could not be reached, which may pass"""

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
        while os.read(0, 1024):  # not `sys.stdin`, which Python wants for itself when it ends
            options.finishing.set()  # `FINISH` is all that is ever sent
        options.cancelled.set()

    threading.Thread(target=watch, daemon=True).start()

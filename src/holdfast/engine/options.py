"""How one process goes about a run, and the messages between a worker and the process that started it."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from holdfast.errors import BudgetReached, Fault, Waiting
from holdfast.store.claims import RunPolicy

if TYPE_CHECKING:
    from holdfast.engine.brake import Reason
    from holdfast.errors import FaultKind
    from holdfast.store.manifest import Manifest
    from holdfast.store.rundir import RunDir


class Options(RunPolicy, frozen=True):
    """How to go about a run, from the command line or from Python."""

    runs_dir: Path = Path("runs")
    grade_only: bool = False
    """grade the outputs that exist, and never ask the target"""
    outputs_of: tuple[RunDir, Manifest] | None = None
    """the run whose outputs are graded"""
    again: bool = False
    """also grade outputs that have all their verdicts"""
    cancelled: threading.Event = msgspec.field(default_factory=threading.Event)
    """set from another thread to stop the run as Ctrl-C does"""
    finishing: threading.Event = msgspec.field(default_factory=threading.Event)
    """set from another thread to start nothing new, and let what is in flight finish"""
    abandon_hint: str = ""
    """how the user abandons requests in flight, for the message about them"""
    wait: float = 0
    """seconds to wait for another process that holds the run; negative: as long as it takes"""
    settle: tuple[str, ...] = ()
    """decisions about calls that were cut off, as `SAMPLE/TRIAL=happened:JSON|again|restart`"""
    wait_for_batches: bool = True
    """False: submit and collect batches, and exit while they are under way"""
    noted: set[str] = msgspec.field(default_factory=set)
    """notices that were already shown: the runs of a suite have many in common"""
    command: str = ""
    """what to type to resume the run"""


WORKER: Final = "HOLDFAST_WORKER"
"""the variable that tells a worker, and whatever it imports or starts, its name"""
FINISH: Final = b"finish\n"
"""sent to an attached worker on its standard input: start nothing new. At the end of the input it stops at once"""


def describe_stopping(requests: int, hint: str = "") -> str:
    """Describe the requests in flight that a stopping run waits for; `hint` says how to abandon them."""
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

"""An invocation shown to whoever waits for it: the logs of its tasks until all are over, and why a job waits."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from holdfast.cluster.remote import invocation as layout
from holdfast.cluster.remote import local
from holdfast.cluster.remote.chain import Chain
from holdfast.cluster.remote.invocation import TaskPlace
from holdfast.cluster.remote.ledger import Ledger, Submitter
from holdfast.cluster.remote.slurm import Slurm
from holdfast.errors import ClusterError, Unreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.cluster.remote.ledger import Invocation
    from holdfast.cluster.remote.transport import Transport

_FOLLOW_SECONDS: Final = 1.0
_AGAIN_SECONDS: Final = 15.0
_ASK_SECONDS: Final = 5.0
"""how often Slurm is asked why a job waits"""
_LOST_SECONDS: Final = 60.0
"""how long a task may have no job, before whoever follows it is told"""


def follow(transport: Transport, invocation: Invocation, write: Callable[[str], None]) -> int:
    """Show the main logs of all tasks until all are over; the worst exit code of theirs."""
    followed = [_Followed(transport, invocation, number) for number in range(len(invocation.tasks))]
    while True:
        try:
            for each in followed:
                each.show(write)
        except Unreachable as error:
            write(f"[info] {error.message}; jobs are not affected by this, trying again")
            time.sleep(_AGAIN_SECONDS)
            continue
        if all(each.over for each in followed):
            return max((each.code for each in followed), default=0)
        time.sleep(_FOLLOW_SECONDS)


def lead(names: Sequence[str], number: int) -> str:
    """What the lines of a task begin with: nothing where it is the only one, `[gsm8k.1]` where others are called so."""
    name = names[number]
    same = f".{names[:number].count(name)}" if names.count(name) > 1 else ""
    return f"[{name}{same}] " if len(names) > 1 else ""


class _Followed:
    """One task that somebody watches."""

    def __init__(self, transport: Transport, invocation: Invocation, number: int) -> None:
        self._transport = transport
        self._invocation = invocation
        self._place = TaskPlace(invocation.directory, number)
        self._lead = lead(invocation.tasks, number)
        self._read: dict[str, int] = {}
        self._rest = b""
        self._seen = time.monotonic()
        self._asked = 0.0
        self._waits = ""
        self.over = False
        self.code = 3

    def show(self, write: Callable[[str], None]) -> None:
        """What is new, and whether that was all."""
        if self.over:
            return
        state = layout.read_state(self._transport, self._place)
        names = self._transport.run(["ls", self._place.logs]).text.split()
        for name in layout.logs_of(names, "main"):
            new = self._transport.read(f"{self._place.logs}/{name}", self._read.get(name, 0))
            self._read[name] = self._read.get(name, 0) + len(new)
            *lines, self._rest = (self._rest + new).split(b"\n")
            for line in lines:
                write(f"{self._lead}{line.decode(errors='replace')}")
        if state.phase in layout.OVER:
            self.over, self.code = True, 3 if state.exit_code is None else state.exit_code
            return
        if state.phase == "waiting" and self._invocation.executor == "slurm":
            self._say_why_it_waits(write)
        if state.updated and time.time() - state.updated < _LOST_SECONDS / 2:
            self._seen = time.monotonic()
        elif time.monotonic() - self._seen > _LOST_SECONDS:
            self._seen = time.monotonic()
            if not self._has_jobs():
                for name in layout.logs_of(names, "slurm")[-1:]:  # what was said before Python could say anything
                    said = self._transport.read(f"{self._place.logs}/{name}").decode(errors="replace")
                    write("\n".join(f"{self._lead}| {line}" for line in said.splitlines()[-15:]))
                write(f"{self._lead}no job of it is left; `holdfast resume {self._invocation.id}` continues it")
                self.over = True

    def _say_why_it_waits(self, write: Callable[[str], None]) -> None:
        """Slurm's reason in words, whenever it is another one."""
        if time.monotonic() - self._asked < _ASK_SECONDS:
            return
        self._asked = time.monotonic()
        ledger = Ledger(self._transport, self._invocation.directory)
        chain = Chain(Submitter(Slurm(self._transport), ledger), self._invocation.id, self._place)
        try:
            live = chain.live("main")
        except ClusterError as error:
            write(f"{self._lead}[info] why it waits cannot be asked: {error.message}")
            self._asked = float("inf")
            return
        waits = bool(live) and all(job.state == "pending" for job in live)
        first = min(live, key=lambda job: int(job.id), default=None)  # what comes after it waits for it alone
        why = f"job {first.handle} is pending: {first.why}" if waits and first and first.why else ""
        if why and why != self._waits:
            write(f"{self._lead}[info] {why}")
        self._waits = why or self._waits

    def _has_jobs(self) -> bool:
        ledger = Ledger(self._transport, self._invocation.directory)
        if self._invocation.executor != "slurm":
            return bool(local.live_jobs(ledger, self._place.number))
        return bool(Chain(Submitter(Slurm(self._transport), ledger), self._invocation.id, self._place).live("main"))

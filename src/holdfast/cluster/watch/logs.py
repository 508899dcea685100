"""Logs of an invocation, from one attempt to the next, and following them until all tasks are over.

Every attempt writes a log of its own, so following a task is following a folder: whatever grows in it is shown, in the
order in which its files were last written. A job that was requeued, or that goes on for another, is simply next.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

from holdfast.cluster.remote import invocation as layout
from holdfast.cluster.remote import local
from holdfast.cluster.remote.chain import Chain
from holdfast.cluster.remote.invocation import TaskPlace
from holdfast.cluster.remote.ledger import Ledger, Submitter
from holdfast.cluster.remote.slurm import Slurm
from holdfast.errors import ClusterError, Unreachable, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from holdfast.cluster.remote.ledger import Invocation
    from holdfast.cluster.remote.transport import Transport


PIECE: Final = 4 << 20
"""bytes read at once"""


class Piece(NamedTuple):
    """What is new in one file."""

    file: str
    data: bytes


class Logs:
    """The logs in one folder whose names fit, with how far each was read."""

    def __init__(self, transport: Transport, folder: str, pattern: str) -> None:
        """`pattern` is the shell's: `main-*.log`."""
        self._transport = transport
        self.folder = folder
        self._pattern = pattern
        self._read: dict[str, int] = {}

    def _sizes(self) -> list[tuple[str, int]]:
        """The files and their sizes, those written last at the end."""
        script = (
            'test -d "$1" || exit 0; '
            'find "$1" -maxdepth 1 -type f -name "$2" -printf "%T@ %s %f\\n" | LC_ALL=C sort -s -n -k 1,1'
        )
        done = self._transport.check(["sh", "-c", script, "sh", self.folder, self._pattern])
        rows = (line.split(" ", 2) for line in done.text.splitlines())
        return [(name, int(size)) for _, size, name in rows]

    def begin_with_the_newest(self) -> None:
        """Leave out what earlier attempts have said. An attempt may have several logs of a kind: one per instance."""
        found = self._sizes()
        newest = self._attempt(found[-1][0]) if found else []
        self._read.update((name, size) for name, size in found if self._attempt(name) != newest)

    def _attempt(self, name: str) -> list[str]:
        """Job and restart of a log: `12` and `0` of `deployment-12-0-1.log`."""
        return name.removeprefix(self._pattern.partition("*")[0]).removesuffix(".log").split("-")[:2]

    def names(self) -> list[str]:
        """The files there are."""
        return [name for name, _ in self._sizes()]

    def read(self) -> Iterator[Piece]:
        """What is new since the last time."""
        for name, size in self._sizes():
            start = self._read.get(name, 0)
            if size < start:  # begun anew under the same name
                start = self._read[name] = 0
            while start < size:
                data = self._transport.read(f"{self.folder}/{name}", start, min(PIECE, size - start))
                if not data:
                    break
                start += len(data)
                self._read[name] = start
                yield Piece(name, data)


class Lines:
    """Whole lines out of pieces, each with what stands before it."""

    def __init__(self, lead: str = "") -> None:
        self._lead = lead
        self._rest: dict[str, bytes] = {}

    def add(self, piece: Piece) -> Iterator[str]:
        """The lines that are whole now."""
        *whole, rest = (self._rest.get(piece.file, b"") + piece.data).split(b"\n")
        self._rest[piece.file] = rest
        for line in whole:
            yield self._lead + line.decode(errors="replace")

    def end(self) -> Iterator[str]:
        """What has no end yet."""
        for rest in self._rest.values():
            if rest:
                yield self._lead + rest.decode(errors="replace")
        self._rest.clear()


def none_yet(logs: Logs, what: str) -> UsageError:
    """There is no such log."""
    return UsageError(
        f"there is no {what} in {logs.folder} yet", remedy="It begins when the job does; -f waits for it."
    )


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

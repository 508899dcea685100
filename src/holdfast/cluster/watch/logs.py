"""Logs, read from where the last look ended, from one attempt to the next.

Every attempt writes a log of its own, so following a task is following a folder: whatever grows in it is shown, in the
order in which its files were last written. A job that was requeued, or that goes on for another, is simply next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from holdfast.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

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

"""`run.log`: what happened, with times, for people."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from holdfast.display.types import Display

if TYPE_CHECKING:
    from pathlib import Path


class RunLog:
    """What happened, with times. Losing a line of it loses nothing that counts, so it is not synced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._early: list[str] | None = []
        """what was written before the run was ours to write"""

    def open(self) -> None:
        """From now on the run is ours."""
        early, self._early = self._early or [], None
        self._append("".join(early))

    def write(self, message: str) -> None:
        """A line, with the time in front."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        line = f"{stamp} {' '.join(message.split())}\n"
        if self._early is None:
            self._append(line)
        else:
            self._early.append(line)

    def _append(self, text: str) -> None:
        if text:
            with suppress(OSError), self._path.open("a", encoding="utf-8") as file:
                file.write(text)


class Noting(Display):
    """The display asked for, with what it tells people kept in the log as well: damage, failed syncs, takeovers."""

    def __init__(self, shown: Display, log: RunLog) -> None:
        self.log = log
        self.begin, self.output, self.grade = shown.begin, shown.output, shown.grade  # type: ignore[method-assign]
        self.error, self.tick, self.end = shown.error, shown.tick, shown.end  # type: ignore[method-assign]
        self._show = shown.notice

    def notice(self, message: str) -> None:
        """Shown, and kept."""
        self._show(message)
        self.log.write(f"notice {message}")

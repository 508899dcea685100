"""`run.log`: what happened, with times, for people."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

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

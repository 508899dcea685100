"""`run.log`: a log with times, for people."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from holdfast.display.terminal import printable
from holdfast.store.run_files import open_file

if TYPE_CHECKING:
    from pathlib import Path


class RunLog:
    """A log file. Nothing depends on its lines, so they are not synced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._early: list[str] | None = []
        """lines that wait until this process may write to the run; None once it may"""

    def open(self) -> None:
        """Write the lines that have waited: from now on, this process may write to the run."""
        early, self._early = self._early or [], None
        self._append("".join(early))

    def write(self, message: str) -> None:
        """Write a line, with the time in front."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        line = f"{stamp} {printable(' '.join(message.split()), '')}\n"
        if self._early is None:
            self._append(line)
        else:
            self._early.append(line)

    def _append(self, text: str) -> None:
        if text:
            with suppress(OSError):
                fd = open_file(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
                with os.fdopen(fd, "ab", buffering=0) as file:
                    file.write(text.encode())

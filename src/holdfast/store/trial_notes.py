"""The files and rules that a table of trials was made from. A change in any of them makes the table stale."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from holdfast.store.rundir import RunDir

FileStamp = tuple[str, int, int, int]
"""name, inode, size and time of the last change of a file"""


class TableNotes(msgspec.Struct):
    """The files that a stored table was made from."""

    kind: Literal["reported", "recorded", "everything"]
    """from the report, from journals that may grow, or from everything at once, which is the slowest"""
    report: list[FileStamp]
    """manifest, metrics and results"""
    dataset: list[list[int]]
    """sizes and times of its files"""
    journals: list[FileStamp] = []
    """except of tables that grow with the journals"""


def journals_of(rundir: RunDir) -> list[Path]:
    """Return the journals that trials are read from."""
    return [path for name in ("outputs", "grades", "errors") for path in rundir.journals(name)]


def stamp_journals(rundir: RunDir) -> list[FileStamp]:
    """Describe the journals as they are now."""
    return _stamp(rundir, journals_of(rundir))


def stamp_report(rundir: RunDir) -> list[FileStamp]:
    """Describe the manifest and the report as they are now."""
    return _stamp(rundir, [rundir.manifest, rundir.metrics, rundir.results])


def _stamp(rundir: RunDir, paths: Iterable[Path]) -> list[FileStamp]:
    """Describe files, as far as they exist."""
    stamps = []
    for path in paths:
        with suppress(OSError):
            stat = path.stat()
            stamps.append((str(path.relative_to(rundir.path)), stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return stamps

"""The runs below a runs directory. Whatever else lies there is passed over, never a crash."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from holdfast.errors import UsageError
from holdfast.store.rundir import ARCHIVE, RunDir

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from holdfast.store.rundir import Manifest


def find_runs(root: Path, *, archived: bool = False) -> Iterator[RunDir]:
    """Every directory that has, or should have, a manifest: `<eval>/<run>`, or `<eval>/archived/<run>`."""
    for folder in _folders(root):
        if archived:
            yield from map(RunDir, _folders(folder / ARCHIVE))
        else:
            yield from (RunDir(path) for path in _folders(folder) if path.name != ARCHIVE)


def sound_runs(root: Path) -> Iterator[tuple[RunDir, Manifest]]:
    """The runs whose manifest can be read."""
    for rundir in find_runs(root):
        with suppress(UsageError, OSError):
            manifest = rundir.read_manifest()
            if manifest is not None:
                yield rundir, manifest


def _folders(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            return sorted(path / entry.name for entry in entries if _is_folder(entry))
    except OSError:
        return []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Not hidden, and named by a text: other names are nobody's eval, and could not be printed."""
    try:
        entry.name.encode()
        return not entry.name.startswith(".") and entry.is_dir()
    except (OSError, UnicodeEncodeError):
        return False  # a symbolic link to itself, say, which must not hide its neighbours

"""Collects the files of code that identities are made of. Evals without code import this, and nothing that parses."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SESSION_FILE: Final = Path("<session>")
"""stands for the code of functions that were typed into a notebook or an interpreter"""
_noted: Final[ContextVar[set[Path] | None]] = ContextVar("_noted", default=None)


@contextmanager
def noting_files() -> Iterator[set[Path]]:
    """Collect all files of code that are read for fingerprints meanwhile."""
    files: set[Path] = set()
    token = _noted.set(files)
    try:
        yield files
    finally:
        _noted.reset(token)


def note_files(files: Iterable[Path]) -> None:
    """Add files of code for `noting_files`."""
    noted = _noted.get()
    if noted is not None:
        noted.update(files)

"""Folders that all processes of a test run share: the first that needs one fills it."""

from __future__ import annotations

import fcntl
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    FillOnce = Callable[[str, Callable[[Path], object]], Path]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes of this machine out."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def fill_once(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> FillOnce:
    """Return a function that takes a name and what fills a folder, and returns the filled folder of that name."""
    base = tmp_path_factory.getbasetemp()
    base = base if worker_id == "master" else base.parent

    def fill(name: str, make: Callable[[Path], object]) -> Path:
        folder, finished = base / name, base / f"{name}.filled"
        with locked(base / f"{name}.lock"):
            if not finished.exists():
                folder.mkdir()
                make(folder)
                finished.touch()
        return folder

    return fill

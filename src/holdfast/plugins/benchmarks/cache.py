"""Compiled benchmarks of this user in `$HOLDFAST_HOME/benchmarks`, and the local data that they are made from."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.canonical import digest
from holdfast.store.files import make_directory, replacing
from holdfast.store.home import home_directory

if TYPE_CHECKING:
    from collections.abc import Mapping

MIRROR: Final = "HOLDFAST_DATA"
"""environment variable that names a mirror"""
_DATASET_FILES: Final = ("README.md", "*.jsonl", "*.json", "*.csv", "*.parquet", "data")


class Source(msgspec.Struct, frozen=True):
    """A dataset that went into compiled rows."""

    path: str
    """on the hub"""
    name: str | None
    """of the configuration"""
    revision: str | None
    folder: str | None = None
    """the local copy that was read instead of the hub"""


class Compiled(msgspec.Struct, frozen=True):
    """A compiled benchmark: its rows file, and what the eval document says of it."""

    request: dict[str, Any]
    rows: str
    """name of the rows file"""
    count: int
    provider_version: str
    document: dict[str, Any]
    sources: list[Source]
    stamps: dict[str, list[tuple[str, int, int]]]
    """of the files in the folders of the sources"""
    notices: list[str] = []


def cache_folder() -> Path:
    """Return the folder of compiled benchmarks."""
    return home_directory() / "benchmarks"


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file of the cache so that readers see all of it or none of it."""
    make_directory(path.parent)
    with replacing(path) as file:
        file.write(content)


def entry_file(name: str, request: Mapping[str, Any]) -> Path:
    """Return the file that describes the rows of a request."""
    return cache_folder() / f"{name.replace('/', '-')}-{digest(dict(request))[7:23]}.json"


def entries_of(name: str) -> list[Compiled]:
    """Return all compiled benchmarks of a name, with any settings, newest first."""
    files = cache_folder().glob(f"{glob.escape(name.replace('/', '-'))}-*.json")
    newest = sorted(files, key=lambda file: (-file.stat().st_mtime_ns, file.name))
    return [entry for file in newest if (entry := read_entry(file)) is not None]


def read_entry(file: Path) -> Compiled | None:
    """Return a compiled benchmark; None if it or its rows file is missing."""
    try:
        compiled = msgspec.json.decode(file.read_bytes(), type=Compiled)
    except (OSError, msgspec.DecodeError):
        return None
    return compiled if (file.parent / compiled.rows).is_file() else None


def mirror_folder(text: str | None, folder: Path) -> Path | None:
    """Return the mirror that an eval or the environment names. Paths in evals are relative to their folder."""
    if text is not None:
        return (folder / Path(text).expanduser()).resolve()
    named = os.environ.get(MIRROR)
    return Path(named).expanduser().resolve() if named else None


def local_dataset(mirror: Path, name: str) -> Path | None:
    """Return a dataset's folder in a mirror: `MIRROR/OWNER/NAME`, or the mirror if it is the dataset itself."""
    inside = mirror / name
    if inside.is_dir():
        return inside
    is_dataset = any(next(mirror.glob(pattern), None) is not None for pattern in _DATASET_FILES)
    return mirror if is_dataset else None


def stamp(folder: Path) -> list[tuple[str, int, int]]:
    """Return names, sizes and times of a folder's files. While these stay equal, so does the data."""
    stats = [(path, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]
    return [(path.relative_to(folder).as_posix(), stat.st_size, stat.st_mtime_ns) for path, stat in stats]

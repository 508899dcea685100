"""Where the data of benchmarks comes from: a mirror on disk in the layout of the Hugging Face hub, or the hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

MIRROR: Final = "HOLDFAST_DATA"
"""environment variable that names a mirror"""
_DATASET_FILES: Final = ("README.md", "*.jsonl", "*.json", "*.csv", "*.parquet", "data")


def mirror_folder(text: str | None, folder: Path) -> Path | None:
    """Return the mirror that an eval or the environment names. Paths in evals are relative to their folder."""
    if text is not None:
        return (folder / Path(text).expanduser()).resolve()
    named = os.environ.get(MIRROR)
    return Path(named).expanduser().resolve() if named else None


def local_dataset(mirror: Path, name: str) -> Path | None:
    """Return the folder of a dataset in a mirror: `MIRROR/OWNER/NAME`, or the mirror where it is the dataset itself."""
    inside = mirror / name
    if inside.is_dir():
        return inside
    is_dataset = any(next(mirror.glob(pattern), None) is not None for pattern in _DATASET_FILES)
    return mirror if is_dataset else None


def stamp(folder: Path) -> list[tuple[str, int, int]]:
    """Return names, sizes and times of a folder's files. While these stay equal, so does the data."""
    stats = [(path, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]
    return [(path.relative_to(folder).as_posix(), stat.st_size, stat.st_mtime_ns) for path, stat in stats]

"""What was read of many runs, kept in `$HOLDFAST_HOME/catalog`, so that thousands are listed without being read again.

What was read of a run counts only while its files look as they did then: names, inodes, sizes and times. A file that
was written just now may change again without looking different, so that it is not kept. A cache that is damaged, or of
another version, is made again.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import msgspec
from xxhash import xxh3_64_hexdigest, xxh3_128_hexdigest

from holdfast.store.home import home_directory
from holdfast.store.records import SCHEMA_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

T = TypeVar("T")

_FORM: Final = 1
"""changes when runs are read differently, so that earlier caches no longer count"""
_MANY: Final = 200
"""runs that have to be read again before it is worth writing a file"""
_SETTLED_SECONDS: Final = 2.0
"""age from which the time of a file tells whether it was written again"""


def stamp_of(files: Iterable[tuple[str, os.stat_result]]) -> tuple[str, bool]:
    """Return how files look, and whether they would look different if they were written again."""
    newest, looks = 0.0, []
    for name, stat in files:
        looks.append(f"{name}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}")
        newest = max(newest, stat.st_mtime)
    text = "\n".join(sorted(looks)).encode("utf-8", "surrogateescape")
    return xxh3_128_hexdigest(text), time.time() - newest > _SETTLED_SECONDS


class CatalogCache(Generic[T]):
    """What was read of the runs below a directory, for one purpose."""

    def __init__(self, root: Path, purpose: str, kind: type[T]) -> None:
        name = os.fsencode(f"{_FORM}\n{SCHEMA_VERSION}\n{root.absolute()}")
        self._path = home_directory() / "catalog" / f"{xxh3_64_hexdigest(name)}.{purpose}"
        self._kept: dict[str, tuple[str, T]] = {}
        self._seen: dict[str, tuple[str, T]] = {}
        self._read = 0
        with suppress(OSError, msgspec.DecodeError):
            checksum, _, data = self._path.read_bytes().partition(b"\n")
            if checksum == xxh3_64_hexdigest(data).encode():
                self._kept = msgspec.json.decode(data, type=dict[str, tuple[str, kind]])  # type: ignore[valid-type]

    def get(self, name: str, stamp: tuple[str, bool], read: Callable[[], T]) -> T:
        """Return what is known of a run that looks as `stamp_of` says, or else what `read` returns."""
        looks, settled = stamp
        entry = self._kept.get(name)
        if entry is None or entry[0] != looks:
            entry = looks, read()
            self._read += settled
        if settled:
            self._seen[name] = entry
        return entry[1]

    def save(self) -> None:
        """Keep what was read, if it was much."""
        if self._read < _MANY:
            return
        data = msgspec.json.encode(self._seen)
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        with suppress(OSError):  # a cache that cannot be written costs time alone
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(xxh3_64_hexdigest(data).encode() + b"\n" + data)
            temporary.replace(self._path)

"""What was read of many runs, kept in `$HOLDFAST_HOME/catalog`, so that thousands are listed without being read again.

What was read of a run counts only while its files look as they did then: inodes, sizes and times. A file that was
written just now may change again without looking different, so that it is not kept. A cache that is damaged, or of
another version, is made again.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

import msgspec
from xxhash import xxh3_64_hexdigest, xxh3_128_hexdigest

from holdfast.store.home import home_directory
from holdfast.store.records import SCHEMA_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

T = TypeVar("T")

_FORM: Final = 4
"""changes when runs are read differently, so that earlier caches no longer count"""
_MANY: Final = 200
"""runs that have to be read again before it is worth writing a file"""
_SETTLED_SECONDS: Final = 2.0
"""age from which the time of a file tells whether it was written again"""


class Stamp(NamedTuple):
    """How some files look."""

    looks: str
    settled: bool
    """they would look different if they were written again; False if there are none"""


def stamp_of(stats: Iterable[os.stat_result]) -> Stamp:
    """Return how files look, in the order in which they are given."""
    newest, looks = 0.0, []
    for stat in stats:
        looks.append(f"{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}")
        if stat.st_mtime > newest:
            newest = stat.st_mtime
    settled = bool(looks) and time.time() - newest > _SETTLED_SECONDS
    return Stamp(xxh3_128_hexdigest("\n".join(looks).encode()), settled)


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

    def get(self, name: str, look: Callable[[T], Stamp | None], read: Callable[[], tuple[Stamp, T]]) -> T:
        """Return what is known of a run, or else what `read` returns.

        `look` returns how the files look now that were looked at for what is known, or None if one is gone; `read` how
        they looked before they were read.
        """
        entry = self._kept.get(name)
        stamp = None if entry is None else look(entry[1])
        if entry is None or stamp is None or entry[0] != stamp.looks:
            stamp, value = read()
            entry = stamp.looks, value
            self._read += stamp.settled
        if stamp.settled:
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

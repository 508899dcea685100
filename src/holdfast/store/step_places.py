"""Notes where the calls of each trial are in a long journal, so that nobody searches all of it for one trial.

`.index/steps`, and `.index/steps.<folder>` for the journal in a folder under `workers/`, have a sealed line for each
stretch of 8 MB of the journal: which trials have calls there, and between which bytes. The process that appends to the
journal adds it, and so does one that holds the run's lease and reads the journal anyway.

It is a cache. A stretch counts only if it is of the same file and the line at its end is still there; whatever no
stretch that counts covers, such as the end of the journal, is searched. So a cache that is missing, torn, damaged,
stale or another run's costs time, and no call. Nothing is synced: the journal is, before a stretch of it is noted.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec
from xxhash import xxh3_64_hexdigest

from holdfast.store.lines import LineRef, scan, seal
from holdfast.store.run_files import UNREADABLE
from holdfast.store.shared import journal_size, run_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_STRETCH: Final = 8 << 20
"""bytes of a journal that a line of the cache describes; fewer are not noted"""
_NEAR: Final = 1 << 16
"""bytes between two calls of a trial that are read rather than noted"""
_LINE_END: Final = len(b',"sum":"0123456789abcdef"}\n')


class _Extent(msgspec.Struct):
    """A stretch of a journal, without what is in it."""

    inode: int
    """number of the journal's file"""
    start: int
    end: int
    end_digest: str
    """of the journal's last bytes before the end, which have the checksum of a line"""


class _Stretch(_Extent):
    trials: dict[str, list[list[int]]]
    """first byte and end of each part with calls of a trial, counted from the start, by the trial's digest"""


_extent: Final = msgspec.json.Decoder(_Extent)
_stretch: Final = msgspec.json.Decoder(_Stretch)


class StepPlaces:
    """Notes where the lines of one journal of calls are, in the order in which they are in the journal."""

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._noted = max((extent.end for extent, _ in _sound_stretches(journal)), default=0)
        self._start = self._end = 0
        self._trials: dict[str, list[list[int]]] = {}

    def add(self, offset: int, data: bytes) -> None:
        """Add whole lines that are in the journal at an offset, unless something behind them is noted already."""
        if offset < self._noted:
            return
        if offset != self._end:
            self._begin(offset)
        first, shift = 0, offset - self._start
        while first < len(data):
            end = data.index(b"\n", first) + 1
            parts = self._trials.setdefault(_digest(data, first), [])
            if parts and shift + first - parts[-1][1] < _NEAR:
                parts[-1][1] = shift + end
            else:
                parts.append([shift + first, shift + end])
            first = end
        self._end = offset + len(data)
        if self._end - self._start >= _STRETCH:
            with suppress(OSError):  # it is a cache
                self._write(data)
            self._begin(self._end)

    def _begin(self, offset: int) -> None:
        self._start = self._end = offset
        self._trials = {}

    def _write(self, data: bytes) -> None:
        inode, path = self._journal.stat().st_ino, _cache_of(self._journal)
        stretch = _Stretch(inode, self._start, self._end, xxh3_64_hexdigest(data[-_LINE_END:]), self._trials)
        path.parent.mkdir(exist_ok=True)
        with path.open("ab", buffering=0) as file:
            file.write(seal(msgspec.json.encode(stretch)))


def places_of(journal: Path, words: bytes) -> list[tuple[int, int]]:
    """Return the parts of a journal that may have lines that begin with these words: its first field, and a comma.

    The parts are in order and do not overlap; lines that begin in a part may end behind it.
    """
    trial, parts, covered = _digest(words), list[tuple[int, int]](), 0
    for extent, line in sorted(_sound_stretches(journal), key=lambda each: each[0].start):
        if extent.start < covered:
            continue  # what it covers beyond the other one is searched
        parts.append((covered, extent.start))
        if trial.encode() in line:
            for first, end in _stretch.decode(line).trials.get(trial, ()):
                parts.append((extent.start + first, extent.start + end))
        covered = extent.end
    parts.append((covered, journal_size(journal)))
    return [(start, end) for start, end in parts if start < end]


def _sound_stretches(journal: Path) -> Iterator[tuple[_Extent, bytes]]:
    """Yield the stretches that are still as they were noted, each with its line in the cache."""
    with suppress(OSError):  # a cache that cannot be read has none
        inode = journal.stat().st_ino
        for line in scan(_cache_of(journal)):
            if line.sound:
                with suppress(*UNREADABLE, OSError):
                    extent = _extent.decode(line.data)
                    last = LineRef(journal, extent.end - _LINE_END, _LINE_END)
                    if extent.inode == inode and xxh3_64_hexdigest(last.read()) == extent.end_digest:
                        yield extent, line.data


def _cache_of(journal: Path) -> Path:
    run = run_of(journal)
    return run / ".index" / ("steps" if journal.parent == run else f"steps.{journal.parent.name}")


def _digest(line: bytes, start: int = 0) -> str:
    """Return the digest by which a trial is found: of the first field of its lines, which is its key."""
    return xxh3_64_hexdigest(line[start : line.find(b",", start)])

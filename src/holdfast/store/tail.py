"""Follow the journals of other workers. Their files are read, never changed.

An unfinished last line is read later; a damaged line is skipped until a single process opens the run.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from holdfast.store.index import KINDS, Entry, Index, Kind
from holdfast.store.lines import LineRef, scan

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from holdfast.store.index import Extent
    from holdfast.store.records import Usage
    from holdfast.store.rundir import RunDir

News = list[tuple[str, Entry]]


class Follower:
    """Reads new lines of a run's journals into an existing index."""

    def __init__(
        self,
        rundir: RunDir,
        index: Index,
        *,
        skip_worker: str | None = None,
        extents: Mapping[Path, Extent] = MappingProxyType({}),
    ) -> None:
        """`extents` tell how far the index covers the journals, which must not contain calls then."""
        self._rundir = rundir
        self._index = index
        self._skip_worker = skip_worker
        self._read_to = {path: extent.end for path, extent in extents.items()}
        self._counted: dict[str, list[Usage]] = {}
        """usage already counted for conversations without an output, call by call"""

    def read(self) -> News:
        """Read the new lines. Changes nothing in memory but positions, so that a thread may call it."""
        return [(kind.name, entry) for kind in KINDS for entry in self._lines(kind)]

    def _lines(self, kind: Kind) -> Iterator[Entry]:
        for path in self._rundir.journals(kind.name):
            if self._skip_worker is not None and path.parent.name.partition("+")[0] == self._skip_worker:
                continue  # also the files that were begun after a failed sync
            decode = kind.decode_in(path)
            for line in scan(path, self._read_to.get(path, 0)):
                if not line.whole:
                    break
                self._read_to[path] = line.offset + len(line.data) + 1
                if line.sound:
                    try:
                        head = decode(line.data)
                    except msgspec.DecodeError:
                        continue
                    if head is not None:
                        yield Entry(LineRef(path, line.offset, len(line.data)), head)

    def apply(self, news: News) -> None:
        """Add new lines, with their usage, to the index."""
        takers = {kind.name: kind.take for kind in KINDS}
        for name, entry in news:
            if name == "outputs":  # an output includes the usage of its calls
                for usage in self._counted.pop(entry.head.key, ()):
                    self._index.spent.take_back(usage)
            elif name == "steps" and entry.head.key not in self._index.outputs and entry.head.source is None:
                self._counted.setdefault(entry.head.key, []).append(entry.head.usage)
            takers[name](self._index, entry)

    def refresh(self) -> None:
        """Read new lines and add them to the index."""
        self.apply(self.read())

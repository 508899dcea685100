"""The records that other workers write, as they write them. Their files are only read.

A last line without its end is not yet there; a damaged one is passed over until the run is next opened alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from holdfast.store.index import KINDS, Entry, Index
from holdfast.store.lines import LineRef, scan

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from holdfast.store.records import Usage
    from holdfast.store.rundir import RunDir

News = list[tuple[str, Entry]]


class Follower:
    """Reads the new lines in the journals of a run since the last look, for an existing index."""

    def __init__(self, rundir: RunDir, index: Index, *, own: str | None = None) -> None:
        self._rundir = rundir
        self._index = index
        self._own = own
        self._read_to: dict[Path, int] = {}
        self._counted: dict[str, list[Usage]] = {}
        """what was counted of conversations that have no output yet, call by call"""

    def read(self) -> News:
        """Return the new lines. Only files are read, so that a thread may do it."""
        return [(kind.name, entry) for kind in KINDS for entry in self._lines(kind.name, kind.decoder)]

    def _lines(self, name: str, decoder: msgspec.json.Decoder[object]) -> Iterator[Entry]:
        for path in self._rundir.journals(name):
            if self._own is not None and path.parent.name.partition("+")[0] == self._own:
                continue  # also what was begun after a failed sync
            for line in scan(path, self._read_to.get(path, 0)):
                if not line.whole:
                    break
                self._read_to[path] = line.offset + len(line.data) + 1
                if line.sound:
                    try:
                        yield Entry(LineRef(path, line.offset, len(line.data)), decoder.decode(line.data))
                    except msgspec.DecodeError:
                        continue

    def apply(self, news: News) -> None:
        """Add new lines to the index, and their usage to what is spent."""
        takers = {kind.name: kind.take for kind in KINDS}
        for name, entry in news:
            if name == "outputs":  # which says what its calls used together
                for usage in self._counted.pop(entry.head.key, ()):
                    self._index.spent.take_back(usage)
            elif name == "steps" and entry.head.key not in self._index.outputs and entry.head.source is None:
                self._counted.setdefault(entry.head.key, []).append(entry.head.usage)
            takers[name](self._index, entry)

    def refresh(self) -> None:
        """Read the new lines and add them to the index."""
        self.apply(self.read())

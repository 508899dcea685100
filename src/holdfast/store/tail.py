"""Follow the journals of other workers. Their files are read, never changed.

An unfinished last line is read later; a damaged line is skipped until a single process opens the run.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from holdfast.store.index import KINDS, Entry, Kind
from holdfast.store.lines import LineRef, scan
from holdfast.store.run_files import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from holdfast.store.index import IndexReader
    from holdfast.store.records import Usage
    from holdfast.store.rundir import RunDir

News = list[tuple[str, Entry]]
_MOST: Final = 10_000
"""lines that are held at a time: an old run has millions"""


class Follower:
    """Reads new lines of a run's journals into the index that a reader has made."""

    def __init__(self, rundir: RunDir, reader: IndexReader, *, skip_worker: str | None = None) -> None:
        self._rundir = rundir
        self._index = reader.index
        self._skip_worker = skip_worker
        self._read_to: dict[Path, int] = {path: extent.end for path, extent in reader.extents.items()}
        self._counted: dict[str, list[Usage]] = {}
        """usage already counted for conversations without an output, call by call"""
        for entry in reader.steps:
            self._count(entry)

    def read(self) -> News:
        """Read new lines, not all at once; none if there are no more.

        Changes nothing in memory but positions, so that a thread may call it.
        """
        return list(islice(((kind.name, entry) for kind in KINDS for entry in self._lines(kind)), _MOST))

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
                    except UNREADABLE:
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
            elif name == "steps":
                self._count(entry)
            takers[name](self._index, entry)
            if name == "outputs" and not self._index.needs_step(entry.head.key):
                self._index.steps.pop(entry.head.key, None)

    def _count(self, step: Entry) -> None:
        if step.head.key not in self._index.outputs and step.head.source is None:
            self._counted.setdefault(step.head.key, []).append(step.head.usage)

    def follow(self) -> Iterator[News]:
        """Add new lines to the index, and yield them, not all at once."""
        news = self.read()
        while news:
            self.apply(news)
            yield news
            news = self.read() if len(news) == _MOST else []  # else this was all: looking again takes as long

    def refresh(self) -> None:
        """Read new lines and add them to the index."""
        for _ in self.follow():
            pass

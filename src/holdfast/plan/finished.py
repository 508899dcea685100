"""Finished trials of a large run, published next to its index, so that a plan looks up only the others.

To find out which of a million trials are finished, all their keys have to be computed and looked up. The result holds
for the records of a published index, as long as the rows and the graders are the same: records that came later can only
finish further trials, unless one of them replaces an output. It also holds for rows of a run
that borrows from this one. All other trials are looked up.
"""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote

import msgspec

from holdfast.canonical import digest
from holdfast.store.index_files import INDEX, UNUSABLE, find_published, publish_file, temporary_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from holdfast.data.columns import Panel
    from holdfast.data.survey import Survey
    from holdfast.plan.plan import Work
    from holdfast.store.index import RunIndex
    from holdfast.store.rundir import RunDir

_NAME: Final = "finished"
_WIDTH: Final = 16
"""bytes of a row's digest"""
_MOST_COMPARED: Final = 1 << 17
"""maximum number of rows to match one by one, between the common rows at the beginning and at the end"""


class _Content(msgspec.Struct):
    """The state for which a published file is valid."""

    index: str
    """name of the index file whose records count"""
    work: str
    trials: int
    rows: int
    basis: str
    """digest of everything else that the result depends on"""
    kinds: list[list[Any]]
    """for each panel: the keys by which its graders' verdicts are found"""


class _Stored(NamedTuple):
    content: _Content
    done: bytes
    """a 1 for each finished trial"""
    rows: bytes
    """digests of the rows"""
    asked: bytes
    """digests of the parts of rows that the target sees; empty if it sees whole rows"""
    panels: bytes
    """number of the panel of each row, as two bytes; empty if all have the first"""


def publish_finished(survey: Survey, work: Work, rundir: RunDir, index: RunIndex, done: bytes) -> None:
    """Publish which trials are finished according to a published index, unless a verdict may change."""
    if index.published is None or index.has_later_rows or _may_change(work, index) or not done:
        return
    folder = rundir.path / INDEX
    kinds, numbers = survey.panels.packed()
    content = _Content(
        index=index.published.name,
        work=work.digest,
        trials=work.trials,
        rows=survey.count,
        basis=_basis(survey, work),
        kinds=[_signs(work, kind) for kind in kinds],
    )
    panels = b"".join(number.to_bytes(2, "little") for number in numbers) if any(numbers) else b""
    parts = {"done": done, "rows": survey.digests, "asked": survey.asked, "panels": panels}
    with suppress(*UNUSABLE), temporary_file(folder, rundir.path) as temporary:
        db = sqlite3.connect(temporary, isolation_level=None)
        db.execute("PRAGMA journal_mode=OFF")
        db.execute("CREATE TABLE parts (name TEXT PRIMARY KEY, bytes BLOB)")
        db.executemany("INSERT INTO parts VALUES (?, ?)", parts.items())
        db.close()
        publish_file(folder, _NAME, temporary, content)


def read_finished(survey: Survey, work: Work, rundir: RunDir, index: RunIndex) -> bytes:
    """Return a 1 for each trial of a run that is known to be finished; empty if nothing is known."""
    if index.published is None or _may_change(work, index) or index.may_unfinish():
        return b""
    with suppress(*UNUSABLE):
        path, content = find_published(rundir.path / INDEX, _NAME, _Content)
        if (content.index, content.basis) == (index.published.name, _basis(survey, work)):
            return _read_part(path, "done")
    return b""


def inherit_finished(survey: Survey, work: Work, lender: RunDir, index: RunIndex) -> bytes:
    """Return a 1 for each trial that is finished in another run, with the same row and verdicts of all graders.

    Empty if nothing is known about that run.
    """
    if index.published is None or _may_change(work, index) or index.may_unfinish():
        return b""
    with suppress(*UNUSABLE):
        path, content = find_published(lender.path / INDEX, _NAME, _Content)
        if (content.index, content.work, content.trials) != (index.published.name, work.digest, work.trials):
            return b""
        parts = (_read_part(path, name) for name in ("done", "rows", "asked", "panels"))
        return _inherit(survey, work, _Stored(content, *parts))
    return b""


def _inherit(survey: Survey, work: Work, stored: _Stored) -> bytes:
    trials = work.trials
    done = bytearray(survey.count * trials)
    kinds, numbers = survey.panels.packed()
    signs = [_signs(work, kind) for kind in kinds]
    for new, old, count in _common_rows(stored.rows, survey.digests):
        pairs = (
            (int.from_bytes(stored.panels[2 * (old + row) : 2 * (old + row) + 2], "little"), numbers[new + row])
            for row in range(count)
        )
        row = 0
        for (theirs, ours), group in groupby(pairs):
            length = sum(1 for _ in group)
            if all(sign in stored.content.kinds[theirs] for sign in signs[ours]):
                start, source = (new + row) * trials, (old + row) * trials
                done[start : start + length * trials] = stored.done[source : source + length * trials]
            row += length
    return bytes(done)


def _common_rows(old: bytes, new: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield each stretch of rows that both datasets have: its start in the new and the old dataset, and its length."""
    shorter = min(len(old), len(new)) // _WIDTH
    head = _same_at_start(old, new, shorter)
    tail = _same_at_start(old[::-1], new[::-1], shorter - head)
    yield 0, 0, head
    ends = len(new) // _WIDTH - tail, len(old) // _WIDTH - tail
    yield *ends, tail
    if max(ends) - head <= _MOST_COMPARED:
        places = {old[place * _WIDTH : (place + 1) * _WIDTH]: place for place in range(head, ends[1])}
        for place in range(head, ends[0]):
            if (other := places.get(new[place * _WIDTH : (place + 1) * _WIDTH])) is not None:
                yield place, other, 1


def _same_at_start(one: bytes, other: bytes, rows: int) -> int:
    """Return the number of equal rows at the beginning, up to a maximum."""
    low, high = 0, rows
    while low < high:
        middle = (low + high + 1) // 2
        if one[low * _WIDTH : middle * _WIDTH] == other[low * _WIDTH : middle * _WIDTH]:
            low = middle
        else:
            high = middle - 1
    return low


def _read_part(path: Path, name: str) -> bytes:
    db = sqlite3.connect(f"file:{quote(str(path))}?immutable=1&mode=ro", uri=True)
    try:
        value: bytes = db.execute("SELECT bytes FROM parts WHERE name = ?", (name,)).fetchone()[0]
    finally:
        db.close()
    return value


def _signs(work: Work, panel: Panel) -> list[Any]:
    """Return the keys, besides the output's, by which the verdicts of a panel's graders are found."""
    slots = [work.slots[number] for number in panel.graders]
    return [[slot.fingerprint, slot.turn, list(slot.measures), slot.reads_row] for slot in slots if not slot.votes]


def _may_change(work: Work, index: RunIndex) -> bool:
    """Return True if a finished trial can become unfinished: a verdict ends conversations, or is on all outputs."""
    return any(slot.stops for slot in work.slots) or index.has_set_verdicts()


def _basis(survey: Survey, work: Work) -> str:
    return digest([survey.digest, survey.panels.fingerprint(), msgspec.to_builtins(work)])

"""Finished trials of a large run, published next to its index, so that a plan looks up only the others.

To find out which of a million trials are finished, all their keys have to be computed and looked up. The result holds
for the records of a published index, as long as the rows and the graders are the same: records that came later can only
finish further trials, unless one of them replaces an output. It also holds for rows of a run
that borrows from this one. All other trials are looked up.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote

import msgspec

from holdfast.canonical import digest
from holdfast.store.index_files import INDEX, UNUSABLE, find_published, publish_file, temporary_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Set
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
    basis: str
    """digest of everything else that the result depends on"""
    kinds: list[list[Any]]
    """for each panel: the keys by which its graders' verdicts are found"""


class Inherited(NamedTuple):
    """What another run says about the trials of a dataset."""

    done: bytes = b""
    """a 1 for each trial that is finished there, with the same row and verdicts of all graders; may be empty"""
    gone: Set[bytes] = frozenset()
    """digests of what the target saw of rows that only the other run has, if they are known"""


def publish_finished(survey: Survey, work: Work, rundir: RunDir, index: RunIndex, done: bytes) -> None:
    """Publish which trials are finished according to a published index, unless a verdict may change."""
    if index.published is None or index.has_later_rows or _may_change(work, index) or not done:
        return
    folder = rundir.path / INDEX
    numbers = survey.panels.packed()
    panels = b"".join(number.to_bytes(2, "little") for number in numbers) if any(numbers) else b""
    signs = [_signs(work, kind) for kind in survey.panels.values]
    content = _Content(index.published.name, work.digest, work.trials, _basis(survey, work), signs)
    with suppress(*UNUSABLE), temporary_file(folder, rundir.path) as temporary:
        with closing(sqlite3.connect(temporary, isolation_level=None)) as db:
            db.execute("PRAGMA journal_mode=OFF")
            # A 1 for each finished trial; the digest of each row, and of what the target sees of it, unless it sees all
            # of it; the panel of each row, or nothing if all have the first.
            db.execute("CREATE TABLE finished (done, digests, asked, panels)")
            db.execute("INSERT INTO finished VALUES (?, ?, ?, ?)", (done, survey.digests, survey.asked, panels))
        publish_file(folder, _NAME, temporary, content)


def read_finished(survey: Survey, work: Work, rundir: RunDir, index: RunIndex) -> bytes:
    """Return a 1 for each trial of a run that is known to be finished; empty if nothing is known."""
    with suppress(*UNUSABLE):
        path, content = _find(work, rundir, index)
        if content.basis == _basis(survey, work):
            (done,) = _select(path, "SELECT done FROM finished")
            return done
    return b""


def inherit_finished(survey: Survey, work: Work, lender: RunDir, index: RunIndex) -> Inherited:
    """Return which trials are finished in another run, and which rows are only there."""
    with suppress(*UNUSABLE):
        path, content = _find(work, lender, index)
        if (content.work, content.trials) == (work.digest, work.trials):
            done, rows, asked, panels = _select(path, "SELECT done, digests, asked, panels FROM finished")
            common = [*_common_rows(rows, survey.digests)]
            return Inherited(
                _inherit(survey, work, content, common, done, panels), _gone(survey, common, asked or rows)
            )
    return Inherited()


def _find(work: Work, rundir: RunDir, index: RunIndex) -> tuple[Path, _Content]:
    """Return what was published about the records of an index; raise one of `UNUSABLE` if that does not hold."""
    if index.published is None or _may_change(work, index) or index.may_unfinish():
        raise ValueError("trials may have become unfinished")
    path, content = find_published(rundir.path / INDEX, _NAME, _Content)
    if content.index != index.published.name:
        raise ValueError("it is about another index")
    return path, content


def _select(path: Path, query: str) -> list[bytes]:
    with closing(sqlite3.connect(f"file:{quote(str(path))}?immutable=1&mode=ro", uri=True)) as db:
        return [*db.execute(query).fetchone()]


def _gone(survey: Survey, common: Iterable[tuple[int, int, int]], old_asked: bytes) -> Set[bytes]:
    """Return what the target saw of rows that are not common, unless it sees the same of a row of this dataset."""
    gone: set[bytes] = set()
    start = 0
    for _, old, count in [*sorted(common, key=itemgetter(1)), (0, len(old_asked) // _WIDTH, 0)]:
        gone.update(_split(old_asked[start * _WIDTH : old * _WIDTH]))
        start = max(start, old + count)
    return gone.difference(_split(survey.asked_digests)) if 0 < len(gone) <= _MOST_COMPARED else frozenset()


def _split(digests: bytes) -> Iterator[bytes]:
    return (digests[start : start + _WIDTH] for start in range(0, len(digests), _WIDTH))


def _inherit(
    survey: Survey,
    work: Work,
    content: _Content,
    common: Iterable[tuple[int, int, int]],
    old_done: bytes,
    panels: bytes,
) -> bytes:
    """Mark the trials of rows that both datasets have, if each verdict that is wanted here was also wanted there."""
    trials = work.trials
    done = bytearray(survey.count * trials)
    numbers = survey.panels.packed()
    signs = [_signs(work, kind) for kind in survey.panels.values]
    for new, old, count in common:
        pairs = (
            (int.from_bytes(panels[2 * (old + row) : 2 * (old + row) + 2], "little"), numbers[new + row])
            for row in range(count)
        )
        # Nearly all rows have the same pair of panels as the row before, so stretches of them are copied at once.
        row = 0
        for (theirs, ours), group in groupby(pairs):
            length = sum(1 for _ in group)
            if all(sign in content.kinds[theirs] for sign in signs[ours]):
                start, source = (new + row) * trials, (old + row) * trials
                done[start : start + length * trials] = old_done[source : source + length * trials]
            row += length
    return bytes(done)


def _common_rows(old: bytes, new: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield each stretch of rows that both datasets have: its start in the new and the old dataset, and its length."""
    # Most changes of a dataset add rows at its end, or touch a few of them. So the equal rows at both ends, often a
    # million, are found with a few comparisons of memory, and a table is made only of what is left between them.
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
    low, high = 0, rows  # a search by halves, in which each step compares only what is not known to be equal
    while low < high:
        middle = (low + high + 1) // 2
        if one[low * _WIDTH : middle * _WIDTH] == other[low * _WIDTH : middle * _WIDTH]:
            low = middle
        else:
            high = middle - 1
    return low


def _signs(work: Work, panel: Panel) -> list[Any]:
    """Return the keys, besides the output's, by which the verdicts of a panel's graders are found."""
    slots = [work.slots[number] for number in panel.graders]
    return [[slot.fingerprint, slot.turn, list(slot.measures), slot.reads_row] for slot in slots if not slot.votes]


def _may_change(work: Work, index: RunIndex) -> bool:
    """Return True if a finished trial can become unfinished: a verdict ends conversations, or is on all outputs."""
    # An output that a checkpoint ended is dropped if the checkpoint has changed, and a verdict on all outputs if one of
    # them has. Neither leaves a later row by which `may_unfinish` would notice it.
    return any(slot.stops for slot in work.slots) or index.has_set_verdicts()


def _basis(survey: Survey, work: Work) -> str:
    return digest([survey.digest, survey.panels.fingerprint(), msgspec.to_builtins(work)])

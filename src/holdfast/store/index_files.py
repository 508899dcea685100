"""Published indexes: the rows of a large run's journals, in a file that never changes.

    .index/head          one sealed line: the file's name, size and digest, and how far each journal was read
    .index/<digest>.db   tables of `store.index`, searchable by key

**One rule of validity.** A published index fits if the head's line is sound and of this version, the file has the
head's size and digest, and each journal that the head names exists, is at least as long as it was read, and has the
same first bytes and the same last line. Whatever does not fit is ignored and made again from the journals. A journal
that the head does not name is new, and lines after the last one that was read were appended: both are read when the
index is opened. A line that is damaged after it was indexed is noticed when it is used.

A file is made under a temporary name, synced, renamed, and named by the head at last, so a reader finds either the
former index or the new one, whenever the writer is killed. No lock is taken and no journal of SQLite is needed, on
any file system. A run that borrows links the lender's file and has a head of its own.

The process that holds the lease publishes in the run directory, and everybody else in `$HOLDFAST_HOME/index`. If that
is impossible, as on a full disk, there is no published index, and the journals are read each time.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sqlite3
from contextlib import suppress
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import msgspec
from xxhash import xxh3_128, xxh3_128_hexdigest

from holdfast.store.durable import replacing, sync_directory
from holdfast.store.index import JOURNALS, TABLES, Extent, RunIndex, make_searchable, make_tables
from holdfast.store.lines import LineRef, is_sound, seal
from holdfast.store.run_files import UNREADABLE, open_binary, read_file
from holdfast.store.shared import journal_size
from holdfast.store.spent import Spent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from holdfast.store.rundir import RunDir

INDEX: Final = ".index"
"""Folder of the published index in a run directory."""
_VERSION: Final = 1
_HEAD: Final = "head"
_FIRST_BYTES: Final = 4096
"""bytes at the beginning of a journal that are compared"""
_FEW: Final = 0.05
"""share of new rows up to which they are added to a searchable table one by one"""
_UNUSABLE: Final = (OSError, sqlite3.Error, *UNREADABLE, ValueError, OverflowError)
"""what makes an index useless, and nothing else"""


class _JournalMark(msgspec.Struct):
    """How far a journal was read."""

    path: str
    """relative to the run directory"""
    last: int
    """where the last line begins that was read"""
    end: int
    head: str
    """digest of the first bytes"""
    tail: str
    """digest of the last line"""


class _Head(msgspec.Struct):
    version: int
    file: str
    size: int
    digest: str
    rows: dict[str, int]
    """number of rows by table"""
    journals: list[_JournalMark | None]
    """by the number under which the tables have them; None for a journal of the lender that is not shared"""
    places: list[tuple[str, int | None]]
    """fingerprints and turns of graders, by the numbers under which the tables have them"""
    spent: tuple[int, int, float, int, int] = (0, 0, 0.0, 0, 0)
    """tokens, requests, cost, unpriced and unmetered work, without calls of conversations that have no output"""
    periods: list[tuple[float, float]] = []


_head: Final = msgspec.json.Decoder(_Head)


def open_index(rundir: RunDir, folders: Sequence[Path], place: Path, *, durable: bool, limit: int) -> RunIndex:
    """Return the index of a run, read to the end of its journals.

    It begins with the published index in one of the folders that covers most. If `limit` bytes of the journals or more
    are not in that one, a new one is published in the folder `place`. `durable` is as for `RunIndex.read`.
    """
    found = [index for folder in folders if (index := _open_published(rundir, folder)) is not None]
    index = max(found, key=lambda index: index.published_bytes, default=None) or RunIndex(rundir.journals)
    return refresh_index(index, rundir, place, durable=durable, limit=limit)


def refresh_index(index: RunIndex, rundir: RunDir, folder: Path, *, durable: bool, limit: int) -> RunIndex:
    """Return an index with what was appended to the journals: the same one, or a new one if much is published now.

    Much is `limit` bytes since the last publication.
    """
    if journals_size(rundir) - index.published_bytes >= limit:
        published = _publish(index, rundir, folder, durable=durable)
        if published is not None:
            published.keep_rules_of(index)
            return published
    index.read(durable=durable)
    return index


def _open_published(rundir: RunDir, folder: Path, head: _Head | None = None) -> RunIndex | None:
    """Return an index that begins with the published one in a folder; None if there is none that fits.

    `head` is passed if the file was checked just now.
    """
    index = RunIndex(rundir.journals)
    with suppress(*_UNUSABLE):
        checked = head is not None
        head = head or _read_head(folder)
        path, marks = folder / head.file, [mark for mark in head.journals if mark is not None]
        for mark in marks:
            _check_journal(rundir.path / mark.path, mark)
        if not checked and (path.stat().st_size != head.size or _digest(path) != head.digest):
            return None
        index.attach(path, [None if mark is None else rundir.path / mark.path for mark in head.journals], head.places)
        index.extents = {rundir.path / mark.path: Extent(mark.last, mark.end) for mark in marks}
        index.published_bytes = sum(mark.end for mark in marks)
        index.rows = {table: head.rows[table] if index.counts(table) else 0 for table in TABLES}
        index.totals = Spent(*head.spent)
        for period in head.periods:
            index.totals.add_time(*period)
        return index
    return None


def _read_head(folder: Path) -> _Head:
    line = read_file(folder / _HEAD)
    if not is_sound(line[:-1]):
        raise ValueError("damaged")
    head = _head.decode(line)
    if head.version != _VERSION or "/" in head.file:
        raise ValueError("another version")
    return head


def _check_journal(path: Path, mark: _JournalMark) -> None:
    if journal_size(path) < mark.end or _digests(path, mark.last, mark.end) != (mark.head, mark.tail):
        raise ValueError("the journal is not the one that was read")


def _digests(path: Path, last: int, end: int) -> tuple[str, str]:
    first_bytes = LineRef(path, 0, min(_FIRST_BYTES, end)).read()
    return xxh3_128_hexdigest(first_bytes), xxh3_128_hexdigest(LineRef(path, last, end - last).read())


def _digest(path: Path) -> str:
    content = xxh3_128()
    with open_binary(path, buffering=0) as file:
        while chunk := file.read(1 << 20):
            content.update(chunk)
    return content.hexdigest()


def _publish(index: RunIndex, rundir: RunDir, folder: Path, *, durable: bool) -> RunIndex | None:
    """Publish an index of the journals as they are now, and return it; None if that is impossible.

    The published index that `index` begins with is copied, so that only what was appended is read.
    """
    temporary = folder / f".{secrets.token_hex(6)}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".*.tmp"):
            leftover.unlink()
        builder = _build(index, rundir, temporary, durable=durable)
        if any(not spot.torn for spot in builder.damage):
            raise ValueError("a damaged line, which has to be cut out first")
        head = _make_head(builder, rundir, temporary)
        former = next((path.name for path in [index.published] if path is not None and path.parent == folder), "")
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(folder / head.file)
        _write_head(folder, head)
        for path in folder.glob("*.db"):
            if path.name not in (head.file, former):  # which a reader may be about to open
                path.unlink()
        published = _open_published(rundir, folder, head)
    except _UNUSABLE:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        return None
    if published is not None:
        published.damage = builder.damage
    return published


def _build(index: RunIndex, rundir: RunDir, path: Path, *, durable: bool) -> RunIndex:
    """Write the tables of all journals to a file; return what was read."""
    builder = None
    if index.published is not None:
        builder = _open_published(rundir, index.published.parent, _read_head(index.published.parent))
    if builder is not None and builder.published is not None:
        shutil.copyfile(builder.published, path)
    else:
        builder = RunIndex(rundir.journals)
    db = builder.db
    db.execute("ATTACH DATABASE ? AS work", (f"file:{quote(str(path))}?nolock=1",))  # one process uses the file
    for setting in ("journal_mode=OFF", "synchronous=OFF", "locking_mode=EXCLUSIVE", "cache_size=4096"):
        db.execute(f"PRAGMA work.{setting}")
    if builder.published is None:
        make_tables(db, "work")
    else:
        _prepare_copy(builder, rundir)
    builder.read(durable=durable, schema="work")
    make_searchable(db, "work")
    db.execute("DETACH DATABASE work")
    return builder


def _prepare_copy(builder: RunIndex, rundir: RunDir) -> None:
    """Remove rows of a lender that do not count here; let the copy not be searchable while many rows are added."""
    appended = journals_size(rundir) - builder.published_bytes
    for table in TABLES:
        if not builder.counts(table):
            builder.db.execute(f"DELETE FROM work.{table}")
        if appended > _FEW * builder.published_bytes:
            builder.db.execute(f"DROP INDEX work.{table}_key")


def journals_size(rundir: RunDir) -> int:
    """Return how many bytes the journals of a run have that an index is made of."""
    return sum(journal_size(path) for kind in JOURNALS for path in rundir.journals(kind.name))


def _make_head(builder: RunIndex, rundir: RunDir, path: Path) -> _Head:
    digest, spent = _digest(path), builder.totals
    return _Head(
        version=_VERSION,
        file=f"{digest[:16]}.db",
        size=path.stat().st_size,
        digest=digest,
        rows=builder.rows,
        journals=[_make_mark(file, builder.extents.get(file), rundir) for file in builder.files],
        places=builder.place_keys,
        spent=(spent.tokens, spent.requests, spent.cost, spent.unpriced, spent.unmetered),
        periods=spent.periods(),
    )


def _make_mark(path: Path, extent: Extent | None, rundir: RunDir) -> _JournalMark | None:
    if extent is None:
        return None
    return _JournalMark(str(path.relative_to(rundir.path)), *extent, *_digests(path, *extent))


def _write_head(folder: Path, head: _Head) -> None:
    """Name the published file, which has to be durable before."""
    sync_directory(folder)
    with replacing(folder / _HEAD) as file:
        file.write(seal(msgspec.json.encode(head)))


def share_published(lender: RunDir, rundir: RunDir, links: Mapping[Path, Path]) -> None:
    """Let a run use the published index of a run whose journals it shares, if there is one that fits.

    `links` maps each journal of the lender that is shared to its link in this run.
    """
    folder = rundir.path / INDEX
    with suppress(*_UNUSABLE):
        head = _read_head(lender.path / INDEX)
        for number, mark in enumerate(head.journals):
            if mark is not None:
                _check_journal(lender.path / mark.path, mark)
                link = links.get(lender.path / mark.path)
                path = None if link is None else str(link.relative_to(rundir.path))
                head.journals[number] = None if path is None else msgspec.structs.replace(mark, path=path)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / head.file).unlink(missing_ok=True)
        os.link(lender.path / INDEX / head.file, folder / head.file)
        _write_head(folder, msgspec.structs.replace(head, spent=_Head.__struct_defaults__[0], periods=[]))

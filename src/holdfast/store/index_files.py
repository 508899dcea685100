"""Published indexes: what is derived from the journals of a large run, in files that never change.

    .index/journals.head, .index/journals-<digest>.db   rows of the journals' lines: `store.index`
    .index/trials.head, .index/trials-<digest>.db       a row for each trial: `report.trial_table`
    .index/finished.head, .index/finished-<digest>.db   which trials are finished: `plan.finished`

A head is one sealed line: the name, size and digest of its file, how far each journal was read, and more.

**One rule of validity.** A published file fits if the head's line is sound and of this version, the file has the size
and digest that the head names, and each journal that the head names exists, is at least as long as it was read, and has
the same first bytes and the same last line. Whatever does not fit is ignored and made again from the journals. A
journal that the head does not name is new, and lines after the last one that was read were appended: both are read when
the index is opened. A line that is damaged after it was indexed is noticed when it is used. The other two files also
name what they were made from, the report or the index, and are ignored with any other.

A file is made under a temporary name, synced, renamed, and named by the head at last, so a reader finds either the
former index or the new one, whenever the writer is killed. No lock is taken and no journal of SQLite is needed, on
any file system. A run that borrows links the lender's file and has a head of its own.

The process that holds the lease publishes in the run directory, and everybody else in a folder of
`$HOLDFAST_HOME/index`, named by the digest of the run's path. Whoever publishes there removes the folders of runs that
are gone. If publishing is impossible, as on a full disk, there is no published index, and the journals are read each
time.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sqlite3
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, Protocol, TypeVar
from urllib.parse import quote

import msgspec
from xxhash import xxh3_128, xxh3_128_hexdigest

from holdfast.canonical import digest_bytes
from holdfast.errors import Fault, UsageError
from holdfast.store.files import UNREADABLE, open_binary, read_file, replacing, sync_directory
from holdfast.store.home import home_directory
from holdfast.store.index import JOURNALS, TABLES, Extent, RunIndex, make_searchable, make_tables
from holdfast.store.lines import LineRef, is_sound, seal
from holdfast.store.records import Spent
from holdfast.store.shared import journal_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path


INDEX: Final = ".index"
"""Folder of the published index in a run directory."""
_VERSION: Final = 2
"""to be changed with any table or content: files with another version are made again"""
_NAME: Final = "journals"
T = TypeVar("T")
_FIRST_BYTES: Final = 4096
"""bytes at the beginning of a journal that are compared"""
_OWNER: Final = "run"
"""File in a private folder with the path of the run, whose digest is the folder's name."""
_ABANDONED: Final = 600.0
"""seconds after which a temporary file is a dead process's"""
_FEW: Final = 0.05
"""share of new rows up to which they are added to a searchable table one by one"""
UNUSABLE: Final = (OSError, sqlite3.Error, *UNREADABLE, ValueError, OverflowError, Fault)
"""errors that mean only that an index cannot be used"""


class JournalFolder(Protocol):
    """The folder that an index is made for: a run directory."""

    path: Path

    def journals(self, name: str) -> Iterator[Path]:
        """Yield the files of one kind of journal, of all writers."""
        ...


class JournalMark(msgspec.Struct):
    """How far a journal was read."""

    path: str
    """relative to the run directory"""
    last: int
    """offset of the last line that was read"""
    end: int
    head: str
    """digest of the first bytes"""
    tail: str
    """digest of the last line"""


class _Head(msgspec.Struct):
    """The line that names a published file."""

    version: int
    file: str
    size: int
    digest: str
    content: msgspec.Raw
    """the state for which the file is valid"""


class _Journals(msgspec.Struct):
    """The state for which an index of journals is valid."""

    rows: dict[str, int]
    """number of rows by table"""
    journals: list[JournalMark | None]
    """by the number under which the tables have them; None for a journal of the lender that is not shared"""
    places: list[tuple[str, int | None]]
    """fingerprints and turns of graders, by the numbers under which the tables have them"""
    spent: tuple[int, int, float, int, int] = (0, 0, 0.0, 0, 0)
    """tokens, requests, cost, unpriced and unmetered work, without calls of conversations that have no output"""
    periods: list[tuple[float, float]] = []


def publish_file(folder: Path, name: str, temporary: Path, content: object) -> Path:
    """Give a complete file in a folder its name, and let the head name it; return its path.

    The file that was published before stays, since a reader may be about to open it.
    """
    digest, size = _digest(temporary), temporary.stat().st_size
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    path = folder / f"{name}-{digest[:16]}.db"
    former = ""
    with suppress(*UNUSABLE):
        former = _read_head(folder, name).file
    temporary.replace(path)
    _write_head(folder, name, _Head(_VERSION, path.name, size, digest, msgspec.Raw(msgspec.json.encode(content))))
    for other in folder.glob(f"{name}-*.db"):
        if other.name not in (path.name, former):
            other.unlink()
    return path


def find_published(folder: Path, name: str, kind: type[T], *, check: bool = True) -> tuple[Path, T]:
    """Return a published file and its head's contents; raise one of `UNUSABLE` if it is missing or damaged.

    Without `check`, the content of the file is not looked at.
    """
    head = _read_head(folder, name)
    path = folder / head.file
    if check and (path.stat().st_size != head.size or _digest(path) != head.digest):
        raise ValueError("damaged")
    return path, msgspec.json.decode(head.content, type=kind)


def _read_head(folder: Path, name: str) -> _Head:
    line = read_file(folder / f"{name}.head")
    if not is_sound(line[:-1]):
        raise ValueError("damaged")
    head = msgspec.json.decode(line, type=_Head)
    if head.version != _VERSION or "/" in head.file:
        raise ValueError("another version")
    return head


def _write_head(folder: Path, name: str, head: _Head) -> None:
    """Name a file, which has to be durable before."""
    sync_directory(folder)
    with replacing(folder / f"{name}.head") as file:
        file.write(seal(msgspec.json.encode(head)))


def private_folder(run: Path) -> Path:
    """Return the folder in `$HOLDFAST_HOME` for what readers publish about a run."""
    return home_directory() / "index" / _folder_name(os.fsencode(run.resolve()))


def _folder_name(run: bytes) -> str:
    return digest_bytes(run).removeprefix("sha256:")


@contextmanager
def temporary_file(folder: Path, run: Path) -> Iterator[Path]:
    """Yield a new name in a folder for what is published about a run, and remove the file if it keeps that name.

    Create the folder if necessary. Remove leftovers of killed processes, and private folders of runs that are gone.
    """
    if folder.name == INDEX:
        folder.mkdir(parents=True, exist_ok=True)
    else:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / _OWNER).write_bytes(os.fsencode(run.resolve()))
        for other in folder.parent.iterdir():
            _remove_if_gone(other)
    for leftover in folder.glob(".*.tmp"):
        with suppress(FileNotFoundError):
            if time.time() - leftover.stat().st_mtime > _ABANDONED:  # else another reader may be writing it
                leftover.unlink()
    temporary = folder / f".{secrets.token_hex(6)}.tmp"
    try:
        yield temporary
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _remove_if_gone(folder: Path) -> None:
    """Remove a private folder whose run is gone. Its name shows that the path in it is whole, and that it is ours."""
    with suppress(*UNUSABLE):
        run = read_file(folder / _OWNER)
        if _folder_name(run) == folder.name and not os.path.lexists(run):
            shutil.rmtree(folder, ignore_errors=True)


def bytes_to_publish() -> int:
    """Return the journal growth, in bytes, after which the index of a run is published."""
    text = os.environ.get("HOLDFAST_INDEX_BYTES") or str(32 << 20)
    if text.isdecimal():
        return int(text)
    raise UsageError(f"HOLDFAST_INDEX_BYTES is {text!r}; expected a number of bytes")


def open_index(rundir: JournalFolder, folders: Sequence[Path], place: Path, *, durable: bool) -> RunIndex:
    """Return the index of a run, read to the end of its journals.

    It begins with the published index, in any of the folders, that covers most. If that lacks `bytes_to_publish` of the
    journals, a new index is published in the folder `place`. `durable` is as for `RunIndex.read`.
    """
    indexes = [index for folder in folders if (index := _open_published(rundir, folder)) is not None]
    index = max(indexes, key=lambda index: index.published_bytes, default=None) or RunIndex(rundir.journals)
    return refresh_index(index, rundir, place, durable=durable)


def refresh_index(index: RunIndex, rundir: JournalFolder, folder: Path, *, durable: bool) -> RunIndex:
    """Bring an index up to date with its journals, and return it.

    After `bytes_to_publish` since the last publication, publish a new index and return that instead.
    """
    if journals_size(rundir) - index.published_bytes >= bytes_to_publish():
        published = _publish(index, rundir, folder, durable=durable)
        if published is not None:
            published.keep_rules_of(index)
            return published
    index.read(durable=durable)
    return index


def _open_published(rundir: JournalFolder, folder: Path, *, check: bool = True) -> RunIndex | None:
    """Return an index that begins with the published index in a folder; None if no such file is valid.

    `check` is as for `find_published`.
    """
    index = RunIndex(rundir.journals)
    with suppress(*UNUSABLE):
        path, content = find_published(folder, _NAME, _Journals, check=check)
        marks = [mark for mark in content.journals if mark is not None]
        for mark in marks:
            check_journal(rundir.path, mark)
        files = [None if mark is None else rundir.path / mark.path for mark in content.journals]
        index.attach(path, files, content.places)
        index.set_extents({rundir.path / mark.path: Extent(mark.last, mark.end) for mark in marks})
        index.published_bytes = sum(mark.end for mark in marks)
        index.rows = {table: content.rows[table] if index.counts(table) else 0 for table in TABLES}
        index.totals = Spent(*content.spent)
        for period in content.periods:
            index.totals.add_time(*period)
        return index
    return None


def check_journal(root: Path, mark: JournalMark) -> None:
    """Raise ValueError if a journal of a run is not the one that was read."""
    path = root / mark.path
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


def _publish(index: RunIndex, rundir: JournalFolder, folder: Path, *, durable: bool) -> RunIndex | None:
    """Publish an index of the journals as they are now, and return it; None if that is impossible.

    The published index that `index` begins with is copied, so that only what was appended is read.
    """
    try:
        with temporary_file(folder, rundir.path) as temporary:
            builder = _build(index, rundir, temporary, durable=durable)
            if any(not spot.torn for spot in builder.damage):
                raise ValueError("a damaged line, which has to be cut out first")
            publish_file(folder, _NAME, temporary, _describe(builder, rundir))
            published = _open_published(rundir, folder, check=False)
    except UNUSABLE:
        return None
    if published is not None:
        published.damage = builder.damage
    return published


def _build(index: RunIndex, rundir: JournalFolder, path: Path, *, durable: bool) -> RunIndex:
    """Write the tables of all journals to a file; return what was read."""
    builder = None
    if index.published is not None:
        builder = _open_published(rundir, index.published.parent, check=False)
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
    builder.into = "work"
    builder.read(durable=durable)
    make_searchable(db, "work")
    db.execute("DETACH DATABASE work")
    return builder


def _prepare_copy(builder: RunIndex, rundir: JournalFolder) -> None:
    """Remove rows of a lender that do not count here; let the copy not be searchable while many rows are added."""
    appended = journals_size(rundir) - builder.published_bytes
    for table in TABLES:
        if not builder.counts(table):
            builder.db.execute(f"DELETE FROM work.{table}")
        if appended > _FEW * builder.published_bytes:
            builder.db.execute(f"DROP INDEX work.{table}_key")


def journals_size(rundir: JournalFolder) -> int:
    """Return how many bytes the journals of a run have that an index is made of."""
    return sum(journal_size(path) for kind in JOURNALS for path in rundir.journals(kind.name))


def _describe(builder: RunIndex, rundir: JournalFolder) -> _Journals:
    spent = builder.totals
    return _Journals(
        rows=builder.rows,
        journals=[make_mark(rundir.path, file, builder.extents.get(file)) for file in builder.files],
        places=builder.place_keys,
        spent=(spent.tokens, spent.requests, spent.cost, spent.unpriced, spent.unmetered),
        periods=spent.periods(),
    )


def make_mark(root: Path, path: Path, extent: Extent | None) -> JournalMark | None:
    """Return how far a journal was read; None if nothing of it was."""
    return None if extent is None else JournalMark(str(path.relative_to(root)), *extent, *_digests(path, *extent))


def share_published(lender: JournalFolder, rundir: JournalFolder, links: Mapping[Path, Path]) -> None:
    """Let a run use the published index of the run whose journals it shares, if that index is valid.

    `links` maps each journal of the lender that is shared to its link in this run.
    """
    folder = rundir.path / INDEX
    with suppress(*UNUSABLE):
        head = _read_head(lender.path / INDEX, _NAME)
        content = msgspec.json.decode(head.content, type=_Journals)
        journals: list[JournalMark | None] = []
        for mark in content.journals:
            link = None if mark is None else links.get(lender.path / mark.path)
            if mark is None or link is None:
                journals.append(None)
            else:
                check_journal(lender.path, mark)
                journals.append(msgspec.structs.replace(mark, path=str(link.relative_to(rundir.path))))
        content = _Journals(content.rows, journals, content.places)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / head.file).unlink(missing_ok=True)
        os.link(lender.path / INDEX / head.file, folder / head.file)
        raw = msgspec.Raw(msgspec.json.encode(content))
        _write_head(folder, _NAME, msgspec.structs.replace(head, content=raw))

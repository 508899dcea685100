"""Journals that a run shares with the run that it borrows from, so that reuse costs no bytes.

    shared/<lender>/outputs.0.523456.jsonl   the lender's first file of outputs, of which 523,456 bytes count
    shared/<lender>/unwanted.json            keys of outputs in these files that do not belong to this run

What counts is in the name, so no crash can separate the two. If the file system can clone files (btrfs, XFS), both runs
have a file of their own with the same blocks. Otherwise both have a hard link to one file, which is sealed: nobody may
write it. The lender may be removed, archived or repaired, which replaces its files; before it goes on, its sealed
journals are replaced by copies. If there are no links either, the bytes are copied at once. Only a lender that nobody
writes is shared, since a writer may cut off what it could not sync.

Shared files are never written or cut: they are the lender's, too.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, unquote

import msgspec

from holdfast.errors import RunFileError
from holdfast.store.files import (
    UNREADABLE,
    drop_cache,
    make_directory,
    open_binary,
    open_file,
    read_file,
    replacing,
    sync,
    sync_directory,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

FOLDER: Final = "shared"
_NAME: Final = re.compile(r"[a-z]+\.\d+\.(\d+)\.jsonl")
_UNWANTED: Final = "unwanted.json"
_CHUNK: Final = 4 << 20
_FICLONE: Final = 0x40049409
"""the request by which Linux shares the blocks of one file with another"""
_WRITABLE: Final = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
_CANNOT_LINK: Final = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)
"""reasons to copy instead: another file system, somebody else's file, too many links, no links at all"""


class StaleJournalError(OSError):
    """A journal of another run became shorter while it was being shared."""


def end_of(path: Path) -> int | None:
    """Return how many bytes of a shared journal count; None for a run's own journal, which counts as a whole."""
    match = _NAME.fullmatch(path.name)
    return None if match is None else int(match[1])


def lender_of(path: Path) -> str | None:
    """Return the run that did the work in a shared journal; None for a run's own journal."""
    return None if end_of(path) is None else unquote(path.parent.name)


def run_of(journal: Path) -> Path:
    """Return the run directory of a journal."""
    inner = journal.parent.parent
    return inner.parent if inner.name in ("workers", FOLDER) else journal.parent


def journal_size(path: Path) -> int:
    """Return how many bytes of a journal count; 0 for a missing file."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return 0
    end = end_of(path)
    return size if end is None else min(size, end)


def unwanted_keys(path: Path) -> frozenset[str]:
    """Return the keys of outputs in a journal that do not belong to this run."""
    if end_of(path) is None:
        return frozenset()
    try:
        return frozenset(msgspec.json.decode(read_file(path.parent / _UNWANTED), type=list[str]))
    except FileNotFoundError:
        return frozenset()
    except UNREADABLE as error:  # without it, outputs of other samples would count
        raise RunFileError(
            f"{path.parent / _UNWANTED}: cannot be read ({error})",
            remedy=f"Remove what was borrowed, and the next `holdfast eval` borrows it again: rm -r {path.parent}",
        ) from error


def write_unwanted(folder: Path, keys: Iterable[str]) -> None:
    """Record, before a journal is shared, which of its outputs do not belong to this run."""
    make_directory(folder)
    unwanted = sorted(keys)
    if unwanted:
        with replacing(folder / _UNWANTED) as file:
            file.write(msgspec.json.encode(unwanted))


def shared_folder(run: Path, lender: str) -> Path:
    """Return the folder for the journals of a lender."""
    return run / FOLDER / quote(lender, safe=" ")


def share(journal: Path, length: int, kind: str, number: int, folder: Path) -> Path:
    """Clone, link or copy the first bytes of another run's journal durably; return the place.

    Raises FileNotFoundError if the journal is gone, and StaleJournalError if it is shorter by now.
    """
    place = folder / f"{kind}.{number}.{length}.jsonl"
    with suppress(FileNotFoundError):
        place.unlink()  # left by a process that was killed before it had shared everything
    if not _clone(journal, place) and not link_sealed(journal, place):
        with open_binary(journal) as source, replacing(place) as copy:
            while (left := length - copy.tell()) and (data := source.read(min(left, _CHUNK))):
                copy.write(data)
    settle(place)
    if journal_size(place) < length:
        place.unlink()
        raise StaleJournalError(f"{journal} has become shorter")
    sync_directory(folder)
    return place


def _clone(source: Path, place: Path) -> bool:
    """Copy a file without copying its bytes; False if the file system cannot do that."""
    if sys.platform == "darwin":
        return False
    import fcntl

    try:
        with source.open("rb") as file, replacing(place) as clone:
            fcntl.ioctl(clone.fileno(), _FICLONE, file.fileno())
    except FileNotFoundError:
        raise
    except OSError:  # a failing disk is noticed by whoever copies the bytes instead
        return False
    return True


def link_sealed(source: Path, place: Path) -> bool:
    """Seal a file and link to it; if that is impossible, return False and leave the file unchanged."""
    mode = stat.S_IMODE(source.stat().st_mode)
    try:
        if mode & _WRITABLE:
            source.chmod(mode & ~_WRITABLE)
        os.link(source, place)
    except OSError as error:
        with suppress(OSError):
            if mode & _WRITABLE and source.stat().st_nlink == 1:  # another run may have a link by now
                source.chmod(mode)
        if error.errno not in _CANNOT_LINK:
            raise
        return False
    return True


def unseal(path: Path) -> None:
    """Make a sealed journal writable before its run goes on: as a copy, if another run has a link to it."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return
    if status.st_mode & _WRITABLE or not os.access(path.parent, os.W_OK):
        return  # a run that somebody protected as a whole stays protected
    if status.st_nlink == 1:
        with suppress(PermissionError):  # another user's, as in the folder of a group: a copy is this user's
            path.chmod(_unsealed(path, stat.S_IMODE(status.st_mode)))
            return
    with path.open("rb") as file, replacing(path) as copy:
        while data := file.read(_CHUNK):
            copy.write(data)


def _unsealed(path: Path, mode: int) -> int:
    """Give everybody who may read a file the right to write it, if a new file in its folder would have that right."""
    probe = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    fd = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)  # both the umask and the folder's ACL count
    try:
        new = os.fstat(fd).st_mode
    finally:
        os.close(fd)
        probe.unlink()
    return mode | stat.S_IWUSR | (new & _WRITABLE & (mode >> 1))


def settle(path: Path) -> None:
    """Sync what a killed process left in the page cache, then drop the cache, so that reads come from the medium."""
    with suppress(FileNotFoundError):
        fd = open_file(path, os.O_RDONLY)
        try:
            sync(fd)
            drop_cache(fd)
        finally:
            os.close(fd)

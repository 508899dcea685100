"""Holdfast's own directory of this user, `$HOLDFAST_HOME`, the cache in it, and the mode of files that Holdfast writes.

The cache is `home.db`, an SQLite file that all processes of a user share. It holds shelves of entries, which are bytes
under a name. Surveys of datasets and summaries of runs are kept here. The file may be deleted at any time: a file that
is busy, damaged, from another program or not writable holds nothing, and costs only time. Locks of network file systems
may fail, so each entry has a digest of its own, and the name of an entry must identify its content, for example by a
digest of the sources.
"""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from xxhash import xxh3_128

from holdfast.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from typing import Self

_REMEDY: Final = "077 lets only you read what is written, 027 also your group."
_ERRORS: Final = (sqlite3.Error, OSError)
"""what may be wrong with the cache"""
_MAGIC: Final = b"SQLite format 3\0"
_HEAD_BYTES: Final = 72
"""bytes at the beginning of an SQLite file, up to the end of `application_id`"""
_APPLICATION: Final = 0x48664864
_VERSION: Final = 1
"""to be changed with the tables: a file with another version is replaced"""
_WAIT_SECONDS: Final = 1.0
"""seconds to wait for another writer: storing the survey of 1,000,000 rows takes a part of this"""
_TOUCH_SECONDS: Final = 3600.0
"""minimum seconds between two marks of a shelf as used, so that reading seldom writes"""
_TABLES: Final = (
    "CREATE TABLE shelves (name TEXT PRIMARY KEY, used REAL NOT NULL)",
    "CREATE TABLE entries (shelf TEXT, name BLOB, sum BLOB, data BLOB, PRIMARY KEY (shelf, name))",
    f"PRAGMA application_id = {_APPLICATION}",
    f"PRAGMA user_version = {_VERSION}",
)
_FORGET_SHELVES: Final = """
    DELETE FROM shelves WHERE name IN
    (SELECT name FROM shelves WHERE substr(name, 1, ?) = ? ORDER BY used DESC LIMIT -1 OFFSET ?)
"""


def home_directory() -> Path:
    """Return `$HOLDFAST_HOME`, by default `~/.holdfast`."""
    return Path(os.environ.get("HOLDFAST_HOME") or Path.home() / ".holdfast")


def apply_umask() -> None:
    """Set the umask of this process, and of all that it starts, to `$HOLDFAST_UMASK`, such as 077."""
    text = os.environ.get("HOLDFAST_UMASK") or ""
    if not text:
        return
    if len(text) > 4 or not set(text) <= set("01234567"):
        raise UsageError(f"HOLDFAST_UMASK is {text!r}; expected an octal number", remedy=_REMEDY)
    umask = int(text, 8)
    if umask & 0o700:
        raise UsageError(f"HOLDFAST_UMASK is {text!r}: you could not read or write your own runs", remedy=_REMEDY)
    os.umask(umask)


class HomeDb:
    """The cache, opened when it is first used. No method raises if the file cannot be used."""

    def __init__(self) -> None:
        self._path = home_directory() / "home.db"
        self._connection: sqlite3.Connection | None = None
        self._is_readable = True
        """False after a failure, so that a locked file is waited for once"""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def get(self, shelf: str, name: bytes) -> bytes | None:
        """Return an entry; None if there is no such entry, or it is damaged."""
        rows = self._read("SELECT name, sum, data FROM entries WHERE shelf = ? AND name = ?", shelf, name)
        return _sound(shelf, rows).get(name)

    def get_all(self, shelf: str) -> dict[bytes, bytes]:
        """Return all entries of a shelf that are not damaged."""
        return _sound(shelf, self._read("SELECT name, sum, data FROM entries WHERE shelf = ?", shelf))

    def touch(self, shelf: str) -> None:
        """Mark a shelf as used."""
        now = time.time()
        if self._read("SELECT 1 FROM shelves WHERE name = ? AND used < ?", shelf, now - _TOUCH_SECONDS):
            self._read("UPDATE shelves SET used = ? WHERE name = ?", now, shelf)

    def put(self, shelf: str, entries: Mapping[bytes, bytes], *, keep: Collection[bytes] = (), most: int) -> None:
        """Add or replace entries of a shelf, and remove all its others except those to `keep`.

        Of the shelves whose names have the same first word, the `most` recently used are kept.
        """
        kept = {*entries, *keep}
        if self._put(shelf, entries, kept, most):
            self._put(shelf, entries, kept, most)  # the damaged file is gone

    def _put(self, shelf: str, entries: Mapping[bytes, bytes], keep: set[bytes], most: int) -> bool:
        """Return True if a damaged file was in the way."""
        kind = shelf.partition(" ")[0] + " "
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            connection = self._connect()
            connection.execute("BEGIN IMMEDIATE")
            if not _is_made(connection):
                for statement in _TABLES:
                    connection.execute(statement)
            stored = connection.execute("SELECT name FROM entries WHERE shelf = ?", (shelf,)).fetchall()
            unwanted = [(shelf, name) for (name,) in stored if name not in keep]
            connection.executemany("DELETE FROM entries WHERE shelf = ? AND name = ?", unwanted)
            rows = ((shelf, name, _sum(shelf, name, data), data) for name, data in entries.items())
            connection.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?)", rows)
            connection.execute("INSERT OR REPLACE INTO shelves VALUES (?, ?)", (shelf, time.time()))
            connection.execute(_FORGET_SHELVES, (len(kind), kind, most))
            connection.execute("DELETE FROM entries WHERE shelf NOT IN (SELECT name FROM shelves)")
            connection.execute("COMMIT")
            (free,), (pages,) = (connection.execute(f"PRAGMA {n}").fetchone() for n in ("freelist_count", "page_count"))
            if free * 2 > pages:
                connection.execute("VACUUM")
        except _ERRORS as error:
            return self._give_up(error)
        return False

    def _read(self, query: str, *values: Any) -> list[Any]:
        """Return the rows of a query; no rows if the file cannot be read."""
        try:
            if not self._is_readable or (self._connection is None and not self._path.exists()):
                return []
            connection = self._connect()
            return connection.execute(query, values).fetchall() if _is_made(connection) else []
        except _ERRORS as error:
            self._is_readable = False
            self._give_up(error)
            return []

    def _connect(self) -> sqlite3.Connection:
        if self._connection is None:
            if not _may_be_ours(self._path):
                raise OSError(f"{self._path} belongs to another program")
            self._connection = sqlite3.connect(self._path, timeout=_WAIT_SECONDS, isolation_level=None)
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.execute("PRAGMA cell_size_check = ON")
        return self._connection

    def _give_up(self, error: BaseException) -> bool:
        """Close the file after an error, which rolls back. Remove the file and return True if it is damaged."""
        self._close()
        # Operational errors come from outside: the file is busy, the disk full, … But a damaged file may lack a table.
        if not isinstance(error, sqlite3.Error):
            return False
        if isinstance(error, sqlite3.OperationalError) and not str(error).startswith("no such"):
            return False
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
            self._path.with_name(f"{self._path.name}-journal").unlink(missing_ok=True)
            return True
        return False

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _may_be_ours(path: Path) -> bool:
    """Return False for a file that another program wrote: it is neither used nor removed."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        # The beginning is empty if a process was killed before its first commit. SQLite rolls that back.
        return not any(head) or (head.startswith(_MAGIC) and head.endswith(_APPLICATION.to_bytes(4, "big")))
    return True


def _is_made(connection: sqlite3.Connection) -> bool:
    """Return False for a new file without tables. Raises DatabaseError if the tables are another version's."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version not in (0, _VERSION):
        raise sqlite3.DatabaseError(f"version {version}")
    return bool(version)


def _sum(shelf: str, name: bytes, data: bytes) -> bytes:
    checksum = xxh3_128(f"{shelf}\n{len(name)}\n".encode())
    checksum.update(name)
    checksum.update(data)
    return checksum.digest()


def _sound(shelf: str, rows: list[tuple[bytes, bytes, bytes]]) -> dict[bytes, bytes]:
    """Return the undamaged entries. In a damaged file, values may even have other types."""
    return {
        name: data
        for name, checksum, data in rows
        if isinstance(name, bytes) and isinstance(data, bytes) and checksum == _sum(shelf, name, data)
    }

"""Files of a run: opened safely, and written durably.

A run may be fetched, shared or somebody else's. What should be a file may be a pipe that never answers, a device that
never ends, or larger than memory. Every reader of a run directory opens files here, so that such a file is
reported as damage, with its path, and no command ever hangs.

Small files are written durably: a file appears only with its whole content, and survives a power cut.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import SpooledTemporaryFile, gettempdir
from typing import TYPE_CHECKING, BinaryIO, Final

import msgspec

from holdfast.errors import RunFileError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LARGEST: Final = 1 << 28
"""bytes of a file that is read at once, such as manifest.json or metrics.json"""
LONGEST_LINE: Final = 1 << 30
"""bytes of a line of a journal or report"""
UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""errors of decoding data that has the wrong type, is not text, or is nested too deeply"""
_KINDS: Final = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}
_SILENT_FILE: Final = 60.0
_SILENT_FOLDER: Final = 24 * 3600.0
"""seconds after which temporary files and folders of a process that seems to be gone are removed"""

if sys.platform == "darwin":
    import fcntl

    def sync(fd: int) -> None:
        """Put a file's bytes on the medium (on macOS, `fsync` leaves them in the drive's cache)."""
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)

    def drop_cache(fd: int) -> None:
        """Do nothing: macOS has no such call."""

else:
    sync = os.fdatasync

    def drop_cache(fd: int) -> None:
        """Forget clean cached pages, so that the next read comes from the medium.

        After a failed sync Linux keeps pages that never reached the disk and calls them clean.
        """
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def open_file(path: Path | str, flags: int = os.O_RDONLY) -> int:
    """Open a regular file, or the one that a link leads to; raise RunFileError for anything else."""
    # Without O_NONBLOCK, opening a pipe waits for its other end. It changes nothing for regular files.
    try:
        fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
    except OSError:
        check_regular(Path(path))
        raise
    kind = stat.S_IFMT(os.fstat(fd).st_mode)
    if kind != stat.S_IFREG:
        os.close(fd)
        raise _not_regular(Path(path), kind)
    return fd


def check_regular(path: Path) -> None:
    """Raise RunFileError if a path exists and is not a regular file."""
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
    except OSError:
        return
    if kind != stat.S_IFREG:
        raise _not_regular(path, kind)


def open_binary(path: Path, buffering: int = -1) -> BinaryIO:
    """Open a regular file for reading."""
    return os.fdopen(open_file(path), "rb", buffering)


def read_file(path: Path, most: int = LARGEST) -> bytes:
    """Return the content of a regular file; raise RunFileError if it is larger than `most` bytes."""
    with open_binary(path, buffering=0) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise RunFileError(
                f"{path}: larger than {most >> 20} MB, which no such file of a run is", remedy=_remedy(path)
            )
        return file.read()


def read_lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Yield the lines of an open file; raise RunFileError at one that is longer than any line of ours."""
    if os.fstat(file.fileno()).st_size <= LONGEST_LINE:
        yield from file
        return
    while line := file.readline(LONGEST_LINE + 1):
        if len(line) > LONGEST_LINE:
            raise too_long(path, file.tell() - len(line))
        yield line


def too_long(path: Path, offset: int) -> RunFileError:
    """Make the error for a line that is longer than any line of ours."""
    return RunFileError(
        f"{path}: the line at byte {offset:,} is longer than {LONGEST_LINE >> 20} MB", remedy=_remedy(path)
    )


def _not_regular(path: Path, kind: int) -> RunFileError:
    return RunFileError(f"{path}: {_KINDS.get(kind, 'not a regular file')}, not a file", remedy=_remedy(path))


def _remedy(path: Path) -> str:
    return f"It is not Holdfast's. Remove it, or restore the run from a copy: rm -r {path}"


def slug(text: str) -> str:
    """Turn a text into a safe name for a file or folder."""
    return re.sub(r"[^\w.-]+", "-", text).strip(".-")[:80] or "unnamed"


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


_ABSENT: Final = frozenset(
    (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ESTALE)
)


@contextmanager
def if_present() -> Iterator[None]:
    """Ignore files that are missing, not readable or not Holdfast's, but no other errors, such as a bad disk's."""
    try:
        yield
    except RunFileError:
        return
    except OSError as error:
        if error.errno not in _ABSENT:
            raise


def advice_for(error: OSError) -> str:
    """Advise what to do about a file or directory that cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Free some disk space."
    if error.errno in (errno.EACCES, errno.EPERM):
        return "Check the permissions."
    if error.errno == errno.EROFS:
        return "The file system is mounted read-only."
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return "A file is in the way of a directory."
    return "Check the disk."


def make_directory(path: Path) -> None:
    """Create a directory and its parents, durably."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


@contextmanager
def replacing(path: Path, place: Callable[[], Path] | None = None) -> Iterator[BinaryIO]:
    """Write a file under a temporary name; on exit, sync it and rename it in one step.

    `place` is called on exit and returns the file's path, if that depends on its content.
    """
    temporary = path.with_name(f"{_prefix(path.name)}{secrets.token_hex(3)}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        path = path if place is None else place()
        temporary.replace(path)
        sync_directory(path.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


@contextmanager
def temporary_folder(parent: Path, name: str) -> Iterator[Path]:
    """Create a folder that is removed on exit, or by `remove_leftovers` if this process is killed."""
    import tempfile  # as below

    with tempfile.TemporaryDirectory(dir=parent, prefix=_prefix(name), suffix=".tmp") as folder:
        yield Path(folder)


def _prefix(name: str) -> str:
    """Begin the name of a temporary file; a random part follows, as two containers may have the same process ids."""
    return f".{name}.{os.getpid()}-{threading.get_ident()}-"


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files and folders that killed processes have left in a folder to which several may write.

    Leftovers stay if a process with their number runs here. A process in a container or on another machine may be
    alive, too: a file is removed only if nobody has written to it for a minute, and a folder, whose files may be
    uploaded for hours, after a day.
    """
    for leftover in folder.glob(".*.tmp"):
        with suppress(OSError):
            is_folder = leftover.is_dir() and not leftover.is_symlink()
            age = time.time() - leftover.stat().st_mtime
            if age <= (_SILENT_FOLDER if is_folder else _SILENT_FILE) or _is_alive(leftover.name):
                continue
            if is_folder:
                import shutil  # imports all kinds of compression

                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink()


def _is_alive(name: str) -> bool:
    """Return True if the process that a temporary file or folder is named for runs on this machine."""
    match = re.search(r"\.([1-9]\d{0,8})-\d+-\w+\.tmp$", name)
    if match is None:
        return False
    try:
        os.kill(int(match[1]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is another user's
    return True


def keep_backup(path: Path) -> Path:
    """Copy a file durably to `.bak`, `.bak.1` …, unless a copy with the same content exists; return its path."""
    data, number = path.read_bytes(), 0
    while True:
        backup = path.with_name(f"{path.name}.bak{f'.{number}' if number else ''}")
        if not backup.exists():
            status = path.stat()
            with replacing(backup) as file:
                with suppress(PermissionError):  # only root may give files away
                    os.fchown(file.fileno(), status.st_uid, status.st_gid)
                os.fchmod(file.fileno(), stat.S_IMODE(status.st_mode))
                file.write(data)
            return backup
        if backup.is_file() and backup.read_bytes() == data:
            return backup
        number += 1


_IN_MEMORY: Final = 1 << 20
"""size in bytes above which the content moves from memory to a file"""


class Spool:
    """A temporary file without a name. Its errors name its folder, so that the user knows which disk is full."""

    def __init__(self) -> None:
        self._file = SpooledTemporaryFile(_IN_MEMORY)

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def write(self, data: bytes) -> None:
        """Write bytes at the current position."""
        try:
            self._file.write(data)
        except OSError as error:
            raise _in_folder(error) from error

    def seek(self, position: int) -> None:
        """Move to a position, after writing what is buffered."""
        try:
            self._file.seek(position)
        except OSError as error:
            raise _in_folder(error) from error

    def tell(self) -> int:
        """Return the current position."""
        return self._file.tell()

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes from the current position, or all that follow."""
        return self._file.read(size)

    def close(self) -> None:
        """Remove the file."""
        with suppress(OSError):  # on a full disk, closing tries once more to write
            self._file.close()


def _in_folder(error: OSError) -> OSError:
    return OSError(error.errno, error.strerror, gettempdir())

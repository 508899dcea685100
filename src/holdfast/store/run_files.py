"""Opens the files of a run: regular files of a sane size, or a clear error.

A run may be fetched, shared or somebody else's. What should be a file may be a pipe that never answers, a device that
never ends, or larger than memory. Every reader of a run directory opens files here, so that such a file is
reported as damage, with its path, and no command ever hangs.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

import msgspec

from holdfast.errors import RunFileError

if TYPE_CHECKING:
    from collections.abc import Iterator

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

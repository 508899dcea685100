"""Records which files of a project users' code reads while it runs in this process, and which of its files read them.

Keys are computed by reading code before it runs. An audit hook sees the files that the code then opens, or imports by
computed names. A read counts for the innermost user file on the stack, whatever library opened the file: the user file
may keep the content for all its functions. Reads by Holdfast do not count, nor do reads by the user's program while
none of its functions runs for Holdfast.

Invisible are files that C libraries, other processes and threads without user code open. Ignored are hidden files and
folders, installed packages, files outside the folders of the eval and its code, and files that the code itself writes.

An audit hook stays for the life of the process. It is added when the first file is loaded.
"""

from __future__ import annotations

import os
import stat
import sys
from importlib.util import source_from_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from holdfast.spec.fingerprint import SESSION_FILE, is_installed

_OURS: Final = "holdfast"
"""stands for Holdfast's files"""
_PACKAGE: Final = f"{Path(__file__).parents[1]}/"
_BETWEEN: Final = frozenset(f"{_PACKAGE}functions/{name}" for name in ("loading.py", "calling.py", "observing.py"))
"""Holdfast's files that are on the stack between a user's file and its imports"""
_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_MOST: Final = 100_000
"""limit of remembered paths that are ignored, or were written"""

Stamp = tuple[int, int, int]
"""size, time of the last change in nanoseconds, and inode of a file"""


class Read(NamedTuple):
    """A file that the user's code has opened."""

    source: str
    """the user's file that opened it, absolute"""
    path: str
    """absolute"""
    stamp: Stamp | None
    """at that time; None if the file did not exist"""
    product: bool = False
    """the code has written the file itself, so it is not an input"""


class Running:
    """Counts the user's functions that are running for Holdfast."""

    count = 0

    def __enter__(self) -> None:
        self.count += 1

    def __exit__(self, *_: object) -> None:
        self.count -= 1


running: Final = Running()
reads: Final[list[Read]] = []
"""all reads of this process so far; reading an unchanged file again adds nothing"""
_stamps: Final[dict[tuple[str, str], Stamp | None]] = {}
_written: Final[set[str]] = set()
_products: Final[set[str]] = set()
"""files that were both read and written"""
_ignored: Final[set[str]] = set()
_roots: set[str] = set()
_excluded: set[str] = set()
_prefixes: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
"""prefixes of paths that count, and of excluded paths among them"""
_sources: Final[dict[str, str | None]] = {}
"""by the file name of code: the user's file, `_OURS`, or None for libraries"""
_is_installed = False


def observe(*folders: Path) -> None:
    """Record reads by the user's code below these folders from now on."""
    global _is_installed
    _roots.update(_spellings(folders))
    _use_folders()
    if not _is_installed:
        _is_installed = True
        sys.addaudithook(_hook)


def exclude(folder: Path) -> None:
    """Ignore reads below a folder, such as the folder of runs."""
    _excluded.update(_spellings([folder]))
    _use_folders()


def _spellings(folders: Any) -> set[str]:
    return {f"{path}/" for folder in folders for path in (folder.absolute(), folder.resolve())}


def _use_folders() -> None:
    global _prefixes
    _prefixes = tuple(_roots), tuple(_excluded)
    _ignored.clear()


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open":
        _opened(*arguments)
    elif event == "os.rename":
        _note_written(os.path.abspath(os.fsdecode(arguments[1])))  # noqa: PTH100 - the hook is called very often


def _opened(path: Any, mode: str | None, flags: int) -> None:
    if type(path) is not str:
        if not isinstance(path, bytes):
            return  # a file descriptor
        path = os.fsdecode(path)
    if path in _ignored:
        return
    full = os.path.abspath(path)  # noqa: PTH100
    if not _is_of_project(full):
        if path == full and len(_ignored) < _MOST:
            _ignored.add(path)
        return
    if flags & _WRITES if mode is None else mode[:1] != "r" or "+" in mode:
        _note_written(full)
        return
    if full.endswith(".pyc"):
        try:
            full = source_from_cache(full)
        except ValueError:
            return
    if (source := _reader()) is not None:
        _note_read(source, full)


def _is_of_project(full: str) -> bool:
    roots, excluded = _prefixes
    if not full.startswith(roots) or full.startswith(excluded) or is_installed(full):
        return False
    return any("/." not in full[len(root) - 1 :] for root in roots if full.startswith(root))


def _note_read(source: str, full: str) -> None:
    if full in _written:
        _note_product(source, full)
        return
    stamp = stamp_of(full)
    key = source, full
    if key not in _stamps or _stamps[key] != stamp:
        _stamps[key] = stamp
        reads.append(Read(source, full, stamp))


def stamp_of(path: str) -> Stamp | None:
    """Return the current stamp of a file; None if the file does not exist."""
    try:
        status = os.stat(path)  # noqa: PTH116
    except (OSError, ValueError):
        return None
    return (status.st_size, status.st_mtime_ns, status.st_ino) if stat.S_ISREG(status.st_mode) else None


def _note_written(full: str) -> None:
    if len(_written) < _MOST and full not in _written and _is_of_project(full):
        _written.add(full)
        for source in [source for source, path in list(_stamps) if path == full]:
            _note_product(source, full)


def _note_product(source: str, full: str) -> None:
    if full not in _products:
        _products.add(full)
        reads.append(Read(source, full, None, product=True))


def _reader() -> str | None:
    """Return the innermost user file on the stack that runs for Holdfast, if any."""
    frame, reader = sys._getframe(3), None
    while frame is not None:
        name = frame.f_code.co_filename
        source = _sources[name] if name in _sources else _classify(name)
        if reader is None and source is _OURS:
            return None
        if reader is None:
            reader = source
        elif source is _OURS or name in _BETWEEN:
            return reader
        frame = frame.f_back  # type: ignore[assignment]
    return reader if running.count else None  # a thread started by a function


def _classify(name: str) -> str | None:
    source: str | None
    if name.startswith("<"):
        source = str(SESSION_FILE) if name.startswith(("<stdin>", "<ipython", "<python-input", "<console>")) else None
    elif name.startswith(_PACKAGE):
        source = None if name in _BETWEEN else _OURS
    elif is_installed(name) or is_installed(os.path.realpath(name)):
        source = None
    else:
        source = os.path.realpath(name) if Path(name).exists() else str(SESSION_FILE)
    _sources[name] = source
    return source

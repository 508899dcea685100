"""Notes which files of a project users' code reads while it runs in this process, and which of its files read them.

Keys are made by reading code, before it runs. What the code opens then, or imports by a name that it computes, is seen
by an audit hook. A read counts for the innermost file of the user on the stack, whatever library opened it: that file
may keep the content for all its functions. What Holdfast itself reads does not count, nor what the user's program reads
while none of its functions runs for Holdfast.

Not seen: files that C libraries, other processes and threads without code of the user open. Not noted: hidden files and
folders, installed packages, what lies outside of the folders of the eval and its code, and what the code itself writes.

An audit hook stays for the life of the process. It is added with the first file that is loaded.
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
"""stands for the files of Holdfast, which are no user's"""
_PACKAGE: Final = f"{Path(__file__).parents[1]}/"
_BETWEEN: Final = frozenset(f"{_PACKAGE}functions/{name}" for name in ("loading.py", "calling.py", "observing.py"))
"""files of Holdfast that stand between a user's file and what it imports"""
_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_MOST: Final = 100_000
"""paths that are remembered because they do not count, or were written"""

Stamp = tuple[int, int, int]
"""size, time of the last change in nanoseconds, and inode of a file"""


class Read(NamedTuple):
    """A file that code of the user has opened."""

    source: str
    """the file of the user that opened it, absolute"""
    path: str
    """absolute"""
    stamp: Stamp | None
    """as it was then; None if it did not exist"""
    product: bool = False
    """the code has written it itself, so it is no input"""


class Running:
    """How many functions of the user run for Holdfast just now."""

    count = 0

    def __enter__(self) -> None:
        self.count += 1

    def __exit__(self, *_: object) -> None:
        self.count -= 1


running: Final = Running()
reads: Final[list[Read]] = []
"""all reads of this process so far; one that finds a file as it was before is not repeated"""
_stamps: Final[dict[tuple[str, str], Stamp | None]] = {}
_written: Final[set[str]] = set()
_products: Final[set[str]] = set()
"""files that were both read and written"""
_ignored: Final[set[str]] = set()
_roots: set[str] = set()
_excluded: set[str] = set()
_prefixes: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
"""what paths begin with that count, and among them those that do not"""
_sources: Final[dict[str, str | None]] = {}
"""by the name of a code's file: the user's file, `_OURS`, or None for libraries"""
_is_installed = False


def observe(*folders: Path) -> None:
    """Note from now on what code of the user reads below these folders."""
    global _is_installed
    _roots.update(_spellings(folders))
    _use_folders()
    if not _is_installed:
        _is_installed = True
        sys.addaudithook(_hook)


def exclude(folder: Path) -> None:
    """Do not note what is read below a folder, such as that of runs."""
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
    """Return the stamp of a file as it is now; None if there is none."""
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
    """Return the innermost file of the user on the stack that runs for Holdfast; None if there is none."""
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
    return reader if running.count else None  # a thread that a function has started


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

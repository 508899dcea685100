"""Store the files of trials by content after each turn, so that any turn can be graded or resumed later.

A workspace is a folder while a trial runs. Its snapshot after a turn maps paths to digests and is stored with the turn.
The contents are in the run directory's `files/`, once for each, however many turns and trials share them.
"""

from __future__ import annotations

import os
import re
import time
from bisect import bisect_right
from contextlib import suppress
from fnmatch import translate
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from holdfast.canonical import digest_bytes, tagged
from holdfast.store.files import make_directory, replacing, sync_directory
from holdfast.store.records import PartialFiles
from holdfast.store.shared import link_sealed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

Files = dict[str, str]
"""a snapshot: relative paths with `/`, mapped to the digests of their contents, with `+x` appended if executable.
A symbolic link has `link:` and its target in place of a digest. An empty folder is a path that ends in `/`, with an
empty digest: some programs, such as git, need such folders"""

LINK: Final = "link:"
_MOST_LINKS: Final = 40
_MOST_PATHS: Final = 1000
"""files that did not fit and are listed by name"""
_PIECE: Final = 1 << 20
"""bytes that are in memory at once"""
_SETTLED: Final = 2.0
"""seconds after which another change of a file is sure to change its times, on any file system"""


class Blobs:
    """Stores contents by digest."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, digest: str) -> Path:
        """Return the path for the contents of a digest."""
        name = digest.removeprefix("sha256:").removesuffix("+x")
        return self._folder / name[:2] / name[2:]

    def keep(self, data: bytes) -> str:
        """Store contents durably and return their digest."""
        digest = digest_bytes(data)
        path = self.path(digest)
        if path.exists():
            return digest
        make_directory(path.parent)
        with replacing(path) as file:
            os.fchmod(file.fileno(), os.fstat(file.fileno()).st_mode & 0o444)  # other runs may have links to it
            file.write(data)
        return digest

    def keep_file(self, source: Path) -> str:
        """Store the contents of a file durably, a piece at a time, and return their digest.

        A file that is being written, such as the log of a server, is stored as it was read.
        """
        digest = digest_file(source)
        if self.path(digest).exists():
            return digest  # most files are stored already, and reading costs less than a durable write
        make_directory(self._folder)
        with replacing(self._folder / "new", lambda: self._made_place(digest)) as file:
            digest = _copy(source, file)
        return digest

    def _made_place(self, digest: str) -> Path:
        path = self.path(digest)
        make_directory(path.parent)
        return path

    def copy(self, digest: str, target: Path) -> None:
        """Write the contents of a digest into a new file; raise ValueError if they do not match it."""
        with target.open("xb") as file:
            copied = _copy(self.path(digest), file)
        if copied != digest.removesuffix("+x"):
            target.unlink()
            raise ValueError(f"the content in files/ does not match its digest {digest[:80]}")

    def take_from(self, folder: Path) -> None:
        """Bring all contents of another run's folder here: as hard links, or copies if the file system has no links."""
        linked = set()
        for source in folder.glob("*/*"):
            path = self._folder / source.parent.name / source.name
            if path.exists() or source.name.startswith("."):
                continue
            make_directory(path.parent)
            if link_sealed(source, path):
                linked.add(path.parent)
            else:
                self.keep_file(source)
        for directory in linked:
            sync_directory(directory)

    def read(self, digest: str) -> bytes:
        """Read the contents of a digest; raise ValueError if they do not match it, or it is not a digest."""
        data = self.path(digest).read_bytes()
        if digest_bytes(data) != digest.removesuffix("+x"):
            raise ValueError(f"the content in files/ does not match its digest {digest[:80]}")
        return data


def _copy(source: Path, target: BinaryIO | None) -> str:
    """Return the digest of a file; copy its content to another file, if one is given."""
    content = sha256()
    with source.open("rb") as file:
        while piece := file.read(_PIECE):
            content.update(piece)
            if target is not None:
                target.write(piece)
    return tagged(content)


def digest_file(path: Path) -> str:
    """Return the digest of a file's content, read a piece at a time."""
    return _copy(path, None)


class Ignored:
    """Globs for files and folders that are not kept: of names at any depth, or with `/` of paths from the top."""

    def __init__(self, globs: Iterable[str]) -> None:
        plain = [glob.strip().removeprefix("./").rstrip("/") for glob in globs]
        self._names = _pattern(glob for glob in plain if "/" not in glob)
        self._paths = _pattern(glob.removeprefix("/") for glob in plain if "/" in glob)

    def __contains__(self, path: str) -> bool:
        """Return True for a path that is left out, or is inside a folder that is left out."""
        parts = path.strip("/").split("/")
        if any(map(self._names.fullmatch, parts)):
            return True
        return any(self._paths.fullmatch("/".join(parts[:end])) for end in range(1, len(parts) + 1))


def _pattern(globs: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(translate(glob) for glob in globs if glob) or r"(?!)")


_Stamp = tuple[int, int, int, int]
"""size, times of modification and change, and inode of a file"""


class Snapshots:
    """Stores the files of a folder repeatedly. A folder that is too large is stored without its largest files.

    A file that looks unchanged is not read again, if its times were old enough when it was stored: the clocks of file
    systems are coarse, so two changes in quick succession may leave the same times.
    """

    def __init__(self, folder: Path, blobs: Blobs, ignored: Ignored, max_size: int) -> None:
        self._folder = folder
        self._blobs = blobs
        self._ignored = ignored
        self._max_size = max_size
        self._stored: dict[str, tuple[_Stamp, str]] = {}
        """by path: the file as it was stored the last time"""
        self.partial: PartialFiles | None = None
        """what the last snapshot lacks"""

    def take(self, *, trust_times: bool = False) -> Files:
        """Store every regular file and symbolic link. Links are stored as links and never followed.

        `trust_times`: files that look unchanged are not read again.
        """
        if self._folder.is_symlink():
            raise ValueError("the workspace folder has been replaced by a symbolic link")
        now = time.time()
        files: Files = {}
        regular: list[tuple[int, str, Path, os.stat_result]] = []
        for name, path in self._walk():
            if name.endswith("/"):
                files[name] = ""
            elif path.is_symlink():
                files[name] = link_of(path, self._folder)
            elif path.is_file():
                status = path.stat()
                regular.append((status.st_size, name, path, status))
        # The smallest files first: source code is worth more than what was built from it.
        regular.sort(key=lambda file: file[:2])
        fitting = bisect_right([*accumulate(size for size, *_ in regular)], self._max_size)
        kept, excess = regular[:fitting], regular[fitting:]
        stored = {}
        for size, name, path, status in kept:
            stamp = size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
            before = self._stored.get(name) if trust_times else None
            digest = before[1] if before is not None and before[0] == stamp else self._blobs.keep_file(path)
            files[name] = digest + _mode(status)
            if max(status.st_mtime, status.st_ctime) < now - _SETTLED:
                stored[name] = stamp, digest
        self._stored = stored
        self.partial = None
        if excess:
            names = sorted(name for _, name, *_ in excess)
            self.partial = PartialFiles(len(names), sum(file[0] for file in excess), names[:_MOST_PATHS])
        return dict(sorted(files.items()))

    def _walk(self) -> Iterator[tuple[str, Path]]:
        """Yield everything that is kept, with its name; empty folders with a `/` at the end."""
        for place, folders, names in os.walk(self._folder):
            for entries in (folders, names):
                entries[:] = sorted(
                    name for name in entries if _name(Path(place, name), self._folder) not in self._ignored
                )
            if not folders and not names and Path(place) != self._folder:
                yield _name(Path(place), self._folder) + "/", Path(place)
            linked = [name for name in folders if Path(place, name).is_symlink()]
            for path in [Path(place, name) for name in names + linked]:
                yield _name(path, self._folder), path


def describe_partial(partial: PartialFiles) -> str:
    """Describe what a snapshot lacks, and what to do."""
    files, were = ("1 file", "was") if partial.count == 1 else (f"{partial.count:,} files", "were")
    return (
        f"the workspace was larger than workspace.max_size, so {files} ({partial.bytes:,} bytes) {were} left out; "
        "raise it, or name what no grader needs under workspace.ignore"
    )


def link_of(path: Path, folder: Path) -> str:
    """Return the entry of a link. A target inside the folder is made relative, since the folder may move."""
    target = os.readlink(path)  # noqa: PTH115 - the exact text: a Path drops `./` and a trailing `/`
    if Path(target).is_relative_to(folder):
        target = os.path.relpath(target, path.parent)
    return LINK + _utf8(target)


def _entry(path: Path, folder: Path) -> str | None:
    """Return the entry of a file or link; None for anything that is not stored."""
    if path.is_symlink():
        return link_of(path, folder)
    return digest_file(path) + mode_of(path) if path.is_file() else None


def restore(files: Files, blobs: Blobs, folder: Path) -> None:
    """Make a folder hold exactly these files. Correct files are not touched, since a server may have them open."""
    if folder.is_symlink():
        folder.unlink()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for place, folders, names in os.walk(folder, topdown=False):
        for path in [Path(place, name) for name in names + folders]:
            name = path.relative_to(folder).as_posix()
            if path.is_dir() and not path.is_symlink():
                if name + "/" not in files:
                    with suppress(OSError):  # it still holds files
                        path.rmdir()
            elif files.get(name) != _entry(path, folder):
                path.unlink()
    # Links come last: no file is written through one.
    for name, digest in sorted(files.items(), key=lambda item: item[1].startswith(LINK)):
        path = inside(folder, name)
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
        elif not os.path.lexists(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if digest.startswith(LINK):
                path.symlink_to(digest.removeprefix(LINK))
                continue
            blobs.copy(digest, path)
            if digest.endswith("+x"):
                path.chmod(0o755)


def follow(files: Mapping[str, str], path: str) -> str | None:
    """Resolve the links of a path in a snapshot; None if they leave the workspace or form a loop."""
    ahead, behind = path.split("/")[::-1], list[str]()
    links = 0
    while ahead:
        part = ahead.pop()
        if part == "..":
            if not behind:
                return None
            behind.pop()
        elif part not in ("", "."):
            behind.append(part)
            target = files.get("/".join(behind), "")
            if target.startswith(LINK):
                links += 1
                if links > _MOST_LINKS or target.startswith(f"{LINK}/"):
                    return None
                behind.pop()
                ahead += target.removeprefix(LINK).split("/")[::-1]
    return "/".join(behind)


def _name(path: Path, folder: Path) -> str:
    return _utf8(path.relative_to(folder).as_posix())


def _utf8(name: str) -> str:
    if not name.isprintable() and any("\udc80" <= letter <= "\udcff" for letter in name):
        raise ValueError(f"the name of {name!r} is not UTF-8")
    return name


def mode_of(path: Path) -> str:
    """Return the suffix of a file's digest: `+x` if it is executable."""
    return _mode(path.stat())


def _mode(status: os.stat_result) -> str:
    return "+x" if status.st_mode & 0o100 else ""


def inside(folder: Path, name: str) -> Path:
    """Join a name to a folder without resolving its last part; raise ValueError if it leaves the folder."""
    path, root = folder / name, folder.resolve()
    parent = path.parent.resolve()
    if (root != parent and root not in parent.parents) or path.name in ("", ".."):
        raise ValueError(f"{name!r} is outside the workspace, or is not a file in it")
    return path

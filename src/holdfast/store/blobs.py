"""Store the files of trials by content after each turn, so that any turn can be graded or resumed later.

A workspace is a folder while a trial runs. Its snapshot after a turn maps paths to digests and is stored with the turn.
The contents are in the run directory's `files/`, once for each, however many turns and trials share them.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from holdfast.canonical import digest_bytes
from holdfast.store.durable import make_directory, replacing, sync_directory
from holdfast.store.shared import link_sealed

if TYPE_CHECKING:
    from collections.abc import Mapping

Files = dict[str, str]
"""a snapshot: relative paths with `/`, mapped to the digests of their contents, with `+x` appended if executable.
A symbolic link has `link:` and its target in place of a digest. An empty folder is a path that ends in `/`, with an
empty digest: some programs, such as git, need such folders"""

MOST_BYTES: Final = 256 * 1024 * 1024
"""maximum size of a workspace; anything larger is a dataset"""


LINK: Final = "link:"
_MOST_LINKS: Final = 40


class TooLarge(ValueError):
    """A workspace that is too large to be stored."""


class Blobs:
    """Stores contents by digest."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, digest: str) -> Path:
        """Return where the contents of a digest are, or would be."""
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
                self.keep(source.read_bytes())
        for directory in linked:
            sync_directory(directory)

    def read(self, digest: str) -> bytes:
        """Read the contents of a digest; raise ValueError if they do not match it, or it is not a digest."""
        data = self.path(digest).read_bytes()
        if digest_bytes(data) != digest.removesuffix("+x"):
            raise ValueError(f"the content in files/ does not match its digest {digest[:80]}")
        return data


def snapshot(folder: Path, blobs: Blobs) -> Files:
    """Store every regular file and symbolic link below a folder. Links are stored as links and never followed."""
    if folder.is_symlink():
        raise ValueError("the workspace folder has been replaced by a symbolic link")
    files: Files = {}
    total = 0
    for place, folders, names in os.walk(folder):
        folders.sort()
        if not folders and not names and Path(place) != folder:
            files[_name(Path(place), folder) + "/"] = ""
        for name in sorted([*names, *(name for name in folders if Path(place, name).is_symlink())]):
            path = Path(place, name)
            if path.is_symlink():
                files[_name(path, folder)] = link_of(path, folder)
            elif path.is_file():
                total += path.stat().st_size
                if total > MOST_BYTES:
                    raise TooLarge(f"the workspace holds more than {MOST_BYTES >> 20} MB")
                files[_name(path, folder)] = blobs.keep(path.read_bytes()) + mode_of(path)
    return files


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
    return digest_bytes(path.read_bytes()) + mode_of(path) if path.is_file() else None


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
            path.write_bytes(blobs.read(digest))
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
    return "+x" if path.stat().st_mode & 0o100 else ""


def inside(folder: Path, name: str) -> Path:
    """Join a name to a folder without resolving its last part; raise ValueError if it leaves the folder."""
    path, root = folder / name, folder.resolve()
    parent = path.parent.resolve()
    if (root != parent and root not in parent.parents) or path.name in ("", ".."):
        raise ValueError(f"{name!r} is outside the workspace, or is not a file in it")
    return path

"""Trees of files that are put on a cluster: each is named by its digest, and is either complete or absent.

The shell functions do on a cluster what the Python functions do on this machine.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from io import BytesIO
from typing import TYPE_CHECKING, Final

from holdfast.canonical import digest
from holdfast.store.files import make_directory, sync

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import BinaryIO


@dataclass(frozen=True)
class SourceFile:
    """A file to put on the cluster: bytes, or the path of a local file, whose mode it keeps unless one is given."""

    content: bytes | Path
    mode: int | None = None

    def open(self) -> tuple[BinaryIO, int, int]:
        """Return its bytes, their number and its mode."""
        if isinstance(self.content, bytes):
            return BytesIO(self.content), len(self.content), 0o644 if self.mode is None else self.mode
        status = self.content.stat()
        return self.content.open("rb"), status.st_size, status.st_mode & 0o777 if self.mode is None else self.mode


# Clean-up jobs of shared file systems delete single old files: what is there counts only if it is all there. Its time
# tells `holdfast clean` that it was used.
IS_WHOLE: Final = """
whole() { test -f "$1/.whole" && test "$(find "$1" -type f | wc -l)" -eq "$2" && { touch -c -- "$1" || :; }; }
list() { if whole "$1/$2" "$3"; then echo "$2"; fi; }
"""

# `.whole` is the last file sent. A stream that broke off between two files is a sound archive for tar. Jobs run what is
# here, so nobody else may change it, whatever the umask.
RECEIVE: Final = """
set -e
umask go-w
mkdir -p -- "$1"
stage=$(mktemp -d -- "$1/.arriving-XXXXXX")
trap 'rm -rf -- "$stage"' EXIT
tar -x -p -m --no-same-owner -f - -C "$stage"
chmod -R go-w "$stage"
find "$stage" -type f -exec sync -- {} +
place() {
    test -f "$stage/$2/.whole"
    chmod +rx "$stage/$2"
    if whole "$1/$2" "$3"; then return 0; fi
    test ! -e "$1/$2" || mv -T -- "$1/$2" "$stage/$2.old"
    mv -T -- "$stage/$2" "$1/$2" || whole "$1/$2" "$3"
}
"""


def shell_calls(function: str, counts: Mapping[str, int]) -> str:
    """Return the lines of a shell script that call a function for each tree."""
    return "".join(f'{function} "$1" {name} {count:d}\n' for name, count in counts.items())


def tree_digest(files: Mapping[str, SourceFile]) -> str:
    """Return the digest of names, modes and contents, which is the name of a tree."""
    described = {}
    for name, file in files.items():
        if name.startswith("/") or ".." in name.split("/") or name in ("", ".whole"):
            raise ValueError(f"not the name of a file below a directory: {name!r}")
        stream, _, mode = file.open()
        hashed = sha256()
        with stream:
            while block := stream.read(1 << 20):
                hashed.update(block)
        described[name] = [mode, hashed.hexdigest()]
    return digest(described).removeprefix("sha256:")


def pack_trees(trees: Mapping[str, Mapping[str, SourceFile]], archive: BinaryIO) -> None:
    """Write an archive of trees. The last file of each is `.whole`."""
    with tarfile.open(fileobj=archive, mode="w|", format=tarfile.GNU_FORMAT) as tar:
        for tree, files in trees.items():
            for name, file in [*sorted(files.items()), (".whole", SourceFile(b""))]:
                info = tarfile.TarInfo(f"{tree}/{name}")
                stream, info.size, info.mode = file.open()
                with stream:
                    tar.addfile(info, stream)


def is_whole(tree: Path, count: int) -> bool:
    """Return True if a tree is there with all its files, and note that it was used."""
    if not (tree / ".whole").is_file() or sum(path.is_file() for path in tree.rglob("*")) != count:
        return False
    with suppress(PermissionError):
        os.utime(tree)
    return True


def place_tree(arrived: Path, target: Path, count: int) -> bool:
    """Move a tree to its place after its arrival; False if it did not arrive completely."""
    if not (arrived / ".whole").is_file():
        return False
    for place in [arrived, *(path for path in arrived.rglob("*") if path.is_dir())]:
        place.chmod(0o755)
    if target.exists() and not is_whole(target, count):
        target.rename(arrived.with_suffix(".old"))
    try:
        arrived.rename(target)
    except OSError:
        if not is_whole(target, count):  # else another process was faster
            raise
    return True


def make_own_directory(path: Path) -> None:
    """Create a directory and its parents, which only their owner may write, whatever the umask."""
    missing = [place for place in (path, *path.parents) if not place.exists()]
    make_directory(path)
    for place in missing:
        place.chmod(place.stat().st_mode & ~0o022)


def unpack_file(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """Write one file of an archive, on the medium when this returns."""
    source = tar.extractfile(member)
    assert source is not None
    path = folder / member.name
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, member.mode & 0o600)
    with os.fdopen(fd, "wb") as file:
        shutil.copyfileobj(source, file)
        file.flush()
        os.fchmod(fd, member.mode & ~0o022)
        sync(fd)

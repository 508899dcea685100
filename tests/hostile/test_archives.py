"""Archives of a machine that was taken over: they write nothing but the files that were asked for."""

from __future__ import annotations

import tarfile
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.apps.cluster.remote.transport import Completed
from holdfast.apps.cluster.watch.copies import _Fetch

if TYPE_CHECKING:
    from pathlib import Path

GOOD, LINK = "ab/" + "0" * 62, "cd/" + "1" * 62


def archive(outside: Path) -> bytes:
    """Pack one good file among members that leave the folder, are links or devices, or have odd names."""
    buffer = BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:

        def add(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", data: bytes = b"") -> None:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.size = kind, target, len(data)
            tar.addfile(member, BytesIO(data))

        add(LINK, tarfile.SYMTYPE, str(outside / "secret"))
        add("ef/" + "2" * 62, tarfile.LNKTYPE, str(outside / "secret"))
        add("ef/" + "3" * 62, tarfile.CHRTYPE)
        add("ef/" + "4" * 62, tarfile.FIFOTYPE)
        add("../" * 5 + GOOD, data=b"evil")
        add(str(outside / "evil"), data=b"evil")
        add("ab/../../evil", data=b"evil")
        add("manifest.json", data=b"evil")
        add(GOOD, data=b"good")
    return buffer.getvalue()


class HostileTransport(NamedTuple):
    """A double of the connection: no real host here answers like this."""

    packed: bytes

    def run(self, arguments: list[str], input: bytes = b"", **_: Any) -> Completed:  # noqa: A002
        listing = f"4 {GOOD}\n9 {LINK}\n9 ../../evil\n".encode()
        return Completed(tuple(arguments), 0, self.packed if input else listing, "")


class Place(NamedTuple):
    transport: HostileTransport
    path: str = "/run"


def test_an_archive_of_a_cluster_writes_only_the_files_that_were_asked_for(tmp_path: Path) -> None:
    outside, copy = tmp_path / "outside", tmp_path / "copies" / "run"
    outside.mkdir()
    copy.mkdir(parents=True)
    (outside / "secret").write_text("secret")
    place: Any = Place(HostileTransport(archive(outside)))
    _Fetch(place, copy, print)._fetch_blobs()
    written = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if not path.is_dir())
    assert written == [f"copies/run/files/{GOOD}", "outside/secret"]
    assert (copy / "files" / GOOD).read_bytes() == b"good"

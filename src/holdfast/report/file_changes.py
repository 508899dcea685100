"""The files of a trial's workspace after a turn, and what the turn changed in them."""

from __future__ import annotations

from difflib import unified_diff
from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec import Struct

from holdfast.store.blobs import LINK, Blobs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.store.rundir import Manifest

Change = Literal["added", "changed", "removed", "unchanged"]
_MOST_TEXT: Final = 20_000
"""characters of a text whose lines are compared"""
_MOST_COMPARED: Final = 50
"""files of a turn whose lines are compared"""


class FileChange(Struct, frozen=True, kw_only=True):
    """A file after a turn, or one that was removed in it."""

    path: str
    change: Change
    digest: str = ""
    """of its content, which is in `files/`; empty for links, folders and removed files"""
    executable: bool = False
    link: str = ""
    """target of a symbolic link"""
    difference: str = ""
    """lines that were added and removed, if both contents are short texts"""


def initial_files(manifest: Manifest) -> dict[str, str]:
    """Return the files that every workspace of a run began with, without files of single rows."""
    workspace: Any = manifest.identity.conversation.get("workspace")
    files = workspace.get("folder") if isinstance(workspace, dict) else None
    return dict(files) if isinstance(files, dict) else {}


def compare_files(
    blobs: Blobs, before: Mapping[str, str], after: Mapping[str, str], *, contents: bool
) -> list[FileChange]:
    """List the files after a turn and the files it removed, changed files first. `contents`: compare their lines."""
    compared, changes = 0, []
    for path in sorted({*before, *after}):
        old, new = before.get(path), after.get(path)
        change: Change = (
            "unchanged" if old == new else "added" if old is None else "removed" if new is None else "changed"
        )
        entry = new or ""
        difference = ""
        if contents and change != "unchanged" and compared < _MOST_COMPARED:
            compared += 1
            difference = _line_difference(_text(blobs, old), _text(blobs, new))
        is_link = entry.startswith(LINK)
        changes.append(
            FileChange(
                path=path,
                change=change,
                digest="" if is_link else entry.removesuffix("+x").removeprefix("sha256:"),
                executable=entry.endswith("+x"),
                link=entry.removeprefix(LINK) if is_link else "",
                difference=difference,
            )
        )
    return sorted(changes, key=lambda each: each.change == "unchanged")


def _text(blobs: Blobs, entry: str | None) -> str | None:
    """Return the text of an entry: empty without a file, None if it is no short text or no longer exists."""
    if not entry:
        return ""
    if entry.startswith(LINK):
        return None
    try:
        data = blobs.read(entry)
        return data.decode() if len(data) <= _MOST_TEXT and b"\0" not in data else None
    except (OSError, ValueError):
        return None


def _line_difference(old: str | None, new: str | None) -> str:
    if old is None or new is None:
        return ""
    lines = unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=2)
    return "\n".join(list(lines)[2:])  # without the names, which the page has

"""A trial's workspace while it runs: a folder that starts as the eval says, and is kept after each turn."""

from __future__ import annotations

import base64
import os
import shutil
import stat
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.canonical import digest
from holdfast.errors import AttemptError
from holdfast.plan.identity import common_files
from holdfast.spec.template import RENDER_ERRORS, expression
from holdfast.store.blobs import Blobs, Files, inside, mode_of, restore, snapshot

if TYPE_CHECKING:
    from holdfast.data.dataset import Sample
    from holdfast.plan.plan import PendingTrial
    from holdfast.spec.load import Eval


class Workspace:
    """One trial's folder."""

    def __init__(self, blobs: Blobs, start: Files, folder: Path) -> None:
        self._blobs = blobs
        self._start = start
        self.now = start
        """what the turn at hand starts from"""
        self.last = start
        """the last state of the folder that was kept or restored"""
        self._untouched = False
        """nothing has happened since the last turn ended, in this process"""
        self._begun = False
        """the turn at hand is had in this process"""
        self._one_at_a_time = threading.Lock()
        """calls that an agent makes side by side are kept, and answered from the record, in threads"""
        self.folder = folder

    def begin(self) -> None:
        """Make the folder what it was when the last turn ended, unless nobody has had it since."""
        if not self._untouched:
            self.go_back_to(self.now)
        self._untouched, self._begun = False, True

    def go_back_to(self, files: Files) -> None:
        """Make the folder what it was at another time."""
        try:
            with self._one_at_a_time:
                restore(files, self._blobs, self.folder)
                self.last = files
        except (ValueError, OSError) as error:
            raise AttemptError("agent", f"the workspace cannot be restored: {error}", retry=False) from error

    def keep(self) -> Files:
        """Keep what the folder holds."""
        try:
            with self._one_at_a_time:
                self.last = snapshot(self.folder, self._blobs)
                return self.last
        except (ValueError, OSError) as error:
            raise AttemptError("agent", f"the workspace cannot be stored: {error}", retry=False) from error

    def ended(self, files: Files | None) -> None:
        """A turn is over; the next one, or another try at it, starts from here."""
        self.now = files or {}
        self._untouched = self._begun and self.last == self.now
        self._begun = False

    def start_anew(self) -> None:
        """No turn has been had."""
        self.now = self._start
        self._untouched = self._begun = False

    def close(self) -> None:
        """Remove the folder; what counts is kept."""
        if self.folder.is_symlink():
            self.folder.unlink()
        else:
            shutil.rmtree(self.folder, ignore_errors=True)


class Workspaces:
    """Makes the workspaces of an eval's trials."""

    def __init__(self, spec: Eval, blobs: Blobs, run: Path) -> None:
        assert spec.workspace is not None
        self._blobs = blobs
        self._run = str(run.resolve())
        common = common_files(spec)
        self._links = {name: path for name, path in common.items() if isinstance(path, str)}
        self._common = {
            name: (path.read_bytes(), mode_of(path)) for name, path in common.items() if isinstance(path, Path)
        }
        self._own = None if spec.workspace.files is None else expression(spec.workspace.files)

    def of(self, pending: PendingTrial) -> Workspace:
        """A new one, with what it starts from kept."""
        sample = pending.sample
        try:
            contents = self._common | self._from_row(sample)
        except (*RENDER_ERRORS, OSError) as error:
            raise AttemptError(
                "bad_request", f"{sample.where}: cannot make the workspace: {error}", retry=False
            ) from error
        files = self._links | {name: self._blobs.keep(data) + mode for name, (data, mode) in contents.items()}
        return Workspace(self._blobs, files, _room(digest([self._run, pending.key])))

    def _from_row(self, sample: Sample) -> dict[str, tuple[bytes, str]]:
        found = None if self._own is None else self._own(sample.fields)
        if found is None:
            return {}
        if not isinstance(found, dict):
            raise TypeError(f"workspace.files gives {found!r:.80}, not a map of paths to contents")
        for name in found:
            inside(Path("/workspace"), name)
        return {name: _contents(value) for name, value in found.items()}


def _room(name: str) -> Path:
    """A folder that is the same after a crash: agents tell their models where they work, and are to say it again."""
    rooms = Path(tempfile.gettempdir(), f"holdfast-{os.getuid()}")
    rooms.mkdir(mode=0o700, exist_ok=True)
    found = rooms.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
        return rooms / name.rpartition(":")[2][:16]
    return Path(tempfile.mkdtemp(prefix="holdfast-"))  # somebody else has made a trap of it


def _contents(value: Any) -> tuple[bytes, str]:
    """Return what a row says of a file: its content and its mode."""
    if isinstance(value, str):
        return value.encode(), ""
    if isinstance(value, dict):
        mode = "+x" if value.get("executable") is True else ""
        if isinstance(value.get("text"), str):
            return value["text"].encode(), mode
        if isinstance(value.get("base64"), str):
            return base64.b64decode(value["base64"], validate=True), mode
    raise TypeError(f"a file's content is a text, {{text: …}} or {{base64: …}}, not {value!r:.80}")

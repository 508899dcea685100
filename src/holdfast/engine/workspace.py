"""The workspace of a trial: a folder with initial files, saved after each turn."""

from __future__ import annotations

import base64
import os
import shutil
import stat
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from holdfast.canonical import digest
from holdfast.containment.survivors import end_survivors
from holdfast.errors import AttemptError
from holdfast.plan.identity import common_files
from holdfast.spec.template import RENDER_ERRORS, expression
from holdfast.store.blobs import Blobs, Files, Ignored, Snapshots, inside, mode_of, restore

if TYPE_CHECKING:
    from msgspec import UnsetType

    from holdfast.data.dataset import Sample
    from holdfast.plan.plan import PendingTrial
    from holdfast.spec.eval import Eval
    from holdfast.store.records import PartialFiles


class Workspace:
    """The folder of one trial."""

    def __init__(self, blobs: Blobs, start: Files, folder: Path, ignored: Ignored, max_size: int) -> None:
        self._blobs = blobs
        self._snapshots = Snapshots(folder, blobs, ignored, max_size)
        self._ignored_start = {name: digest for name, digest in start.items() if name in ignored}
        """initial files that no snapshot has"""
        self._start = start
        self.now = start
        """the files with which the current turn starts"""
        self.last = start
        """the files that were saved or restored last"""
        self._untouched = False
        """nothing has changed the folder since the last turn ended, in this process"""
        self._begun = False
        """the current turn runs in this process"""
        self._one_at_a_time = threading.Lock()
        """the calls that an agent makes at the same time save and restore the folder in threads"""
        self.folder = folder

    def begin(self) -> list[str]:
        """Restore the folder as it was when the last turn ended, unless nothing has changed it since.

        Return the processes that still ran in the folder, which were ended first.
        """
        survivors = []
        if not self._untouched:
            survivors = end_survivors(self.folder) if self.folder.exists() else []
            self.go_back_to(self.now)
        self._untouched, self._begun = False, True
        return survivors

    def go_back_to(self, files: Files) -> None:
        """Restore the folder as it was at another time."""
        try:
            with self._one_at_a_time:
                restore(self._ignored_start | files, self._blobs, self.folder)
                self.last = files
        except (ValueError, OSError) as error:
            raise AttemptError("agent", f"the workspace cannot be restored: {error}", retry=False) from error

    def keep(self, *, trust_times: bool = False) -> Files:
        """Save the files of the folder. `trust_times`: those that look unchanged are not read again."""
        try:
            with self._one_at_a_time:
                self.last = self._snapshots.take(trust_times=trust_times)
                return self.last
        except (ValueError, OSError) as error:
            raise AttemptError("agent", f"the workspace cannot be stored: {error}", retry=False) from error

    @property
    def partial(self) -> PartialFiles | UnsetType:
        """The files that the last snapshot lacks, because the folder is too large."""
        return UNSET if self._snapshots.partial is None else self._snapshots.partial

    @property
    def changed(self) -> bool:
        """True if the files that were saved last are not those with which the current turn started."""
        return self.last | self._ignored_start != self.now | self._ignored_start

    def ended(self, files: Files | None) -> None:
        """End a turn. The next turn, or another attempt at this one, starts with these files."""
        self.now = files or {}
        self._untouched = self._begun and self.last == self.now
        self._begun = False

    def restart(self) -> None:
        """Forget all turns."""
        self.now = self._start
        self._untouched = self._begun = False

    def close(self) -> None:
        """Remove the folder, whose files are saved."""
        if self.folder.is_symlink():
            self.folder.unlink()
        else:
            shutil.rmtree(self.folder, ignore_errors=True)


class Workspaces:
    """Creates the workspaces of an eval's trials."""

    def __init__(self, spec: Eval, blobs: Blobs, run: Path) -> None:
        assert spec.workspace is not None
        self._blobs = blobs
        self._run = str(run.resolve())
        self._ignored = Ignored(spec.workspace.ignore)
        self._max_size = spec.workspace.max_size
        self._common = common_files(spec)
        self._stored: Files | None = None
        """the common files, once they are saved"""
        self._storing = threading.Lock()
        self._row_files = None if spec.workspace.files is None else expression(spec.workspace.files)

    def _store_common(self) -> Files:
        with self._storing:
            if self._stored is None:
                self._stored = {
                    name: path if isinstance(path, str) else self._blobs.keep_file(path) + mode_of(path)
                    for name, path in self._common.items()
                }
            return self._stored

    def create(self, pending: PendingTrial) -> Workspace:
        """Return a new workspace, whose initial files are saved."""
        sample = pending.sample
        try:
            common, own = self._store_common(), self._from_row(sample)
        except (*RENDER_ERRORS, OSError) as error:
            raise AttemptError(
                "bad_request", f"{sample.where}: cannot make the workspace: {error}", retry=False
            ) from error
        files = common | {name: self._blobs.keep(data) + mode for name, (data, mode) in own.items()}
        folder = _folder(digest([self._run, pending.key]))
        return Workspace(self._blobs, files, folder, self._ignored, self._max_size)

    def _from_row(self, sample: Sample) -> dict[str, tuple[bytes, str]]:
        files = None if self._row_files is None else self._row_files(sample.fields)
        if files is None:
            return {}
        if not isinstance(files, dict):
            raise TypeError(f"workspace.files gives {files!r:.80}, not a map of paths to contents")
        for name in files:
            inside(Path("/workspace"), name)
        return {name: _contents(value) for name, value in files.items()}


def _folder(name: str) -> Path:
    """Return a path that stays the same after a crash: agents mention it in requests, which must stay the same."""
    parent = Path(tempfile.gettempdir(), f"holdfast-{os.getuid()}")
    parent.mkdir(mode=0o700, exist_ok=True)
    status = parent.lstat()
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022:
        return parent / name.rpartition(":")[2][:16]
    return Path(tempfile.mkdtemp(prefix="holdfast-"))  # another user could write to the folder


def _contents(value: Any) -> tuple[bytes, str]:
    """Return the content and the mode of a file, as a row describes it."""
    if isinstance(value, str):
        return value.encode(), ""
    if isinstance(value, dict):
        mode = "+x" if value.get("executable") is True else ""
        if isinstance(value.get("text"), str):
            return value["text"].encode(), mode
        if isinstance(value.get("base64"), str):
            return base64.b64decode(value["base64"], validate=True), mode
    raise TypeError(f"a file's content is a text, {{text: …}} or {{base64: …}}, not {value!r:.80}")

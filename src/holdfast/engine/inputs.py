"""Record the files that users' code reads, before any result that may depend on them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from holdfast.functions.observing import exclude, reads, stamp_of
from holdfast.plan.inputs import (
    Input,
    append_inputs,
    digest_now,
    extend_sources,
    is_excluded,
    mend_inputs,
    read_inputs,
    relative,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.engine.session import Session
    from holdfast.functions.observing import Read, Stamp
    from holdfast.plan.identity import RunIdentity
    from holdfast.store.rundir import RunDir

_MOST: Final = 10_000
"""maximum number of recorded files; more have to be named in the eval file"""


def observe_inputs(session: Session) -> InputRecorder:
    """Start to record the files that code reads, except in the folder of the runs."""
    exclude(session.options.runs_dir)
    return InputRecorder(session.identity, session.rundir, session.journals, session.notice)


class InputRecorder:
    """Records what the code of a run reads, in one folder of its journals."""

    def __init__(self, identity: RunIdentity, rundir: RunDir, folder: Path, notice: Callable[[str], None]) -> None:
        self._identity, self._folder, self._notice = identity, folder, notice
        self._place = 0
        """number of this process's reads that were examined"""
        self._sources = [(files, set(files)) for files in identity.code.values()]
        """by part: files whose content is in its key, and those with the modules that they import dynamically"""
        mend_inputs(folder)
        self._lines = set[Input]()
        for each in read_inputs(rundir):
            self._keep(each)
        self._versions: dict[str, tuple[Stamp | None, list[Stamp | str | None]]] = {}
        """by path: the stamp at the first read of this process, and the different contents so far"""
        self._noted: set[str] = set()
        self._started = time.time_ns()

    def flush(self) -> None:
        """Record what was read since the last time, durably."""
        if self._place == len(reads):
            return
        new = reads[self._place :]
        self._place += len(new)
        records = [record for read in new if (record := self._record(read)) is not None]
        append_inputs(self._folder, records)

    def _record(self, read: Read) -> Input | None:
        folder = self._identity.spec.folder
        source, path = relative(read.source, folder), relative(read.path, folder)
        if not self._matters(source, path):
            return None
        if len(self._lines) >= _MOST:
            self._say_full(source)
            return None
        record = self._describe(read, source, path)
        if record in self._lines:
            return None
        self._keep(record)
        return record

    def _keep(self, record: Input) -> None:
        self._lines.add(record)
        for _, sources in self._sources:
            extend_sources(sources, record)

    def _matters(self, source: str, path: str) -> bool:
        """Return True if a part of the run may depend on a file, and its key does not contain it."""
        depends = any(source in sources and path not in files for files, sources in self._sources)
        return depends and not is_excluded(path, self._identity.spec)

    def _describe(self, read: Read, source: str, path: str) -> Input:
        if read.product:
            return Input(source, path, "", product=True)
        now = digest_now(Path(read.path))
        changed = stamp_of(read.path) != read.stamp
        digest = "" if changed else now  # what was read before a change is not known
        first, versions = self._versions.setdefault(path, (read.stamp, []))
        for version in (read.stamp, now) if changed else (now,):
            if version not in versions:
                versions.append(version)
        made_now = first is None or first[1] >= self._started
        if len(versions) > (1 if made_now else 2):
            self._say_once(f"{source} reads {path}, which is written while the eval runs: it is part of no key")
            return Input(source, path, "", product=True)
        if len(versions) == 2:
            self._say_once(
                f"{path} changed while the eval was running, and {source} read it: the same command repeats what "
                f'depends on it. If it is not an input, write `files: ["!{path}"]`.'
            )
        size, mtime = (0, 0) if read.stamp is None else read.stamp[:2]
        return Input(source, path, digest, size, mtime)

    def _say_once(self, message: str) -> None:
        if message not in self._noted:
            self._noted.add(message)
            self._notice(message)

    def _say_full(self, source: str) -> None:
        self._say_once(
            f"{source} reads more than {_MOST:,} files: the others are part of no key. Name them under `files:`."
        )

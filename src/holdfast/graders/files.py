"""Graders of the files in a trial's workspace. They read stored contents, and restore no files."""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING, Any

from msgspec import UnsetType

from holdfast.canonical import digest_bytes
from holdfast.errors import AttemptError
from holdfast.graders.expected import Patterns, expected_names, share
from holdfast.graders.types import WaitingGrader
from holdfast.spec.file_grader_schema import DiffGrader, FileGrader
from holdfast.spec.schema import inside_workspace
from holdfast.spec.template import is_template
from holdfast.store.blobs import Ignored, describe_partial, follow

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from holdfast.graders.types import Case, Verdict
    from holdfast.spec.eval import Origin
    from holdfast.store.blobs import Blobs


class _Workspace:
    """The files of one trial."""

    def __init__(self, case: Case, ignored: Ignored) -> None:
        self._ignored = ignored
        files, blobs = case.output.files, case.blobs
        if isinstance(files, UnsetType) or blobs is None:
            raise AttemptError("grader", "this trial has no workspace to look at", retry=False)
        self._files: Mapping[str, str] = files
        self._blobs: Blobs = blobs
        self._partial = case.output.files_partial

    def has(self, path: str) -> bool:
        """Return True for a file, a link, or a folder with files in it."""
        if self._lists(path) or ((end := follow(self._files, path)) is not None and self._lists(end)):
            return True
        self._check_kept(path)
        return False

    def _lists(self, path: str) -> bool:
        return path in self._files or any(name.startswith(f"{path}/") for name in self._files)

    def _check_kept(self, path: str) -> None:
        """Raise AttemptError for a file that may be missing only because it was not kept."""
        if path in self._ignored:
            raise AttemptError("grader", f"{path} was not kept: workspace.ignore leaves it out", retry=False)
        if isinstance(self._partial, UnsetType):
            return
        paths, ends = self._partial.paths, {path, follow(self._files, path) or path}
        left_out = any(f"{name}/".startswith(f"{end}/") for name in paths for end in ends)
        if left_out or self._partial.count > len(paths):
            raise AttemptError("grader", f"{path} was not kept: {describe_partial(self._partial)}", retry=False)

    def read(self, path: str) -> bytes | None:
        """Return the content of a file; None where there is none. Links are followed inside the workspace only."""
        end = follow(self._files, path)
        if end is None or end not in self._files:
            self._check_kept(path)
            return None
        try:
            return self._blobs.read(self._files[end])
        except (OSError, ValueError) as error:
            raise AttemptError("grader", f"{path} of the workspace cannot be read: {error}", retry=False) from error


def _ignored(origin: Origin, paths: Iterable[str]) -> Ignored:
    """Return what the workspace leaves out; raise ConfigError if a grader looks for it."""
    ignored = Ignored(() if origin.spec.workspace is None else origin.spec.workspace.ignore)
    for path in paths:
        if path in ignored:
            raise origin.error(f"{path} is not kept, because workspace.ignore leaves it out")
    return ignored


class File(WaitingGrader):
    """Checks which files exist, and their contents."""

    schema = FileGrader
    block: FileGrader

    def __init__(self, block: FileGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        self._contents = [
            (expected, Patterns(expected.must_match, block.dialect), Patterns(expected.must_not_match, block.dialect))
            for expected in block.content_patterns
        ]
        paths = (*block.must_exist, *block.must_not_exist, *(expected.path for expected in block.content_patterns))
        self._ignored = _ignored(origin, paths)

    async def judge(self, case: Case) -> Verdict:
        """Make one check per file and per pattern."""
        return await asyncio.to_thread(self._judge, _Workspace(case, self._ignored), case.sample.fields)

    def _judge(self, files: _Workspace, fields: dict[str, Any]) -> Verdict:
        must_exist, must_not_exist = (
            [path for written in paths for path in _paths(written, fields)]
            for paths in (self.block.must_exist, self.block.must_not_exist)
        )
        failures = [f"{path} is missing" for path in must_exist if not files.has(path)]
        failures += [f"{path} is there" for path in must_not_exist if files.has(path)]
        count = len(must_exist) + len(must_not_exist)
        for expected, match, not_match in self._contents:
            required, forbidden = match.for_row(fields), not_match.for_row(fields)
            for path in _paths(expected.path, fields):
                count += 1 + len(required) + len(forbidden)
                data = files.read(path)
                if data is None:
                    failures.append(f"{path} is missing")
                    failures += [f"{path} has no {p.pattern!r}: it is missing" for p in (*required, *forbidden)]
                    continue
                text = data.decode("utf-8", "replace")
                failures += [f"{path} has no {p.pattern!r}" for p in required if not p.search(text)]
                failures += [f"{path} has {p.pattern!r}" for p in forbidden if p.search(text)]
        return share(count, failures)


class Diff(WaitingGrader):
    """Compares files with the expected ones."""

    schema = DiffGrader
    block: DiffGrader

    def __init__(self, block: DiffGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        self._snapshots = _read_snapshots(block, origin)
        self._ignored = _ignored(origin, (expected.path for expected in block.expected_files))

    @classmethod
    def identity(cls, block: DiffGrader, origin: Origin) -> dict[str, Any]:
        """Add the contents of the snapshots."""
        snapshots = {name: digest_bytes(data) for name, data in _read_snapshots(block, origin).items()}
        return {**block.identity(), "snapshots": snapshots}

    async def judge(self, case: Case) -> Verdict:
        """Make one check per file, per snapshot and per text."""
        return await asyncio.to_thread(self._judge, _Workspace(case, self._ignored), case.sample.fields)

    def _judge(self, files: _Workspace, fields: dict[str, Any]) -> Verdict:
        count, failures = 0, []
        for expected in self.block.expected_files:
            snapshot = expected.snapshot
            fragments = [
                (required, fragment)
                for required, written in expected.fragments()
                for fragment in expected_names(written, fields)
            ]
            checks = 1 + (snapshot is not None) + len(fragments)
            for path in _paths(expected.path, fields):
                count += checks
                data = files.read(path)
                if data is None:
                    failures += [f"{path} is missing"] * checks
                    continue
                if snapshot is not None and data != self._snapshots[snapshot]:
                    failures.append(f"{path} is not as {snapshot}")
                text = data.decode("utf-8", "replace")
                failures += [
                    f"{path} {'lacks' if required else 'has'} {fragment!r}"
                    for required, fragment in fragments
                    if (fragment in text) != required
                ]
        verdict = share(count, failures)
        return type(verdict)(verdict.score, "; ".join(dict.fromkeys(failures)))


def _paths(written: str, fields: dict[str, Any]) -> list[str]:
    """Return the paths in the workspace that a text stands for, in their plainest form."""
    if not is_template(written):
        return [written]
    try:
        return [inside_workspace(path) for path in expected_names(written, fields)]
    except ValueError as error:
        raise AttemptError("grader", f"{written!r}: {error}", retry=False) from error


def _read_snapshots(block: DiffGrader, origin: Origin) -> dict[str, bytes]:
    names = {file.snapshot for file in block.expected_files if file.snapshot is not None}
    return {
        name: _content(block.snapshots[name]) if name in block.snapshots else origin.read(name)
        for name in sorted(names)
    }


def _content(value: str | Mapping[Any, str]) -> bytes:
    return value.encode() if isinstance(value, str) else base64.b64decode(value["base64"])

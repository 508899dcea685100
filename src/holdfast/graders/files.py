"""Graders of the files in a trial's workspace. They read the stored contents without restoring files."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from msgspec import UnsetType
from pydantic import Field, model_validator

from holdfast.canonical import digest_bytes
from holdfast.errors import AttemptError
from holdfast.graders.expected import Patterns, expected_names, share
from holdfast.graders.types import WaitingGrader
from holdfast.spec.grader_schema import GraderBlock, PatternBlock
from holdfast.spec.schema import Block, EvalPath, Names, Pattern, WorkspacePath, inside_workspace
from holdfast.spec.template import is_template
from holdfast.store.blobs import Ignored, describe_partial, follow

if TYPE_CHECKING:
    from collections.abc import Iterable

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
        """Raise AttemptError for a file that is missing but may only have been left out."""
        if path in self._ignored:
            raise AttemptError("grader", f"{path} was not kept: workspace.ignore leaves it out", retry=False)
        if isinstance(self._partial, UnsetType):
            return
        paths, ends = self._partial.paths, {path, follow(self._files, path) or path}
        left_out = any(f"{name}/".startswith(f"{end}/") for name in paths for end in ends)
        if left_out or self._partial.count > len(paths):
            raise AttemptError("grader", f"{path} was not kept: {describe_partial(self._partial)}", retry=False)

    def read(self, path: str) -> bytes | None:
        """Return the content of a file, or None. Links are followed only inside the workspace."""
        end = follow(self._files, path)
        if end is None or end not in self._files:
            self._check_kept(path)
            return None
        try:
            return self._blobs.read(self._files[end])
        except (OSError, ValueError) as error:
            raise AttemptError("grader", f"{path} of the workspace cannot be read: {error}", retry=False) from error


def _ignored(origin: Origin, paths: Iterable[str]) -> Ignored:
    """Return the paths that the workspace leaves out; raise ConfigError if a grader looks for one of them."""
    ignored = Ignored(() if origin.spec.workspace is None else origin.spec.workspace.ignore)
    for path in paths:
        if path in ignored:
            raise origin.error(f"{path} is not kept, because workspace.ignore leaves it out")
    return ignored


class ContentPattern(Block):
    """Patterns for the content of one file."""

    path: WorkspacePath
    """File in the workspace."""
    must_match: tuple[Pattern, ...] = ()
    """Patterns that must be found in the file."""
    must_not_match: tuple[Pattern, ...] = ()
    """Patterns that must not be found in the file."""

    templates: ClassVar[tuple[str, ...]] = ("path", "must_match", "must_not_match")
    regexes: ClassVar[tuple[str, ...]] = ("must_match", "must_not_match")

    @model_validator(mode="after")
    def _checks_something(self) -> Self:
        if not self.must_match and not self.must_not_match:
            raise ValueError(
                "checks nothing: give must_match or must_not_match; must_exist checks that a file is there"
            )
        return self


class FileGrader(PatternBlock):
    """Checks which files exist, and what they contain."""

    type: Literal["file"]
    must_exist: tuple[WorkspacePath, ...] = ()
    """Files or folders of the workspace that must exist. Templates over the row."""
    must_not_exist: tuple[WorkspacePath, ...] = ()
    """Files or folders of the workspace that must not exist. Templates over the row."""
    content_patterns: tuple[ContentPattern, ...] = ()
    """Patterns for the contents of files: a list of `{path, must_match, must_not_match}`. Templates over the row."""

    checks: ClassVar[tuple[str, ...]] = ("must_exist", "must_not_exist", "content_patterns")
    templates: ClassVar[tuple[str, ...]] = checks
    needs_workspace: ClassVar[bool] = True


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


class ExpectedFile(Block):
    """A file with its expected content."""

    path: WorkspacePath
    """File in the workspace."""
    snapshot: EvalPath | None = None
    """File in the eval file's folder with the expected content, byte for byte."""
    contains: Names = ()
    """Texts that must occur in the file. A leading `-` means that the text must not occur; a leading `+` is ignored."""

    templates: ClassVar[tuple[str, ...]] = ("path", "contains")
    instead: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"snapshot": "a snapshot's content is part of the key; `contains` takes texts of the row"}
    )

    @model_validator(mode="after")
    def _checks_something(self) -> Self:
        if self.snapshot is None and not self.contains:
            raise ValueError("checks nothing: give snapshot or contains")
        if not all(text for _, text in self.fragments()):
            raise ValueError("checks nothing: an empty text is in every file")
        return self

    def fragments(self) -> list[tuple[bool, str]]:
        """The texts, each with True if it must occur. Signs are read before templates are rendered."""
        return [
            (not written.startswith("-"), (written[1:] if written[0] in "+-" else written).strip())
            for written in self.contains
        ]


class DiffGrader(GraderBlock):
    """Compares files with their expected contents."""

    type: Literal["diff"]
    expected_files: Annotated[tuple[ExpectedFile, ...], Field(min_length=1)]
    """Files to compare: a list of `{path, snapshot, contains}`. `path` and `contains` are templates over the row."""
    snapshots: dict[str, str | dict[Literal["base64"], str]] = Field(default={})
    """Contents of snapshots by name, as a text or `{base64: …}`, instead of files in the eval file's folder."""

    templates: ClassVar[tuple[str, ...]] = ("expected_files",)
    needs_workspace: ClassVar[bool] = True


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
    """Return the normalized paths in the workspace that a text stands for."""
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

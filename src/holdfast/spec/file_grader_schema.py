"""Models of graders that check the files of a trial, or run a program on them. Unknown keys are errors."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from holdfast.spec.grader_schema import GraderBlock, Measure, OnTimeout, PatternBlock, TextBlock
from holdfast.spec.schema import Block, EvalPath, Names, Pattern, Seconds, WorkspacePath


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
            raise ValueError("checks nothing: give must_match or must_not_match (must_exist is for files as such)")
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
        """The texts, each with whether it is wanted: the sign is read before a template is rendered."""
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


class ProgramGrader(TextBlock):
    """Runs a program whose exit code is the verdict."""

    type: Literal["program"]
    command: str = Field(min_length=1)
    """Program to run: a file in the eval file's folder, or a program on the `PATH`."""
    args: tuple[str, ...] = ()
    """Arguments, as templates over the row; one that gives a list stands for several. An argument that names a file in
    the eval file's folder stands for that file."""
    timeout: Seconds = 30
    """Time limit of the program."""
    on_timeout: OnTimeout = "fail"
    """The result of a timeout: a failed check with score 0 (`fail`), or an `error` that the next command retries."""
    network: bool = False
    """Allow access to the network."""

    templates: ClassVar[tuple[str, ...]] = ("args",)
    instead: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"command": "the program is part of the key; its `args` take values of the row"}
    )
    runs_code: ClassVar[bool] = True
    later: ClassVar[tuple[str, ...]] = (*TextBlock.later, "on_timeout")

    @property
    def program(self) -> tuple[str, ...]:
        """The program and its arguments."""
        return (self.command, *self.args)


class CodeGrader(TextBlock):
    """Evaluates expressions that must be true."""

    type: Literal["code"]
    assertions: Names = Field(min_length=1)
    """Expressions that must be true, each of which is one check."""
    language: Literal["python", "javascript"] = "python"
    """Language of the expressions. `javascript` needs `node`."""
    timeout: Seconds = 30
    """Time limit for all assertions together."""
    on_timeout: OnTimeout = "fail"
    """The result of a timeout: a failed check with score 0 (`fail`), or an `error` that the next command retries."""

    templates: ClassVar[tuple[str, ...]] = ()
    instead: ClassVar[Mapping[str, str]] = MappingProxyType({"assertions": "write sample['FIELD']"})
    later: ClassVar[tuple[str, ...]] = (*TextBlock.later, "on_timeout")

    @property
    def measures(self) -> tuple[Measure, ...]:
        """The time, where an assertion speaks of it; to the others it is not told."""
        return ("seconds",) if any("duration_ms" in assertion for assertion in self.assertions) else ()

    @model_validator(mode="after")
    def _are_expressions(self) -> Self:
        if self.language == "python":
            for assertion in self.assertions:
                try:
                    compile(assertion.strip(), "assertion", "eval")
                except (SyntaxError, ValueError) as error:
                    raise ValueError(f"not a Python expression: {assertion!r} ({error})") from error
        return self

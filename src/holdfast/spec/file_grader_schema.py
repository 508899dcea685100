"""What users may write in a grader that looks at a trial's files or runs a program on them. Unknown keys are errors."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from holdfast.spec.grader_schema import GraderBlock, Measure, OnTimeout, PatternBlock, TextBlock
from holdfast.spec.schema import Block, EvalPath, Names, Pattern, Seconds, WorkspacePath


class ContentPattern(Block):
    """What is in a file."""

    path: WorkspacePath
    must_match: tuple[Pattern, ...] = ()
    must_not_match: tuple[Pattern, ...] = ()

    @model_validator(mode="after")
    def _checks_something(self) -> Self:
        if not self.must_match and not self.must_not_match:
            raise ValueError("checks nothing: give must_match or must_not_match (must_exist is for files as such)")
        return self


class FileGrader(PatternBlock):
    """Which files are there, and what is in them."""

    type: Literal["file"]
    must_exist: tuple[WorkspacePath, ...] = ()
    must_not_exist: tuple[WorkspacePath, ...] = ()
    content_patterns: tuple[ContentPattern, ...] = ()

    checks: ClassVar[tuple[str, ...]] = ("must_exist", "must_not_exist", "content_patterns")
    templates: ClassVar[tuple[str, ...]] = ()
    needs_workspace: ClassVar[bool] = True

    def patterns(self) -> Iterator[tuple[str, bool]]:
        """Return those of all files."""
        for expected in self.content_patterns:
            for pattern in (*expected.must_match, *expected.must_not_match):
                yield pattern, False


class ExpectedFile(Block):
    """A file and what it should be."""

    path: WorkspacePath
    snapshot: EvalPath | None = None
    """a file in the eval's folder with the same content, byte for byte"""
    contains: Names = ()
    """texts in it; with `-` in front, texts that are not; a `+` in front is only for show"""

    @model_validator(mode="after")
    def _checks_something(self) -> Self:
        if self.snapshot is None and not self.contains:
            raise ValueError("checks nothing: give snapshot or contains")
        if not all(text for _, text in self.fragments()):
            raise ValueError("checks nothing: an empty text is in every file")
        return self

    def fragments(self) -> list[tuple[bool, str]]:
        """The texts, each with whether it is wanted."""
        return [
            (not written.startswith("-"), (written[1:] if written[0] in "+-" else written).strip())
            for written in self.contains
        ]


class DiffGrader(GraderBlock):
    """Files compared with what they should be."""

    type: Literal["diff"]
    expected_files: Annotated[tuple[ExpectedFile, ...], Field(min_length=1)]
    snapshots: dict[str, str | dict[Literal["base64"], str]] = Field(default={})
    """contents of snapshots by their names, instead of files in the eval's folder: a text or {base64: …}"""

    templates: ClassVar[tuple[str, ...]] = ()
    needs_workspace: ClassVar[bool] = True


class ProgramGrader(TextBlock):
    """A program that says by its exit code whether the output is good."""

    type: Literal["program"]
    command: str = Field(min_length=1)
    """a file in the eval's folder, or a program on the PATH"""
    args: tuple[str, ...] = ()
    """templates over the row; one that names a file in the eval's folder is that file"""
    timeout: Seconds = 30
    on_timeout: OnTimeout = "fail"
    network: bool = False
    """whether it may talk to others"""

    templates: ClassVar[tuple[str, ...]] = ("args",)
    later: ClassVar[tuple[str, ...]] = (*TextBlock.later, "on_timeout")


class CodeGrader(TextBlock):
    """Expressions that have to be true."""

    type: Literal["code"]
    assertions: Names = Field(min_length=1)
    language: Literal["python", "javascript"] = "python"
    timeout: Seconds = 30
    on_timeout: OnTimeout = "fail"

    templates: ClassVar[tuple[str, ...]] = ()
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

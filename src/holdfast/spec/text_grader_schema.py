"""Models of graders that compare texts."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from holdfast.spec.grader_schema import Expected, NotEmpty, PatternBlock, TextBlock
from holdfast.spec.schema import Strings, check_pattern


class ExactGrader(TextBlock):
    """Checks that the whole answer equals the expected one."""

    type: Literal["exact"]
    expected: Expected = "{{ expected }}"
    """Expected answer, or a list of accepted answers. Templates over the row."""
    ignore_case: bool = False
    """Ignore upper and lower case."""
    strip: bool = True
    """Ignore white space around the answer and the expected value."""


class TextGrader(PatternBlock, TextBlock):
    """Checks which texts and patterns the answer contains. Keys that end in `_cs` match case."""

    type: Literal["text"]
    contains: Strings = []
    """Texts that must all occur, ignoring case. Templates over the row."""
    contains_cs: Strings = []
    """Texts that must all occur, matching case. Templates over the row."""
    contains_any: Strings = []
    """Texts of which at least one must occur, ignoring case. Templates over the row."""
    contains_any_cs: Strings = []
    """Texts of which at least one must occur, matching case. Templates over the row."""
    not_contains: Strings = []
    """Texts that must not occur, ignoring case. Templates over the row."""
    not_contains_cs: Strings = []
    """Texts that must not occur, matching case. Templates over the row."""
    regex_match: Strings = []
    """Patterns that must be found. Templates over the row."""
    regex_not_match: Strings = []
    """Patterns that must not be found. Templates over the row."""

    checks: ClassVar[tuple[str, ...]] = (
        "contains",
        "contains_cs",
        "contains_any",
        "contains_any_cs",
        "not_contains",
        "not_contains_cs",
        "regex_match",
        "regex_not_match",
    )
    templates: ClassVar[tuple[str, ...]] = checks
    regexes: ClassVar[tuple[str, ...]] = checks[6:]
    alternatives: ClassVar[tuple[str, ...]] = checks[:6]

    @model_validator(mode="after")
    def _regexes_compile(self) -> Self:
        for pattern in (*self.regex_match, *self.regex_not_match):
            check_pattern(pattern)
        if any("" in getattr(self, field) for field in self.checks):
            raise ValueError("checks nothing: an empty text is in every answer")
        return self


class ChoiceGrader(TextBlock):
    """Checks the letter of a multiple-choice answer."""

    type: Literal["choice"]
    expected: Annotated[str | int | list[str | int], NotEmpty] = "{{ expected }}"
    """Letter of the right choice, its position counted from 0, or a list of accepted ones."""
    choices: str = Field(default="ABCDEFGHIJ", min_length=1)
    """Letters that count as choices."""

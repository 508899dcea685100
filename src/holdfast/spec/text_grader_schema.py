"""Models of graders that compare texts."""

from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from holdfast.spec.grader_schema import Expected, NotEmpty, PatternBlock, TextBlock
from holdfast.spec.regex import compile_regex
from holdfast.spec.schema import Strings


class ExactGrader(TextBlock):
    """Checks that the whole answer equals the expected one."""

    type: Literal["exact"]
    expected: Expected = "{{ expected }}"
    """Expected answer, or a list of accepted answers. Templates over the row."""
    ignore_case: bool = False
    """Ignore upper and lower case."""
    strip: bool = True
    """Ignore white space around the answer and the expected value."""

    alternatives: ClassVar[tuple[str, ...]] = ("expected",)


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
    """Patterns that must be found."""
    regex_not_match: Strings = []
    """Patterns that must not be found."""

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
    templates: ClassVar[tuple[str, ...]] = checks[:6]
    alternatives: ClassVar[tuple[str, ...]] = templates

    @model_validator(mode="after")
    def _regexes_compile(self) -> Self:
        for pattern, _ in self.patterns():
            compile_regex(pattern)
        if any("" in getattr(self, field) for field in self.checks):
            raise ValueError("checks nothing: an empty text is in every answer")
        return self

    def patterns(self) -> Iterable[tuple[str, bool]]:
        """Return those of `regex_match` and `regex_not_match`."""
        return ((pattern, False) for pattern in (*self.regex_match, *self.regex_not_match))


class ChoiceGrader(TextBlock):
    """Checks the letter of a multiple-choice answer."""

    type: Literal["choice"]
    expected: Annotated[str | int | list[str | int], NotEmpty] = "{{ expected }}"
    """Letter of the right choice, its position counted from 0, or a list of accepted ones."""
    choices: str = Field(default="ABCDEFGHIJ", min_length=1)
    """Letters that count as choices."""

    alternatives: ClassVar[tuple[str, ...]] = ("expected",)

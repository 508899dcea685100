"""The model of the grader that compares numbers."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from holdfast.spec.expected import alternatives
from holdfast.spec.grader_schema import NotEmpty, PatternBlock, TextBlock
from holdfast.spec.numbers import numbers_in
from holdfast.spec.regex import compile_regex
from holdfast.spec.template import RENDER_ERRORS, template


class NumberGrader(PatternBlock, TextBlock):
    """Checks a number in the answer: the last one, or the one after a pattern."""

    type: Literal["number"]
    expected: Annotated[str | int | float | list[str | int | float], NotEmpty] = "{{ expected }}"
    """Expected number, or a list of accepted numbers. Templates over the row."""
    after: str | None = None
    """Pattern. The first number after its last match is compared. Default: the last number of the answer."""
    tolerance: float = Field(default=0.0, ge=0)
    """Largest accepted difference."""
    relative: bool = False
    """Take `tolerance` as a share of the expected number."""

    alternatives: ClassVar[tuple[str, ...]] = ("expected",)

    @model_validator(mode="after")
    def _regex_compiles(self) -> Self:
        if self.after is not None:
            compile_regex(self.after)
        return self

    @model_validator(mode="after")
    def _expects_numbers(self) -> Self:
        for part in self.expected if isinstance(self.expected, list) else [self.expected]:
            if not (isinstance(part, str) and "{" in part) and len(numbers_in(str(part))) != 1:
                raise ValueError(f"expected: {part!r} is not one number; write several as a list")
        return self

    def reads_as_before(self, fields: Mapping[str, Any]) -> bool:
        """Return True for a row that is read as before: of a text with several numbers, the first once counted."""
        if not super().reads_as_before(fields):
            return False
        if not isinstance(self.expected, str):
            return True
        value = template(self.expected).lone_field(fields)
        if isinstance(value, int | float) or (isinstance(value, str) and value.isdecimal()):
            return True  # as most rows are
        try:
            return all(len(numbers_in(text)) < 2 for text in alternatives(self.expected, fields))
        except RENDER_ERRORS:
            return False

    def patterns(self) -> Iterable[tuple[str, bool]]:
        """Return that of `after`."""
        return () if self.after is None else ((self.after, False),)

"""The model of the grader that compares numbers."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from holdfast.spec.grader_schema import NotEmpty, PatternBlock, TextBlock
from holdfast.spec.numbers import numbers_in
from holdfast.spec.regex import compile_regex


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

    @model_validator(mode="after")
    def _regex_compiles(self) -> Self:
        if self.after is not None:
            compile_regex(self.after)
        return self

    @model_validator(mode="after")
    def _expects_numbers(self) -> Self:
        for part in self.expected if isinstance(self.expected, list) else [self.expected]:
            if any(mark in str(part) for mark in ("{{", "{%", "{#")):
                continue
            numbers = numbers_in(str(part))
            if len(numbers) != 1:
                raise ValueError(f"expected: {part!r} is not one number; write several as a list")
            if numbers[0].value is None:
                raise ValueError(f"expected: {part!r} can be read in more than one way; write it without separators")
        return self

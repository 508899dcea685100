"""What users may write in a grader, one model per kind. Unknown keys are errors."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from holdfast.spec.fields import Block, Strings


class GraderBlock(Block):
    """What every grader has."""

    type: str
    name: str = ""
    weight: float = Field(default=1.0, ge=0)
    """of this grader in a trial's overall score"""
    threshold: float | None = Field(default=None, ge=0, le=1)
    """the score from which it passes"""
    where: str | None = None
    """an expression over the row's fields: where it is false, the grader does not apply"""

    checks: ClassVar[tuple[str, ...]] = ()
    """of these fields at least one must be set, or the grader would check nothing"""
    templates: ClassVar[tuple[str, ...]] = ("expected",)

    @model_validator(mode="after")
    def _checks_something(self) -> GraderBlock:
        if self.checks and not any(getattr(self, field) for field in self.checks):
            written = (type(self).model_fields[field].alias or field for field in self.checks)
            raise ValueError(f"checks nothing: give at least one of {', '.join(written)}")
        return self

    def identity(self) -> dict[str, Any]:
        """What is in the grade's key: all but the name, the weight and the threshold."""
        identity = self.model_dump(exclude={"name", "weight", "threshold", "where"})
        return identity if self.where is None else {**identity, "where": self.where}


class ExactGrader(GraderBlock):
    """The whole answer equals the expected one."""

    type: Literal["exact"]
    expected: str | int | float | bool = "{{ expected }}"
    ignore_case: bool = False
    strip: bool = True


class TextGrader(GraderBlock):
    """The answer contains, or matches, what it should. Ignores case unless the key ends in `_cs`."""

    type: Literal["text"]
    contains: Strings = []
    contains_cs: Strings = []
    contains_any: Strings = []
    contains_any_cs: Strings = []
    not_contains: Strings = []
    not_contains_cs: Strings = []
    regex_match: Strings = []
    regex_not_match: Strings = []

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

    @model_validator(mode="after")
    def _regexes_compile(self) -> TextGrader:
        for pattern in [*self.regex_match, *self.regex_not_match]:
            compile_regex(pattern)
        if any("" in getattr(self, field) for field in self.checks):
            raise ValueError("checks nothing: an empty text is in every answer")
        return self


class ChoiceGrader(GraderBlock):
    """The letter of a multiple-choice answer."""

    type: Literal["choice"]
    expected: str | int = "{{ expected }}"
    """a letter, or the position of the right choice counted from 0"""
    choices: str = Field(default="ABCDEFGHIJ", min_length=1)
    """the letters that count"""


class NumberGrader(GraderBlock):
    """A number in the answer: the last one, or the one after a pattern."""

    type: Literal["number"]
    expected: str | int | float = "{{ expected }}"
    after: str | None = None
    """a regular expression; the first number after its last match counts"""
    tolerance: float = Field(default=0.0, ge=0)
    relative: bool = False
    """the tolerance is a share of the expected number"""

    @model_validator(mode="after")
    def _regex_compiles(self) -> NumberGrader:
        if self.after is not None:
            compile_regex(self.after)
        return self


class JsonSchemaGrader(GraderBlock):
    """The answer is JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    schema_file: str | None = None
    extract: bool = False
    """look for the JSON in a ```json block or between the first and last brace"""

    checks: ClassVar[tuple[str, ...]] = ("json_schema", "schema_file")
    templates: ClassVar[tuple[str, ...]] = ()


class PythonGrader(GraderBlock):
    """A Python function, `file.py:function`, given what its parameters name."""

    type: Literal["python"]
    function: str = Field(pattern=r"^[^:]+\.py:[A-Za-z_][\w.]*$")
    expected: str | int | float | bool | None = None
    """default: the row's `expected`, else its `answer`"""
    params: dict[str, Any] = {}
    """further keyword arguments"""
    version: str | None = None


class PromptGrader(GraderBlock):
    """A judge model with a rubric."""

    type: Literal["prompt"]
    rubric: str = Field(min_length=1)
    """what to judge by; a template over the row, with `output` and `messages`"""
    model: str | None = None
    """the judge; default: the target's model and endpoint"""
    base_url: str | None = None
    api_key_env: str | None = None
    params: dict[str, Any] = {"temperature": 0}
    transcript: Literal["last", "all"] = "last"
    """what the judge sees: the last reply, or the whole conversation"""

    templates: ClassVar[tuple[str, ...]] = ("rubric",)


GRADERS: dict[str, type[GraderBlock]] = {
    "exact": ExactGrader,
    "text": TextGrader,
    "choice": ChoiceGrader,
    "number": NumberGrader,
    "json_schema": JsonSchemaGrader,
    "python": PythonGrader,
    "prompt": PromptGrader,
}


TAKEN_NAMES = frozenset({"overall", "score", "passed", "coverage", "target"})
"""words of reports, gates and errors, which a grader of that name could not be told from"""


def compile_regex(pattern: str) -> re.Pattern[str]:
    """A pattern as graders use it, or a ValueError that names it."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {pattern!r} ({error})") from error

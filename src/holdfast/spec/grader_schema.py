"""Models of the keys that all graders share, and of graders that check what was said. Unknown keys are errors."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeGuard

from pydantic import BeforeValidator, Field, model_validator

from holdfast.spec.expected import alternatives, reads_as_before
from holdfast.spec.numbers import numbers_in
from holdfast.spec.regex import Dialect, compile_regex
from holdfast.spec.schema import Block, Formula, Strings
from holdfast.spec.template import RENDER_ERRORS, template

if TYPE_CHECKING:
    from holdfast.spec.judge_schema import PromptGrader

Measure = Literal["tokens", "seconds"]
Combine = Literal["majority", "mean", "median", "min"]
"""how the votes of several judges become one verdict"""
OnTimeout = Literal["fail", "error"]
"""what a check is that takes too long because of the answer: failed, with the score 0, or an error and tried again"""


def _not_empty(value: Any) -> Any:
    if value is None:
        raise ValueError("must not be null; omit it to use the row's `expected`")
    if value == []:
        raise ValueError("is an empty list: no answer could be right")
    return value


NotEmpty = BeforeValidator(_not_empty)
Expected = Annotated[str | int | float | bool | list[str | int | float | bool], NotEmpty]
"""a text, a number, a template over the row, or a list of them: any one of the list will do"""


class GraderBlock(Block):
    """Keys that every grader has."""

    type: str
    """Type of the grader."""
    name: str = ""
    """Name in reports. Default: the type. `overall`, `score`, `passed`, `coverage` and `target` are reserved."""
    weight: float = Field(default=1.0, ge=0)
    """Weight in the trial's overall score. A grader of weight 0 is reported, and changes neither the score of a trial
    nor whether it passes."""
    threshold: float | None = Field(default=None, ge=0, le=1)
    """Minimum score to pass. The default depends on the type."""
    where: str | None = None
    """Expression over the row's fields. Where it is false, the grader does not apply to the row and counts in no
    number."""

    checks: ClassVar[tuple[str, ...]] = ()
    """of these fields at least one must be set, or the grader would check nothing"""
    templates: ClassVar[tuple[str, ...]] = ("expected",)
    alternatives: ClassVar[tuple[str, ...]] = ()
    """fields whose templates may stand for a list of strings"""
    later: ClassVar[tuple[str, ...]] = ("where", "transcript")
    """fields that are in the key only where they are set, so that grades from before they came stay good"""
    inherited: ClassVar[tuple[str, ...]] = ()
    """fields whose defaults come from the target; a `baseline` is graded with those of the first target"""
    needs_workspace: ClassVar[bool] = False

    @property
    def measures(self) -> tuple[Measure, ...]:
        """Measures of the output that the verdict depends on, beside its text: a part of its grades' keys."""
        return ()

    def expanded(self) -> "tuple[GraderBlock, ...]":
        """Return the graders that the block stands for: itself, after the votes that it combines."""
        return (self,)

    @property
    def program(self) -> tuple[str, ...]:
        """The program that the grader runs, with its arguments; empty where there is none."""
        return ()

    @model_validator(mode="after")
    def _checks_something(self) -> Self:
        if self.checks and not any(self._is_set(field) for field in self.checks):
            written = (type(self).model_fields[field].alias or field for field in self.checks)
            raise ValueError(f"checks nothing: give at least one of {', '.join(written)}")
        return self

    def _is_set(self, field: str) -> bool:
        value = getattr(self, field)
        return value not in (None, "", [], (), {}) and value != type(self).model_fields[field].default

    def reads_as_before(self, fields: Mapping[str, Any]) -> bool:
        """Return True for a row that is read as before lists were supported, so that earlier verdicts hold."""
        for name in self.alternatives:
            value = getattr(self, name)
            if name == "expected":
                if not reads_as_before(value, fields):
                    return False
            elif not all(reads_as_before(part, fields) for part in value):
                return False
        return True

    def identity(self) -> dict[str, Any]:
        """Return the keys of the block that are in a grade's key: all but name, weight, threshold and timeout."""
        identity = self.model_dump(exclude={"name", "weight", "threshold", "timeout"})
        for field in self.later:
            if field in identity and not self._is_set(field):
                del identity[field]
        return identity


def is_judge(block: object) -> "TypeGuard[PromptGrader]":
    """Tell a judge from other blocks, without its schema, which evals without judges do not import."""
    return isinstance(block, GraderBlock) and block.type == "prompt"


class TextBlock(GraderBlock):
    """A grader that looks at text."""

    transcript: Literal["last", "all"] = "last"
    """What to look at: the `last` reply, or `all` replies so far, joined by blank lines."""


class PatternBlock(GraderBlock):
    """A grader with regular expressions."""

    dialect: Dialect = "python"
    """Meaning of [patterns](graders.md#patterns) that both Python's `re` and RE2 can read: `python`, or `re2` as in
    Go."""

    def patterns(self) -> Iterable[tuple[str, bool]]:
        """Return all regular expressions, each with whether it ignores case."""
        raise NotImplementedError

    def identity(self) -> dict[str, Any]:
        """Add the engine where its verdict could differ from that of Python's `re`, which made all earlier grades."""
        identity = super().identity()
        del identity["dialect"]
        regexes = (compile_regex(p, ignore_case=loose, dialect=self.dialect) for p, loose in self.patterns())
        return {**identity, "engine": "re2"} if any(regex.key for regex in regexes) else identity


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


class LikelihoodGrader(GraderBlock):
    """Checks that the right continuation is the most likely one. Needs `continuations`."""

    type: Literal["likelihood"]
    expected: Annotated[str | int | list[str | int], NotEmpty] = "{{ expected }}"
    """Right continuation: its position counted from 0, its text among `choices`, or a list of accepted ones."""
    normalize: Literal["none", "chars", "bytes", "tokens"] = "none"
    """Divide each log-likelihood by the length of its text, in characters, bytes of UTF-8 or tokens."""
    choices: Formula | None = None
    """Expression over the row that returns the texts whose lengths normalize, and among which `expected` is looked
    up. Default: the continuations without white space at their beginning."""
    greedy: bool = False
    """Check instead that greedy decoding would produce the right continuation."""

    @model_validator(mode="after")
    def _greedy_is_not_normalized(self) -> Self:
        if self.greedy and self.normalize != "none":
            raise ValueError("`greedy` compares no likelihoods, so there is nothing to `normalize`")
        return self


TAKEN_NAMES = frozenset({"overall", "score", "passed", "coverage", "target"})
"""words of reports, gates and errors, which a grader of that name could not be told from"""

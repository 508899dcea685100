"""What users may write in a grader that looks at what was said. Unknown keys are errors.

What every kind has is here too; graders of tool calls are in `tool_fields`, those of files in `file_fields`.
"""

from collections.abc import Iterable
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from holdfast.spec.fields import BaseUrl, Block, EvalPath, Seconds, Strings
from holdfast.spec.regex import Dialect, compile_regex

Measure = Literal["tokens", "seconds"]
OnTimeout = Literal["fail", "error"]
"""what a check is that takes too long because of the answer: failed, with the score 0, or an error and tried again"""


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
    later: ClassVar[tuple[str, ...]] = ("where", "transcript")
    """fields that are in the key only where they are set, so that grades from before they came stay good"""
    decides: ClassVar[bool] = False
    """it says itself whether it passes; a threshold, where one is given, goes before"""
    needs_workspace: ClassVar[bool] = False

    @property
    def measures(self) -> tuple[Measure, ...]:
        """What it looks at beside what was said: a part of its grades' keys, since the same words may take longer."""
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

    def identity(self) -> dict[str, Any]:
        """What is in the grade's key: all but the name, the weight, the threshold and how long it may take."""
        identity = self.model_dump(exclude={"name", "weight", "threshold", "timeout"})
        for field in self.later:
            if field in identity and not self._is_set(field):
                del identity[field]
        return identity


class TextBlock(GraderBlock):
    """A grader that looks at text."""

    transcript: Literal["last", "all"] = "last"
    """the last reply, or all that the target has said so far, joined by blank lines"""


class PatternBlock(GraderBlock):
    """A grader with regular expressions."""

    dialect: Dialect = "python"
    """whose meaning a pattern has that both Python's `re` and RE2 can read: `python`, or `re2` (Go's)"""

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
    """The whole answer equals the expected one."""

    type: Literal["exact"]
    expected: str | int | float | bool = "{{ expected }}"
    ignore_case: bool = False
    strip: bool = True


class TextGrader(PatternBlock, TextBlock):
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
    """The letter of a multiple-choice answer."""

    type: Literal["choice"]
    expected: str | int = "{{ expected }}"
    """a letter, or the position of the right choice counted from 0"""
    choices: str = Field(default="ABCDEFGHIJ", min_length=1)
    """the letters that count"""


class NumberGrader(PatternBlock, TextBlock):
    """A number in the answer: the last one, or the one after a pattern."""

    type: Literal["number"]
    expected: str | int | float = "{{ expected }}"
    after: str | None = None
    """a regular expression; the first number after its last match counts"""
    tolerance: float = Field(default=0.0, ge=0)
    relative: bool = False
    """the tolerance is a share of the expected number"""

    @model_validator(mode="after")
    def _regex_compiles(self) -> Self:
        if self.after is not None:
            compile_regex(self.after)
        return self

    def patterns(self) -> Iterable[tuple[str, bool]]:
        """Return that of `after`."""
        return () if self.after is None else ((self.after, False),)


class JsonSchemaGrader(GraderBlock):
    """The answer is JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    schema_file: str | None = None
    extract: bool = False
    """look for the JSON in a ```json block or between the first and last brace"""

    checks: ClassVar[tuple[str, ...]] = ("json_schema", "schema_file")
    templates: ClassVar[tuple[str, ...]] = ()


class PythonGrader(TextBlock):
    """A Python function, `file.py:function`, given what its parameters name."""

    type: Literal["python"]
    function: str = Field(pattern=r"^[^:]+\.py:[A-Za-z_][\w.]*$")
    expected: str | int | float | bool | None = None
    """default: the row's `expected`, else its `answer`"""
    params: dict[str, Any] = {}
    """further keyword arguments"""
    version: str | None = None


class SimilarityGrader(TextBlock):
    """How alike the answer and the expected one are, letter by letter."""

    type: Literal["similarity"]
    expected: str | int | float = "{{ expected }}"
    method: Literal["ratio", "partial", "token_sort", "token_set", "levenshtein", "jaro_winkler"] = "ratio"
    ignore_case: bool = False


class MathGrader(TextBlock):
    """The answer equals the expected one as mathematics: 1/2 is 0.5 is \\frac{2}{4}."""

    type: Literal["math"]
    expected: str | int | float = "{{ expected }}"
    timeout: Seconds = 10
    """for one comparison"""
    on_timeout: OnTimeout = "fail"

    later: ClassVar[tuple[str, ...]] = (*TextBlock.later, "on_timeout")


class TriggerGrader(GraderBlock):
    """Whether the prompt is one that a skill is meant for, by the words of its SKILL.md."""

    type: Literal["trigger"]
    skill_path: EvalPath
    """the SKILL.md, or the folder it lies in"""
    mode: Literal["positive", "negative"]
    """`negative`: the prompt should not be one"""

    templates: ClassVar[tuple[str, ...]] = ()


RUBRIC_FILES = (".md", ".yaml", ".yml", ".txt")


class PromptGrader(GraderBlock):
    """A judge model with a rubric, or with a prompt of the user's and two tools to say passed and failed with."""

    type: Literal["prompt"]
    rubric: str | None = Field(default=None, min_length=1)
    """what to judge by; a template over the row, with `output` and `messages`, or a file in the eval's folder"""
    prompt: str | None = Field(default=None, min_length=1)
    """the judge's task in the user's words; it answers by calling set_waza_grade_pass and set_waza_grade_fail"""
    model: str | None = None
    """the judge; default: the target's model and endpoint"""
    base_url: BaseUrl | None = None
    api_key_env: str | None = None
    params: dict[str, Any] = {"temperature": 0}
    transcript: Literal["last", "all"] = "last"
    """what the judge sees: the last reply, or the whole conversation"""
    continue_session: bool = False
    mode: Literal["independent", "pairwise"] = "independent"

    checks: ClassVar[tuple[str, ...]] = ("rubric", "prompt")
    templates: ClassVar[tuple[str, ...]] = ("rubric", "prompt")
    later: ClassVar[tuple[str, ...]] = ("where", "prompt", "continue_session", "mode")

    @model_validator(mode="after")
    def _judges_alone(self) -> Self:
        if self.continue_session:
            raise ValueError(
                "continue_session: a judge never goes on in the target's own session; `transcript: all` shows it "
                "the whole conversation"
            )
        if self.mode == "pairwise":
            raise ValueError(
                "mode: pairwise judges two runs at once, which a grader cannot; grade both with the same rubric and "
                "use `holdfast compare`"
            )
        return self


SAID: dict[str, type[GraderBlock]] = {
    "exact": ExactGrader,
    "text": TextGrader,
    "choice": ChoiceGrader,
    "number": NumberGrader,
    "similarity": SimilarityGrader,
    "math": MathGrader,
    "json_schema": JsonSchemaGrader,
    "python": PythonGrader,
    "prompt": PromptGrader,
    "trigger": TriggerGrader,
}
"""the graders of this module"""


TAKEN_NAMES = frozenset({"overall", "score", "passed", "coverage", "target"})
"""words of reports, gates and errors, which a grader of that name could not be told from"""

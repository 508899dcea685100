"""What users may write in a grader that looks at what was said. Unknown keys are errors.

What every kind has is here too; graders of tool calls are in `tool_fields`, those of files in `file_fields`.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from holdfast.spec.expected import alternatives, reads_as_before
from holdfast.spec.numbers import numbers_in
from holdfast.spec.regex import Dialect, compile_regex
from holdfast.spec.schema import BaseUrl, Block, EvalPath, Seconds, Strings, refuse_secret_paths
from holdfast.spec.template import RENDER_ERRORS, template

Measure = Literal["tokens", "seconds"]
OnTimeout = Literal["fail", "error"]
"""what a check is that takes too long because of the answer: failed, with the score 0, or an error and tried again"""


def _given(value: Any) -> Any:
    if value is None:
        raise ValueError("needs a value; without this key it is the row's field `expected`")
    if value == []:
        raise ValueError("is an empty list: no answer could be right")
    return value


_Given = BeforeValidator(_given)
Expected = Annotated[str | int | float | bool | list[str | int | float | bool], _Given]
"""a text, a number, a template over the row, or a list of them: any one of the list will do"""


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
    alternatives: ClassVar[tuple[str, ...]] = ()
    """fields whose templates may stand for a list of texts"""
    later: ClassVar[tuple[str, ...]] = ("where", "transcript")
    """fields that are in the key only where they are set, so that grades from before they came stay good"""
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

    def reads_as_before(self, fields: Mapping[str, Any]) -> bool:
        """Whether a row means what it meant before lists of answers had a meaning, so that earlier verdicts hold."""
        for name in self.alternatives:
            value = getattr(self, name)
            if name == "expected":
                if not reads_as_before(value, fields):
                    return False
            elif not all(reads_as_before(part, fields) for part in value):
                return False
        return True

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
    expected: Expected = "{{ expected }}"
    ignore_case: bool = False
    strip: bool = True

    alternatives: ClassVar[tuple[str, ...]] = ("expected",)


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
    """The letter of a multiple-choice answer."""

    type: Literal["choice"]
    expected: Annotated[str | int | list[str | int], _Given] = "{{ expected }}"
    """a letter, or the position of the right choice counted from 0; of a list any one"""
    choices: str = Field(default="ABCDEFGHIJ", min_length=1)
    """the letters that count"""

    alternatives: ClassVar[tuple[str, ...]] = ("expected",)


class NumberGrader(PatternBlock, TextBlock):
    """A number in the answer: the last one, or the one after a pattern."""

    type: Literal["number"]
    expected: Annotated[str | int | float | list[str | int | float], _Given] = "{{ expected }}"
    """one number, or a list of which any one will do"""
    after: str | None = None
    """a regular expression; the first number after its last match counts"""
    tolerance: float = Field(default=0.0, ge=0)
    relative: bool = False
    """the tolerance is a share of the expected number"""

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
        """Whether a row means what it meant: of a text with several numbers the first once counted."""
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
    """default: the row's field of the parameter's name, else `expected`, `answer`, `ground_truth`, `target`, `ideal`"""
    params: dict[str, Any] = {}
    """further keyword arguments"""
    version: str | None = None


class SimilarityGrader(TextBlock):
    """How alike the answer and the expected one are, letter by letter."""

    type: Literal["similarity"]
    expected: Expected = "{{ expected }}"
    """of a list the one that is most alike counts"""
    method: Literal["ratio", "partial", "token_sort", "token_set", "levenshtein", "jaro_winkler"] = "ratio"
    ignore_case: bool = False

    alternatives: ClassVar[tuple[str, ...]] = ("expected",)


class MathGrader(TextBlock):
    """The answer equals the expected one as mathematics: 1/2 is 0.5 is \\frac{2}{4}."""

    type: Literal["math"]
    expected: Annotated[str | int | float | list[str | int | float], _Given] = "{{ expected }}"
    """of a list any one will do"""
    timeout: Seconds = 10
    """for one comparison"""
    on_timeout: OnTimeout = "fail"

    later: ClassVar[tuple[str, ...]] = (*TextBlock.later, "on_timeout")

    alternatives: ClassVar[tuple[str, ...]] = ("expected",)


class TriggerGrader(GraderBlock):
    """Whether the prompt is one that a skill is meant for, by the words of its SKILL.md."""

    type: Literal["trigger"]
    skill_path: EvalPath | None = None
    """the SKILL.md, or the folder it lies in"""
    skill: str | None = None
    """the text of the SKILL.md, where the file is not to be read"""
    mode: Literal["positive", "negative"]
    """`negative`: the prompt should not be one"""

    templates: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="after")
    def _names_one_skill(self) -> Self:
        if self.skill_path is None and self.skill is None:
            raise ValueError("needs the skill: give `skill_path`, or its text as `skill`")
        return self


class NatGrader(GraderBlock):
    """An evaluator of NeMo Agent Toolkit, run in this process."""

    type: Literal["nat"]
    config_file: str | None = Field(default=None, pattern=r"\.(ya?ml|json)$")
    """the configuration that has the evaluator, and the components it names; default: the target's"""
    evaluator: str | dict[str, Any] | None = None
    """its name under `eval.evaluators`, or its block with a `_type`; default: the grader's name"""
    override: dict[str, Any] = {}
    """values laid over the configuration, by dotted path"""
    question: str | None = None
    """what the evaluator gets as the question; a template; default: the first user message"""
    expected: str | int | float | bool | None = None
    """what it gets as the expected answer; a template; default: the row's `expected`, else its `answer`"""
    range: tuple[float, float] | None = None
    """the evaluator's lowest and highest score, mapped to 0 and 1; default: it scores from 0 to 1"""
    measure: bool = False
    """keep its number as a measurement, without a verdict"""
    version: str | None = None

    templates: ClassVar[tuple[str, ...]] = ("question", "expected")

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        refuse_secret_paths(self.override)
        if self.range is not None and not self.range[0] < self.range[1]:
            raise ValueError("`range` is the lowest and the highest score, as in [1, 5]")
        if self.range is not None and self.measure:
            raise ValueError("give either `range`, for a score, or `measure`, for a number without a verdict")
        if isinstance(self.evaluator, dict) and not self.evaluator.get("_type"):
            raise ValueError("an evaluator's block needs its `_type`")
        return self


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
                "continue_session: a judge never continues the target's own session; `transcript: all` shows it "
                "the whole conversation"
            )
        if self.mode == "pairwise":
            raise ValueError(
                "mode: pairwise compares the answers of two runs, which a grader cannot; use `holdfast compare --judge`"
            )
        return self


TAKEN_NAMES = frozenset({"overall", "score", "passed", "coverage", "target"})
"""words of reports, gates and errors, which a grader of that name could not be told from"""

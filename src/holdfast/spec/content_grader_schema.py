"""Models of graders that take an answer as more than its words: JSON, mathematics, similarity, skills and functions."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from holdfast.spec.grader_schema import Expected, GraderBlock, NotEmpty, OnTimeout, TextBlock
from holdfast.spec.schema import EvalPath, FunctionName, Seconds


class JsonSchemaGrader(GraderBlock):
    """Checks that the answer is JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    """JSON Schema that the answer must fit."""
    schema_file: str | None = None
    """File with the JSON Schema, in the eval file's folder."""
    extract: bool = False
    """Look for the JSON in the last ```` ```json ```` block, or take the last object or list, instead of parsing the
    whole answer."""

    checks: ClassVar[tuple[str, ...]] = ("json_schema", "schema_file")
    templates: ClassVar[tuple[str, ...]] = ()


class PythonGrader(GraderBlock):
    """Calls a Python function with the values that its parameters name."""

    type: Literal["python"]
    function: FunctionName
    """Function to call, as `file.py:function` relative to the eval file, or as `package.module:function`."""
    expected: str | int | float | bool | None = None
    """Template of the expected value. Default: the row's field of the parameter's name, else its first field among
    `expected`, `answer`, `ground_truth`, `target` and `ideal`."""
    transcript: Literal["last", "all", "reasoning"] = "last"
    """Replies that `output` holds: the `last` one, or `all` so far, joined by blank lines. With `reasoning` it is the
    last reply, and `messages` have the model's `reasoning`."""
    params: dict[str, Any] = {}
    """Further keyword arguments. Texts in them are templates over the row, and a text that is a single
    `{{ expression }}` keeps the type of its value."""
    version: str | None = None
    """Change this when the function grades differently for a reason its source does not show."""

    templates: ClassVar[tuple[str, ...]] = ("expected", "params")
    runs_code: ClassVar[bool] = True


class SimilarityGrader(TextBlock):
    """Scores how similar the answer is to the expected one."""

    type: Literal["similarity"]
    expected: Expected = "{{ expected }}"
    """Expected text, or a list of which the most similar counts. Templates over the row."""
    method: Literal["ratio", "partial", "token_sort", "token_set", "levenshtein", "jaro_winkler"] = "ratio"
    """How similarity is measured: `partial` uses the best matching part of the longer text, `token_sort` and
    `token_set` compare words in any order or as sets."""
    ignore_case: bool = False
    """Ignore upper and lower case."""


class MathGrader(TextBlock):
    """Checks that the answer equals the expected one as mathematics: 1/2 is 0.5 is \\frac{2}{4}."""

    type: Literal["math"]
    expected: Annotated[str | int | float | list[str | int | float], NotEmpty] = "{{ expected }}"
    """Expected value, or a list of accepted values. Templates over the row."""
    timeout: Seconds = 10
    """Time limit for one comparison."""
    on_timeout: OnTimeout = "fail"
    """The result of a timeout: a failed check with score 0 (`fail`), or an `error` that the next command retries."""

    later: ClassVar[tuple[str, ...]] = (*TextBlock.later, "on_timeout")


class TriggerGrader(GraderBlock):
    """Scores whether the prompt should trigger a skill, by the words of its SKILL.md."""

    type: Literal["trigger"]
    skill_path: EvalPath | None = None
    """The skill's `SKILL.md`, or its folder, in the eval file's folder."""
    skill: str | None = None
    """Text of the skill's `SKILL.md`, instead of a file."""
    mode: Literal["positive", "negative"]
    """`positive` if the prompt should trigger the skill, `negative` if it should not."""

    templates: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="after")
    def _names_one_skill(self) -> Self:
        if self.skill_path is None and self.skill is None:
            raise ValueError("needs the skill: give `skill_path`, or its text as `skill`")
        return self

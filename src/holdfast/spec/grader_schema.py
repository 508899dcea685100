"""Models of the keys that graders share. Unknown keys are errors."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeGuard

from pydantic import BeforeValidator, Field, model_validator

from holdfast.spec.regex import Dialect
from holdfast.spec.schema import Block

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
    """Name in reports. Default: the type. `overall`, `score`, `passed`, `coverage`, `whole`, `graded` and `target` are
    reserved."""
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
    sees_row: ClassVar[bool] = True
    """the grader may read any field of the row; False: only those that its templates name"""
    expressions: ClassVar[tuple[str, ...]] = ()
    """fields that hold expressions over the row, which must have a value for every row"""
    runs_code: ClassVar[bool] = False
    """the grader runs code of the user"""
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

    later: ClassVar[tuple[str, ...]] = (*GraderBlock.later, "dialect")


TAKEN_NAMES = frozenset({"overall", "score", "passed", "coverage", "whole", "graded", "target"})
"""words of reports, gates and errors, which a grader of that name could not be told from"""

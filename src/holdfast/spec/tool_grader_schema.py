"""What users may write in a grader that looks at tool calls. Unknown keys are errors."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from holdfast.spec.grader_schema import GraderBlock, Measure, PatternBlock
from holdfast.spec.schema import Block, LoosePattern, Names, Pattern


class Range(Block):
    """Bounds of a number."""

    gte: float | None = None
    lte: float | None = None
    gt: float | None = None
    lt: float | None = None

    @model_validator(mode="after")
    def _bounds_something(self) -> Self:
        if all(bound is None for bound in (self.gte, self.lte, self.gt, self.lt)):
            raise ValueError("checks nothing: give at least one of gte, lte, gt, lt")
        return self


class Matcher(Block):
    """What an argument of a call has to be. Exactly one way to say it."""

    equals: Any = None
    """this JSON value; null counts"""
    regex: Pattern | None = None
    """a pattern found in it; what is no text is taken as JSON"""
    contains: str | None = Field(default=None, min_length=1)
    range: Range | None = None
    json_schema: dict[str, Any] | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        given = [name for name in self.model_fields_set if name == "equals" or getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"is exactly one of {', '.join(type(self).model_fields)}")
        return self


class CallSpec(Block):
    """A call that is looked for: the tool's name, and what its arguments have to be."""

    tool: LoosePattern
    args: dict[str, Matcher] = Field(default={})

    def patterns(self) -> Iterator[tuple[str, bool]]:
        """Return the regular expressions, each with whether it ignores case."""
        yield self.tool, True
        for matcher in self.args.values():
            if matcher.regex is not None:
                yield matcher.regex, False


class ConstraintSpec(CallSpec):
    """The same, with patterns for the arguments that most tools have."""

    command_pattern: LoosePattern | None = None
    path_pattern: LoosePattern | None = None
    skill_pattern: LoosePattern | None = None

    def patterns(self) -> Iterator[tuple[str, bool]]:
        """Return those of the arguments too."""
        yield from super().patterns()
        for pattern in (self.command_pattern, self.path_pattern, self.skill_pattern):
            if pattern is not None:
                yield pattern, True


class ToolBlock(GraderBlock):
    """A grader of tool calls. Nothing in it is a template."""

    templates: ClassVar[tuple[str, ...]] = ()


class BehaviorGrader(ToolBlock):
    """How much the target did, and with which tools."""

    type: Literal["behavior"]
    max_tool_calls: int | None = Field(default=None, ge=0)
    """0: none at all"""
    max_tokens: int | None = Field(default=None, gt=0)
    """input and output together; where the target does not say, the grade is an error"""
    max_duration_ms: float | None = Field(default=None, gt=0)
    required_tools: Names = ()
    forbidden_tools: Names = ()

    checks: ClassVar[tuple[str, ...]] = (
        "max_tool_calls",
        "max_tokens",
        "max_duration_ms",
        "required_tools",
        "forbidden_tools",
    )

    @property
    def measures(self) -> tuple[Measure, ...]:
        """Those that have a limit."""
        limits: dict[Measure, float | None] = {"tokens": self.max_tokens, "seconds": self.max_duration_ms}
        return tuple(name for name, limit in limits.items() if limit is not None)


class ActionSequenceGrader(ToolBlock):
    """Which tools were called, in which order."""

    type: Literal["action_sequence"]
    expected_actions: Names = Field(min_length=1)
    matching_mode: Literal["exact_match", "in_order_match", "any_order_match"]


class SkillInvocationGrader(ToolBlock):
    """Which skills were used, in which order."""

    type: Literal["skill_invocation"]
    required_skills: Names = ()
    forbidden_skills: Names = ()
    mode: Literal["exact_match", "in_order", "any_order"] | None = None
    """needed with required_skills"""
    allow_extra: bool = True

    checks: ClassVar[tuple[str, ...]] = ("required_skills", "forbidden_skills")

    @model_validator(mode="after")
    def _knows_how(self) -> Self:
        if self.required_skills and self.mode is None:
            raise ValueError("required_skills need a mode: exact_match, in_order or any_order")
        if not self.required_skills and "allow_extra" in self.model_fields_set and not self.allow_extra:
            raise ValueError("allow_extra: false says what may stand beside required_skills, and there are none")
        return self


class ToolCallsGrader(PatternBlock, ToolBlock):
    """Which tools were called, how often, and with what."""

    type: Literal["tool_calls"]
    required_tools: Names = ()
    forbidden_tools: Names = ()
    min_calls: int = Field(default=0, ge=0)
    max_calls: int | None = Field(default=None, ge=0)
    expect: tuple[CallSpec, ...] = ()
    """each needs one call of that name whose arguments all fit"""

    checks: ClassVar[tuple[str, ...]] = ("required_tools", "forbidden_tools", "min_calls", "max_calls", "expect")

    @model_validator(mode="after")
    def _can_be_met(self) -> Self:
        if self.max_calls is not None and self.min_calls > self.max_calls:
            raise ValueError(f"no number of calls is at least {self.min_calls} and at most {self.max_calls}")
        return self

    def patterns(self) -> Iterator[tuple[str, bool]]:
        """Return those of the expected calls."""
        for spec in self.expect:
            yield from spec.patterns()


class ToolConstraintGrader(PatternBlock, ToolBlock):
    """Calls that have to be there, calls that must not, and the only tools that may be called."""

    type: Literal["tool_constraint"]
    expect_tools: tuple[ConstraintSpec, ...] = ()
    reject_tools: tuple[ConstraintSpec, ...] = ()
    allow_only: tuple[LoosePattern, ...] = ()
    """an empty list allows no tool at all"""

    checks: ClassVar[tuple[str, ...]] = ("expect_tools", "reject_tools", "allow_only")

    @property
    def restricts(self) -> bool:
        """Whether `allow_only` is given, be it as an empty list."""
        return "allow_only" in self.model_fields_set

    def _is_set(self, field: str) -> bool:
        return self.restricts if field == "allow_only" else super()._is_set(field)

    def identity(self) -> dict[str, Any]:
        """What is in the grade's key; an empty `allow_only` that is given differs from one that is not."""
        identity = super().identity()
        return {**identity, "allow_only": None} if self.restricts and not self.allow_only else identity

    def patterns(self) -> Iterator[tuple[str, bool]]:
        """Return those of all calls and of the allowed names."""
        for spec in (*self.expect_tools, *self.reject_tools):
            yield from spec.patterns()
        for pattern in self.allow_only:
            yield pattern, True

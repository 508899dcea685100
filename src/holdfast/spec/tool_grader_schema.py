"""Models of graders that check tool calls. Unknown keys are errors."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from holdfast.spec.grader_schema import GraderBlock, Measure, PatternBlock
from holdfast.spec.schema import Block, LoosePattern, Names, Pattern


class Range(Block):
    """Bounds of a number."""

    gte: float | None = None
    """Minimum, inclusive."""
    lte: float | None = None
    """Maximum, inclusive."""
    gt: float | None = None
    """Minimum, exclusive."""
    lt: float | None = None
    """Maximum, exclusive."""

    @model_validator(mode="after")
    def _bounds_something(self) -> Self:
        if all(bound is None for bound in (self.gte, self.lte, self.gt, self.lt)):
            raise ValueError("checks nothing: give at least one of gte, lte, gt, lt")
        return self


class Matcher(Block):
    """A condition on an argument of a call, by exactly one of its keys."""

    equals: Any = None
    """JSON value that the argument must equal. `1` equals `1.0` but not `true`; null is a value too."""
    regex: Pattern | None = None
    """Pattern to find in the argument. A value that is not text is searched as JSON."""
    contains: str | None = Field(default=None, min_length=1)
    """Text to find in the argument. A value that is not text is searched as JSON."""
    range: Range | None = None
    """Bounds of a number: `gte`, `lte`, `gt`, `lt`."""
    json_schema: dict[str, Any] | None = Field(default=None, min_length=1)
    """JSON Schema that the argument must fit."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        matchers = [name for name in self.model_fields_set if name == "equals" or getattr(self, name) is not None]
        if len(matchers) != 1:
            raise ValueError(f"must be exactly one of {', '.join(type(self).model_fields)}")
        return self


class CallSpec(Block):
    """A call to look for: the tool's name, and conditions on its arguments."""

    tool: LoosePattern
    """Pattern of the tool's name, ignoring case."""
    args: dict[str, Matcher] = Field(default={})
    """Matchers by argument, all of which must match. An argument that is missing does not match."""

    def patterns(self) -> Iterator[tuple[str, bool]]:
        """Return the regular expressions, each with whether it ignores case."""
        yield self.tool, True
        for matcher in self.args.values():
            if matcher.regex is not None:
                yield matcher.regex, False


class ConstraintSpec(CallSpec):
    """A call to look for, with patterns for the arguments that most tools have."""

    command_pattern: LoosePattern | None = None
    """Pattern of the argument `command` or `cmd`, ignoring case."""
    path_pattern: LoosePattern | None = None
    """Pattern of the argument `path` or `file_path`, ignoring case."""
    skill_pattern: LoosePattern | None = None
    """Pattern of the skill's name, ignoring case."""

    def patterns(self) -> Iterator[tuple[str, bool]]:
        """Return those of the arguments too."""
        yield from super().patterns()
        for pattern in (self.command_pattern, self.path_pattern, self.skill_pattern):
            if pattern is not None:
                yield pattern, True


class ToolGraderBlock(GraderBlock):
    """A grader of tool calls. Nothing in it is a template."""

    templates: ClassVar[tuple[str, ...]] = ()


class BehaviorGrader(ToolGraderBlock):
    """Checks how much the target did, and with which tools."""

    type: Literal["behavior"]
    max_tool_calls: int | None = Field(default=None, ge=0)
    """Maximum number of tool calls; 0 allows none."""
    max_tokens: int | None = Field(default=None, gt=0)
    """Maximum number of input and output tokens together. If the target reports no tokens, the grade is an error."""
    max_duration_ms: float | None = Field(default=None, gt=0)
    """Maximum duration of the trial in milliseconds."""
    required_tools: Names = ()
    """Names of tools that must be called."""
    forbidden_tools: Names = ()
    """Names of tools that must not be called."""

    checks: ClassVar[tuple[str, ...]] = (
        "max_tool_calls",
        "max_tokens",
        "max_duration_ms",
        "required_tools",
        "forbidden_tools",
    )

    @property
    def measures(self) -> tuple[Measure, ...]:
        """The measures that have a limit."""
        limits: dict[Measure, float | None] = {"tokens": self.max_tokens, "seconds": self.max_duration_ms}
        return tuple(name for name, limit in limits.items() if limit is not None)


class ActionSequenceGrader(ToolGraderBlock):
    """Checks which tools were called, in which order."""

    type: Literal["action_sequence"]
    expected_actions: Names = Field(min_length=1)
    """Names of the tools to call."""
    matching_mode: Literal["exact_match", "in_order_match", "any_order_match"]
    """How calls must match: exactly (`exact_match`), in order with others in between (`in_order_match`), or each at
    least as often in any order (`any_order_match`)."""


class SkillInvocationGrader(ToolGraderBlock):
    """Checks which skills were used, in which order."""

    type: Literal["skill_invocation"]
    required_skills: Names = ()
    """Names of skills that must be used."""
    forbidden_skills: Names = ()
    """Names of skills that must not be used."""
    mode: Literal["exact_match", "in_order", "any_order"] | None = None
    """How required skills must match: exactly, in order with others in between, or in any order. Needed with
    `required_skills`."""
    allow_extra: bool = True
    """Allow skills beyond the required ones. If false, extra skills reduce the score by 0.6 × their share and fail
    the check."""

    checks: ClassVar[tuple[str, ...]] = ("required_skills", "forbidden_skills")

    @model_validator(mode="after")
    def _knows_how(self) -> Self:
        if self.required_skills and self.mode is None:
            raise ValueError("required_skills need a mode: exact_match, in_order or any_order")
        if not self.required_skills and "allow_extra" in self.model_fields_set and not self.allow_extra:
            raise ValueError("allow_extra: false says what may stand beside required_skills, and there are none")
        return self


class ToolCallsGrader(PatternBlock, ToolGraderBlock):
    """Checks which tools were called, how often, and with which arguments."""

    type: Literal["tool_calls"]
    required_tools: Names = ()
    """Names of tools that must be called."""
    forbidden_tools: Names = ()
    """Names of tools that must not be called."""
    min_calls: int = Field(default=0, ge=0)
    """Minimum number of calls in total."""
    max_calls: int | None = Field(default=None, ge=0)
    """Maximum number of calls in total."""
    expect: tuple[CallSpec, ...] = ()
    """Calls to look for. Each needs one call whose name and arguments all match."""

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


class ToolConstraintGrader(PatternBlock, ToolGraderBlock):
    """Checks calls that must occur, calls that must not, and the only tools that may be called."""

    type: Literal["tool_constraint"]
    expect_tools: tuple[ConstraintSpec, ...] = ()
    """Calls that must occur."""
    reject_tools: tuple[ConstraintSpec, ...] = ()
    """Calls that must not occur."""
    allow_only: tuple[LoosePattern, ...] = ()
    """Patterns of the only tools that may be called, as one check. An empty list allows no tool at all."""

    checks: ClassVar[tuple[str, ...]] = ("expect_tools", "reject_tools", "allow_only")

    @property
    def restricts(self) -> bool:
        """True where `allow_only` is set, also to an empty list."""
        return "allow_only" in self.model_fields_set

    def _is_set(self, field: str) -> bool:
        return self.restricts if field == "allow_only" else super()._is_set(field)

    def identity(self) -> dict[str, Any]:
        """Return the keys of the block that are in a grade's key; an empty `allow_only` differs from a missing one."""
        identity = super().identity()
        return {**identity, "allow_only": None} if self.restricts and not self.allow_only else identity

    def patterns(self) -> Iterator[tuple[str, bool]]:
        """Return those of all calls and of the allowed names."""
        for spec in (*self.expect_tools, *self.reject_tools):
            yield from spec.patterns()
        for pattern in self.allow_only:
            yield pattern, True

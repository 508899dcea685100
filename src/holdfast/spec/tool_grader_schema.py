"""Models of graders that check tool calls. Unknown keys are errors."""

import re
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from holdfast.spec.grader_schema import GraderBlock, Measure, PatternBlock
from holdfast.spec.schema import Block, Names, Pattern
from holdfast.spec.template import is_template
from holdfast.spec.validation import suggest


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
    """JSON value that the argument must equal. `1` equals `1.0` but not `true` or `"1"`; null is a value too. A value
    that a template takes from the row also equals an argument that is written like it: `4711` equals `"4711"`."""
    regex: Pattern | None = None
    """Pattern to find in the argument. A value that is not text is searched as JSON."""
    contains: str | None = Field(default=None, min_length=1)
    """Text to find in the argument. A value that is not text is searched as JSON."""
    range: Range | None = None
    """Bounds of a number: `gte`, `lte`, `gt`, `lt`."""
    json_schema: dict[str, Any] | None = Field(default=None, min_length=1)
    """JSON Schema that the argument must fit."""

    templates: ClassVar[tuple[str, ...]] = ("equals", "regex", "contains")
    regexes: ClassVar[tuple[str, ...]] = ("regex",)

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        matchers = [name for name in self.model_fields_set if name == "equals" or getattr(self, name) is not None]
        if len(matchers) != 1:
            raise ValueError(f"must be exactly one of {', '.join(type(self).model_fields)}")
        return self


class NamePattern(Block):
    """A pattern of names."""

    pattern: Pattern
    """Pattern to find in the name, matching case."""

    templates: ClassVar[tuple[str, ...]] = ("pattern",)
    regexes: ClassVar[tuple[str, ...]] = ("pattern",)


def _is_a_name(name: Any) -> Any:
    if isinstance(name, str) and not is_template(name) and re.search(r"[\\^$|*+?()\[\]]", name):
        raise ValueError(f"{name!r} is not the name of a tool, and names are compared whole; write {{pattern: …}}")
    return name


def _as_matcher(value: Any) -> Any:
    if not isinstance(value, dict):
        return {"equals": value}
    for key in value.keys() - Matcher.model_fields.keys():
        known = ", ".join(Matcher.model_fields)
        hint = suggest(key, Matcher.model_fields) or f"; known here: {known}; an object is written as {{equals: …}}"
        raise ValueError(f"{key}: unknown key{hint}")
    return value


def _as_names(value: Any) -> Any:
    return [value] if isinstance(value, str | dict) else value


ToolName = Annotated[Annotated[str, Field(min_length=1)] | NamePattern, BeforeValidator(_is_a_name)]
"""the whole name of a tool, or `{pattern: …}`"""
ToolNames = Annotated[tuple[ToolName, ...], BeforeValidator(_as_names)]


class CallSpec(Block):
    """A call to look for: the tool's name, and conditions on its arguments."""

    tool: ToolName
    """Name of the tool, or `{pattern: …}`."""
    args: dict[str, Annotated[Matcher, BeforeValidator(_as_matcher)]] = Field(default={})
    """Conditions by argument, all of which must hold: a value that the argument must equal, or a matcher. An argument
    that is missing meets none."""

    templates: ClassVar[tuple[str, ...]] = ("tool", "args")


class ConstraintSpec(CallSpec):
    """A call to look for, with patterns for the arguments that most tools have."""

    command_pattern: Pattern | None = None
    """Pattern of the argument `command` or `cmd`."""
    path_pattern: Pattern | None = None
    """Pattern of the argument `path` or `file_path`."""
    skill_pattern: Pattern | None = None
    """Pattern of the skill's name."""

    regexes: ClassVar[tuple[str, ...]] = ("command_pattern", "path_pattern", "skill_pattern")
    templates: ClassVar[tuple[str, ...]] = (*CallSpec.templates, *regexes)


class BehaviorGrader(GraderBlock):
    """Checks how much the target did, and with which tools."""

    type: Literal["behavior"]
    max_tool_calls: int | None = Field(default=None, ge=0)
    """Maximum number of tool calls; 0 allows none."""
    max_tokens: int | None = Field(default=None, gt=0)
    """Maximum number of input and output tokens together. If the target reports no tokens, the grade is an error."""
    max_duration_ms: float | None = Field(default=None, gt=0)
    """Maximum duration of the trial in milliseconds."""
    required_tools: ToolNames = ()
    """Tools that must be called, each by its name or as `{pattern: …}`. Templates over the row."""
    forbidden_tools: ToolNames = ()
    """Tools that must not be called, each by its name or as `{pattern: …}`. Templates over the row."""

    templates: ClassVar[tuple[str, ...]] = ("required_tools", "forbidden_tools")
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


class ActionSequenceGrader(GraderBlock):
    """Checks which tools were called, in which order."""

    type: Literal["action_sequence"]
    expected_actions: Names = Field(min_length=1)
    """Names of the tools to call. Templates over the row. For `exact_match`, a row's empty list means that no tool is
    called."""
    matching_mode: Literal["exact_match", "in_order_match", "any_order_match"]
    """How calls must match: exactly (`exact_match`), in order with others in between (`in_order_match`), or each at
    least as often in any order (`any_order_match`)."""
    partial: bool = False
    """Score F1 also where the calls do not match. Default: such an output scores 0."""

    templates: ClassVar[tuple[str, ...]] = ("expected_actions",)


class SkillInvocationGrader(GraderBlock):
    """Checks which skills were used, in which order."""

    type: Literal["skill_invocation"]
    required_skills: Names = ()
    """Names of skills that must be used. Templates over the row."""
    forbidden_skills: Names = ()
    """Names of skills that must not be used. Templates over the row."""
    mode: Literal["exact_match", "in_order", "any_order"] | None = None
    """How required skills must match: exactly, in order with others in between, or in any order. Needed with
    `required_skills`."""
    allow_extra: bool = True
    """Allow skills beyond the required ones. If false, extra skills fail the check."""
    partial: bool = False
    """Score F1 also where the skills do not match, reduced by 0.6 × the share of extra skills that are not allowed.
    Default: such an output scores 0."""

    templates: ClassVar[tuple[str, ...]] = ("required_skills", "forbidden_skills")
    checks: ClassVar[tuple[str, ...]] = ("required_skills", "forbidden_skills")

    @model_validator(mode="after")
    def _knows_how(self) -> Self:
        if self.required_skills and self.mode is None:
            raise ValueError("required_skills need a mode: exact_match, in_order or any_order")
        if not self.required_skills and "allow_extra" in self.model_fields_set and not self.allow_extra:
            raise ValueError("allow_extra: false says what may stand beside required_skills, and there are none")
        return self


class ToolCallsGrader(PatternBlock):
    """Checks which tools were called, how often, and with which arguments."""

    type: Literal["tool_calls"]
    required_tools: ToolNames = ()
    """Tools that must be called, each by its name or as `{pattern: …}`. Templates over the row."""
    forbidden_tools: ToolNames = ()
    """Tools that must not be called, each by its name or as `{pattern: …}`. Templates over the row."""
    min_calls: int = Field(default=0, ge=0)
    """Minimum number of calls in total."""
    max_calls: int | None = Field(default=None, ge=0)
    """Maximum number of calls in total."""
    expect: tuple[CallSpec, ...] = ()
    """Calls to look for. Each needs a call of its own whose name and arguments all match."""
    distinct: bool = True
    """Let each entry of `expect` need a call of its own. If false, one call may meet several entries."""

    templates: ClassVar[tuple[str, ...]] = ("required_tools", "forbidden_tools", "expect")
    checks: ClassVar[tuple[str, ...]] = ("required_tools", "forbidden_tools", "min_calls", "max_calls", "expect")

    @model_validator(mode="after")
    def _can_be_met(self) -> Self:
        if self.max_calls is not None and self.min_calls > self.max_calls:
            raise ValueError(f"no number of calls is at least {self.min_calls} and at most {self.max_calls}")
        return self


class ToolConstraintGrader(PatternBlock):
    """Checks calls that must occur, calls that must not, and the only tools that may be called."""

    type: Literal["tool_constraint"]
    expect_tools: tuple[ConstraintSpec, ...] = ()
    """Calls that must occur."""
    reject_tools: tuple[ConstraintSpec, ...] = ()
    """Calls that must not occur."""
    allow_only: ToolNames = ()
    """The only tools that may be called, each by its name or as `{pattern: …}`, as one check. An empty list allows no
    tool at all. Templates over the row."""

    templates: ClassVar[tuple[str, ...]] = ("expect_tools", "reject_tools", "allow_only")
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

"""Graders of tool calls: behavior, action_sequence, skill_invocation, tool_calls, tool_constraint."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from holdfast.errors import AttemptError
from holdfast.graders.expected import expected_names, expected_value, share
from holdfast.graders.tool_calls import (
    NOT_SEEN,
    CallSpec,
    CallTests,
    ConstraintSpec,
    NameTests,
    ToolNames,
    calls_of,
    skills_of,
    unmet,
)
from holdfast.graders.types import InstantGrader, Verdict
from holdfast.spec.grader_schema import GraderBlock, Measure, PatternBlock, is_everywhere
from holdfast.spec.schema import Names
from holdfast.spec.template import is_template

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.graders.tool_calls import Call
    from holdfast.graders.types import Case
    from holdfast.spec.eval import Origin


_NAMES: Final = ("b", "read_file", "server-tool", "Z9")
"""a pattern that is found in all of these is found in every name of a tool"""


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


class Behavior(InstantGrader):
    """Checks the number of calls, tokens and milliseconds, and the tools that were called."""

    schema = BehaviorGrader
    block: BehaviorGrader

    def __init__(self, block: BehaviorGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        self._required, self._forbidden = NameTests(block.required_tools), NameTests(block.forbidden_tools)

    def check(self, case: Case) -> Verdict:
        """Make one check per limit and per tool."""
        block = self.block
        calls = calls_of(case.output)
        if calls is None:
            if block.max_tool_calls is not None or block.required_tools or block.forbidden_tools:
                return NOT_SEEN
            calls = []
        spent: dict[str, float] = {"tool_calls": len(calls)}  # others only with a limit: else not in the key
        if block.max_duration_ms is not None:
            spent["duration_ms"] = case.output.timing.seconds * 1000
        if block.max_tokens is not None:
            spent["tokens"] = _tokens(case)
        limits = {
            "tool_calls": block.max_tool_calls,
            "tokens": block.max_tokens,
            "duration_ms": block.max_duration_ms,
        }
        set_ = {name: limit for name, limit in limits.items() if limit is not None}
        failures = [
            f"{spent[name]:.6g} {name.replace('_', ' ')}, more than {limit:g}"
            for name, limit in set_.items()
            if spent[name] > limit
        ]
        count, wrong_names = _check_names(calls, self._required, self._forbidden, case)
        return share(len(set_) + count, failures + wrong_names, spent)


def _tokens(case: Case) -> int:
    tokens = case.output.usage.tokens
    if tokens is None:
        raise AttemptError("grader", "max_tokens cannot be checked: the target does not report its tokens", retry=False)
    return tokens


def _check_names(calls: Sequence[Call], required: NameTests, forbidden: NameTests, case: Case) -> tuple[int, list[str]]:
    """Return the number of checks of names, and those that failed."""
    fields, called = case.sample.fields, {call.name for call in calls}
    musts, must_nots = required.for_row(fields), forbidden.for_row(fields)
    failures = [f"{test.description} was not called" for test in musts if not any(map(test.fits, called))]
    hits = (", ".join(sorted(filter(test.fits, called))) for test in must_nots)
    failures += [f"{names} was called" for names in hits if names]
    return len(musts) + len(must_nots), failures


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
    """Score F1 even if the calls do not match. Default: such an output scores 0."""

    templates: ClassVar[tuple[str, ...]] = ("expected_actions",)


class ActionSequence(InstantGrader):
    """Compares the order of tool calls. The matching mode decides if the output passes; its score is then F1."""

    schema = ActionSequenceGrader
    default_threshold = None
    block: ActionSequenceGrader

    def check(self, case: Case) -> Verdict:
        """Compare the calls' names."""
        calls = calls_of(case.output)
        if calls is None:
            return NOT_SEEN
        mode = self.block.matching_mode.removesuffix("_match")
        expected = _sequence(self.block.expected_actions, case, may_be_empty=mode == "exact")
        called = [call.name for call in calls]
        fits = matches(expected, called, mode)
        names, right = (", ".join(listed) or "nothing" for listed in (called, expected))
        feedback = "" if fits else f"called {names}, not {right}"
        value = f1(expected, called)
        score = value if fits or self.block.partial else 0.0
        return Verdict(score, feedback, {"called": called, "f1": value}, passed=fits)


def _sequence(written: Sequence[str], case: Case, *, may_be_empty: bool = False) -> list[str]:
    """Return the names of a row's sequence."""
    fields = case.sample.fields
    if may_be_empty and len(written) == 1 and is_template(written[0]) and expected_value(written[0], fields) == []:
        return []
    return [name for each in written for name in expected_names(each, fields)]


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
    """Score F1 even if the skills do not match, reduced by 0.6 × the share of extra skills that are not allowed.
    Default: such an output scores 0."""

    templates: ClassVar[tuple[str, ...]] = ("required_skills", "forbidden_skills")
    checks: ClassVar[tuple[str, ...]] = ("required_skills", "forbidden_skills")

    @model_validator(mode="after")
    def _knows_how(self) -> Self:
        if self.required_skills and self.mode is None:
            raise ValueError("required_skills need a mode: exact_match, in_order or any_order")
        if not self.required_skills and "allow_extra" in self.model_fields_set and not self.allow_extra:
            raise ValueError("allow_extra: false limits skills to required_skills, which is empty")
        return self


class SkillInvocation(InstantGrader):
    """Checks which skills were used, and in which order."""

    schema = SkillInvocationGrader
    default_threshold = None
    block: SkillInvocationGrader

    def check(self, case: Case) -> Verdict:
        """Score F1 of the required skills; 0 if they do not match, or if a forbidden skill was used."""
        block = self.block
        calls = calls_of(case.output)
        if calls is None:
            return NOT_SEEN
        required, forbidden = _sequence(block.required_skills, case), _sequence(block.forbidden_skills, case)
        used = skills_of(calls)
        failures, score = [], 1.0
        details: dict[str, Any] = {"used": used}
        if required:
            score = details["f1"] = f1(required, used)
            if not matches(required, used, (block.mode or "any_order").removesuffix("_match")):
                failures.append(f"used {', '.join(used) or 'none'}, not {', '.join(required)}")
            extra = len(used) - len(required)
            if extra > 0 and not block.allow_extra:
                score *= 1 - 0.6 * extra / len(used)
                failures.append(f"used {len(used)} skills, {extra} more than allowed")
        if failures and not block.partial:
            score = 0.0
        if hits := [name for name in dict.fromkeys(forbidden) if name in used]:
            score = 0.0
            failures.append(f"used {', '.join(hits)}")
        return Verdict(score, "; ".join(failures), details, passed=not failures)


def matches(expected: Sequence[str], called: Sequence[str], mode: str) -> bool:
    """Compare names: `exact`, `in_order` (others may come between) or `any_order`."""
    if mode == "exact":
        return list(called) == list(expected)
    if mode == "in_order":
        rest = iter(called)
        return all(name in rest for name in expected)
    return Counter(expected) <= Counter(called)


def f1(expected: Sequence[str], called: Sequence[str]) -> float:
    """Return F1 of precision and recall over names, with repetitions; the order does not matter."""
    if not expected and not called:
        return 1.0
    return 2 * (Counter(expected) & Counter(called)).total() / (len(expected) + len(called))


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


class ToolCalls(InstantGrader):
    """Checks which tools were called, how often, and with which arguments."""

    schema = ToolCallsGrader
    block: ToolCallsGrader

    def __init__(self, block: ToolCallsGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        self._required = NameTests(block.required_tools, block.dialect)
        self._forbidden = NameTests(block.forbidden_tools, block.dialect)
        self._expected = CallTests(block.expect, block.dialect, origin)

    def check(self, case: Case) -> Verdict:
        """Make one check per tool, per bound and per expected call."""
        block = self.block
        calls = calls_of(case.output)
        if calls is None:
            return NOT_SEEN
        count, failures = _check_names(calls, self._required, self._forbidden, case)
        if len(calls) < block.min_calls:
            failures.append(f"{len(calls)} calls, fewer than {block.min_calls}")
        if block.max_calls is not None and len(calls) > block.max_calls:
            failures.append(f"{len(calls)} calls, more than {block.max_calls}")
        expected = self._expected.for_row(case.sample.fields)
        failures += [test.describe_lack(calls) for test in unmet(expected, calls, distinct=block.distinct)]
        count += ("min_calls" in block.model_fields_set) + (block.max_calls is not None) + len(expected)
        return share(count, failures, {"called": [call.name for call in calls]})


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

    def idle_checks(self) -> Iterator[str]:
        """Yield a warning for each pattern that allows all tools."""
        yield from super().idle_checks()
        for name in self.allow_only:
            if not isinstance(name, str) and is_everywhere(name.pattern, _NAMES):
                yield f"the pattern {name.pattern!r} is found in every name, so {self.name!r} allows all tools"

    @property
    def restricts(self) -> bool:
        """True if `allow_only` is set, even to an empty list."""
        return "allow_only" in self.model_fields_set

    def _is_set(self, field: str) -> bool:
        return self.restricts if field == "allow_only" else super()._is_set(field)

    def identity(self) -> dict[str, Any]:
        """Return the block's part of a grade's key, in which an empty `allow_only` differs from a missing one."""
        identity = super().identity()
        return {**identity, "allow_only": None} if self.restricts and not self.allow_only else identity


class ToolConstraint(InstantGrader):
    """Checks required calls, forbidden calls, and the only tools that are allowed."""

    schema = ToolConstraintGrader
    block: ToolConstraintGrader

    def __init__(self, block: ToolConstraintGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        self._expected = CallTests(block.expect_tools, block.dialect, origin)
        self._rejected = CallTests(block.reject_tools, block.dialect, origin)
        self._allowed = NameTests(block.allow_only, block.dialect)

    def check(self, case: Case) -> Verdict:
        """Make one check per entry, and one for `allow_only`."""
        calls = calls_of(case.output)
        if calls is None:
            return NOT_SEEN
        fields = case.sample.fields
        expected, rejected = self._expected.for_row(fields), self._rejected.for_row(fields)
        failures = [test.describe_lack(calls) for test in unmet(expected, calls, distinct=False)]
        failures += [f"a call of {test.description}" for test in rejected if any(map(test.fits, calls))]
        if self.block.restricts:
            allowed = self._allowed.for_row(fields)
            names = dict.fromkeys(call.name for call in calls)
            if others := [name for name in names if not any(test.fits(name) for test in allowed)]:
                failures.append(f"{', '.join(others)} may not be called")
        count = len(expected) + len(rejected) + self.block.restricts
        return share(count, failures, {"called": [call.name for call in calls]})

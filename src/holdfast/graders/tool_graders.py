"""Graders of the tool calls in a conversation."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from holdfast.errors import AttemptError
from holdfast.graders.expected import share
from holdfast.graders.json_schema import compile_schema
from holdfast.graders.tool_calls import NOT_SEEN, as_text, calls_of, skills_of
from holdfast.graders.types import InstantGrader, Verdict
from holdfast.spec.regex import compile_regex
from holdfast.spec.tool_grader_schema import (
    ActionSequenceGrader,
    BehaviorGrader,
    ConstraintSpec,
    SkillInvocationGrader,
    ToolCallsGrader,
    ToolConstraintGrader,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.graders.tool_calls import Call
    from holdfast.graders.types import Case
    from holdfast.spec.origin import Origin
    from holdfast.spec.regex import Dialect, Regex
    from holdfast.spec.tool_grader_schema import CallSpec, Matcher

_COMMAND = ("command", "cmd")
_PATH = ("path", "file_path", "filePath")


class Behavior(InstantGrader):
    """Checks the number of calls, tokens and milliseconds, and the tools that were called."""

    schema = BehaviorGrader
    block: BehaviorGrader

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
        failures += _names(calls, block.required_tools, block.forbidden_tools)
        count = len(set_) + len(block.required_tools) + len(block.forbidden_tools)
        return share(count, failures, spent)


def _tokens(case: Case) -> int:
    tokens = case.output.usage.tokens
    if tokens is None:
        raise AttemptError("grader", "max_tokens cannot be checked: the target does not report its tokens", retry=False)
    return tokens


def _names(calls: Sequence[Call], required: Sequence[str], forbidden: Sequence[str]) -> list[str]:
    called = {call.name for call in calls}
    return [f"{name} was not called" for name in required if name not in called] + [
        f"{name} was called" for name in forbidden if name in called
    ]


class ActionSequence(InstantGrader):
    """Compares the order of tool calls. The score is F1; the matching mode decides whether the output passes."""

    schema = ActionSequenceGrader
    default_threshold = None
    block: ActionSequenceGrader

    def check(self, case: Case) -> Verdict:
        """Compare the calls' names."""
        expected = self.block.expected_actions
        calls = calls_of(case.output)
        if calls is None:
            return NOT_SEEN
        called = [call.name for call in calls]
        fits = matches(expected, called, self.block.matching_mode.removesuffix("_match"))
        feedback = "" if fits else f"called {', '.join(called) or 'nothing'}, not {', '.join(expected)}"
        return Verdict(f1(expected, called), feedback, {"called": called}, passed=fits)


class SkillInvocation(InstantGrader):
    """Checks which skills were used, and in which order."""

    schema = SkillInvocationGrader
    default_threshold = None
    block: SkillInvocationGrader

    def check(self, case: Case) -> Verdict:
        """Score F1 of the required skills, reduced by extra ones that are not allowed; 0 with a forbidden one."""
        block, required = self.block, self.block.required_skills
        calls = calls_of(case.output)
        if calls is None:
            return NOT_SEEN
        used = skills_of(calls)
        failures, score = [], 1.0
        if required:
            score = f1(required, used)
            if not matches(required, used, (block.mode or "any_order").removesuffix("_match")):
                failures.append(f"used {', '.join(used) or 'none'}, not {', '.join(required)}")
            extra = len(used) - len(required)
            if extra > 0 and not block.allow_extra:
                score *= 1 - 0.6 * extra / len(used)
                failures.append(f"used {len(used)} skills, {extra} more than allowed")
        if forbidden := [name for name in dict.fromkeys(block.forbidden_skills) if name in used]:
            score = 0.0
            failures.append(f"used {', '.join(forbidden)}")
        return Verdict(score, "; ".join(failures), {"used": used}, passed=not failures)


def matches(expected: Sequence[str], called: Sequence[str], mode: str) -> bool:
    """Compare names: `exact`, `in_order` (others may come between) or `any_order`."""
    if mode == "exact":
        return list(called) == list(expected)
    if mode == "in_order":
        rest = iter(called)
        return all(name in rest for name in expected)
    return Counter(expected) <= Counter(called)


def f1(expected: Sequence[str], called: Sequence[str]) -> float:
    """Return F1 of precision and recall over names, counted as often as they occur; the order does not matter."""
    common = (Counter(expected) & Counter(called)).total()
    return 2 * common / (len(expected) + len(called)) if common else 0.0


class ToolCalls(InstantGrader):
    """Checks which tools were called, how often, and with which arguments."""

    schema = ToolCallsGrader
    block: ToolCallsGrader

    def __init__(self, block: ToolCallsGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        self._expected = [_CallPattern(spec, block.dialect, origin) for spec in block.expect]

    def check(self, case: Case) -> Verdict:
        """Make one check per tool, per bound and per expected call."""
        block = self.block
        calls = calls_of(case.output)
        if calls is None:
            return NOT_SEEN
        failures = _names(calls, block.required_tools, block.forbidden_tools)
        if len(calls) < block.min_calls:
            failures.append(f"{len(calls)} calls, fewer than {block.min_calls}")
        if block.max_calls is not None and len(calls) > block.max_calls:
            failures.append(f"{len(calls)} calls, more than {block.max_calls}")
        failures += [f"no call of {pattern}" for pattern in self._expected if not any(map(pattern.fits, calls))]
        bounds = ("min_calls" in block.model_fields_set) + (block.max_calls is not None)
        count = len(block.required_tools) + len(block.forbidden_tools) + bounds + len(block.expect)
        return share(count, failures, {"called": [call.name for call in calls]})


class ToolConstraint(InstantGrader):
    """Checks required calls, forbidden calls, and the only tools that are allowed."""

    schema = ToolConstraintGrader
    block: ToolConstraintGrader

    def __init__(self, block: ToolConstraintGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        self._expected = [_CallPattern(spec, block.dialect, origin) for spec in block.expect_tools]
        self._rejected = [_CallPattern(spec, block.dialect, origin) for spec in block.reject_tools]
        self._allowed = [
            compile_regex(pattern, ignore_case=True, dialect=block.dialect) for pattern in block.allow_only
        ]

    def check(self, case: Case) -> Verdict:
        """Make one check per entry, and one for `allow_only`."""
        calls = calls_of(case.output)
        if calls is None:
            return NOT_SEEN
        failures = [f"no call of {pattern}" for pattern in self._expected if not any(map(pattern.fits, calls))]
        failures += [f"a call of {pattern}" for pattern in self._rejected if any(map(pattern.fits, calls))]
        names = dict.fromkeys(call.name for call in calls)
        rejected = [name for name in names if not any(pattern.search(name) for pattern in self._allowed)]
        if self.block.restricts and rejected:
            failures.append(f"{', '.join(rejected)} may not be called")
        count = len(self._expected) + len(self._rejected) + self.block.restricts
        return share(count, failures, {"called": [call.name for call in calls]})


class _CallPattern:
    """A pattern for tool calls."""

    def __init__(self, spec: CallSpec, dialect: Dialect, origin: Origin) -> None:
        self._dialect = dialect
        self._tool = compile_regex(spec.tool, ignore_case=True, dialect=dialect)
        self._args = {name: _matching(matcher, dialect, origin) for name, matcher in spec.args.items()}
        self._texts: list[tuple[Regex, Callable[[Call], str]]] = []
        self._description = spec.tool
        if isinstance(spec, ConstraintSpec):
            self._look(spec.command_pattern, lambda call: call.text(*_COMMAND))
            self._look(spec.path_pattern, lambda call: call.text(*_PATH))
            self._look(spec.skill_pattern, lambda call: call.skill or call.text("skill"))
        if self._args:
            self._description += f" with fitting {', '.join(self._args)}"

    def _look(self, pattern: str | None, text: Callable[[Call], str]) -> None:
        if pattern is not None:
            self._texts.append((compile_regex(pattern, ignore_case=True, dialect=self._dialect), text))
            self._description += f" with {pattern}"

    def __str__(self) -> str:
        """Describe the calls for messages."""
        return self._description

    def fits(self, call: Call) -> bool:
        """Return True for a call whose name and arguments match."""
        return (
            self._tool.search(call.name)
            and all(pattern.search(text(call)) for pattern, text in self._texts)
            and all(name in call.arguments and fits(call.arguments[name]) for name, fits in self._args.items())
        )


def _matching(matcher: Matcher, dialect: Dialect, origin: Origin) -> Callable[[Any], bool]:
    """Return a test for an argument."""
    if matcher.regex is not None:
        pattern = compile_regex(matcher.regex, dialect=dialect)
        return lambda value: pattern.search(as_text(value))
    if matcher.contains is not None:
        part = matcher.contains
        return lambda value: part in as_text(value)
    if matcher.range is not None:
        bounds = matcher.range
        return lambda value: (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and (bounds.gte is None or value >= bounds.gte)
            and (bounds.lte is None or value <= bounds.lte)
            and (bounds.gt is None or value > bounds.gt)
            and (bounds.lt is None or value < bounds.lt)
        )
    if matcher.json_schema is not None:
        validator = compile_schema(matcher.json_schema, origin)
        return lambda value: bool(validator.is_valid(value))
    return lambda value: _same(matcher.equals, value)


def _same(one: Any, other: Any) -> bool:
    """Compare as JSON: 1 equals 1.0, but not true."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)

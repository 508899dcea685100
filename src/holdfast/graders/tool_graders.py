"""Graders that look at the tool calls of the conversation so far."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from holdfast.errors import AttemptError
from holdfast.graders.json_schema import compile_schema
from holdfast.graders.text import share
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
    """How much was done, and with which tools."""

    schema = BehaviorGrader
    block: BehaviorGrader

    def check(self, case: Case) -> Verdict:
        """One check per limit and per tool."""
        block = self.block
        calls = calls_of(case.output)
        if calls is None:
            if block.max_tool_calls is not None or block.required_tools or block.forbidden_tools:
                return NOT_SEEN
            calls = []
        spent: dict[str, float] = {"tool_calls": len(calls)}  # and what has a limit: the rest is not in the key
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
        raise AttemptError("grader", "max_tokens cannot be checked: the target does not say what it used", retry=False)
    return tokens


def _names(calls: Sequence[Call], required: Sequence[str], forbidden: Sequence[str]) -> list[str]:
    called = {call.name for call in calls}
    return [f"{name} was not called" for name in required if name not in called] + [
        f"{name} was called" for name in forbidden if name in called
    ]


class ActionSequence(InstantGrader):
    """Which tools were called, in which order. The score is F1, whether it passes the mode's to say."""

    schema = ActionSequenceGrader
    default_threshold = None
    block: ActionSequenceGrader

    def check(self, case: Case) -> Verdict:
        """Compare the calls' names."""
        wanted = self.block.expected_actions
        calls = calls_of(case.output)
        if calls is None:
            return NOT_SEEN
        got = [call.name for call in calls]
        fits = matches(wanted, got, self.block.matching_mode.removesuffix("_match"))
        said = "" if fits else f"called {', '.join(got) or 'nothing'}, not {', '.join(wanted)}"
        return Verdict(f1(wanted, got), said, {"called": got}, passed=fits)


class SkillInvocation(InstantGrader):
    """Which skills were used, in which order."""

    schema = SkillInvocationGrader
    default_threshold = None
    block: SkillInvocationGrader

    def check(self, case: Case) -> Verdict:
        """F1 of the required ones, less where more was used than allowed; 0 with a forbidden one."""
        block, wanted = self.block, self.block.required_skills
        calls = calls_of(case.output)
        if calls is None:
            return NOT_SEEN
        got = skills_of(calls)
        failures, score = [], 1.0
        if wanted:
            score = f1(wanted, got)
            if not matches(wanted, got, (block.mode or "any_order").removesuffix("_match")):
                failures.append(f"used {', '.join(got) or 'none'}, not {', '.join(wanted)}")
            extra = len(got) - len(wanted)
            if extra > 0 and not block.allow_extra:
                score *= 1 - 0.6 * extra / len(got)
                failures.append(f"used {len(got)} skills, {extra} more than allowed")
        if used := [name for name in dict.fromkeys(block.forbidden_skills) if name in got]:
            score = 0.0
            failures.append(f"used {', '.join(used)}")
        return Verdict(score, "; ".join(failures), {"used": got}, passed=not failures)


def matches(wanted: Sequence[str], got: Sequence[str], mode: str) -> bool:
    """Whether what was called is what was wanted: `exact`, `in_order` (others may come between) or `any_order`."""
    if mode == "exact":
        return list(got) == list(wanted)
    if mode == "in_order":
        rest = iter(got)
        return all(name in rest for name in wanted)
    return Counter(wanted) <= Counter(got)


def f1(wanted: Sequence[str], got: Sequence[str]) -> float:
    """Of precision and recall over names, each as often as it comes; 1 where both are the same, in whatever order."""
    common = (Counter(wanted) & Counter(got)).total()
    return 2 * common / (len(wanted) + len(got)) if common else 0.0


class ToolCalls(InstantGrader):
    """Which tools were called, how often, and with what."""

    schema = ToolCallsGrader
    block: ToolCallsGrader

    def __init__(self, block: ToolCallsGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        self._expected = [_Looked(spec, block.dialect, origin) for spec in block.expect]

    def check(self, case: Case) -> Verdict:
        """One check per tool, per bound and per expected call."""
        block = self.block
        calls = calls_of(case.output)
        if calls is None:
            return NOT_SEEN
        failures = _names(calls, block.required_tools, block.forbidden_tools)
        if len(calls) < block.min_calls:
            failures.append(f"{len(calls)} calls, fewer than {block.min_calls}")
        if block.max_calls is not None and len(calls) > block.max_calls:
            failures.append(f"{len(calls)} calls, more than {block.max_calls}")
        failures += [f"no call of {found.shown}" for found in self._expected if not any(map(found, calls))]
        bounds = ("min_calls" in block.model_fields_set) + (block.max_calls is not None)
        count = len(block.required_tools) + len(block.forbidden_tools) + bounds + len(block.expect)
        return share(count, failures, {"called": [call.name for call in calls]})


class ToolConstraint(InstantGrader):
    """Calls that have to be there, calls that must not, and the only tools that may be called."""

    schema = ToolConstraintGrader
    block: ToolConstraintGrader

    def __init__(self, block: ToolConstraintGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        self._expected = [_Looked(spec, block.dialect, origin) for spec in block.expect_tools]
        self._rejected = [_Looked(spec, block.dialect, origin) for spec in block.reject_tools]
        self._allowed = [
            compile_regex(pattern, ignore_case=True, dialect=block.dialect) for pattern in block.allow_only
        ]

    def check(self, case: Case) -> Verdict:
        """One check per entry; what alone is allowed is one."""
        calls = calls_of(case.output)
        if calls is None:
            return NOT_SEEN
        failures = [f"no call of {found.shown}" for found in self._expected if not any(map(found, calls))]
        failures += [f"a call of {found.shown}" for found in self._rejected if any(map(found, calls))]
        names = dict.fromkeys(call.name for call in calls)
        others = [name for name in names if not any(pattern.search(name) for pattern in self._allowed)]
        if self.block.restricts and others:
            failures.append(f"{', '.join(others)} may not be called")
        count = len(self._expected) + len(self._rejected) + self.block.restricts
        return share(count, failures, {"called": [call.name for call in calls]})


class _Looked:
    """A call that is looked for."""

    def __init__(self, spec: CallSpec, dialect: Dialect, origin: Origin) -> None:
        self._dialect = dialect
        self._tool = compile_regex(spec.tool, ignore_case=True, dialect=dialect)
        self._args = {name: _matching(matcher, dialect, origin) for name, matcher in spec.args.items()}
        self._texts: list[tuple[Regex, Callable[[Call], str]]] = []
        self.shown = spec.tool
        """in words"""
        if isinstance(spec, ConstraintSpec):
            self._look(spec.command_pattern, lambda call: call.text(*_COMMAND))
            self._look(spec.path_pattern, lambda call: call.text(*_PATH))
            self._look(spec.skill_pattern, lambda call: call.skill or call.text("skill"))
        if self._args:
            self.shown += f" with fitting {', '.join(self._args)}"

    def _look(self, pattern: str | None, text: Callable[[Call], str]) -> None:
        if pattern is not None:
            self._texts.append((compile_regex(pattern, ignore_case=True, dialect=self._dialect), text))
            self.shown += f" with {pattern}"

    def __call__(self, call: Call) -> bool:
        """Whether it is this one."""
        return (
            self._tool.search(call.name)
            and all(pattern.search(text(call)) for pattern, text in self._texts)
            and all(name in call.arguments and fits(call.arguments[name]) for name, fits in self._args.items())
        )


def _matching(matcher: Matcher, dialect: Dialect, origin: Origin) -> Callable[[Any], bool]:
    """What an argument has to be, as a function."""
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
    """Equal as JSON: 1 is 1.0, but true is not 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)

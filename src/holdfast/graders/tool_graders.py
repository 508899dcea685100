"""Graders of the tool calls in a conversation."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.errors import AttemptError
from holdfast.graders.expected import Patterns, expected_names, expected_value, share
from holdfast.graders.json_schema import compile_schema
from holdfast.graders.tool_arguments import ArgumentTest, argument_test, show
from holdfast.graders.tool_calls import NOT_SEEN, calls_of, skills_of
from holdfast.graders.types import InstantGrader, Verdict
from holdfast.spec.grader_texts import is_fixed
from holdfast.spec.template import is_template
from holdfast.spec.tool_grader_schema import (
    ActionSequenceGrader,
    BehaviorGrader,
    ConstraintSpec,
    NamePattern,
    SkillInvocationGrader,
    ToolCallsGrader,
    ToolConstraintGrader,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.graders.tool_calls import Call
    from holdfast.graders.types import Case
    from holdfast.spec.eval import Origin
    from holdfast.spec.regex import Dialect, Regex
    from holdfast.spec.tool_grader_schema import CallSpec, ToolName

_COMMAND = ("command", "cmd")
_PATH = ("path", "file_path", "filePath")
_SHOWN = 3
"""calls of the right tool that a feedback shows"""


class Behavior(InstantGrader):
    """Checks the number of calls, tokens and milliseconds, and the tools that were called."""

    schema = BehaviorGrader
    block: BehaviorGrader

    def __init__(self, block: BehaviorGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        self._required, self._forbidden = _Names(block.required_tools), _Names(block.forbidden_tools)

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


class _NameTest(NamedTuple):
    """A test of tools' names."""

    description: str
    fits: Callable[[str], bool]


class _Names:
    """Names of tools, and patterns of names, of which some may be templates over the row."""

    def __init__(self, written: Sequence[ToolName], dialect: Dialect = "python") -> None:
        self._written, self._dialect = written, dialect
        templates = (each.pattern if isinstance(each, NamePattern) else each for each in written)
        self._fixed = None if any(map(is_template, templates)) else self._tests({})

    def for_row(self, fields: dict[str, Any]) -> list[_NameTest]:
        """Return a test for each name and pattern; a template that gives a list stands for each of its elements."""
        return self._tests(fields) if self._fixed is None else self._fixed

    def _tests(self, fields: dict[str, Any]) -> list[_NameTest]:
        tests: list[_NameTest] = []
        for each in self._written:
            if isinstance(each, NamePattern):
                regexes = Patterns([each.pattern], self._dialect).for_row(fields)
                tests += [_NameTest(f"/{regex.pattern}/", regex.search) for regex in regexes]
            else:
                tests += [_NameTest(name, name.__eq__) for name in expected_names(each, fields)]
        return tests


def _check_names(calls: Sequence[Call], required: _Names, forbidden: _Names, case: Case) -> tuple[int, list[str]]:
    """Return the number of checks of names, and those that failed."""
    fields, called = case.sample.fields, {call.name for call in calls}
    musts, must_nots = required.for_row(fields), forbidden.for_row(fields)
    failures = [f"{test.description} was not called" for test in musts if not any(map(test.fits, called))]
    hits = (", ".join(sorted(filter(test.fits, called))) for test in must_nots)
    failures += [f"{names} was called" for names in hits if names]
    return len(musts) + len(must_nots), failures


class ActionSequence(InstantGrader):
    """Compares the order of tool calls. The matching mode decides whether the output passes; the score is then F1."""

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


class SkillInvocation(InstantGrader):
    """Checks which skills were used, and in which order."""

    schema = SkillInvocationGrader
    default_threshold = None
    block: SkillInvocationGrader

    def check(self, case: Case) -> Verdict:
        """Score F1 of the required skills; 0 where they do not match, or with a forbidden one."""
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
    """Return F1 of precision and recall over names, counted as often as they occur; the order does not matter."""
    if not expected and not called:
        return 1.0
    return 2 * (Counter(expected) & Counter(called)).total() / (len(expected) + len(called))


class ToolCalls(InstantGrader):
    """Checks which tools were called, how often, and with which arguments."""

    schema = ToolCallsGrader
    block: ToolCallsGrader

    def __init__(self, block: ToolCallsGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        self._required = _Names(block.required_tools, block.dialect)
        self._forbidden = _Names(block.forbidden_tools, block.dialect)
        self._expected = _CallTests(block.expect, block.dialect, origin)

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


class ToolConstraint(InstantGrader):
    """Checks required calls, forbidden calls, and the only tools that are allowed."""

    schema = ToolConstraintGrader
    block: ToolConstraintGrader

    def __init__(self, block: ToolConstraintGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        self._expected = _CallTests(block.expect_tools, block.dialect, origin)
        self._rejected = _CallTests(block.reject_tools, block.dialect, origin)
        self._allowed = _Names(block.allow_only, block.dialect)

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


class _CallTest(NamedTuple):
    """A test of tool calls, for one row."""

    names: list[_NameTest]
    """the tool has one of these names"""
    texts: list[tuple[str, Regex, Callable[[Call], str]]]
    """patterns of usual arguments, each with the argument's name"""
    arguments: dict[str, ArgumentTest]

    @property
    def description(self) -> str:
        """The calls that are looked for."""
        conditions = [f"{name} matching {regex.pattern!r}" for name, regex, _ in self.texts]
        conditions += [f"{name} {test.description}" for name, test in self.arguments.items()]
        name = " or ".join(test.description for test in self.names)
        return f"{name} with {' and '.join(conditions)}" if conditions else name

    def fits(self, call: Call) -> bool:
        """Return True for a call whose name and arguments match."""
        return (
            self.is_named(call)
            and all(regex.search(text(call)) for _, regex, text in self.texts)
            and all(name in call.arguments and test.fits(call.arguments[name]) for name, test in self.arguments.items())
        )

    def is_named(self, call: Call) -> bool:
        """Return True for a call of the tool."""
        return any(test.fits(call.name) for test in self.names)

    def describe_lack(self, calls: Sequence[Call]) -> str:
        """Tell what is missing, and which calls of the tool came nearest."""
        named = [call for call in calls if self.is_named(call)]
        seen = [self._differences(call) for call in named[:_SHOWN]]
        if not any(seen):
            return f"no {'further ' if named else ''}call of {self.description}"
        more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
        return f"no call of {self.description}; called with {' / '.join(filter(None, seen))}{more}"

    def _differences(self, call: Call) -> str:
        """Return the arguments of a call that are not as they should be."""
        if call.raw is not None:
            return f"arguments that are not JSON: {show(call.raw)}"
        wrong = [f"{name} = {show(text(call))}" for name, regex, text in self.texts if not regex.search(text(call))]
        for name, test in self.arguments.items():
            if name not in call.arguments:
                wrong.append(f"no {name}")
            elif not test.fits(call.arguments[name]):
                wrong.append(f"{name} = {show(call.arguments[name])}")
        return ", ".join(wrong)


class _CallTests:
    """Calls to look for, of which some may have templates over the row."""

    def __init__(self, specs: Sequence[CallSpec], dialect: Dialect, origin: Origin) -> None:
        self._specs, self._dialect = specs, dialect
        self._schemas = {
            id(matcher): compile_schema(matcher.json_schema, origin)
            for spec in specs
            for matcher in spec.args.values()
            if matcher.json_schema is not None
        }
        self._fixed: list[_CallTest] | None = None
        if all(map(is_fixed, specs)):
            self._fixed = [self._test(spec, {}) for spec in specs]

    def for_row(self, fields: dict[str, Any]) -> list[_CallTest]:
        """Return the tests for a row."""
        return [self._test(spec, fields) for spec in self._specs] if self._fixed is None else self._fixed

    def _test(self, spec: CallSpec, fields: dict[str, Any]) -> _CallTest:
        texts: list[tuple[str, Regex, Callable[[Call], str]]] = []
        if isinstance(spec, ConstraintSpec):
            looks: list[tuple[str, str | None, Callable[[Call], str]]] = [
                ("command", spec.command_pattern, lambda call: call.text(*_COMMAND)),
                ("path", spec.path_pattern, lambda call: call.text(*_PATH)),
                ("skill", spec.skill_pattern, lambda call: call.skill or call.text("skill")),
            ]
            for name, pattern, text in looks:
                if pattern is not None:
                    regexes = Patterns([pattern], self._dialect).for_row(fields)
                    texts += [(name, regex, text) for regex in regexes]
        arguments = {
            name: argument_test(matcher, fields, self._dialect, self._schemas.get(id(matcher)))
            for name, matcher in spec.args.items()
        }
        return _CallTest(_Names([spec.tool], self._dialect).for_row(fields), texts, arguments)


def unmet(tests: Sequence[_CallTest], calls: Sequence[Call], *, distinct: bool) -> list[_CallTest]:
    """Return the tests that no call meets; if `distinct`, each call meets one test at most, so that most are met."""
    candidates = [[place for place, call in enumerate(calls) if test.fits(call)] for test in tests]
    if not distinct:
        return [test for test, places in zip(tests, candidates, strict=True) if not places]
    taken: dict[int, int] = {}
    """calls, and the tests that they meet"""

    def place(number: int, tried: set[int]) -> bool:
        """Find a call for a test; a test that has taken it may move on to another one."""
        for call in candidates[number]:
            if call not in tried:
                tried.add(call)
                if call not in taken or place(taken[call], tried):
                    taken[call] = number
                    return True
        return False

    return [test for number, test in enumerate(tests) if not place(number, set())]

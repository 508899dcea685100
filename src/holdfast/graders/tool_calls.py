"""The tool calls of an output (those it lists, else those in its messages), and tests of them.

Messages have the form of OpenAI's chat API: an assistant message has `tool_calls`, each with an `id` and a `function`
of `name` and `arguments` (JSON as text), and a message with the role `tool` answers a call by its `tool_call_id`. A
skill is used by calling a tool named `skill` or `use_skill` with the skill's name as its argument `skill`, `name` or
`command`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, NamedTuple, Self
from unicodedata import normalize

import msgspec
from msgspec import UnsetType
from pydantic import BeforeValidator, Field, model_validator

from holdfast.errors import AttemptError, suggest
from holdfast.graders.expected import Patterns, expected_names, expected_value
from holdfast.graders.json_schema import compile_schema
from holdfast.graders.types import Verdict
from holdfast.spec.load_graders import is_fixed
from holdfast.spec.schema import Block, Pattern
from holdfast.spec.template import is_template
from holdfast.targets.trace import as_listed, read_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from holdfast.spec.eval import Origin
    from holdfast.spec.regex import Dialect, Regex
    from holdfast.store.records import Output

_SKILL_TOOLS: Final = frozenset({"skill", "use_skill"})
_SKILL: Final = ("skill", "name", "command")
_COMMAND: Final = ("command", "cmd")
_PATH: Final = ("path", "file_path", "filePath")
_SHOWN: Final = 3
"""calls of the right tool that feedback shows"""
_LONGEST: Final = 80
"""characters of a value in feedback"""


class Call(NamedTuple):
    """A tool call and its result."""

    name: str
    arguments: dict[str, Any]
    """empty if they are not a JSON object"""
    raw: str | None
    """the original arguments, if they are not a JSON object"""
    result: Any = None
    """the tool's result, if the conversation contains it"""

    def text(self, *names: str) -> str:
        """Return the first of the named arguments as text; if the arguments are not JSON, all of them."""
        if self.raw is not None:
            return self.raw
        return next((as_text(self.arguments[name]) for name in names if name in self.arguments), "")

    @property
    def skill(self) -> str | None:
        """The skill that the call uses, if any."""
        return self.text(*_SKILL).strip() if self.name.casefold() in _SKILL_TOOLS else None


NOT_SEEN: Final = Verdict(None, "nothing was checked: the target does not report its tool calls")
"""the verdict on an output whose tool calls are unknown"""


def calls_of(output: Output) -> list[Call] | None:
    """Return the tool calls of an output in order; None if they are unknown."""
    if isinstance(output.calls, UnsetType):
        return calls_in_messages(output.conversation)
    if any(call.name is None for call in output.calls):
        return None
    return [_call(call.name or "", call.arguments, call.result) for call in output.calls]


def calls_in_messages(messages: Iterable[Mapping[str, Any]]) -> list[Call]:
    """Return the tool calls of messages in order."""
    return [_call(call.name or "", call.arguments, call.result) for call in as_listed(read_calls(messages), 1)]


def skills_of(calls: Iterable[Call]) -> list[str]:
    """Return the names of the skills that calls use, in order."""
    return [call.skill for call in calls if call.skill]


def as_text(value: Any) -> str:
    """Return a value as text for patterns: null as an empty text, everything but texts as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _call(name: str, arguments: Any, result: Any) -> Call:
    if not name:
        raise AttemptError("grader", f"a tool call has no name: {str(arguments)[:200]}", retry=False)
    if isinstance(arguments, dict):
        return Call(name, arguments, None, result)
    return Call(name, {}, as_text(arguments), result)


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


def _as_names(value: Any) -> Any:
    return [value] if isinstance(value, str | dict) else value


ToolName = Annotated[Annotated[str, Field(min_length=1)] | NamePattern, BeforeValidator(_is_a_name)]
"""the whole name of a tool, or `{pattern: …}`"""
ToolNames = Annotated[tuple[ToolName, ...], BeforeValidator(_as_names)]


class _NameTest(NamedTuple):
    """A test of tools' names."""

    description: str
    fits: Callable[[str], bool]


class NameTests:
    """Names of tools and patterns of names, some of which may be templates over the row."""

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
    that a template takes from the row also equals an argument that is written the same way: `4711` equals `"4711"`."""
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


def _as_matcher(value: Any) -> Any:
    if not isinstance(value, dict):
        return {"equals": value}
    for key in value.keys() - Matcher.model_fields.keys():
        known = ", ".join(Matcher.model_fields)
        hint = suggest(key, Matcher.model_fields) or f"; known here: {known}; an object is written as {{equals: …}}"
        raise ValueError(f"{key}: unknown key{hint}")
    return value


class CallSpec(Block):
    """A call to look for: the tool's name, and conditions on its arguments."""

    tool: ToolName
    """Name of the tool, or `{pattern: …}`."""
    args: dict[str, Annotated[Matcher, BeforeValidator(_as_matcher)]] = Field(default={})
    """Conditions by argument, which must all hold: a value that the argument must equal, or a matcher. A
    missing argument meets no condition."""

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
        """Describe the missing call, and the calls of the tool that came closest."""
        named = [call for call in calls if self.is_named(call)]
        seen = [self._differences(call) for call in named[:_SHOWN]]
        if not any(seen):
            return f"no {'further ' if named else ''}call of {self.description}"
        more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
        return f"no call of {self.description}; called with {' / '.join(filter(None, seen))}{more}"

    def _differences(self, call: Call) -> str:
        """Describe the arguments of a call that do not match."""
        if call.raw is not None:
            return f"arguments that are not JSON: {show(call.raw)}"
        wrong = [f"{name} = {show(text(call))}" for name, regex, text in self.texts if not regex.search(text(call))]
        for name, test in self.arguments.items():
            if name not in call.arguments:
                wrong.append(f"no {name}")
            elif not test.fits(call.arguments[name]):
                wrong.append(f"{name} = {show(call.arguments[name])}")
        return ", ".join(wrong)


class CallTests:
    """Calls to look for, some of which may have templates over the row."""

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
        return _CallTest(NameTests([spec.tool], self._dialect).for_row(fields), texts, arguments)


def unmet(tests: Sequence[_CallTest], calls: Sequence[Call], *, distinct: bool) -> list[_CallTest]:
    """Return the tests that no call meets; if `distinct`, each call meets at most one test, chosen to meet most."""
    candidates = [[place for place, call in enumerate(calls) if test.fits(call)] for test in tests]
    if not distinct:
        return [test for test, places in zip(tests, candidates, strict=True) if not places]
    taken: dict[int, int] = {}
    """calls, and the tests that they meet"""

    def place(number: int, tried: set[int]) -> bool:
        """Find a call for a test; a test that has taken the call may move on to another call."""
        for call in candidates[number]:
            if call not in tried:
                tried.add(call)
                if call not in taken or place(taken[call], tried):
                    taken[call] = number
                    return True
        return False

    return [test for number, test in enumerate(tests) if not place(number, set())]


class ArgumentTest(NamedTuple):
    """A test of one argument, for one row."""

    description: str
    """follows the argument's name"""
    fits: Callable[[Any], bool]


def argument_test(matcher: Matcher, fields: dict[str, Any], dialect: Dialect, schema: Any) -> ArgumentTest:
    """Return the test that a matcher stands for; `schema` is its compiled JSON Schema, if any."""
    if matcher.regex is not None:
        regexes = Patterns([matcher.regex], dialect).for_row(fields)
        description = " or ".join(f"matching {regex.pattern!r}" for regex in regexes)
        return ArgumentTest(description, lambda value: any(regex.search(as_text(value)) for regex in regexes))
    if matcher.contains is not None:
        parts = expected_names(matcher.contains, fields)
        description = "containing " + " and ".join(map(repr, parts))
        return ArgumentTest(description, lambda value: all(part in as_text(value) for part in parts))
    if matcher.range is not None:
        bounds = matcher.range
        return ArgumentTest(_describe_range(bounds), lambda value: _is_within(value, bounds))
    if matcher.json_schema is not None:
        return ArgumentTest("that fits its schema", lambda value: bool(schema.is_valid(value)))
    expected = _filled_in(matcher.equals, fields)
    return ArgumentTest(f"= {show(_plain(expected))}", lambda value: _same(expected, value))


def show(value: Any) -> str:
    """Return a value as JSON, shortened to one line."""
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _describe_range(bounds: Range) -> str:
    signs = {"≥": bounds.gte, "≤": bounds.lte, ">": bounds.gt, "<": bounds.lt}
    return " and ".join(f"{sign} {bound:g}" for sign, bound in signs.items() if bound is not None)


def _is_within(value: Any, bounds: Range) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and (bounds.gte is None or value >= bounds.gte)
        and (bounds.lte is None or value <= bounds.lte)
        and (bounds.gt is None or value > bounds.gt)
        and (bounds.lt is None or value < bounds.lt)
    )


class _OfRow(NamedTuple):
    """A value from the row. Files such as CSV have no types, so texts and numbers that are written alike are equal."""

    value: Any


def _filled_in(written: Any, fields: dict[str, Any]) -> Any:
    if isinstance(written, str):
        return _OfRow(expected_value(written, fields)) if is_template(written) else written
    if isinstance(written, dict):
        return {key: _filled_in(inner, fields) for key, inner in written.items()}
    if isinstance(written, list | tuple) and not isinstance(written, _OfRow):
        return [_filled_in(inner, fields) for inner in written]
    return written


def _plain(expected: Any) -> Any:
    """Return a value without the marks on values from the row."""
    if isinstance(expected, _OfRow):
        return expected.value
    if isinstance(expected, dict):
        return {key: _plain(inner) for key, inner in expected.items()}
    return [_plain(inner) for inner in expected] if isinstance(expected, list) else expected


def _same(one: Any, other: Any, *, alike: bool = False) -> bool:
    """Compare as JSON: 1 equals 1.0, but not true. With `alike`, a number equals a text that is spelled the same."""
    if isinstance(one, _OfRow):
        return _same(one.value, other, alike=True)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key], alike=alike) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(_same(*pair, alike=alike) for pair in zip(one, other, strict=True))
    if isinstance(one, str) and isinstance(other, str):
        return normalize("NFC", one) == normalize("NFC", other)
    if alike and isinstance(one, str) != isinstance(other, str):
        return _same(_as_scalar(one), _as_scalar(other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _as_scalar(value: Any) -> Any:
    """Return the number or boolean that a text spells; any other value unchanged."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text in ("True", "False"):  # as Python writes them
        return text == "True"
    try:
        scalar = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return value
    return scalar if isinstance(scalar, bool | int | float) else value

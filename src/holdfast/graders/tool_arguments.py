"""Tests of the arguments of tool calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from unicodedata import normalize

import msgspec

from holdfast.graders.expected import Patterns, expected_names, expected_value
from holdfast.graders.tool_calls import as_text
from holdfast.spec.template import is_template

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.spec.regex import Dialect
    from holdfast.spec.tool_grader_schema import Matcher, Range

_LONGEST = 80
"""characters of a value in a feedback"""


class ArgumentTest(NamedTuple):
    """A test of one argument, for one row."""

    description: str
    """follows the argument's name"""
    fits: Callable[[Any], bool]


def argument_test(matcher: Matcher, fields: dict[str, Any], dialect: Dialect, schema: Any) -> ArgumentTest:
    """Return the test that a matcher stands for; `schema` is its JSON Schema, compiled, where it has one."""
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
    """Return a value as JSON, at most a line of it."""
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
    """A value from the row: files such as CSV keep no types, so texts and numbers that are written alike are equal."""

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
    """Return a value without the marks of where it comes from."""
    if isinstance(expected, _OfRow):
        return expected.value
    if isinstance(expected, dict):
        return {key: _plain(inner) for key, inner in expected.items()}
    return [_plain(inner) for inner in expected] if isinstance(expected, list) else expected


def _same(one: Any, other: Any, *, alike: bool = False) -> bool:
    """Compare as JSON: 1 equals 1.0, but not true. With `alike`, a number equals a text that is written like it."""
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
    """Return the number or boolean that a text is; any other value as it is."""
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

"""Which requests of a program count as the same: all that ask the same, whatever the client changes on every start.

A path names a field: `metadata.user_id`, or `input[].id` for a field of every object in a list.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Volatile(NamedTuple):
    """A field of requests that says nothing about what is asked, or the part of it that says nothing."""

    path: str
    pattern: re.Pattern[str] | None = None
    """matches the parts of a text that are left out; None: the field is left out"""


def without(body: Any, fields: Iterable[Volatile]) -> Any:
    """Return the body of a request without what is volatile in it."""
    for field in fields:
        body = _without(body, re.findall(r"\[\]|[^.\[\]]+", field.path), field.pattern)
    return body


def _without(value: Any, path: Sequence[str], pattern: re.Pattern[str] | None) -> Any:
    if not path:
        return pattern.sub("", value) if pattern is not None and isinstance(value, str) else value
    name, *rest = path
    if name == "[]":
        return [_without(each, rest, pattern) for each in value] if isinstance(value, list) else value
    if not isinstance(value, dict) or name not in value:
        return value
    if not rest and pattern is None:
        return {key: each for key, each in value.items() if key != name}
    return {**value, name: _without(value[name], rest, pattern)}

"""Regular expressions as users write them: Python's, and what other tools' patterns (RE2) have beside them.

RE2 lets flags stand anywhere, `a(?i)b`, and Python only at the start; there they are rewritten as `a(?i:b)`. What
Python would read as something else, or not at all, is an error that says what to write.
"""

from __future__ import annotations

import re
import warnings
from functools import lru_cache
from typing import Final

_FLAGS: Final = re.compile(r"\(\?([a-zA-Z]*(?:-[a-zA-Z]+)?)\)")
_POSIX_CLASS: Final = re.compile(r"\[\^?\[:\^?\w+:\]")


@lru_cache(maxsize=4096)
def compile_regex(pattern: str, flags: int = 0) -> re.Pattern[str]:
    """A pattern as graders use it, or a ValueError that names it."""
    if _POSIX_CLASS.search(pattern):
        raise ValueError(f"not a regular expression: {pattern!r} (write [A-Za-z] for [[:alpha:]], \\d for [[:digit:]])")
    try:
        try:
            return _compiled(pattern, flags)
        except re.error as error:
            if "global flags not at the start" not in str(error):
                raise
        return _compiled(_scoped(pattern), flags)
    except re.error as error:
        raise ValueError(f"not a regular expression: {pattern!r} ({error})") from error


def _compiled(pattern: str, flags: int) -> re.Pattern[str]:
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of sets in sets, which Python has not
        return re.compile(pattern, flags)


def _scoped(pattern: str) -> str:
    """Flags in the middle as groups, each to the end of its alternative and again in the next, as RE2 means them."""
    parts: list[str] = []
    opened: list[list[str]] = [[]]
    """by depth: the flags that hold until the group ends"""
    place = 0
    while place < len(pattern):
        character = pattern[place]
        width = 1
        if character == "\\":
            width = 2
        elif character == "[":
            width = _class_end(pattern, place) - place
        elif match := _FLAGS.match(pattern, place):
            opened[-1].append(match[1])
            parts.append(f"(?{match[1]}:")
            place = match.end()
            continue
        elif character == "(":
            opened.append([])
        elif character == ")":
            parts.append(")" * len(opened[-1]))
            if len(opened) > 1:
                opened.pop()
        elif character == "|":
            parts += [")" * len(opened[-1]), "|", *(f"(?{flags}:" for flags in opened[-1])]
            place += 1
            continue
        parts.append(pattern[place : place + width])
        place += width
    return "".join(parts) + ")" * len(opened[0])


def _class_end(pattern: str, start: int) -> int:
    """Where a `[…]` ends; a `]` that comes first in it belongs to it."""
    place = start + 1
    if pattern[place : place + 1] == "^":
        place += 1
    if pattern[place : place + 1] == "]":
        place += 1
    while place < len(pattern) and pattern[place] != "]":
        place += 2 if pattern[place] == "\\" else 1
    return place + 1

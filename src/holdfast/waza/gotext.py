"""Go's `text/template` and regular expressions, as far as evals use them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_ACTION: Final = re.compile(r"(?:\s*\{\{-\s|\{\{)(.*?)(?:\s-\}\}\s*|\}\})", re.DOTALL)
_VARIABLE: Final = re.compile(r"\.Vars\.(\w+)|index\s+\.Vars\s+\"([^\"]*)\"")
_OPEN: Final = re.compile(r"\{(?=[{%#])")
_FLAGS: Final = re.compile(r"\(\?([ims]+)\)")

PER_TRIAL: Final = ("JobID", "Iteration", "Attempt", "Timestamp")
"""what differs from trial to trial there: a text with one of them has no content to be known by"""


def render(text: str, variables: Mapping[str, str], task_id: str, task_name: str) -> str:
    """A text with its variables filled in; ValueError for what is missing, or beyond plain variables."""
    known = {".TaskID": task_id, ".TaskName": task_name}

    def value(match: re.Match[str]) -> str:
        action = match[1].strip()
        if variable := _VARIABLE.fullmatch(action):
            name = variable[1] or variable[2]
            if name in variables:
                return variables[name]
            given = f"; inputs have: {', '.join(sorted(variables))}" if variables else "; the eval has no inputs"
            raise ValueError(f"there is no variable {name!r}{given}")
        if action in known:
            return known[action]
        if literal := re.fullmatch(r'"((?:[^"\\])*)"|`([^`]*)`', action):
            return literal[1] or literal[2] or ""
        if action.startswith("/*"):
            return ""
        if action.removeprefix(".") in PER_TRIAL:
            raise ValueError(f"{{{{{action}}}}} differs from trial to trial and cannot be part of a prompt")
        raise ValueError(
            f"{{{{{action}}}}} is more of Go's templates than is read here: {{{{.Vars.name}}}}, {{{{.TaskID}}}}, "
            '{{.TaskName}}; two braces as such are written {{"{{"}}'
        )

    return _ACTION.sub(value, text)


def literal(text: str) -> str:
    """A text that a template of ours says as it stands: what waza does not read as a template is none here."""
    return _OPEN.sub("{{ '{' }}", text)


def python_regex(pattern: str) -> str:
    """A regular expression of Go's as Python reads it: flags in its middle hold to the end of their group."""
    pattern = pattern.replace("\\z", "\\Z")
    at = 1
    while (found := _FLAGS.search(pattern, at)) is not None:
        *bars, end = _bars_and_end(pattern, found.end())
        ends = [found.end(), *(place + 1 for place in bars)]
        parts = [pattern[start:stop] for start, stop in zip(ends, [*bars, end], strict=True)]
        flagged = "|".join(f"(?{found[1]}:{part})" for part in parts)
        pattern = f"{pattern[: found.start()]}{flagged}{pattern[end:]}"
        at = found.start() + 1
    return pattern


def _bars_and_end(pattern: str, start: int) -> list[int]:
    """The bars of the group in which a position is, behind it, and where the group ends."""
    depth, in_class, at = 0, False, start
    bars: list[int] = []
    while at < len(pattern):
        character = pattern[at]
        if character == "\\":
            at += 1
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character == "(":
            depth += 1
        elif character == "|" and depth == 0:
            bars.append(at)
        elif character == ")":
            if depth == 0:
                break
            depth -= 1
        at += 1
    return [*bars, at]

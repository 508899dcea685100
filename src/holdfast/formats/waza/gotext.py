"""Go's `text/template`, as far as evals use it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from holdfast.spec.template import is_template

if TYPE_CHECKING:
    from collections.abc import Mapping

_ACTION: Final = re.compile(r"(?:\s*\{\{-\s|\{\{)(.*?)(?:\s-\}\}\s*|\}\})", re.DOTALL)
_VARIABLE: Final = re.compile(r"\.Vars\.(\w+)|index\s+\.Vars\s+\"([^\"]*)\"")

PER_TRIAL: Final = ("JobID", "Iteration", "Attempt", "Timestamp")
"""variables that differ between trials in waza: a text with one of them has no fixed content"""


def render(text: str, variables: Mapping[str, str], task_id: str, task_name: str) -> str:
    """Fill in the variables of a text; raise ValueError for missing ones, and for anything but plain variables."""
    builtins = {".TaskID": task_id, ".TaskName": task_name}

    def value(match: re.Match[str]) -> str:
        action = match[1].strip()
        if variable := _VARIABLE.fullmatch(action):
            name = variable[1] or variable[2]
            if name in variables:
                return variables[name]
            available = f"; inputs have: {', '.join(sorted(variables))}" if variables else "; the eval has no inputs"
            raise ValueError(f"there is no variable {name!r}{available}")
        if action in builtins:
            return builtins[action]
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
    """Escape a text that waza does not read as a template, so that Holdfast's templates repeat it literally."""
    if not is_template(text):
        return text
    return "{% raw %}" + text.replace("endraw", "{% endraw %}endraw{% raw %}") + "{% endraw %}"

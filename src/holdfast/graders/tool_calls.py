"""The tool calls of an output: those it lists, else those in its messages.

Messages are as OpenAI's chat API has them: an assistant message has `tool_calls`, each with an `id` and a `function` of
`name` and `arguments` (JSON as a text), and a message of the role `tool` answers one by its `tool_call_id`. A skill is
used by calling a tool named `skill` or `use_skill` with the skill's name as its argument `skill`, `name` or `command`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from msgspec import UnsetType

from holdfast.errors import AttemptError
from holdfast.graders.types import Verdict
from holdfast.targets.trace import as_listed, read_calls

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from holdfast.store.records import Output

_SKILL_TOOLS: Final = frozenset({"skill", "use_skill"})
_SKILL: Final = ("skill", "name", "command")


class Call(NamedTuple):
    """A tool call and its result."""

    name: str
    arguments: dict[str, Any]
    """empty where they are not a JSON object"""
    raw: str | None
    """the arguments as they were written, where they are not a JSON object"""
    result: Any = None
    """the tool's result, where the conversation has it"""

    def text(self, *names: str) -> str:
        """Return the first of the named arguments as a text; where the arguments are not JSON, all of them."""
        if self.raw is not None:
            return self.raw
        return next((as_text(self.arguments[name]) for name in names if name in self.arguments), "")

    @property
    def skill(self) -> str | None:
        """The skill it uses, if it uses one."""
        return self.text(*_SKILL).strip() if self.name.casefold() in _SKILL_TOOLS else None


NOT_SEEN: Final = Verdict(None, "nothing was checked: the target does not report its tool calls")
"""the verdict on an output whose tool calls are not known"""


def calls_of(output: Output) -> list[Call] | None:
    """Return the tool calls of an output in order; None where they are not known."""
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
    """Return a value as patterns see it: a text as it is, null as an empty text, all else as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _call(name: str, arguments: Any, result: Any) -> Call:
    if not name:
        raise AttemptError("grader", f"a tool call has no name: {str(arguments)[:200]}", retry=False)
    if isinstance(arguments, dict):
        return Call(name, arguments, None, result)
    return Call(name, {}, as_text(arguments), result)

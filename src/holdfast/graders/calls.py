"""The tool calls of a conversation, read out of its messages.

Messages are as OpenAI's chat API has them: an assistant message has `tool_calls`, each with an `id` and a `function` of
`name` and `arguments` (JSON as a text), and a message of the role `tool` answers one by its `tool_call_id`. A skill is
used by calling a tool named `skill` or `use_skill` with the skill's name as its argument `skill`, `name` or `command`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from holdfast.errors import AttemptError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_SKILL_TOOLS: Final = frozenset({"skill", "use_skill"})
_SKILL: Final = ("skill", "name", "command")


class Call(NamedTuple):
    """A tool call and what came of it."""

    name: str
    arguments: dict[str, Any]
    """empty where they are not a JSON object"""
    raw: str | None
    """the arguments as they were written, where they are not a JSON object"""
    result: Any = None
    """what the tool said, where it is in the conversation"""

    def text(self, *names: str) -> str:
        """The first of these arguments that is there, as a text; of arguments that are not JSON, all of them."""
        if self.raw is not None:
            return self.raw
        return next((as_text(self.arguments[name]) for name in names if name in self.arguments), "")

    @property
    def skill(self) -> str | None:
        """The skill it uses, if it uses one."""
        return self.text(*_SKILL).strip() if self.name.casefold() in _SKILL_TOOLS else None


def calls_of(messages: Iterable[Mapping[str, Any]]) -> list[Call]:
    """All calls in their order."""
    results: dict[str, Any] = {}
    asked: list[Any] = []
    for message in messages:
        if message.get("role") == "tool":
            results.setdefault(str(message.get("tool_call_id")), message.get("content"))
        elif message.get("role") == "assistant":
            asked += message.get("tool_calls") or ()
    return [_call(call, results) for call in asked]


def skills_of(calls: Iterable[Call]) -> list[str]:
    """The skills used, in their order."""
    return [call.skill for call in calls if call.skill]


def as_text(value: Any) -> str:
    """A value as patterns see it: a text as it is, null as nothing, anything else as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _call(call: Any, results: dict[str, Any]) -> Call:
    body: Any = call.get("function") or call.get("custom") or call if isinstance(call, dict) else None
    name = body.get("name") if isinstance(body, dict) else None
    if not isinstance(name, str) or not name:
        raise AttemptError("grader", f"a tool call has no name: {str(call)[:200]}", retry=False)
    written = body.get("arguments", body.get("input"))
    given: Any = written
    if isinstance(written, str):
        try:
            given = msgspec.json.decode(written or "{}")
        except (msgspec.DecodeError, RecursionError):
            given = written
    result = results.get(str(call.get("id")), call.get("result"))
    if given is None or isinstance(given, dict):
        return Call(name, given or {}, None, result)
    return Call(name, {}, as_text(written), result)

"""waza's mock executor, which repeats the prompt, the task's description, and its files.

A row always gets the same answer, so an eval and its graders can be tried out without a model.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, Final, Literal

from holdfast import Reply, Target, TargetBlock, Usage

if TYPE_CHECKING:
    from holdfast import Turn
    from holdfast.data.readers import Row

_PREVIEW: Final = 1024


class MockTarget(TargetBlock):
    """A target that repeats its prompt, for trying out an eval without a model."""

    mock: Literal["waza"]
    """The mock to use: `waza` answers as waza's mock executor does."""


class Mock(Target):
    """A target that answers at once, without any calls."""

    schema = MockTarget

    async def reply(self, turn: Turn) -> Reply:
        """Return the prompt, and a description of the row."""
        lines = [f"Mock response for: {turn.prompt}", *_about(turn.sample.fields)]
        text = "\n".join(lines)
        messages = [{"role": "assistant", "content": text}]  # a reply with messages has only the calls in them
        return Reply(text=text, messages=messages, usage=Usage(0, 0, 0, 0.0))


def _about(row: Row) -> list[str]:
    lines = [
        f"{title}: {row[key]}" for title, key in (("Task", "name"), ("Description", "description")) if row.get(key)
    ]
    if context := row.get("context"):
        lines += ["Context:", *(f"  {key}: {_go_value(context[key])}" for key in sorted(context))]
    if files := row.get("files"):
        lines.append(f"Analyzed {len(files)} file(s):")
        for path, content in files.items():
            lines.append(f"  - {path}")
            data = content.encode() if isinstance(content, str) else base64.b64decode(content["base64"])
            if data:
                suffix = "...(truncated)" if len(data) > _PREVIEW else ""
                lines.append(data[:_PREVIEW].decode("utf-8", "replace") + suffix)
    return lines


def _go_value(value: Any) -> str:
    """Format a value as Go prints it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return f"map[{' '.join(f'{key}:{_go_value(value[key])}' for key in sorted(value))}]"
    if isinstance(value, list):
        return f"[{' '.join(map(_go_value, value))}]"
    return "<nil>" if value is None else str(value)

"""waza's mock executor: it says again what it was asked, what the task says of itself, and the files it was given.

The same row always gets the same answer, so an eval can be tried out, and its graders tested, without a model.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, Final, Literal

from holdfast.spec.schema import TargetBlock
from holdfast.store.records import Usage
from holdfast.targets.types import Reply, Target

if TYPE_CHECKING:
    from holdfast.data.readers import Row
    from holdfast.targets.types import Turn

_PREVIEW: Final = 1024


class MockTarget(TargetBlock):
    """A target that repeats its prompt, for trying out an eval without a model."""

    mock: Literal["waza"]
    """The mock to use: `waza` answers as waza's mock executor does."""


class Mock(Target):
    """Answers at once, and calls nothing."""

    schema = MockTarget

    async def reply(self, turn: Turn) -> Reply:
        """The prompt, and what is known of the row."""
        said = [f"Mock response for: {turn.prompt}", *_about(turn.sample.fields)]
        text = "\n".join(said)
        messages = [{"role": "assistant", "content": text}]  # a reply with messages has no other calls than theirs
        return Reply(text=text, messages=messages, usage=Usage(0, 0, 0, 0.0))


def _about(row: Row) -> list[str]:
    said = [f"{title}: {row[key]}" for title, key in (("Task", "name"), ("Description", "description")) if row.get(key)]
    if context := row.get("context"):
        said += ["Context:", *(f"  {key}: {_go_value(context[key])}" for key in sorted(context))]
    if files := row.get("files"):
        said.append(f"Analyzed {len(files)} file(s):")
        for path, content in files.items():
            said.append(f"  - {path}")
            data = content.encode() if isinstance(content, str) else base64.b64decode(content["base64"])
            if data:
                cut = "...(truncated)" if len(data) > _PREVIEW else ""
                said.append(data[:_PREVIEW].decode("utf-8", "replace") + cut)
    return said


def _go_value(value: Any) -> str:
    """A value as Go prints it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return f"map[{' '.join(f'{key}:{_go_value(value[key])}' for key in sorted(value))}]"
    if isinstance(value, list):
        return f"[{' '.join(map(_go_value, value))}]"
    return "<nil>" if value is None else str(value)

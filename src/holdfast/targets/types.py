"""What a target is given, and what it gives back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from holdfast.store.records import Usage

if TYPE_CHECKING:
    from types import TracebackType

    from holdfast.data.dataset import Sample

Message = dict[str, Any]
"""A message as OpenAI's chat API has it: role, content, and what belongs to tool calls."""


class Turn(msgspec.Struct, frozen=True):
    """One user message, and all that was said before it."""

    prompt: str
    """the user's message of this turn"""
    messages: list[Message]
    """the conversation up to and with that message"""
    sample: Sample
    trial: int
    number: int
    """1 for the first"""
    seed: int
    """the same for the same sample and trial, whatever the order of execution"""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What a target says to one user message.

    A Python target may return this instead of a text, to say more: `messages` with the tool calls it made,
    `usage`, or `stop` (why it ended).
    """

    text: str
    """the answer that graders see"""
    messages: list[Message] | None = None
    """what to add to the conversation; default: one assistant message with the text"""
    usage: Usage = Usage()
    stop: str = "stop"
    first_token: float | None = None
    """seconds until the first token came"""
    state: Any = None
    """what the target wants kept with the output; JSON"""


class Target(Protocol):
    """Something that answers. Opened once per run, used by many trials at once."""

    async def __aenter__(self) -> Target:
        """Get ready: open connections, start servers."""
        ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let everything go."""
        ...

    async def reply(self, turn: Turn) -> Reply:
        """Answer, or raise AttemptError (this attempt failed) or Fault (all will)."""
        ...

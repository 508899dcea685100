"""A Python function as the target."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import msgspec

from holdfast.errors import AttemptError, Fault
from holdfast.functions import Function, said_with_place
from holdfast.store.records import Usage
from holdfast.targets.types import Reply

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.targets.types import Message, Turn

OFFERED = ("prompt", "messages", "sample", "context")


@dataclass
class Context:
    """What a Python target may want to know beside the prompt."""

    trial: int
    turn: int
    seed: int
    """the same for the same sample and trial; seed your randomness with it"""
    sample_id: str
    params: dict[str, Any] = field(default_factory=dict)
    """`target.params` of the eval file"""


class PythonFunction:
    """Calls the user's function once per turn."""

    def __init__(self, function: Callable[..., Any], params: dict[str, Any], where: str) -> None:
        self._function = Function(function, OFFERED, where)
        self._params = params

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def reply(self, turn: Turn) -> Reply:
        """Whatever the function returns, as a reply."""
        offered = {
            "prompt": turn.prompt,
            "messages": [dict(message) for message in turn.messages],
            "sample": dict(turn.sample.fields),
            "context": Context(turn.trial, turn.number, turn.seed, turn.sample.id, self._params),
        }
        try:
            returned = await self._function(offered)
        except (AttemptError, Fault):
            raise
        except Exception as error:  # the agent's own: an error of this trial, never of the run
            raise AttemptError("agent", said_with_place(error)) from error
        return _settled(_as_reply(returned))


def _settled(reply: Reply) -> Reply:
    """The reply as the journal will give it back; what JSON cannot hold is the agent's fault, not the run's."""
    try:
        return msgspec.json.decode(msgspec.json.encode(reply), type=Reply)
    except (TypeError, ValueError, RecursionError) as error:
        raise AttemptError("agent", f"the function's reply cannot be kept as JSON: {error}", retry=False) from error


def _as_reply(returned: Any) -> Reply:
    if isinstance(returned, Reply):
        return returned
    if isinstance(returned, str):
        return Reply(text=returned)
    if isinstance(returned, dict):
        return _from_dict(returned)
    raise AttemptError(
        "agent",
        f"the function returned {type(returned).__name__}, not a text, a dict with `output`, or a holdfast.Reply",
        retry=False,
    )


def _from_dict(returned: dict[str, Any]) -> Reply:
    text = next((returned[key] for key in ("output", "text", "content") if key in returned), None)
    messages: list[Message] | None = returned.get("messages")
    if text is None and messages:
        text = messages[-1].get("content")
    if not isinstance(text, str):
        raise AttemptError("agent", f"the function's reply has no text: {str(returned)[:200]}", retry=False)
    if messages is None and returned.get("tool_calls"):
        messages = [{"role": "assistant", "content": text, "tool_calls": returned["tool_calls"]}]
    counts = returned.get("usage") or {}
    usage = Usage(
        counts.get("input_tokens", counts.get("prompt_tokens")),
        counts.get("output_tokens", counts.get("completion_tokens")),
        counts.get("requests", 0),
        counts.get("cost"),
    )
    return Reply(
        text=text,
        messages=messages,
        usage=usage,
        stop=str(returned.get("stop", "stop")),
        state=returned.get("state"),
    )

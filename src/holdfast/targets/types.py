"""What a target is given, and what it gives back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple, Protocol, Self

import msgspec
from msgspec import UNSET, UnsetType

from holdfast.store.records import ToolCall, TraceStep, Usage

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.data.dataset import Sample
    from holdfast.spec.origin import Origin
    from holdfast.spec.schema import TargetBlock

Message = dict[str, Any]
"""A message as OpenAI's chat API has it: role, content, and what belongs to tool calls."""


ReplayPolicy = Literal["record", "never", "again"]
"""What happens to a tool call that is on record when a trial goes on after a crash: it is answered from the record; it
is a side effect that must never happen twice; or it runs again, to bring a server's own state back."""


PROCESS: Final = object()
"""The home of state that lives in this process, such as the globals of a Python module."""


class ToolFailure(NamedTuple):
    """A tool's result where its Python function raised."""

    message: str
    """what the model reads"""
    traceback: str
    """of the user's code, for the record alone"""


class PastCall(NamedTuple):
    """A finished tool call of a trial, to be run again where the state it built has been lost."""

    turn: int
    name: str
    arguments: Any
    """UNSET where they are not on record"""
    function: str | UnsetType | None = UNSET
    """of `context.tool(function)`: `module:name`, or None for a function that no other process can find"""


class Home(NamedTuple):
    """What holds the state that a past call has built."""

    home: object
    """compared by identity"""
    rerun: Callable[[], Awaitable[object]] | None
    """runs the call there; None where it cannot be run any more"""


FindHome = Callable[[PastCall], Awaitable[Home | None]]
"""finds the home of a past call; None where it is no `replay: again` call"""


class Calls(Protocol):
    """One attempt's model and tool calls: recorded before their results are used, answered from the record later."""

    id: str
    """the trial's, as long as this process lives"""
    workspace: Path | None
    """the trial's folder, where the eval has one"""
    first: bool
    """nothing of this turn has been tried before, and the turn before it was had in this process"""
    observed: bool
    """the target makes its tool calls through here: where there are none, it has made none"""

    async def model(
        self, request: Any, live: Callable[[], Awaitable[Any]], usage: Callable[[Any], Usage] | None = None
    ) -> Any:
        """A model's answer, as JSON. `usage` reads what it used from that; default: its field `usage`."""
        ...

    async def tool(
        self,
        name: str,
        arguments: Any,
        live: Callable[[], Awaitable[Any]],
        replay: ReplayPolicy,
        home: object = PROCESS,
        function: str | UnsetType | None = UNSET,
    ) -> Any:
        """A tool's result, as JSON. `home` holds the state that a `replay: again` call builds.

        Of a `ToolFailure`, the message is the result, and the traceback is recorded beside it.
        """
        ...

    async def restore(self, find: FindHome) -> None:
        """Run the earlier `replay: again` calls of the trial in homes that have not seen them."""
        ...

    async def resource(self, name: str, open_: Callable[[], Awaitable[Closing]]) -> Any:
        """Something that lives as long as the trial, opened when it is first asked for."""
        ...


class Closing(Protocol):
    """What can be let go."""

    alive: bool

    async def close(self) -> None:
        """Let it go."""
        ...


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
    state: Any = None
    """what the reply before this one wanted kept"""
    calls: Calls | None = None
    """where a trial may have calls of its own: tools, agents, programs"""


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
    """what the target wants kept with the output, and gets back with the next turn; JSON"""
    files: dict[str, str] | None = None
    """the workspace after this reply, filled in by the engine"""
    calls: list[ToolCall] | UnsetType = UNSET
    """every tool call of this turn, filled in by the engine where `messages` do not hold them all"""
    trace: list[TraceStep] | None = None
    """the target's inner steps in this turn, where it reports them; kept with the output as `Output.trace`"""


class Target:
    """Base class of all targets: answers users' messages. Opened once per run, used by many trials at once.

    A kind of target is one class, which owns everything that is known of the kind.
    """

    schema: ClassVar[type[TargetBlock]]
    """the keys of the target's block in the eval file"""

    block: TargetBlock
    """the target's block in the eval file"""

    def __init__(self, block: TargetBlock, origin: Origin) -> None:
        self.block = block

    @classmethod
    def build(cls, block: Any, origin: Origin) -> Target:
        """Build the target of an eval."""
        return cls(block, origin)

    @classmethod
    def identity(cls, block: Any, origin: Origin) -> dict[str, Any]:
        """Return everything that can change an answer: a part of the keys of outputs."""
        identity: dict[str, Any] = block.model_dump()
        return identity

    async def __aenter__(self) -> Self:
        """Open connections and start servers."""
        return self

    async def __aexit__(self, *details: object) -> None:
        """Release all resources."""

    async def reply(self, turn: Turn) -> Reply:
        """Answer, or raise AttemptError (this attempt failed) or Fault (all will)."""
        raise NotImplementedError

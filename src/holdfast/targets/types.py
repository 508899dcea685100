"""Targets: the base class, the turns they answer, and their replies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Protocol, Self

import msgspec
from msgspec import UNSET, UnsetType
from xxhash import xxh3_64_intdigest

from holdfast.store.records import OnCutOff, PartialFiles, ToolCall, TraceStep, Usage

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.data.dataset import Sample
    from holdfast.spec.eval import Origin
    from holdfast.spec.target_schema import TargetBlock
    from holdfast.targets.batches import Batches

Message = dict[str, Any]
"""a message as OpenAI's chat API has it: role, content, tool calls"""


ReplayPolicy = Literal["record", "never", "again"]
"""What happens to a tool call when a trial goes on after a crash. `record`: it is answered from the record, or made
again if it was cut off. `never`: the same, but if it was cut off it is not made again, since it may have happened.
`again`: it runs again, to bring a server's own state back."""


PROCESS: Final = object()
"""the home of state in this process, such as the globals of a Python module"""


class ToolFailure(msgspec.Struct, frozen=True):
    """A tool's result where its Python function raised."""

    message: str
    """for the model"""
    traceback: str
    """of the user's code, for the record alone"""


class PastCall(msgspec.Struct, frozen=True):
    """A finished tool call of a trial, to be run again where the state it built has been lost."""

    turn: int
    name: str
    arguments: Any
    function: str | UnsetType | None = UNSET
    """of `context.tool(function)`: `module:name`, or None for a function that no other process can find"""
    call_id: str = ""


class Home(msgspec.Struct, frozen=True):
    """The object that holds the state which a past call built."""

    home: object
    """compared by identity"""
    rerun: Callable[[], Awaitable[object]] | None
    """runs the call there; None where it cannot be run any more"""


FindHome = Callable[[PastCall], Awaitable[Home | None]]
"""finds the home of a past call; None unless the call has `replay: again`"""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """How a model call is read that is in the form of somebody else's program."""

    identity: Any = UNSET
    """the request without what clients change on every start; the record is searched for it"""
    messages: list[Message] = []
    """the conversation in the request"""
    usage: Callable[[Any], Usage]
    """reads the usage from the answer"""
    answers: Callable[[Any], list[Message] | None] = lambda _: []
    """reads the messages of the model from the answer; None: they cannot be read"""


class Calls(Protocol):
    """The model and tool calls of an attempt, recorded before their results are used, and later replayed."""

    id: str
    """the trial's id in this process"""
    workspace: Path | None
    """the trial's folder, where the eval has one"""
    first: bool
    """the first attempt at the turn, and the previous turn was answered in this process"""
    observed: bool
    """the target makes its tool calls through this object: no calls here means no calls"""
    text_so_far: str
    """what the target has answered so far: the answer, if a limit ends the attempt"""

    async def model(self, request: Any, ask: Callable[[], Awaitable[Any]], reading: Reading | None = None) -> Any:
        """Return a model's answer, as JSON; `ask` gets it where it is not on record.

        Default: the request has `messages`, and the answer is a `Reply`.
        """
        ...

    async def tool(
        self,
        name: str,
        arguments: Any,
        run: Callable[[str], Awaitable[Any]],
        replay: ReplayPolicy,
        home: object = PROCESS,
        function: str | UnsetType | None = UNSET,
        on_cut_off: OnCutOff = "stop",
    ) -> Any:
        """Return a tool's result, as JSON; `run` gets it where it is not on record, from the id of the call.

        `on_cut_off` is for `replay: never`, and `home` holds the state that a `replay: again` call builds. Of a
        `ToolFailure`, the message is the result, and the traceback is recorded beside it.
        """
        ...

    async def restore(self, find: FindHome) -> None:
        """Run the earlier `replay: again` calls of the trial in homes that have not seen them."""
        ...

    async def resource(self, name: str, open_: Callable[[], Awaitable[Closing]]) -> Any:
        """Return a resource that lives as long as the trial, opened on first use."""
        ...


class Closing(Protocol):
    """A closable resource."""

    alive: bool

    async def close(self) -> None:
        """Close the resource."""
        ...


class Continuation(msgspec.Struct, frozen=True):
    """A text whose likelihood is asked for."""

    text: str
    context: str | None = None
    """what stands before the text; None: the prompt"""
    rolling: bool = False
    """the text stands alone, and is divided where it is longer than the model's context"""


def most_likely(logprobs: Sequence[float]) -> int:
    """Return the position of the largest value, the first of equal ones."""
    return max(range(len(logprobs)), key=logprobs.__getitem__)


class Turn(msgspec.Struct, frozen=True):
    """A user message, and the conversation before it."""

    prompt: str
    """the user's message of this turn, with files as their names"""
    messages: list[Message]
    """the conversation up to and with that message"""
    sample: Sample
    trial: int
    number: int
    """1 for the first"""
    state: Any = None
    """the `state` of the previous reply"""
    calls: Calls | None = None
    """recorded calls, for tools, agents and programs"""
    continuations: tuple[Continuation, ...] = ()
    """texts whose likelihood is asked for instead of a reply"""
    params: Mapping[str, Any] = MappingProxyType({})
    """the row's own parameters of requests to a model"""
    load: Callable[[str], bytes] | None = None
    """returns the content of a file in `messages`, by its digest"""
    deadline: float | None = None
    """when the time for this reply is up, in seconds since the epoch; None: not known"""

    @property
    def seed(self) -> int:
        """Seed of the trial: the same number for the same sample and trial, whatever the order of execution."""
        return xxh3_64_intdigest(f"{self.sample.digest}:{self.trial}".encode()) & 0x7FFFFFFF


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A target's answer to one user message.

    A Python target may return this instead of a text, to add: `messages` with the tool calls it made,
    `usage`, or `stop` (why it ended).
    """

    text: str
    """the answer that graders see"""
    messages: list[Message] | None = None
    """messages to add to the conversation; default: one assistant message with the text"""
    usage: Usage = Usage()
    stop: str = "stop"
    first_token: float | None = None
    """seconds until the first token came"""
    state: Any = None
    """data that is stored with the output, and given back with the next turn; JSON"""
    files: dict[str, str] | None = None
    """the workspace after this reply, filled in by the engine"""
    files_partial: PartialFiles | UnsetType = UNSET
    """what `files` lacks, if the workspace was too large; filled in by the engine"""
    stop_detail: str | UnsetType = UNSET
    """which limit ended the reply, or the end of what a failed program printed; filled in by the engine"""
    calls: list[ToolCall] | UnsetType = UNSET
    """every tool call of this turn, filled in by the engine where `messages` do not hold them all"""
    trace: list[TraceStep] | None = None
    """the target's inner steps in this turn, where it reports them; stored as `Output.trace`"""
    value: Any = UNSET
    """the answer itself, where it is no text but an object, a list, a number …; JSON. `text` is then its text"""


class Target:
    """Base class of all targets: answers users' messages. Opened once per run, used by many trials at once.

    A kind of target is one class, which owns everything that is known of the kind.
    """

    schema: ClassVar[type[TargetBlock]]
    """the keys of the target's block in the eval file"""
    extra: ClassVar[str | None] = None
    """the extra of Holdfast that installs what the target needs"""

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

    @classmethod
    def sees_row(cls, block: Any, origin: Origin) -> bool:
        """Return True if an answer may depend on the row by more than the conversation and the block's templates."""
        return bool(block.sees_row)

    def limit_requests(self, limit: Callable[[], int]) -> None:
        """Take the limit of requests in flight, before the target is opened.

        The engine keeps as many trials in flight. A target that makes several requests at once for a trial has to
        keep their sum within the limit, which may change at any time.
        """

    def use_batches(self, batches: Batches) -> None:
        """Take what makes requests in batches, before the target is opened, if the run has any."""

    async def __aenter__(self) -> Self:
        """Open connections and start servers."""
        return self

    async def __aexit__(self, *details: object) -> None:
        """Release all resources."""

    async def reply(self, turn: Turn) -> Reply:
        """Answer, or raise AttemptError (this attempt failed) or Fault (all will)."""
        raise NotImplementedError

"""Targets: the base class, the turns they answer, their replies, and the interface to batches.

The core can do without batches: `holdfast.plugins.batches` is loaded when a run needs it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Protocol, Self

import msgspec
from msgspec import UNSET, UnsetType
from xxhash import xxh3_64_intdigest

from holdfast.spec.plugins import load_reference
from holdfast.store.records import OnCutOff, PartialFiles, ToolCall, TraceStep, Usage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from holdfast.data.dataset import Sample
    from holdfast.http.client import Client
    from holdfast.spec.eval import Origin
    from holdfast.spec.providers import ModelEndpoint
    from holdfast.spec.target_schema import BatchBlock, TargetBlock
    from holdfast.spec.trial_limits import RowLimits
    from holdfast.store.rundir import RunDir

Message = dict[str, Any]
"""a message as OpenAI's chat API has it: role, content, tool calls"""


ReplayPolicy = Literal["record", "never", "again"]
"""What happens to a tool call when a trial goes on after a crash. `record`: it is answered from the record, or made
again if it was cut off. `never`: the same, but if it was cut off it is not made again, since it may have happened.
`again`: it runs again, to bring a server's own state back."""


PROXY: Final = "holdfast.targets.proxy:Proxy"
"""the recording proxy, loaded by name because aiohttp takes long to import"""
PROCESS: Final = object()
"""the home of state in this process, such as the globals of a Python module"""


class ToolFailure(msgspec.Struct, frozen=True):
    """A tool's result if its Python function raised."""

    message: str
    """for the model"""
    traceback: str
    """of the user's code, only for the record"""


class PastCall(msgspec.Struct, frozen=True):
    """A finished tool call of a trial, to be run again if the state it built has been lost."""

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
    """runs the call there; None if it can no longer be run"""


FindHome = Callable[[PastCall], Awaitable[Home | None]]
"""finds the home of a past call; None unless the call has `replay: again`"""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """How to read a model call that is in a third-party program's form."""

    identity: Any = UNSET
    """the request without the parts that clients change on every start; the record is searched for it"""
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
    """the trial's folder, if the eval has a workspace"""
    first: bool
    """the first attempt at the turn, and the previous turn was answered in this process"""
    observed: bool
    """the target makes its tool calls through this object: no calls here means no calls"""
    text_so_far: str
    """what the target has answered so far: the answer, if a limit ends the attempt"""

    async def model(self, request: Any, ask: Callable[[], Awaitable[Any]], reading: Reading | None = None) -> Any:
        """Return a model's `Reply` to a request with `messages`; `ask` gets it if it is not on record.

        With `reading`, request and answer are JSON in any form.
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
        """Return a tool's result, as JSON; `run` gets it from the id of the call if it is not on record.

        `on_cut_off` is for `replay: never`, and `home` holds the state that a `replay: again` call builds. The
        message of a `ToolFailure` is the result, and its traceback is recorded as well.
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
    """the text before it; None: the prompt"""
    rolling: bool = False
    """the text has no context, and is divided if it is longer than the model's context"""


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
    key: str = ""
    """the trial's key: the same in every process and every run that would reuse the trial's output"""
    run: str = ""
    """the run's name, such as `myeval/3f2a…`"""
    base_url: str = ""
    """a base URL for this trial's model calls, which are recorded (`TargetBlock.proxied`)"""
    environment: Mapping[str, str] = MappingProxyType({})
    """variables by which the clients of OpenAI, Anthropic and Google find `base_url`; the proxy adds the keys"""

    @property
    def seed(self) -> int:
        """Seed of the trial: the same number for the same sample and trial, in any order of execution."""
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
    """every tool call of this turn, filled in by the engine if `messages` do not hold them all"""
    trace: list[TraceStep] | None = None
    """the target's inner steps in this turn, if it reports them; stored as `Output.trace`"""
    value: Any = UNSET
    """the answer itself, if it is an object, a list, a number … and not a text; JSON. `text` is its text"""


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

    def use_batches(self, batches: BatchHub) -> None:
        """Take the run's batches, if it has any, before the target is opened."""

    def limits(self, sample: Sample) -> RowLimits | None:
        """Return a row's own limits, for trials with recorded calls; None: the limits of the eval count."""
        return None

    async def __aenter__(self) -> Self:
        """Open connections and start servers."""
        return self

    async def __aexit__(self, *details: object) -> None:
        """Release all resources."""

    async def reply(self, turn: Turn) -> Reply:
        """Answer, or raise AttemptError (this attempt failed) or Fault (all will)."""
        raise NotImplementedError


_PARTS: Final = {
    "hub": "holdfast.plugins.batches.hub:open_batches",
    "problem": "holdfast.plugins.batches.providers:batch_problem",
    "most_requests": "holdfast.plugins.batches.providers:most_requests",
    "lines": "holdfast.plugins.batches.collecting:batch_lines",
}


class Asker(Protocol):
    """The attempt at a trial or a grade that makes a request, which names the request in a batch."""

    key: str
    """of the trial"""
    where: str
    """`target`, or the grader's name"""

    def waiting(self) -> AbstractContextManager[None]:
        """Suspend time limits while the request waits for its batch, which may take a day."""
        ...


ASKER: Final[ContextVar[Asker]] = ContextVar("asker")
"""set by the engine for each attempt"""


class BatchedClient(Protocol):
    """Makes the requests of one model in batches."""

    async def post(self, body: Any) -> tuple[Any, bool]:
        """Return the reply to a request, and whether it comes from a batch."""
        ...


class BatchHub(Protocol):
    """The batches of a run, for all models that it asks."""

    def client(
        self, client: Client, endpoint: ModelEndpoint, path: str, block: BatchBlock | None, where: str
    ) -> BatchedClient | None:
        """Return a client for batches of a model, whose single requests `client` makes; None if it has no batches."""
        ...

    def open(self) -> None:
        """Read what earlier processes have submitted and collected, once all clients are there."""
        ...

    async def run(self) -> None:
        """Submit batches and hand out their results, until cancelled."""
        ...

    async def settle(self) -> None:
        """Return when no batch is being submitted, and no results are being stored."""
        ...

    def leave(self) -> None:
        """Let nobody wait for a batch any longer: another process collects it."""
        ...

    def summary(self) -> list[str]:
        """Describe the batches that somebody waits for."""
        ...


def open_batches(rundir: RunDir, journals: Path, **options: Any) -> BatchHub:
    """Return the batches of a run; options as for `holdfast.plugins.batches.hub.Batches`."""
    hub: BatchHub = load_reference(_PARTS["hub"])(rundir, journals, **options)
    return hub


def batch_problem(block: BatchBlock, model: str, endpoint: ModelEndpoint) -> str | None:
    """Return why a model cannot be asked in batches; None if it can."""
    problem: str | None = load_reference(_PARTS["problem"])(block, model, endpoint)
    return problem


def most_requests(endpoint: ModelEndpoint) -> int:
    """Return how many requests one batch may have."""
    most: int = load_reference(_PARTS["most_requests"])(endpoint)
    return most


def batch_lines(rundir: RunDir, states: Mapping[str, str] = MappingProxyType({})) -> Iterator[str]:
    """Describe the batches of a run that have no results yet; `states` has their progress, by intent."""
    if rundir.has_batches:
        yield from load_reference(_PARTS["lines"])(rundir, states)

"""The model and tool calls of one attempt at a turn: from the trial's record, or made and recorded.

`engine.replay` states the invariants.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter, defaultdict
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from holdfast.canonical import digest
from holdfast.engine.replay import Unrepeatable
from holdfast.errors import AttemptError, Fault
from holdfast.store.records import NO_USAGE, CallIntent, ToolCall, ToolResponse, Usage
from holdfast.targets.trace import Trace, as_listed
from holdfast.targets.types import PROCESS, PastCall, Reply, ToolFailure

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from holdfast.engine.replay import Key, Replay
    from holdfast.engine.workspace import Workspace
    from holdfast.spec.trial_limits import LimitName
    from holdfast.store.blobs import Files
    from holdfast.store.records import OnCutOff
    from holdfast.targets.types import Closing, FindHome, Reading, ReplayPolicy

_INSIDE_CALL: ContextVar[bool] = ContextVar("inside_call", default=False)
"""True inside a recorded call, such as a tool that asks a model"""


class RecordedCalls:
    """The model and tool calls of one attempt at one turn, as targets make them (`targets.types.Calls`)."""

    def __init__(self, replay: Replay, turn: int, *, first: bool) -> None:
        self._replay = replay
        self._turn = turn
        self._request_counts: Counter[tuple[str, str]] = Counter()
        """by kind and request: how many equal calls were made"""
        self._failed_numbers: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        """by kind and request: numbers of failed calls, to be taken by the next equal calls"""
        self._outages: dict[str, AttemptError | Fault] = {}
        """by request: the failures of calls that have not succeeded since"""
        self._again_keys: set[Key] = set()
        """the `replay: again` calls of this attempt"""
        self._furthest = -1
        """position in the record of the call after which the workspace was saved or restored"""
        self._moving = asyncio.Lock()
        self._over = False
        self._in_flight = 0
        """number of calls in flight"""
        self._asked: dict[Key, float] = {}
        """model calls in flight, and when they began by the monotonic clock"""
        self._cut_off: dict[Key, float] = {}
        """model calls that were cancelled since the last answer, and when they began"""
        self._held: list[asyncio.Future[None]] = []
        """calls that may not start, because the run is halted or a limit is reached"""
        self._ending = False
        """the trial or the attempt was ended because of held calls"""
        self.limit: LimitName | None = None
        """the trial's limit because of which a call is held"""
        self.expire: Callable[[], object] = lambda: None
        """ends the attempt"""
        self.text_so_far = ""
        self.first = first
        self.usage: Usage | None = None
        """of this attempt's model calls, recorded ones included; None: no call was made"""
        self._tokens, self._cost = 0, 0.0
        """sums over the calls that report tokens or cost"""
        self._trace = Trace()

    @classmethod
    async def begin(cls, replay: Replay, turn: int) -> RecordedCalls:
        """Begin an attempt at a turn; raise what `Replay.begin_attempt` raises."""
        return cls(replay, turn, first=await replay.begin_attempt(turn))

    @property
    def id(self) -> str:
        """The trial's id in this process."""
        return self._replay.id

    @property
    def workspace(self) -> Path | None:
        """The trial's folder."""
        return None if self._replay.workspace is None else self._replay.workspace.folder

    def _check_not_over(self) -> None:
        if self._over:
            raise AttemptError("agent", "the attempt ended before this call returned", retry=False)

    def _next_key(self, kind: str, request: Any) -> Key:
        self._check_not_over()
        # Secrets are replaced first, because a request may repeat a recorded answer, in which they are.
        request_digest = digest(self._replay.without_secrets(request))
        if self._failed_numbers[kind, request_digest]:
            return self._turn, kind, request_digest, self._failed_numbers[kind, request_digest].pop()
        self._request_counts[kind, request_digest] += 1
        return self._turn, kind, request_digest, self._request_counts[kind, request_digest]

    async def _admit(self, kind: str) -> None:
        """Return if a call may start; otherwise wait for the end of the attempt, and raise AttemptError."""
        if _INSIDE_CALL.get():
            return
        if not self._replay.halted():
            limit = self._limit_reached() if kind == "model" else None
            if limit is None:
                return
            self.limit = limit
        held = asyncio.get_running_loop().create_future()
        self._held.append(held)
        self._end_if_held()
        await held
        self._check_not_over()

    def _end_if_held(self) -> None:
        """End the trial if it cannot continue and has no call in flight."""
        if self._held and not self._in_flight and not self._ending:
            self._ending = True
            if self._replay.halted():
                self._replay.end_trial()
            else:
                self.expire()

    def _limit_reached(self) -> LimitName | None:
        """Return the first limit of the trial that another model call would exceed."""
        limits = self._replay.limits
        if limits is None:
            return None
        before, requests = self._replay.usage_before, 0 if self.usage is None else self.usage.requests
        if limits.calls is not None and before.requests + requests + len(self._asked) >= limits.calls:
            return "call_limit"
        if limits.tokens is not None and (before.tokens or 0) + self._tokens >= limits.tokens:
            return "token_limit"
        if limits.cost is not None and (before.cost or 0.0) + self._cost >= limits.cost:
            return "cost_limit"
        return None

    @property
    def halted(self) -> bool:
        """True if the run is halted while a call of this attempt waits to start."""
        return bool(self._held) and self._replay.halted()

    @property
    def seconds_unanswered(self) -> float:
        """How long the oldest unanswered model call has been waiting, or had been when it was cut off."""
        now = time.monotonic()
        return now - min((*self._asked.values(), *self._cut_off.values()), default=now)

    async def _make(self, key: Key, live: Callable[[], Awaitable[tuple[Any, Usage]]]) -> Any:
        """Make a call and record its result."""
        self._check_not_over()  # a thread may have waited for the disk, or to be admitted
        call = self._replay.begin_call(key)
        self._in_flight += 1
        if key[1] == "model":
            self._asked[key] = call.started
        outside = _INSIDE_CALL.set(True)
        try:
            response, usage = await live()
            response = self._replay.without_secrets(response)
            self._check_not_over()  # the next attempt may have its own answer to the same call
            await self._replay.end_call(call, response, usage)
            if key[1] == "model":
                self._cut_off.clear()  # the target has recovered
        except asyncio.CancelledError:
            if key in self._asked:
                self._cut_off[key] = call.started
            raise
        finally:
            _INSIDE_CALL.reset(outside)
            self._in_flight -= 1
            self._asked.pop(key, None)
            self._end_if_held()
        return response

    async def _call(self, key: Key, live: Callable[[], Awaitable[tuple[Any, Usage]]], *, admitted: bool = False) -> Any:
        """Return the result of a call, as JSON: from the record, or from `live`, which also returns its usage."""
        _, kind, request, nth = key
        try:
            if (step := self._replay.take(key)) is not None:
                response = step.response
            else:
                if not admitted:
                    await self._admit(kind)
                response = await self._make(key, live)
        except (AttemptError, Fault) as error:
            if isinstance(error, Fault) or error.kind != "bad_request":
                self._outages.setdefault(request, error)
            self._failed_numbers[kind, request].append(nth)
            raise
        self._outages.pop(request, None)
        return response

    async def _call_once(self, key: Key, intent: CallIntent, live: Callable[[], Awaitable[tuple[Any, Usage]]]) -> Any:
        """Return the result of a call that must not be made twice; its intent is on disk before it begins."""
        if self._replay.has(key):
            return await self._call(key, live)
        await self._admit("tool")  # before the intent, after which the call may have happened
        self._in_flight += 1  # keeps a held call from ending the trial between the intent and the call
        try:
            await self._replay.record_intent((key[0], "intent", *key[2:]), intent)
            return await self._call(key, live, admitted=True)
        finally:
            self._in_flight -= 1
            self._end_if_held()

    async def model(self, request: Any, live: Callable[[], Awaitable[Any]], reading: Reading | None = None) -> Any:
        """Return a model's answer. Without `reading`, it is a `Reply`, which is on record as JSON."""
        key = self._next_key("model", request if reading is None or reading.identity is UNSET else reading.identity)
        self._trace.request(reading.messages if reading else request["messages"])
        read_usage = reading.usage if reading else _usage

        async def ask() -> tuple[Any, Usage]:
            answer = await live()
            response = answer if reading else msgspec.to_builtins(answer)
            return response, read_usage(response)

        # A tool in flight may ask through the proxy, which cannot see that the request is inside a call: waiting to be
        # admitted would be a deadlock.
        inside = reading is not None and self._in_flight > len(self._asked)
        response = await self._call(key, ask, admitted=inside)
        if reading is None:
            answer: Any = msgspec.convert(response, Reply)
            self._trace.response(key, key[2], answer.messages or [{"role": "assistant", "content": answer.text}])
        else:
            answer = response
            self._trace.response(key, key[2], reading.answers(response))
        used = read_usage(response)
        self.usage = used if self.usage is None else self.usage + used
        self._tokens += used.tokens or 0
        self._cost += used.cost or 0.0
        self._replay.usage_counted = True
        return answer

    async def tool(
        self,
        name: str,
        arguments: Any,
        live: Callable[[str], Awaitable[Any]],
        replay: ReplayPolicy,
        home: object = PROCESS,
        function: str | UnsetType | None = UNSET,
        on_cut_off: OnCutOff = "stop",
    ) -> Any:
        """Return a tool's result."""
        turn, _, request, _ = key = self._next_key("tool", [name, arguments])
        identity = self._replay.call_id(key)
        workspace, again = self._replay.workspace, self._replay.again
        files_before = None if workspace is None else workspace.last
        ran = False

        async def run() -> tuple[Any, Usage]:
            nonlocal ran
            ran = True
            result = await live(identity)
            traceback: str | UnsetType = UNSET
            if isinstance(result, ToolFailure):
                traceback, result = result.traceback, result.message
            response = ToolResponse(
                name,
                arguments,
                result,
                traceback,
                function if replay == "again" else UNSET,
                UNSET if workspace is None else await asyncio.to_thread(workspace.keep, trust_times=True),
            )
            return msgspec.to_builtins(response), NO_USAGE

        once = CallIntent(name, arguments, function, on_cut_off) if replay == "never" else None
        try:
            answer = await (self._call(key, run) if once is None else self._call_once(key, once, run))
            response = msgspec.convert(answer, ToolResponse)
        except (AttemptError, Fault):
            raise
        except Exception:  # raised by the user's function: the call happened
            self._trace.ran(None, name, arguments, None)
            raise
        if replay == "again":
            if not ran and not again.seen(key, home):
                await self._rerun(request, functools.partial(live, identity))  # only for the state
            again.note(key, PastCall(turn, name, arguments, function, identity), home, files_before)
            self._again_keys.add(key)
        if workspace is not None:
            await self._move_on(key, workspace, UNSET if ran else response.files)
        self._trace.ran(key, name, arguments, response.result)
        return response.result

    async def _move_on(self, key: Key, workspace: Workspace, files: Files | UnsetType) -> None:
        """Restore the workspace as it was after a recorded call, unless this attempt is past that call.

        An agent may repeat its calls in another order, or diverge from the record.
        """
        async with self._moving:
            position = self._replay.call_order().get(key, -1)
            if position > self._furthest:
                self._furthest = position
                if not isinstance(files, UnsetType):
                    await asyncio.to_thread(workspace.go_back_to, files)

    async def _rerun(self, request: str, live: Callable[[], Awaitable[Any]]) -> None:
        try:
            await live()
        except (AttemptError, Fault) as error:
            self._outages.setdefault(request, error)
            raise

    async def restore(self, find: FindHome) -> None:
        """Rerun the `replay: again` calls of earlier turns and of this attempt, in homes that have not seen them."""
        try:
            await self._replay.again.restore(find, lambda key: key[0] < self._turn or key in self._again_keys)
        except Unrepeatable as error:
            raise self._replay.lost(str(error)) from error

    async def resource(self, name: str, open_: Callable[[], Awaitable[Closing]]) -> Any:
        """Return a resource that lives as long as the trial."""
        return await self._replay.resource(name, open_)

    @property
    def observed(self) -> bool:
        """True if the target makes its tool calls through this object."""
        return self._trace.observed

    @observed.setter
    def observed(self, value: bool) -> None:
        self._trace.observed = value

    def with_calls(self, reply: Reply) -> Reply:
        """Return a reply with all tool calls of the attempt, in its messages or in a list of their own."""
        trace, messages = self._trace, reply.messages
        if messages is not None:
            complete = trace.covered_by(messages)
        else:
            messages, complete = trace.transcript(reply.text)
            if trace.unread or not trace.observed:
                return replace(reply, messages=messages, calls=[ToolCall(self._turn, None)])
        calls = UNSET if complete else as_listed(trace.calls(self._replay.call_order()), self._turn)
        return replace(reply, messages=messages, calls=calls)

    def end(self) -> None:
        """End the attempt. Calls that a thread makes or finishes later are not recorded."""
        self._over = True
        for held in self._held:
            if not held.done():
                held.set_result(None)

    def raise_outage(self) -> None:
        """Raise a failure from which the target did not recover: a reply after an outage is not its answer."""
        for error in sorted(self._outages.values(), key=lambda error: not isinstance(error, Fault)):
            raise error


def _usage(response: Any) -> Usage:
    return msgspec.convert(response["usage"], Usage)

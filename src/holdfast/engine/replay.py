"""The recorded calls of one trial: each is on disk before its result is used, and is answered from there after a crash.

Invariants:

1. A call is identified by its turn, its kind, the digest of its request (without what clients change on every start),
   and its number among equal requests of the attempt. Calls that an agent makes at the same time may therefore come
   back in any order.
2. Nobody sees the result of a live call before its record is on disk.
3. A recorded call is never made again. Exceptions are 4, and calls with `replay: again`, which run again where the
   state that they built is lost; also then the recorded result counts.
4. The conversation diverges from the record when a live call ends and recorded calls have not been asked for since it
   began. Those calls are dropped with a notice, and the conversation continues live. Calls with `replay: never` are
   kept: if the conversation comes to one of them later, it is answered from the record.
5. Before a call with `replay: never` starts, its intent is on disk.
6. An intent without a result means that the call may or may not have happened: the process was killed, or the attempt
   failed during the call. The call is not made again. Its tool's `on_cut_off` decides: the trial stops as uncertain
   until a person settles the call (`engine.settlement`), the call gets an error as its result, or the trial restarts,
   which it does only if that makes no call again whose tool does not allow it.
7. A call that failed has no record, and keeps its number: when it is repeated, it is the same call.
8. Once a whole turn is on record, the calls inside it are not asked for again.
9. An attempt that is over records nothing, although its threads may still be running.
10. In a run that is halted, or whose budget is spent, no call starts, except inside one that is in flight. A trial
   that wants to make one ends as soon as nothing of it is in flight, and has no output.
11. The same holds for model calls of a trial that has reached a limit of its own; its attempt ends with an output.
   What calls on record used counts as if they were made now.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter, defaultdict
from contextlib import suppress
from contextvars import ContextVar
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from holdfast.canonical import digest
from holdfast.engine.replay_again import AgainCalls, Unrepeatable
from holdfast.errors import AttemptError, Fault, RestartTrial, Uncertain
from holdfast.store.calls import cut_off_calls, describe_cut_off, why_uncertain
from holdfast.store.records import (
    NO_USAGE,
    CallIntent,
    Step,
    ToolCall,
    ToolResponse,
    Usage,
    call_id,
    describe_call,
    to_microseconds,
    to_milliseconds,
)
from holdfast.targets.trace import Trace, as_listed
from holdfast.targets.types import PROCESS, PastCall, ToolFailure

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from pathlib import Path

    from holdfast.engine.recorder import Recorder
    from holdfast.engine.replay_again import Key
    from holdfast.engine.workspace import Workspace
    from holdfast.plan.plan import PendingTrial
    from holdfast.spec.redact import Secrets
    from holdfast.spec.trial_limits import LimitName, TrialLimits
    from holdfast.store.blobs import Files
    from holdfast.store.records import OnCutOff
    from holdfast.targets.types import Closing, FindHome, Reading, ReplayPolicy, Reply

_INSIDE_TURN = ("model", "tool", "intent")
_INSIDE_CALL: ContextVar[bool] = ContextVar("inside_call", default=False)
"""True in what a recorded call runs, such as a tool that asks a model"""
_UNKNOWN: Final = "Error: this call was interrupted, and it is unknown whether it happened"
"""result of a call that was cut off, with `on_cut_off: error_result`"""


class LiveCall(msgspec.Struct, frozen=True):
    """A call that is not on record and is being made."""

    key: Key
    unused: set[Key]
    """recorded calls that had not been asked for when this one began"""
    started: float
    """by the monotonic clock"""
    replayed_seconds: float
    """the replay's count when this call began"""
    in_batches: float
    """seconds that the trial had waited for batches by then"""


class Replay:
    """The record of one trial's calls."""

    def __init__(
        self,
        pending: PendingTrial,
        recorder: Recorder,
        recorded: Iterable[Step],
        notice: Callable[[str], None],
        workspace: Workspace | None = None,
        in_batches: Callable[[], float] = lambda: 0.0,
        halted: Callable[[], bool] = lambda: False,
        end_trial: Callable[[], object] = lambda: None,
        limits: TrialLimits | None = None,
        secrets: Secrets | None = None,
    ) -> None:
        """`in_batches` returns the seconds that the trial has waited for batches, which count nowhere.

        `halted` returns True if no call may start any more, and `end_trial` ends the trial without an output. `limits`
        are those of the trial itself. `secrets` are replaced in responses before anybody sees them.
        """
        self.limits = limits
        self._pending = pending
        self._in_batches = in_batches
        self.halted = halted
        self.end_trial = end_trial
        self._recorder = recorder
        self._secrets = secrets
        self._notice = notice
        self.workspace = workspace
        self.id = token_hex(16)
        self._unused = {(step.turn, step.kind, step.request, step.nth): step for step in recorded}
        """recorded calls that the conversation has not asked for yet"""
        self.settled = sum(
            step.kind == "tool" and step.response.get("settled") == "happened" for step in self._unused.values()
        )
        """calls whose results a person has given"""
        self._from_earlier_process = set(self._unused)
        """calls that an earlier process recorded, and that are not counted in `replayed_seconds` yet"""
        self.replayed_seconds = 0.0
        """how long calls answered from an earlier process's record took there"""
        self._turn = 0
        """the turn being asked"""
        self._turn_calls: dict[Key, Step] = {}
        """everything on record inside that turn, made by this process or an earlier one"""
        self._positions: dict[Key, int] = {}
        """positions of that turn's calls in the record, also of calls that were dropped"""
        self._length = 0
        """position of the next call"""
        self._intents = {key: step for key, step in self._unused.items() if step.kind == "intent"}
        """all calls of the trial that must not be made twice, finished or not"""
        self._last_live_turn = 0
        self.again = AgainCalls(workspace)
        self._resources: dict[str, Closing] = {}
        self._opening_resource = asyncio.Lock()
        self.usage_counted = False
        """the target's usage was counted call by call"""
        self.usage_before = NO_USAGE
        """of earlier turns"""
        self.seconds_before = 0.0
        """how long earlier turns took"""
        self.turn_seconds = 0.0
        """how long the turns took so far, including those that an earlier process recorded"""

    @property
    def trial_name(self) -> str:
        """The trial's name in messages."""
        return f"{self._pending.sample.id} #{self._pending.trial}"

    def without_secrets(self, value: Any) -> Any:
        """Return a request or a response in which known secrets are replaced. Paths of a workspace stay."""
        cleaned = value if self._secrets is None else self._secrets.clean(value)
        if cleaned is value or not isinstance(value, dict) or "files" not in value:
            return cleaned
        return {**cleaned, "files": value["files"]}

    def call_order(self) -> dict[Key, int]:
        """Return the positions of the current turn's calls in the record."""
        return self._positions

    def call_id(self, key: Key) -> str:
        """Return the id of a tool call, for the tool to use."""
        turn, _, request, nth = key
        return call_id(self._pending.key, turn, request, nth)

    @property
    def progress(self) -> int:
        """The number of calls that the current turn has made. Dropped calls do not count."""
        return len(self._turn_calls) + self.again.restored

    @property
    def recorded_seconds(self) -> float:
        """How long the recorded calls of the current turn took. Calls made at the same time count once."""
        seconds = end = 0.0
        calls = (step for step in self._turn_calls.values() if step.kind in ("model", "tool"))
        for step in sorted(calls, key=lambda step: step.time - step.seconds):
            seconds += max(0.0, step.time - max(end, step.time - step.seconds))
            end = max(end, step.time)
        return seconds

    async def begin_attempt(self, turn: int) -> RecordedCalls:
        """Begin an attempt at a turn. Calls that are on record from earlier attempts are answered from there.

        Raises Uncertain or RestartTrial if a call that must not happen twice was cut off.
        """
        if turn != self._turn:
            self._turn = turn
            self._turn_calls = {key: step for key, step in self._unused.items() if key[0] == turn}
            self._positions = {key: number for number, key in enumerate(self._turn_calls)}
            self._length = len(self._positions)
        self._unused |= self._turn_calls
        await self._settle_cut_off()
        continues_live = self._last_live_turn == turn - 1
        self._last_live_turn = turn
        return RecordedCalls(self, turn, first=continues_live)

    def _cut_off(self) -> list[tuple[Step, CallIntent]]:
        steps = cut_off_calls((self._unused | self._turn_calls).values())
        return [(step, msgspec.convert(step.response, CallIntent)) for step in steps]

    async def _settle_cut_off(self) -> None:
        """Do with calls that were cut off what their tools say."""
        for step, intent in self._cut_off():
            if intent.on_cut_off == "error_result":
                response = ToolResponse(intent.tool, intent.arguments, _UNKNOWN, settled="error_result")
                key = (step.turn, "tool", step.request, step.nth)
                result = await self._write(key, msgspec.to_builtins(response), NO_USAGE, time.monotonic())
                self._unused[key] = result
                self._notice(
                    f"{self.trial_name}: {describe_call(step)} was cut off; the target gets an error as result"
                )
        if (uncertain := self.uncertain()) is not None:
            raise uncertain
        if cut_off := self._cut_off():
            raise self._restarted(describe_cut_off([cut_off[0][0]]))

    def uncertain(self) -> Uncertain | None:
        """Return the error that stops the trial because of calls that were cut off; None if there is no such call."""
        why = why_uncertain((step for step, _ in self._cut_off()), self._intents.values())
        return Uncertain(why) if why else None

    def report_cut_off(self) -> str:
        """Mention calls that were cut off although the turn has an end that counts; return what is said, or nothing."""
        text = describe_cut_off(step for step, _ in self._cut_off())
        if text:
            self._notice(f"{self.trial_name}: {text}; the trial is graded as it was left")
        return text

    def _may_restart(self) -> bool:
        """Return True if no call is on record whose tool forbids that the trial makes it again."""
        intents = [msgspec.convert(step.response, CallIntent) for step in self._intents.values()]
        return all(intent.on_cut_off == "restart" for intent in intents)

    def _restarted(self, why: str) -> RestartTrial:
        return RestartTrial("agent", f"{self.trial_name}: {why}; the trial starts from scratch", retry=False)

    def lost(self, tool: str) -> AttemptError:
        """Return the error for a trial whose state, which `replay: again` calls of a tool built, cannot be restored."""
        why = f"the state that a call of {tool} (replay: again) has built is lost, and the call cannot be run again"
        if self._may_restart():
            return self._restarted(f"{why} from the record")
        repeated = "; ".join(map(describe_call, self._intents.values()))
        return Uncertain(f"{why}; only `restart` can settle this, and makes again: {repeated}")

    async def restart(self) -> None:
        """Begin the trial again: nothing that is on record counts any more."""
        await self._write((0, "restart", "", 1), None, NO_USAGE, time.monotonic())
        self._unused.clear()
        self._turn_calls.clear()
        self._positions.clear()
        self._intents.clear()
        self.settled = 0
        self._turn = self._last_live_turn = 0
        self._from_earlier_process.clear()
        self.again.clear()
        self.turn_seconds = self.replayed_seconds = self.seconds_before = 0.0
        self.usage_before = NO_USAGE
        if self.workspace is not None:
            self.workspace.restart()
        await self.close()

    def has(self, key: Key) -> bool:
        """Return True for a call that is on record and has not been asked for yet."""
        return key in self._unused

    def take(self, key: Key) -> Step | None:
        """Take a call from the record; None where it has to be made."""
        if (step := self._unused.pop(key, None)) is None:
            return None
        self._count_seconds(step)
        if key in self._from_earlier_process:
            self._from_earlier_process.discard(key)
            self.replayed_seconds += step.seconds
        return step

    def begin_call(self, key: Key) -> LiveCall:
        """Note that a call is about to be made."""
        return LiveCall(key, set(self._unused), time.monotonic(), self.replayed_seconds, self._in_batches())

    async def end_call(self, call: LiveCall, response: Any, usage: Usage) -> None:
        """Record the result of a live call, given as JSON; return when it is on disk."""
        # A turn takes as long as the calls inside it, whichever process made them.
        started = call.started - (self.replayed_seconds - call.replayed_seconds)
        started += self._in_batches() - call.in_batches
        self._drop(call.unused & self._unused.keys(), call.key[0])
        await self._write(call.key, response, usage, started)

    def end_turn(self, turn: int, response: Any) -> None:
        """Forget the calls inside a turn: its reply is on record, so they are not asked for again."""
        inside = [key for key in self._unused if key[0] == turn and key[1] in _INSIDE_TURN]
        if turn != self._last_live_turn:  # an earlier process was answered, and the state its tools built is not here
            before = None if self.workspace is None else self.workspace.now
            self.again.remember((self._unused[key] for key in inside), response, before)
        for key in inside:
            del self._unused[key]

    async def record_intent(self, key: Key, intent: CallIntent) -> None:
        """Record that a call is about to be made that must not be made twice; raise AttemptError if it has begun."""
        if key in self._turn_calls:  # it failed, and the target repeats it: the next attempt says what happens now
            raise AttemptError("agent", f"{describe_call(self._turn_calls[key])} was cut off, and is not made again")
        response = self.without_secrets(msgspec.to_builtins(intent))
        self._intents[key] = await self._write(key, response, NO_USAGE, time.monotonic())

    async def _write(self, key: Key, response: Any, usage: Usage, started: float) -> Step:
        turn, kind, request, nth = key
        step = Step(
            key=self._pending.key,
            sample=self._pending.sample.id,
            trial=self._pending.trial,
            turn=turn,
            kind=kind,
            request=request,
            nth=nth,
            response=response,
            usage=usage,
            time=to_milliseconds(time.time()),
            seconds=to_microseconds(time.monotonic() - started),
        )
        await self._recorder.step(step)
        self._count_seconds(step)
        if turn == self._turn and kind != "turn":
            self._turn_calls[key] = step
            self._positions[key] = self._length
            self._length += 1
        return step

    def _count_seconds(self, step: Step) -> None:
        if step.kind not in _INSIDE_TURN:
            self.turn_seconds += step.seconds
        if step.kind == "turn":
            self.seconds_before += step.seconds

    def _drop(self, keys: set[Key], turn: int) -> None:
        """Drop recorded calls that the conversation did not ask for while it made a new one."""
        calls = [key for key in keys if key[1] != "intent" and not self._happens_once(key)]
        if calls:
            count = "1 recorded call is" if len(calls) == 1 else f"{len(calls)} recorded calls are"
            self._notice(
                f"{self.trial_name}: the target is not deterministic: turn {turn} makes "
                f"other calls than before it was interrupted; {count} dropped, and the trial continues live"
            )
        for key in calls:
            self._unused.pop(key, None)
            self._turn_calls.pop(key, None)
        self.again.forget(calls)

    def _happens_once(self, key: Key) -> bool:
        """Return True for a recorded call with `replay: never`."""
        return (key[0], "intent", *key[2:]) in self._intents

    def report_unasked(self) -> None:
        """Mention side effects that happened before an interruption, and that the conversation no longer has."""
        for key, step in self._unused.items():
            if key[:2] == (self._turn, "tool") and self._happens_once(key):
                self._notice(
                    f"{self.trial_name}: {describe_call(step)} (replay: never) happened before the trial was "
                    "interrupted, but the target, which is not deterministic, has not asked for it again"
                )

    async def resource(self, name: str, open_: Callable[[], Awaitable[Closing]]) -> Any:
        """Return a resource that lives as long as the trial; one that died is opened again."""
        async with self._opening_resource:  # an agent may ask for it twice at once
            resource = self._resources.get(name)
            if resource is not None and not resource.alive:
                await resource.close()
                resource = None
            if resource is None:
                resource = self._resources[name] = await open_()
            return resource

    async def close(self) -> None:
        """Close the trial's resources."""
        while self._resources:
            _, resource = self._resources.popitem()
            with suppress(Exception):  # nothing depends on it any more
                await resource.close()


class RecordedCalls:
    """The model and tool calls of one attempt at one turn, as targets make them (`targets.types.Calls`)."""

    def __init__(self, replay: Replay, turn: int, *, first: bool) -> None:
        self._replay = replay
        self._turn = turn
        self._request_counts: Counter[tuple[str, str]] = Counter()
        """by kind and request: how many equal calls were made"""
        self._failed_numbers: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        """by kind and request: the numbers of calls that failed, which the next equal calls take"""
        self._outages: dict[str, AttemptError | Fault] = {}
        """by request: the failures of calls that have not succeeded since"""
        self._again_keys: set[Key] = set()
        """the `replay: again` calls of this attempt"""
        self._furthest = -1
        """position in the record of the call whose files the workspace has"""
        self._moving = asyncio.Lock()
        self._over = False
        self._in_flight = 0
        """calls that are being made"""
        self._asked: dict[Key, float] = {}
        """when the model calls that are being made began, by the monotonic clock"""
        self._cut_off: dict[Key, float] = {}
        """model calls that were cancelled since the last answer, and when they began"""
        self._held: list[asyncio.Future[None]] = []
        """calls that may not start, because the run is halted, or a limit is reached"""
        self._ending = False
        """the trial, or the attempt, was ended because of them"""
        self.limit: LimitName | None = None
        """the limit of the trial that a call was held for"""
        self.expire: Callable[[], object] = lambda: None
        """ends the attempt"""
        self.text_so_far = ""
        self.first = first
        self.usage: Usage | None = None
        """of this attempt's model calls, including those answered from the record; None: there was none"""
        self._tokens, self._cost = 0, 0.0
        """of the calls among them that report theirs"""
        self._trace = Trace()

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
        # Without secrets, since a recorded answer that the request repeats is without them, too.
        request_digest = digest(self._replay.without_secrets(request))
        if self._failed_numbers[kind, request_digest]:
            return self._turn, kind, request_digest, self._failed_numbers[kind, request_digest].pop()
        self._request_counts[kind, request_digest] += 1
        return self._turn, kind, request_digest, self._request_counts[kind, request_digest]

    async def _admit(self, kind: str) -> None:
        """Return if a call may start; if not, wait until the attempt is over, and raise AttemptError."""
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
        """End the trial if it cannot continue, and nothing of it is in flight."""
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
        """True if the attempt waits for a call that the run may not make any more."""
        return bool(self._held) and self._replay.halted()

    @property
    def seconds_unanswered(self) -> float:
        """How long the oldest model call without an answer has been waiting for it, or had been when it was cut off."""
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
            self._check_not_over()  # the next attempt may have an answer of its own to the same call
            await self._replay.end_call(call, response, usage)
            if key[1] == "model":
                self._cut_off.clear()  # the target has got over it
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
        await self._admit("tool")  # before the intent, which would say that the call may have happened
        self._in_flight += 1  # so that a call that is held does not end the trial between the intent and the call
        try:
            await self._replay.record_intent((key[0], "intent", *key[2:]), intent)
            return await self._call(key, live, admitted=True)
        finally:
            self._in_flight -= 1
            self._end_if_held()

    def _model_key(self, request: Any, reading: Reading | None) -> Key:
        if reading is None or reading.identity is UNSET:
            return self._next_key("model", request)
        key = self._next_key("model", reading.identity)
        if reading.identity != request and not self._replay.has(key):
            # Records from before volatile fields were left out have the digest of the whole request.
            old = self._next_key("model", request)
            return old if self._replay.has(old) else key
        return key

    async def model(self, request: Any, live: Callable[[], Awaitable[Any]], reading: Reading | None = None) -> Any:
        """Return a model's answer."""
        key = self._model_key(request, reading)
        self._trace.request(reading.messages if reading else request["messages"])
        read_usage = reading.usage if reading else _usage

        async def ask() -> tuple[Any, Usage]:
            answer = await live()
            return answer, read_usage(answer)

        # A tool in flight may ask through the proxy, which does not know that: it would wait for itself.
        inside = reading is not None and self._in_flight > len(self._asked)
        response = await self._call(key, ask, admitted=inside)
        self._trace.response(key, key[2], reading.answers(response) if reading else response["messages"] or ())
        used = read_usage(response)
        self.usage = used if self.usage is None else self.usage + used
        self._tokens += used.tokens or 0
        self._cost += used.cost or 0.0
        self._replay.usage_counted = True
        return response

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
        except Exception:  # raised by the user's function, which was called all the same
            self._trace.ran(None, name, arguments, None)
            raise
        if replay == "again":
            if not ran and not again.seen(key, home):
                await self._rerun(request, functools.partial(live, identity))  # for the state: the first result counts
            again.note(key, PastCall(turn, name, arguments, function, identity), home, files_before)
            self._again_keys.add(key)
        if workspace is not None:
            await self._move_on(key, workspace, UNSET if ran else response.files)
        self._trace.ran(key, name, arguments, response.result)
        return response.result

    async def _move_on(self, key: Key, workspace: Workspace, files: Files | UnsetType) -> None:
        """Bring the workspace to where it was after a recorded call, unless it has been further in this attempt.

        An agent may ask for its calls in another order than before, or may have diverged from the record.
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
        """Run the `replay: again` calls of earlier turns, and of this attempt, in homes that have not seen them."""
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
        """Return a reply with all tool calls of the attempt: in its messages, or listed beside them."""
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
        """End the attempt. Calls that a thread makes or ends later are not recorded."""
        self._over = True
        for held in self._held:
            if not held.done():
                held.set_result(None)

    def raise_outage(self) -> None:
        """Raise a failure that the target met and did not overcome: a reply after an outage is not its answer."""
        for error in sorted(self._outages.values(), key=lambda error: not isinstance(error, Fault)):
            raise error


def _usage(response: Any) -> Usage:
    return msgspec.convert(response["usage"], Usage)

"""The record of one trial's calls: each is on disk before its result is used, and answers the call after a crash.

Invariants:

1. A call is identified by its turn, its kind, the digest of its request (without what clients change on every start),
   and its number among equal requests of the attempt. Calls that an agent makes at the same time may therefore come
   back in any order.
2. Nobody sees the result of a live call before its record is on disk.
3. A recorded call is never made again. Exceptions are 4, and calls with `replay: again`, which run again if the state
   that they built is lost; even then the recorded result counts.
4. The conversation diverges from the record when a live call ends and recorded calls have not been asked for since it
   began. Those calls are dropped with a notice, and the conversation continues live. Calls with `replay: never` are
   kept: if the conversation comes to one of them later, it is answered from the record.
5. Before a call with `replay: never` starts, its intent is on disk.
6. An intent without a result means that the call may or may not have happened: the process was killed, or the attempt
   failed during the call. The call is not made again. Its tool's `on_cut_off` decides: the trial stops as uncertain
   until a person settles the call (`engine.settlement`), the call gets an error as its result, or the trial restarts,
   unless that would repeat a call whose tool forbids it.
7. A failed call has no record and keeps its number: when repeated, it is the same call.
8. Once a whole turn is on record, the calls inside it are not asked for again.
9. An attempt that is over records nothing, although its threads may still be running.
10. In a run that is halted, or whose budget is spent, no call starts, except inside a call in flight. A trial that
   tries to make a call ends without an output, as soon as nothing of it is in flight.
11. The same holds for model calls of a trial that has reached its own limit, but its attempt ends with an output.
   Recorded calls count towards limits as if they were made now.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import UnsetType

from holdfast.errors import AttemptError, RestartTrial, Uncertain
from holdfast.store.heads import call_id, cut_off_calls, describe_call, describe_cut_off, why_uncertain
from holdfast.store.records import NO_USAGE, CallIntent, Step, ToolResponse, Usage, to_microseconds, to_milliseconds
from holdfast.targets.types import PastCall

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from holdfast.engine.recorder import Recorder
    from holdfast.engine.workspace import Workspace
    from holdfast.plan.plan import PendingTrial
    from holdfast.spec.redact import Secrets
    from holdfast.spec.trial_limits import TrialLimits
    from holdfast.store.blobs import Files
    from holdfast.targets.types import Closing, FindHome

_INSIDE_TURN = ("model", "tool", "intent")
_UNKNOWN: Final = "Error: this call was interrupted, and it is unknown whether it happened"
"""result of a call that was cut off, with `on_cut_off: error_result`"""


Key = tuple[int, str, str, int]
"""turn, kind, digest of the request, number among equal requests"""


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
        """`in_batches` returns the seconds that the trial has waited for batches, which do not count as its time.

        `halted` returns True if no call may start, and `end_trial` ends the trial without an output. `limits` are the
        trial's own. `secrets` are replaced in responses before anybody sees them.
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
        """number of calls whose result a person has given"""
        self._from_earlier_process = set(self._unused)
        """calls that an earlier process recorded, and that are not counted in `replayed_seconds` yet"""
        self.replayed_seconds = 0.0
        """how long calls took that are answered from an earlier process's record"""
        self._turn = 0
        """the turn being asked"""
        self._turn_calls: dict[Key, Step] = {}
        """all recorded calls of that turn, of this process or an earlier one"""
        self._positions: dict[Key, int] = {}
        """positions of that turn's calls in the record, including dropped calls"""
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

    async def begin_attempt(self, turn: int) -> bool:
        """Begin an attempt at a turn; return True if it is the first, after a turn that was answered in this process.

        Calls that are on record from earlier attempts are answered from there. Raises Uncertain or RestartTrial if a
        call that must not happen twice was cut off.
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
        return continues_live

    def _cut_off(self) -> list[tuple[Step, CallIntent]]:
        steps = cut_off_calls((self._unused | self._turn_calls).values())
        return [(step, msgspec.convert(step.response, CallIntent)) for step in steps]

    async def _settle_cut_off(self) -> None:
        """Handle calls that were cut off as their tools' `on_cut_off` says."""
        for step, intent in self._cut_off():
            if intent.on_cut_off == "error_result":
                response = ToolResponse(intent.tool, intent.arguments, _UNKNOWN, settled="error_result")
                key = (step.turn, "tool", step.request, step.nth)
                result = await self._write(key, msgspec.to_builtins(response), NO_USAGE, time.monotonic())
                self._unused[key] = result
                self._notice(
                    f"{self.trial_name}: {describe_call(step)} was cut off; the target gets an error as its result"
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
        """Report calls that were cut off in a turn that is graded all the same; return the description, or ''."""
        text = describe_cut_off(step for step, _ in self._cut_off())
        if text:
            self._notice(f"{self.trial_name}: {text}; the trial is graded as it was left")
        return text

    def _may_restart(self) -> bool:
        """Return True if every recorded call may be made again."""
        intents = [msgspec.convert(step.response, CallIntent) for step in self._intents.values()]
        return all(intent.on_cut_off == "restart" for intent in intents)

    def _restarted(self, why: str) -> RestartTrial:
        return RestartTrial("agent", f"{self.trial_name}: {why}; the trial starts from scratch", retry=False)

    def lost(self, tool: str) -> AttemptError:
        """Return the error for a trial whose `replay: again` calls of a tool cannot be run again."""
        why = f"the state that a call of {tool} (replay: again) has built is lost, and the call cannot be run again"
        if self._may_restart():
            return self._restarted(f"{why} from the record")
        repeated = "; ".join(map(describe_call, self._intents.values()))
        return Uncertain(f"{why}; only `restart` can settle this, which repeats: {repeated}")

    async def restart(self) -> None:
        """Begin the trial again: its record no longer counts."""
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
        """Take a call from the record; None if it has to be made."""
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

    def end_turn(self, turn: int) -> None:
        """Forget the calls inside a turn: its reply is on record, so they are not asked for again."""
        inside = [key for key in self._unused if key[0] == turn and key[1] in _INSIDE_TURN]
        if turn != self._last_live_turn:  # an earlier process made the calls, and its tools built state there
            before = None if self.workspace is None else self.workspace.now
            self.again.remember((self._unused[key] for key in inside), before)
        for key in inside:
            del self._unused[key]

    async def record_intent(self, key: Key, intent: CallIntent) -> None:
        """Record that a call is about to be made that must not be made twice; raise AttemptError if it has begun."""
        if key in self._turn_calls:  # it failed, and the target repeats it: the next attempt decides
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
        """Report side effects from before an interruption that the conversation no longer contains."""
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
            with suppress(Exception):  # nothing depends on it
                await resource.close()


class Unrepeatable(Exception):
    """A call whose state is lost cannot be run again."""


class _RepeatableCall(msgspec.Struct):
    call: PastCall
    before: Files | None
    """the workspace before the call"""
    home: object | None = None
    """where the call was made last; None: nowhere in this process"""


class AgainCalls:
    """The `replay: again` calls of a trial, in the order in which they were made.

    They run again if the state that they built is lost. The state lives in a home: the connection to an MCP server, an
    object of the agent's, or this process. No home sees a call twice. A new home (another process, a server that was
    restarted after a crash) first sees all earlier calls, of previous turns and of the current attempt.
    """

    def __init__(self, workspace: Workspace | None) -> None:
        self._workspace = workspace
        self._calls: dict[Key, _RepeatableCall] = {}
        self._one_at_a_time = asyncio.Lock()
        self.restored = 0
        """number of calls that were run again, which counts as progress of an attempt that times out"""

    def seen(self, key: Key, home: object) -> bool:
        """Return True if a call was made in a home."""
        repeatable = self._calls.get(key)
        return repeatable is not None and repeatable.home is home

    def note(self, key: Key, call: PastCall, home: object, before: Files | None) -> None:
        """Note that a call was made in a home. A repeated call keeps its position."""
        self._calls.setdefault(key, _RepeatableCall(call, self._deduplicate(before))).home = home

    def _deduplicate(self, files: Files | None) -> Files | None:
        """Return the previous call's map if it is equal: most calls change nothing, and a map may be large."""
        last = next(reversed(self._calls.values()), None)
        return last.before if last is not None and last.before == files else files

    def remember(self, steps: Iterable[Step], before: Files | None) -> None:
        """Remember the tool calls of a turn answered from an earlier process's record.

        The target knows which of them are `replay: again`; the others are forgotten when it looks for their homes.
        """
        for step in steps:
            if step.kind != "tool":
                continue
            response = msgspec.convert(step.response, ToolResponse)
            identity = call_id(step.key, step.turn, step.request, step.nth)
            call = PastCall(step.turn, response.tool, response.arguments, response.function, identity)
            key = (step.turn, step.kind, step.request, step.nth)
            self._calls.setdefault(key, _RepeatableCall(call, self._deduplicate(before)))
            before = before if isinstance(response.files, UnsetType) else response.files

    def forget(self, keys: Iterable[Key]) -> None:
        """Forget calls that the conversation no longer makes."""
        for key in keys:
            self._calls.pop(key, None)

    def clear(self) -> None:
        """Forget everything: the trial starts from scratch."""
        self._calls.clear()

    async def restore(self, find: FindHome, due: Callable[[Key], bool]) -> None:
        """Run the calls that are due in homes that have not seen them; raise Unrepeatable if that is impossible."""
        async with self._one_at_a_time:  # an agent may use two tools at once
            present: Files | None = None
            try:
                for key, repeatable in list(self._calls.items()):
                    call = repeatable.call
                    if not due(key) or (call.function is None and repeatable.home is not None):
                        continue
                    place = await find(call)
                    if place is None:
                        self._calls.pop(key, None)  # not, or no longer, `replay: again`
                        continue
                    if place.home is repeatable.home:
                        continue
                    if place.rerun is None:
                        raise Unrepeatable(call.name)
                    if self._workspace is not None:
                        if present is None:
                            present = await asyncio.to_thread(self._workspace.keep)
                        if repeatable.before is not None:
                            await asyncio.to_thread(self._workspace.go_back_to, repeatable.before)
                    await place.rerun()
                    repeatable.home = place.home
                    self.restored += 1
            finally:
                if present is not None and self._workspace is not None:
                    await asyncio.to_thread(self._workspace.go_back_to, present)

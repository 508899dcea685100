"""The calls of one conversation, recorded before their results are used, and answered from the record after a crash.

A call is known by its turn, by what it asks and by how many equal ones came before it in the turn, so that calls made
side by side may come back in any order. A conversation that asks something else than it did before its crash is not
deterministic: what was recorded beyond that point is of no use, and it goes on live. A turn that failed and is asked
again in the same process is answered from the record in the same way.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter, defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from holdfast.canonical import digest
from holdfast.conversation.turns import add_usage
from holdfast.engine.again import AgainCalls, Unrepeatable
from holdfast.errors import AttemptError, Fault
from holdfast.store.records import NO_USAGE, Step, ToolCall, Usage
from holdfast.targets.trace import Trace, as_listed
from holdfast.targets.types import PROCESS, PastCall, ToolFailure

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from pathlib import Path

    from holdfast.engine.again import Key
    from holdfast.engine.recorder import Keeper
    from holdfast.engine.workspace import Workspace
    from holdfast.plan.plan import Job
    from holdfast.targets.types import Closing, FindHome, Replay, Reply

_INNER = ("model", "tool", "intent")


class StartAnew(AttemptError):
    """A call that must never happen twice may have happened: the trial cannot go on, only start again."""


class Steps:
    """The record of one trial's calls."""

    def __init__(
        self,
        job: Job,
        keeper: Keeper,
        earlier: Iterable[Step],
        notice: Callable[[str], None],
        workspace: Workspace | None = None,
    ) -> None:
        self._job = job
        self._keeper = keeper
        self._notice = notice
        self.workspace = workspace
        self.id = secrets.token_hex(16)
        self._earlier = {(step.turn, step.kind, step.request, step.nth): step for step in earlier}
        self._from_before = set(self._earlier)
        """what an earlier process has recorded, and has not been counted into `replayed` yet"""
        self.replayed = 0.0
        """seconds that calls answered from an earlier process's record took there"""
        self._this_turn: dict[Key, Step] = {}
        """all that is on record of the turn at hand, made now or before"""
        self._turn = 0
        self._tried = 0
        """the last turn that was asked live"""
        self.again = AgainCalls(workspace)
        self._resources: dict[str, Closing] = {}
        self._opening = asyncio.Lock()
        self.counted = False
        """what the target used was counted call by call"""
        self.seconds = 0.0
        """how long the turns took so far, also those that an earlier process has seen"""

    @property
    def shown(self) -> str:
        """The trial, as messages name it."""
        return f"{self._job.sample.id} #{self._job.trial}"

    def places(self) -> dict[Key, int]:
        """The calls on record of the turn at hand, by their order there."""
        return {key: number for number, key in enumerate(self._this_turn)}

    @property
    def reached(self) -> int:
        """How far the turn at hand has come: calls that are of no use any more do not count."""
        return len(self._this_turn) + self.again.restored

    def begin(self, turn: int) -> Attempt:
        """A turn is asked, or asked once more: what is on record of it comes first."""
        if turn != self._turn:
            self._turn = turn
            self._this_turn = {key: step for key, step in self._earlier.items() if key[0] == turn}
        self._earlier |= self._this_turn
        self._look_for_unfinished()
        first = self._tried == turn - 1
        self._tried = turn
        return Attempt(self, turn, first)

    def _look_for_unfinished(self) -> None:
        for turn, kind, request, nth in self._earlier:
            if kind == "intent" and (turn, "tool", request, nth) not in self._earlier:
                name = self._earlier[turn, kind, request, nth].response
                raise StartAnew(
                    "agent",
                    f"{self.shown}: a call of {name} (replay: never) was cut off, and may "
                    "or may not have happened; the trial starts from scratch",
                    retry=False,
                )

    async def start_anew(self) -> None:
        """Nothing that is on record counts any more."""
        await self._write(0, "restart", "", 1, None, NO_USAGE, time.monotonic())
        self._earlier.clear()
        self._this_turn.clear()
        self._turn = self._tried = 0
        self._from_before.clear()
        self.again.clear()
        self.seconds = self.replayed = 0.0
        if self.workspace is not None:
            self.workspace.start_anew()
        await self.close()

    async def call(
        self, kind: str, turn: int, request: Any, live: Callable[[], Awaitable[Any]], usage: Callable[[Any], Usage]
    ) -> Any:
        """The result of a call of the conversation itself: a whole turn, or the simulated user's decision."""
        response = await self.answer((turn, kind, digest(request), 1), live, usage)
        if kind == "turn":
            inner = [key for key in self._earlier if key[0] == turn and key[1] in _INNER]
            if turn != self._tried:  # answered by an earlier process: the state that its tools built is not here
                before = None if self.workspace is None else self.workspace.now
                self.again.remember((self._earlier[key] for key in inner), response, before)
            for key in inner:
                del self._earlier[key]  # the reply is on record: the calls it was made of are not asked for again
        return response

    async def answer(self, key: Key, live: Callable[[], Awaitable[Any]], usage: Callable[[Any], Usage] | None) -> Any:
        """The result of a call, as JSON: from the record, or from `live` and then recorded."""
        if (known := self._earlier.pop(key, None)) is not None:
            self._took(known)
            if key in self._from_before:
                self._from_before.discard(key)
                self.replayed += known.seconds
            return known.response
        unasked = set(self._earlier)
        begun, replayed = time.monotonic(), self.replayed
        response = await live()
        begun -= self.replayed - replayed  # a turn is as long as its calls were, whichever process made them
        self._drop(unasked & self._earlier.keys(), key[0])
        await self._write(*key, response, NO_USAGE if usage is None else usage(response), begun)
        return response

    async def intend(self, key: Key, name: str) -> None:
        """Say that a call is about to be made that must never be made twice."""
        if key not in self._earlier:
            await self._write(*key, name, NO_USAGE, time.monotonic())

    async def _write(
        self, turn: int, kind: str, request: str, nth: int, response: Any, usage: Usage, begun: float
    ) -> None:
        step = Step(
            key=self._job.key,
            sample=self._job.sample.id,
            trial=self._job.trial,
            turn=turn,
            kind=kind,
            request=request,
            nth=nth,
            response=response,
            usage=usage,
            time=round(time.time(), 3),
            seconds=round(time.monotonic() - begun, 6),
        )
        await self._keeper.step(step)
        self._took(step)
        if turn == self._turn and kind != "turn":
            self._this_turn[turn, kind, request, nth] = step

    def _took(self, step: Step) -> None:
        if step.kind not in _INNER:
            self.seconds += step.seconds

    def _drop(self, unasked: set[Key], turn: int) -> None:
        """New ground was reached, and calls recorded before were not made again meanwhile, not even side by side."""
        calls = [key for key in unasked if key[1] != "intent"]
        if calls:
            lost = "1 recorded call is" if len(calls) == 1 else f"{len(calls)} recorded calls are"
            self._notice(
                f"{self.shown}: the target is not deterministic: turn {turn} does not go "
                f"as it went before it was interrupted; {lost} of no use, and it continues live from here"
            )
        for at, kind, request, nth in calls:
            for gone in ((at, kind, request, nth), (at, "intent", request, nth)):
                self._earlier.pop(gone, None)
                self._this_turn.pop(gone, None)
        self.again.forget(calls)

    async def resource(self, name: str, open_: Callable[[], Awaitable[Closing]]) -> Any:
        """Something that lives as long as the trial; one that died is opened anew."""
        async with self._opening:  # an agent may ask for it twice at once
            known = self._resources.get(name)
            if known is not None and not known.alive:
                await known.close()
                known = None
            if known is None:
                known = self._resources[name] = await open_()
            return known

    async def close(self) -> None:
        """Let go what the trial had opened."""
        while self._resources:
            _, resource = self._resources.popitem()
            with suppress(Exception):  # it has served
                await resource.close()


class Attempt:
    """The calls of one try at one turn, as targets make them."""

    def __init__(self, steps: Steps, turn: int, first: bool) -> None:
        self._steps = steps
        self._turn = turn
        self._asked: Counter[tuple[str, str]] = Counter()
        self._free: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        """the numbers of calls that failed: asked again they are the same calls"""
        self._failed: dict[str, AttemptError | Fault] = {}
        """requests that met an outage, and have not worked since"""
        self._made: set[Key] = set()
        """the `replay: again` calls of this attempt"""
        self._over = False
        self.first = first
        self.usage: Usage | None = None
        """of the model calls of this turn, those answered from the record included"""
        self._trace = Trace()

    @property
    def id(self) -> str:
        """The trial's."""
        return self._steps.id

    @property
    def workspace(self) -> Path | None:
        """The trial's folder."""
        return None if self._steps.workspace is None else self._steps.workspace.folder

    def _check_time(self) -> None:
        if self._over:
            raise AttemptError("agent", "this attempt was over before its call was", retry=False)

    def _key(self, kind: str, request: Any) -> Key:
        self._check_time()
        asked = digest(request)
        if self._free[kind, asked]:
            return self._turn, kind, asked, self._free[kind, asked].pop()
        self._asked[kind, asked] += 1
        return self._turn, kind, asked, self._asked[kind, asked]

    async def _answer(self, key: Key, live: Callable[[], Awaitable[Any]], usage: Callable[[Any], Usage] | None) -> Any:
        async def in_time() -> Any:
            response = await live()
            self._check_time()  # the next attempt may have an answer of its own to the same call
            return response

        try:
            response = await self._steps.answer(key, in_time, usage)
        except (AttemptError, Fault) as error:
            if isinstance(error, Fault) or error.kind != "bad_request":
                self._failed.setdefault(key[2], error)
            self._free[key[1], key[2]].append(key[3])
            raise
        self._failed.pop(key[2], None)
        return response

    async def model(
        self, request: Any, live: Callable[[], Awaitable[Any]], usage: Callable[[Any], Usage] | None = None
    ) -> Any:
        """A model's answer."""
        key, proxied = self._key("model", request), "body" in request
        self._trace.request(request["body"] if proxied else request)
        read = usage or _usage
        response = await self._answer(key, live, read)
        self._trace.response(key, key[2], request["path"] if proxied else None, response)
        spent = read(response)
        self.usage = spent if self.usage is None else add_usage(self.usage, spent)
        self._steps.counted = True
        return response

    async def tool(
        self,
        name: str,
        arguments: Any,
        live: Callable[[], Awaitable[Any]],
        replay: Replay,
        home: object = PROCESS,
        function: str | UnsetType | None = UNSET,
    ) -> Any:
        """A tool's result."""
        turn, _, request, nth = key = self._key("tool", [name, arguments])
        workspace, again = self._steps.workspace, self._steps.again
        before = None if workspace is None else workspace.last
        ran = False

        async def run() -> Any:
            nonlocal ran
            ran = True
            result = await live()
            kept: dict[str, Any] = {"tool": name, "arguments": arguments, "result": result}
            if isinstance(result, ToolFailure):
                kept |= {"result": result.message, "traceback": result.traceback}
            if replay == "again" and not isinstance(function, UnsetType):
                kept["function"] = function
            if workspace is not None:
                kept["files"] = await asyncio.to_thread(workspace.keep)
            return kept

        if replay == "never":
            await self._steps.intend((turn, "intent", request, nth), name)
        try:
            kept = await self._answer(key, run, None)
        except (AttemptError, Fault):
            raise
        except Exception:  # the function's own: it was called all the same
            self._trace.ran(None, name, arguments, None)
            raise
        if replay == "again":
            if not ran and not again.seen(key, home):
                await self._rerun(request, live)  # the state is lost; what the call said the first time counts
            again.note(key, PastCall(turn, name, arguments, function), home, before)
            self._made.add(key)
        if not ran and workspace is not None and "files" in kept:
            await asyncio.to_thread(workspace.go_back_to, kept["files"])
        self._trace.ran(key, name, arguments, kept["result"])
        return kept["result"]

    async def _rerun(self, request: str, live: Callable[[], Awaitable[Any]]) -> None:
        try:
            await live()
        except (AttemptError, Fault) as error:
            self._failed.setdefault(request, error)
            raise

    async def restore(self, find: FindHome) -> None:
        """Run the `replay: again` calls of earlier turns, and of this attempt, in homes that have not seen them."""
        try:
            await self._steps.again.restore(find, lambda key: key[0] < self._turn or key in self._made)
        except Unrepeatable as error:
            raise StartAnew(
                "agent",
                f"{self._steps.shown}: the state that a call of {error} (replay: again) has built is lost, and the "
                "call cannot be run again from the record; the trial starts from scratch",
                retry=False,
            ) from error

    async def resource(self, name: str, open_: Callable[[], Awaitable[Closing]]) -> Any:
        """Something that lives as long as the trial."""
        return await self._steps.resource(name, open_)

    @property
    def observed(self) -> bool:
        """Whether the target makes its tool calls through here."""
        return self._trace.observed

    @observed.setter
    def observed(self, value: bool) -> None:
        self._trace.observed = value

    def with_calls(self, reply: Reply) -> Reply:
        """A reply with all tool calls of the attempt: in its messages, or listed beside them."""
        trace, messages = self._trace, reply.messages
        if messages is not None:
            complete = trace.covered_by(messages)
        else:
            messages, complete = trace.transcript(reply.text)
            if trace.unread or not trace.observed:
                return replace(reply, messages=messages, calls=[ToolCall(self._turn, None)])
        calls = UNSET if complete else as_listed(trace.calls(self._steps.places()), self._turn)
        return replace(reply, messages=messages, calls=calls)

    def end(self) -> None:
        """The attempt is over: calls that come or end later, in a thread nobody waits for, are not recorded."""
        self._over = True

    def check(self) -> None:
        """Raise what the target met and did not get over: what it says after an outage is not its answer."""
        for error in sorted(self._failed.values(), key=lambda error: not isinstance(error, Fault)):
            raise error


def _usage(response: Any) -> Usage:
    return msgspec.convert(response["usage"], Usage)

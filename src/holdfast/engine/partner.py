"""One trial's conversation from the engine's side: asked with retries, recorded step by step, graded on the way."""

from __future__ import annotations

import asyncio
import functools
import time
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from holdfast.conversation.simulated_user import Decision
from holdfast.conversation.turns import NOTHING
from holdfast.errors import AttemptError
from holdfast.graders.types import Case
from holdfast.store.records import NO_USAGE, Output, Timing, Usage
from holdfast.targets.types import Reply

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.conversation.simulated_user import Player
    from holdfast.engine.grading import Grading
    from holdfast.engine.replay import Steps
    from holdfast.engine.retry import Attempts, Deadline
    from holdfast.plan.plan import Job
    from holdfast.store.blobs import Blobs
    from holdfast.store.records import Mark, ToolCall
    from holdfast.targets.types import Message, Target, Turn


class Halted(Exception):
    """The run has stopped admitting; the conversation goes on in another process."""


class TrialPartner:
    """What `converse` needs, for one trial."""

    def __init__(
        self,
        job: Job,
        target: Target,
        player: Player | None,
        attempts: Attempts,
        grading: Grading,
        steps: Steps | None,
        checkpoints: frozenset[int],
        deadline: Deadline,
        stopping: Callable[[], bool],
        blobs: Blobs,
        *,
        turn_by_turn: bool,
    ) -> None:
        self._job = job
        self._target = target
        self._player = player
        self._attempts = attempts
        self._grading = grading
        self._steps = steps
        self._checkpoints = checkpoints
        self._deadline = deadline
        self._stopping = stopping
        self._blobs = blobs
        self._turn_by_turn = turn_by_turn
        """whole replies are recorded too: there are several"""
        self._started = time.time()
        self._uncounted = NO_USAGE
        """what the last reply used beside the calls that were counted one by one"""

    async def ask(self, turn: Turn) -> Reply:
        """The target's reply; in a conversation of several turns, recorded before it is used."""
        steps = self._steps
        if steps is None:
            return await self._attempts.target(lambda: self._target.reply(turn), self._job, self._deadline)

        async def live() -> Reply:
            if turn.number > 1 and self._stopping():
                raise Halted
            attempt = functools.partial(self._attempt, steps, turn)
            return await self._attempts.target(attempt, self._job, self._deadline, lambda: steps.reached)

        if self._turn_by_turn:
            asked = turn.messages if turn.state is None else [turn.messages, turn.state]

            async def kept() -> object:
                return msgspec.to_builtins(await live())

            said = await steps.call("turn", turn.number, asked, kept, lambda _: self._uncounted)
            reply = msgspec.convert(said, Reply)
        else:
            reply = await live()
        if steps.workspace is not None:
            steps.workspace.ended(reply.files)
        return reply

    async def _attempt(self, steps: Steps, turn: Turn) -> Reply:
        """Ask once; what the target calls meanwhile is recorded, and counted call by call."""
        calls = steps.begin(turn.number)
        workspace = steps.workspace
        try:
            if workspace is not None:
                await asyncio.to_thread(workspace.begin)
            try:
                reply = await self._target.reply(replace(turn, calls=calls))
            except AttemptError:
                calls.check()  # an outage is why it failed
                raise
            calls.check()
            files = None if workspace is None else await asyncio.to_thread(workspace.keep)
        finally:
            calls.end()
        self._uncounted = reply.usage if calls.usage is None else NO_USAGE
        return replace(calls.with_calls(reply), usage=calls.usage or reply.usage, files=files)

    @property
    def seconds(self) -> float:
        """How long the conversation has taken so far: by the record where there is one, so that it stays the same."""
        steps = self._steps if self._turn_by_turn else None
        return round(time.time() - self._started if steps is None else steps.seconds, 6)

    async def next_message(self, messages: list[Message], turn: int) -> tuple[str | None, Usage]:
        """What the simulated user says, if there is one."""
        player = self._player
        if player is None:
            return None, NOTHING
        assert self._steps is not None

        async def live() -> object:
            return msgspec.to_builtins(
                await self._attempts.target(
                    lambda: player.decide(messages, self._job.sample, turn), self._job, self._deadline
                )
            )

        said = await self._steps.call("responder", turn, messages, live, _usage)
        decision = msgspec.convert(said, Decision)
        return decision.message, decision.usage if decision.usage.requests else NOTHING

    async def after_turn(
        self, turn: int, messages: list[Message], mark: Mark, reply: Reply, calls: list[ToolCall] | UnsetType
    ) -> bool:
        """Grade where a checkpoint stands."""
        if turn not in self._checkpoints:
            return False
        so_far = Output(
            key=self._job.key,
            sample=self._job.sample.id,
            trial=self._job.trial,
            attempt=1,
            messages=[*messages],
            output=reply.text,
            turns=turn,
            stop=reply.stop,
            usage=reply.usage if isinstance(mark.usage, UnsetType) else mark.usage,
            timing=Timing(self._started, self.seconds),
            digest=mark.digest,
            files=mark.files,
            calls=calls,
            trace=[*reply.trace] if reply.trace else UNSET,
        )
        begun = time.monotonic()
        try:
            return await self._grading.after_turn(turn, Case(self._job.sample, so_far, self._blobs), self._job)
        finally:
            self._deadline.postpone(time.monotonic() - begun)  # graders have time limits of their own


def _usage(said: object) -> Usage:
    return msgspec.convert(said["usage"], Usage) if isinstance(said, dict) else NOTHING

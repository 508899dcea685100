"""One trial's conversation from the engine's side: asked with retries, recorded step by step, graded on the way."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from holdfast.conversation.responder import Decision
from holdfast.conversation.talk import NOTHING
from holdfast.graders.types import Case
from holdfast.store.records import Output, Timing, Usage
from holdfast.targets.types import Reply

if TYPE_CHECKING:
    from holdfast.conversation.responder import Player
    from holdfast.engine.attempts import Attempts
    from holdfast.engine.grading import Grading
    from holdfast.engine.steps import Steps
    from holdfast.plan.plan import Job
    from holdfast.store.records import Mark
    from holdfast.targets.types import Message, Target, Turn


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
        deadline: float,
    ) -> None:
        self._job = job
        self._target = target
        self._player = player
        self._attempts = attempts
        self._grading = grading
        self._steps = steps
        self._checkpoints = checkpoints
        self._deadline = deadline
        self._started = time.time()

    async def ask(self, turn: Turn) -> Reply:
        """The target's reply; in a conversation of several turns, recorded before it is used."""
        if self._steps is None:
            return await self._attempts.target(lambda: self._target.reply(turn), self._job, self._deadline)

        async def live() -> object:
            return msgspec.to_builtins(
                await self._attempts.target(lambda: self._target.reply(turn), self._job, self._deadline)
            )

        said = await self._steps.call("turn", turn.number, turn.messages, live, _usage)
        return msgspec.convert(said, Reply)

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

    async def after_turn(self, turn: int, messages: list[Message], mark: Mark, reply: Reply) -> bool:
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
            usage=reply.usage,
            timing=Timing(self._started, time.time() - self._started),
            digest=mark.digest,
        )
        return await self._grading.after_turn(turn, Case(self._job.sample, so_far), self._job)


def _usage(said: object) -> Usage:
    return msgspec.convert(said["usage"], Usage) if isinstance(said, dict) else NOTHING

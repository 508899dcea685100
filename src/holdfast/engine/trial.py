"""The life of one trial: the conversation with the target, the record of its output, and its grades.

Trials.run          generate an output unless there is one, then grade it
Trial.generate      render the prompts, have the conversation, record the output
Trial._converse     turn by turn: ask the target, grade at checkpoints, ask the simulated user
Trial._ask          ask live; in a trial of several calls, take the reply from the record, or ask live and record it
Trial._attempt      ask once, inside the retries of `engine.retry`
Trial._reply        ask within the limits of the trial; one that is reached ends the attempt with what is there
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from holdfast.canonical import digest, digest_bytes
from holdfast.conversation.turns import Conversation, Script
from holdfast.data.dataset import dataset_changed
from holdfast.engine.admission import Halted
from holdfast.engine.retry import Deadline
from holdfast.errors import AttemptError, LimitReached, ProgramExited, RestartTrial, Uncertain
from holdfast.graders.types import Case
from holdfast.spec.eval import fields_of_target
from holdfast.spec.plugins import load_reference
from holdfast.spec.trial_limits import LIMIT_NAMES, trial_limits
from holdfast.store.blobs import Blobs
from holdfast.store.heads import read_output, read_steps
from holdfast.store.records import EXIT, NO_USAGE, Output, Timing, to_microseconds, to_milliseconds
from holdfast.targets.types import Reply

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    from holdfast.conversation.simulated_user import Decision
    from holdfast.conversation.turns import Prompts
    from holdfast.data.messages import Attachment
    from holdfast.engine.calls import RecordedCalls
    from holdfast.engine.grading import Grading
    from holdfast.engine.hooks import Hooks
    from holdfast.engine.recorder import Recorder
    from holdfast.engine.replay import Replay
    from holdfast.engine.retry import Retrier
    from holdfast.engine.session import Session
    from holdfast.engine.workspace import Workspaces
    from holdfast.plan.plan import PendingTrial
    from holdfast.spec.redact import Secrets
    from holdfast.spec.trial_limits import TrialLimits
    from holdfast.store.records import Mark, Usage
    from holdfast.targets.types import Turn

_ELSEWHERE: Final = {
    "replay": "holdfast.engine.replay:Replay",
    "calls": "holdfast.engine.calls:RecordedCalls",
    "workspaces": "holdfast.engine.workspace:Workspaces",
    "decision": "holdfast.conversation.simulated_user:Decision",
}
"""of trials that make several calls"""


class Trials:
    """Runs trials, one call of `run` for each, and holds what they share."""

    def __init__(
        self,
        session: Session,
        recorder: Recorder,
        retrier: Retrier,
        grading: Grading,
        hooks: Hooks | None,
        stopping: Callable[[], bool],
        calls_stopped: Callable[[], bool],
    ) -> None:
        self.spec = session.spec
        self.work = session.identity.work
        self.target = session.parts.target
        self.simulated_user = session.parts.player
        self.recorder = recorder
        self.retrier = retrier
        self.grading = grading
        self.hooks = hooks
        self.notice = session.notice
        self.stopping = stopping
        """returns True if no new turn may start"""
        self.calls_stopped = calls_stopped
        """returns True if no call may start, not even inside a turn"""
        self.run_name = "/".join(session.rundir.path.parts[-2:])
        self.limits = trial_limits(self.spec)
        self._noted: set[str] = set()
        self.script = Script(self.spec)
        self.blobs = Blobs(session.rundir.files)
        self.workspaces: Workspaces | None = None
        if self.spec.workspace is not None:
            self.workspaces = load_reference(_ELSEWHERE["workspaces"])(self.spec, self.blobs, session.rundir.path)
        # Computed once: the same for all trials.
        self.multi_turn, self.multi_call = self.spec.multi_turn, self.spec.multi_call
        self.has_opening = self.spec.history is not None or self.spec.prompt is None
        self.sees_part = fields_of_target(self.spec) is not None
        """messages before the prompt are not what the target said"""
        self.checkpoints = grading.checkpoints
        self._session = session

    async def run(self, pending: PendingTrial) -> None:
        """Generate the trial's output unless it has one, and grade it."""
        if pending.output is None:
            try:
                output = await Trial(pending, self).generate()
            finally:
                if self.hooks is not None:
                    await self.hooks.after_task(pending)
        else:
            output = read_output(pending.output)
        await self.grading.grade(Case(pending.sample, output, self.blobs), pending)

    def note_once(self, message: str) -> None:
        """Show a notice once, even if several trials have it."""
        if message not in self._noted:
            self._noted.add(message)
            self.notice(message)

    def limits_of(self, pending: PendingTrial) -> TrialLimits:
        """Return the limits of a trial: the eval's, except those that its row has."""
        row = None if self.target is None else self.target.limits(pending.sample)
        return self.limits if row is None else self.limits.for_row(row)

    async def open_replay(self, pending: PendingTrial, deadline: Deadline, limits: TrialLimits) -> Replay:
        """Return the record of a trial's calls, including calls of earlier processes."""
        recorded = read_steps(self._session.index.steps(pending.key))
        workspace = None if self.workspaces is None else await asyncio.to_thread(self.workspaces.create, pending)
        trial = asyncio.current_task()
        assert trial is not None
        make: type[Replay] = load_reference(_ELSEWHERE["replay"])
        return make(
            pending,
            self.recorder,
            recorded,
            self.notice,
            workspace,
            in_batches=lambda: deadline.in_batches,
            halted=self.calls_stopped,
            end_trial=trial.cancel,
            limits=limits,
            secrets=self.recorder.secrets,
        )


class _Answer(msgspec.Struct, frozen=True):
    """A live reply of the target."""

    reply: Reply
    uncounted_usage: Usage
    """usage of the reply that was not counted call by call"""


class Trial:
    """One trial that has no output yet."""

    def __init__(self, pending: PendingTrial, shared: Trials) -> None:
        self._pending = pending
        self._shared = shared
        self._started, self._clock = time.time(), time.monotonic()
        self._deadline = Deadline(self._clock + shared.spec.limits.trial_timeout)
        self._conversation_started = self._started
        self._limits = shared.limits
        self._replay: Replay | None = None
        """None for a trial that is a single call: a crash loses no more than that call"""

    async def generate(self) -> Output:
        """Have the conversation and record its output; return when the record is on disk."""
        shared, pending = self._shared, self._pending
        try:
            prompts = shared.script.render(pending.sample)
            if prompts.files:
                await asyncio.to_thread(_keep_files, prompts.files, shared.blobs, pending.sample.where)
            if shared.hooks is not None:
                await shared.hooks.before_task(pending)
            if shared.multi_call:
                self._limits = shared.limits_of(pending)
                self._replay = await shared.open_replay(pending, self._deadline, self._limits)
        except AttemptError as error:
            shared.retrier.never_asked(error, pending, self._clock)
            raise
        if self._replay is None:
            conversation = await self._converse(prompts)
        else:
            conversation = await self._converse_with_restarts(prompts, self._replay)
        seconds = time.monotonic() - self._clock - self._deadline.in_batches
        seconds += 0.0 if self._replay is None else self._replay.replayed_seconds
        timing = Timing(to_milliseconds(self._started), to_microseconds(seconds), conversation.reply.first_token)
        attempt = 1 + shared.recorder.failed_attempts(pending.key, "target")
        # Marks describe the conversation after each turn, as checkpoints grade it.
        marked = conversation.turns > 1 or shared.checkpoints
        stopped_by = shared.work.stop_digest(conversation.turns) if conversation.stopped else UNSET
        marks = conversation.marks if marked else UNSET
        output = self._output(conversation, timing, attempt, conversation.state, marks, stopped_by)
        usage_counted = shared.multi_turn or (self._replay is not None and self._replay.usage_counted)
        await shared.recorder.output(output, usage_counted=usage_counted)
        return output

    async def _converse_with_restarts(self, prompts: Prompts, replay: Replay) -> Conversation:
        """Have the conversation; restart it if a call that must not happen twice was cut off."""
        restarts = 0
        try:
            while True:
                try:
                    return await self._converse(prompts)
                except RestartTrial as cut_off:
                    if restarts == self._shared.spec.limits.retries:
                        raise
                    restarts += 1
                    self._shared.notice(cut_off.message)
                    await replay.restart()
        finally:
            await replay.close()
            if replay.workspace is not None:
                await asyncio.to_thread(replay.workspace.close)

    async def _converse(self, prompts: Prompts) -> Conversation:
        pending, shared = self._pending, self._shared
        conversation = Conversation(
            prompts, pending.sample, pending.trial, shared.blobs.read, key=pending.key, run=shared.run_name
        )
        self._conversation_started = time.time()
        prompt = conversation.scripted_prompt
        while prompt is not None:
            reply = without_secrets(await self._ask(conversation.begin_turn(prompt)), self._shared.recorder.secrets)
            conversation.end_turn(reply, self._conversation_seconds())
            if conversation.turns in self._shared.checkpoints and await self._stopped_by_checkpoint(conversation):
                conversation.stopped = True
                break
            if conversation.cut_short:
                break
            prompt = conversation.scripted_prompt
            if prompt is None and self._shared.simulated_user is not None:
                prompt = await self._ask_simulated_user(conversation)
        return conversation

    def _conversation_seconds(self) -> float:
        """Return how long the conversation has taken; by the record, if any, so that it is the same after a crash."""
        if self._shared.multi_turn and self._replay is not None:
            return to_microseconds(self._replay.turn_seconds)
        return to_microseconds(time.time() - self._conversation_started - self._deadline.in_batches)

    def _ask(self, turn: Turn) -> Coroutine[Any, Any, Reply]:
        """Return the target's reply."""
        target = self._shared.target
        assert target is not None
        if self._replay is not None:
            return self._ask_on_record(self._replay, turn)
        return self._shared.retrier.target(lambda: target.reply(turn), self._pending, self._deadline)

    async def _ask_on_record(self, replay: Replay, turn: Turn) -> Reply:
        """Return the target's reply. In a conversation of several turns it is on record before it is used."""
        if self._shared.multi_turn:
            request = turn.messages if turn.state is None else [turn.messages, turn.state]
            key = (turn.number, "turn", digest(request), 1)
            if (step := replay.take(key)) is not None:
                response = step.response
            else:
                call = replay.begin_call(key)
                answer = await self._ask_live(replay, turn)
                response = msgspec.to_builtins(answer.reply)
                await replay.end_call(call, response, answer.uncounted_usage)
            replay.end_turn(turn.number)
            reply = msgspec.convert(response, Reply)
            replay.usage_before += reply.usage
        else:
            reply = (await self._ask_live(replay, turn)).reply
        if replay.workspace is not None:
            replay.workspace.ended(reply.files)
        return reply

    async def _ask_live(self, replay: Replay, turn: Turn) -> _Answer:
        if turn.number > 1 and self._shared.stopping():
            raise Halted
        try:
            return await self._shared.retrier.target(
                lambda: self._attempt(replay, turn),
                self._pending,
                self._deadline,
                lambda: replay.progress,
                timed=self._limits.guarded,
            )
        except (RestartTrial, Uncertain):
            raise
        except AttemptError as error:  # the last attempt failed, perhaps during a call that must not happen twice
            if (uncertain := replay.uncertain()) is None:
                raise
            self._shared.retrier.failed(uncertain, self._pending, "target", time.monotonic(), final=True)
            raise uncertain from error

    async def _attempt(self, replay: Replay, turn: Turn) -> _Answer:
        """Ask the target once. The calls it makes meanwhile are recorded, and their usage is counted one by one."""
        calls: RecordedCalls = await load_reference(_ELSEWHERE["calls"]).begin(replay, turn.number)
        workspace = replay.workspace
        try:
            if workspace is not None:
                self._report_survivors(await asyncio.to_thread(workspace.begin))
            exited: ProgramExited | None = None
            try:
                reply = await self._reply(replay, calls, turn)
            except AttemptError as error:
                calls.raise_outage()  # the reason why the target failed
                if not isinstance(error, ProgramExited) or self._limits.on_exit == "error":
                    raise
                exited = error
                reply = Reply(text=error.output, stop=f"{EXIT}{error.code}", stop_detail=error.message)
            calls.raise_outage()
            replay.report_unasked()
            if isinstance(reply.stop_detail, str) and (cut_off := replay.report_cut_off()):
                reply = replace(reply, stop_detail=f"{reply.stop_detail}; {cut_off}")
            if workspace is not None:
                files = await asyncio.to_thread(workspace.keep)
                reply = replace(reply, files=files, files_partial=workspace.partial)
            if exited is not None and not (
                reply.text.strip() or calls.usage or (workspace is not None and workspace.changed)
            ):
                raise exited  # it never began to work, as when it is called or installed wrongly
        finally:
            calls.end()
        uncounted = reply.usage if calls.usage is None else NO_USAGE
        reply = without_secrets(calls.with_calls(reply), self._shared.recorder.secrets)
        reply = replace(reply, usage=calls.usage or reply.usage)
        self._check_enforced(reply)
        return _Answer(reply, uncounted)

    async def _reply(self, replay: Replay, calls: RecordedCalls, turn: Turn) -> Reply:
        """Ask the target, within the limits of the trial. At a limit that scores, return the reply so far."""
        shared, limits, started = self._shared, self._limits, time.monotonic()
        assert shared.target is not None
        time_limit = limits.time_left(replay.seconds_before, replay.recorded_seconds)
        guard = min(shared.spec.limits.turn_timeout, self._deadline.at - started) if limits.guarded else math.inf
        seconds = guard if time_limit is None else min(guard, time_limit.seconds)
        turn = replace(turn, calls=calls, deadline=time.time() + seconds)
        late: TimeoutError | None = None
        reached: LimitReached | None = None
        try:
            with shared.retrier.within(None if time_limit is None else time_limit.seconds) as block:
                calls.expire = block.expire
                reply = await shared.target.reply(turn)
        except TimeoutError as error:
            if not block.expired:
                raise
            late, reply = error, Reply(text=calls.text_so_far)
        except LimitReached as error:  # a limit of the target's own
            reached, reply = error, Reply(text=error.output or calls.text_so_far)
        except ProgramExited as error:
            if calls.limit is None and not calls.halted:
                raise
            reply = Reply(text=error.output)
        if calls.halted:  # what a target says after a refused call is not its answer
            raise Halted
        if late is None and reached is None and calls.limit is None:
            return reply
        calls.raise_outage()
        notes = getattr(late and late.__cause__, "__notes__", [])  # the output of a program
        if (
            calls.limit is None
            and late is not None
            and time_limit is not None
            and calls.seconds_unanswered > time_limit.limit / 2
        ):
            silence = f"a model call had no answer for {calls.seconds_unanswered:.0f} s when the time was up"
            raise AttemptError("timeout", "; ".join([silence, *notes]))
        if calls.limit is None and reached is not None:
            stop, detail = LIMIT_NAMES[reached.limit], reached.message
        else:
            stop = calls.limit or "time_limit"
            detail = limits.describe(stop, time_limit)
        if limits.on_limit == "error":
            raise AttemptError("timeout" if stop == "time_limit" else "agent", "; ".join([detail, *notes]), retry=False)
        if late is not None and stop == "time_limit" and time_limit is not None and time_limit.default:
            shared.note_once(f"a default time limit has ended a trial: {detail}")
        return replace(reply, stop=stop, stop_detail="; ".join([detail, *notes]))

    def _check_enforced(self, reply: Reply) -> None:
        """Report once which limits could not be enforced, or left something out."""
        limits, usage, note_once = self._limits, reply.usage, self._shared.note_once
        written = {"tokens": limits.tokens, "cost": limits.cost, "calls": limits.calls}
        if not usage.requests:
            for name in (name for name, limit in written.items() if limit is not None):
                note_once(f"no model call of a trial was seen, so limits.trial.{name} did not apply to it")
        else:
            for name, value in (("tokens", usage.tokens), ("cost", usage.cost)):
                if written[name] is not None and value is None:
                    note_once(f"limits.trial.{name} cannot be enforced: model calls do not report their {name}")
        if not isinstance(reply.files_partial, UnsetType):
            note_once(
                "a workspace is larger than workspace.max_size: its largest files are not kept, and graders do not see "
                "them; the output names them as files_partial"
            )

    def _report_survivors(self, processes: list[str]) -> None:
        if processes:
            names = ", ".join(processes[:8]) + (", …" if len(processes) > 8 else "")
            where = f"{self._pending.sample.id}, trial {self._pending.trial}"
            self._shared.notice(
                f"{where}: ended processes that an earlier attempt had left running in its workspace: {names}"
            )

    async def _ask_simulated_user(self, conversation: Conversation) -> str | None:
        """Return the simulated user's next message, which is on record before it is used; None: it stops."""
        user, replay, turn = self._shared.simulated_user, self._replay, conversation.turns
        assert user is not None and replay is not None
        # The examples of a history are not part of what the user has said.
        messages = conversation.messages[0 if self._shared.spec.history is None else conversation.opening :]
        key = (turn, "responder", digest(conversation.messages), 1)
        if (step := replay.take(key)) is not None:
            decision: Decision = msgspec.convert(step.response, load_reference(_ELSEWHERE["decision"]))
        else:
            if self._shared.calls_stopped():
                raise Halted
            call = replay.begin_call(key)
            decision = await self._shared.retrier.target(
                lambda: user.decide(messages, self._pending.sample, turn), self._pending, self._deadline
            )
            decision = self._shared.recorder.secrets.clean(decision)
            await replay.end_call(call, msgspec.to_builtins(decision), decision.usage)
        if decision.usage.requests:
            conversation.usage += decision.usage
        return decision.message

    async def _stopped_by_checkpoint(self, conversation: Conversation) -> bool:
        """Grade the conversation at the checkpoint after its last turn; True if that ends it."""
        turn = conversation.turns
        so_far = self._output(conversation, Timing(self._conversation_started, self._conversation_seconds()))
        case = Case(self._pending.sample, so_far, self._shared.blobs)
        started = time.monotonic()
        try:
            return await self._shared.grading.after_turn(turn, case, self._pending)
        finally:
            self._deadline.postpone(time.monotonic() - started)  # graders have their own time limits

    def _output(
        self,
        conversation: Conversation,
        timing: Timing,
        attempt: int = 1,
        state: Any = None,
        marks: list[Mark] | UnsetType = UNSET,
        stopped_by: str | UnsetType = UNSET,
    ) -> Output:
        """Return the record of the conversation as it is now."""
        reply = conversation.reply
        return Output(
            key=self._pending.key,
            sample=self._pending.sample.id,
            trial=self._pending.trial,
            attempt=attempt,
            messages=[*conversation.messages],
            output=reply.text,
            turns=conversation.turns,
            stop=conversation.stop,
            answer=conversation.answer,
            usage=conversation.usage,
            timing=timing,
            digest=conversation.marks[-1].digest,
            state=state,
            marks=marks,
            stopped_by=stopped_by,
            files=UNSET if reply.files is None else reply.files,
            stop_detail=reply.stop_detail,
            files_partial=reply.files_partial,
            calls=conversation.calls,
            trace=[*conversation.trace] if conversation.trace else UNSET,
            opening=conversation.opening if self._shared.has_opening else UNSET,
            value=reply.value,
            row=self._pending.sample.row if self._shared.sees_part else UNSET,
            settled=(self._replay.settled if self._replay is not None else 0) or UNSET,
        )


def without_secrets(reply: Reply, secrets: Secrets) -> Reply:
    """Replace known secrets in a reply, except in paths of a workspace; recorded and live replies are the same."""
    cleaned = secrets.clean(reply)
    return reply if cleaned is reply else replace(cleaned, files=reply.files)


def _keep_files(files: Iterable[Attachment], blobs: Blobs, where: str) -> None:
    """Store the files of a conversation; raise Fault for one that has changed since its row was read."""
    for file in files:
        if blobs.path(file.digest).exists():
            continue
        try:
            data = file.read()
        except OSError as error:
            raise dataset_changed(where) from error
        if digest_bytes(data) != file.digest:
            raise dataset_changed(where)
        blobs.keep(data)

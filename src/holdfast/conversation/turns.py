"""A conversation as it grows, turn by turn, and the digests that tie grades to it.

Turn 1 is the prompt. Follow-up i, counted from 0, is turn i + 2, and so is the i-th reply of a simulated user. Nothing
here waits: `engine.trial` asks the target and the simulated user, and adds their replies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import UNSET, UnsetType

from holdfast.canonical import digest_as_written
from holdfast.store.answers import classify_answer
from holdfast.store.records import NO_USAGE, Mark, ToolCall, content_text
from holdfast.targets.trace import as_listed, read_calls
from holdfast.targets.types import Turn

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.conversation.script import Prompts
    from holdfast.data.dataset import Sample
    from holdfast.store.answers import AnswerClass
    from holdfast.store.records import Content, TraceStep
    from holdfast.targets.types import Message, Reply


def messages_digest(
    messages: list[Message],
    files: dict[str, str] | None = None,
    calls: list[ToolCall] | UnsetType = UNSET,
    trace: list[TraceStep] | None = None,
    value: Any = UNSET,
) -> str:
    """Return the digest that ties grades to what graders see: messages, files, listed calls, trace, value."""
    listed = None if isinstance(calls, UnsetType) else calls
    values = [] if value is UNSET else [value]  # null is a value, too
    return digest_as_written([messages, files, listed, trace or None, *values])


class Conversation:
    """The conversation of one trial so far."""

    reply: Reply
    """the last reply; not set before the first turn has ended"""

    def __init__(
        self, prompts: Prompts, sample: Sample, trial: int, load: Callable[[str], bytes] | None = None
    ) -> None:
        self._prompts = prompts.contents
        self._load = load
        self._continuations, self._params = prompts.continuations, prompts.params
        self._sample = sample
        self._trial = trial
        self.messages = [*prompts.opening]
        self.opening = len(prompts.opening)
        """number of messages before the prompt"""
        self.usage = NO_USAGE
        self.state: Any = None
        self.turns = 0
        """number of turns that have ended"""
        self.marks: list[Mark] = []
        """the ends of the turns"""
        self.trace: list[TraceStep] = []
        """the target's inner steps in all turns, if it reports them"""
        self.calls: list[ToolCall] | UnsetType = UNSET
        """every tool call, if the messages do not contain all of them"""
        self._listed: list[list[ToolCall] | UnsetType] = []
        """by turn: its tool calls, if its messages do not contain all of them"""
        self.answer: AnswerClass = "whole"
        """class of the first incomplete reply, on which all later turns build"""
        self.stopped = False
        """a checkpoint ended the conversation"""

    @property
    def scripted_prompt(self) -> Content | None:
        """The script's message for the next turn; None after its last one."""
        return self._prompts[self.turns] if self.turns < len(self._prompts) else None

    @property
    def cut_short(self) -> bool:
        """True if a limit, or a program's exit code, ended the last turn: no turn follows."""
        return classify_answer(self.reply.stop, empty=False) in ("limited", "exited")

    @property
    def stop(self) -> str:
        """Why the conversation ended, as the output records it."""
        return f"checkpoint@{self.turns}" if self.stopped else self.reply.stop

    def begin_turn(self, prompt: Content) -> Turn:
        """Add a user message."""
        self.messages.append({"role": "user", "content": prompt})
        return Turn(
            content_text(prompt),
            self.messages,
            self._sample,
            self._trial,
            self.turns + 1,
            self.state,
            continuations=self._continuations,
            params=self._params,
            load=self._load,
        )

    def end_turn(self, reply: Reply, seconds: float) -> None:
        """Add the target's reply; `seconds` is the duration of the conversation so far."""
        calls_unknown = reply.messages is None and isinstance(reply.calls, UnsetType)
        listed = [ToolCall(self.turns + 1, None)] if calls_unknown else reply.calls
        self._listed.append(listed)
        self.messages.extend(reply.messages or [{"role": "assistant", "content": reply.text}])
        self.usage = self.usage + reply.usage if self.turns else reply.usage
        self.trace += reply.trace or ()
        if not (isinstance(listed, UnsetType) and isinstance(self.calls, UnsetType)):
            self.calls = self._all_calls()
        self.reply, self.state = reply, reply.state
        if self.answer == "whole":
            self.answer = classify_answer(reply.stop, empty=_is_empty(reply))
        self.turns += 1
        self.marks.append(
            Mark(
                end=len(self.messages),
                digest=messages_digest(self.messages, reply.files, self.calls, self.trace, reply.value),
                output=UNSET if reply.text == (self.messages[-1].get("content") or "") else reply.text,
                usage=self.usage,
                seconds=seconds,
                files=UNSET if reply.files is None else reply.files,
                trace=len(self.trace) if self.trace else UNSET,
                value=reply.value,
                files_partial=reply.files_partial,
            )
        )

    def _all_calls(self) -> list[ToolCall]:
        """Return the calls of all turns, from their messages unless they are listed separately."""
        ends = [*(mark.end for mark in self.marks), len(self.messages)]
        every: list[ToolCall] = []
        for turn, (start, end, calls) in enumerate(zip([self.opening, *ends], ends, self._listed, strict=False), 1):
            every += as_listed(read_calls(self.messages[start:end]), turn) if isinstance(calls, UnsetType) else calls
        return every


def _is_empty(reply: Reply) -> bool:
    """Return True if a reply has no text, tool calls or likelihoods, and was not made in a workspace.

    Files in a workspace are an answer, even without text.
    """
    if reply.text.strip() or reply.files is not None:
        return False
    if not isinstance(reply.calls, UnsetType) and any(call.name is not None for call in reply.calls):
        return False
    last = reply.messages[-1] if reply.messages else {}
    return not (last.get("tool_calls") or last.get("likelihoods"))

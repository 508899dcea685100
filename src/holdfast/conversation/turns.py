"""One conversation: the user's messages go in, one turn after the other; what was said comes out.

Turn 1 is the prompt; follow-up i, counted from 0, is turn i + 2, and so is the i-th reply of a simulated user. How a
turn is asked (time-outs, retries, records), who plays the user and what is graded on the way is the engine's: it
hands in a `Partner`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from holdfast.canonical import digest_bytes
from holdfast.errors import AttemptError
from holdfast.spec.template import RENDER_ERRORS, NotText, Template, expression
from holdfast.store.records import Mark, ToolCall, Usage
from holdfast.targets.trace import as_listed, read_calls
from holdfast.targets.types import Turn

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.data.dataset import Sample
    from holdfast.spec.load import Eval
    from holdfast.store.records import TraceStep
    from holdfast.targets.types import Message, Reply

_encode = msgspec.json.Encoder(order="sorted").encode


def messages_digest(
    messages: list[Message],
    files: dict[str, str] | None = None,
    calls: list[ToolCall] | UnsetType = UNSET,
    trace: list[TraceStep] | None = None,
) -> str:
    """Return the digest that ties grades to what graders may look at: messages, workspace, listed calls, trace."""
    listed = None if isinstance(calls, UnsetType) else calls
    if trace:
        return digest_bytes(_encode([messages, files, trace] if listed is None else [messages, files, listed, trace]))
    if listed is not None:
        return digest_bytes(_encode([messages, files, listed]))
    return digest_bytes(_encode(messages if files is None else [messages, files]))


class Said(NamedTuple):
    """A whole conversation."""

    messages: list[Message]
    output: str
    turns: int
    stop: str
    usage: Usage
    first_token: float | None
    state: Any
    files: dict[str, str] | None
    marks: list[Mark]
    """the ends of the turns"""
    stopped: bool
    """a checkpoint ended it"""
    calls: list[ToolCall] | UnsetType
    """every tool call, where the messages do not hold them all"""
    trace: list[TraceStep]
    """the target's inner steps, where it reported them"""


class Lines(NamedTuple):
    """What the user's side says about one sample, as far as it is known before it starts."""

    opening: list[Message]
    """what stands before the first user message"""
    prompts: list[str]


class Partner(Protocol):
    """The engine's side of a conversation."""

    @property
    def seconds(self) -> float:
        """How long the conversation has taken so far."""
        ...

    async def ask(self, turn: Turn) -> Reply:
        """The target's reply."""
        ...

    async def next_message(self, messages: list[Message], turn: int) -> tuple[str | None, Usage]:
        """What the simulated user says after a turn; None when it has nothing more to say."""
        ...

    async def after_turn(
        self, turn: int, messages: list[Message], mark: Mark, reply: Reply, calls: list[ToolCall] | UnsetType
    ) -> bool:
        """Handle the end of a turn; return whether the conversation ends here. `reply.trace` is that of all turns."""
        ...


class Script:
    """The templates of the user's side."""

    def __init__(self, spec: Eval) -> None:
        self._system = None if spec.system is None else Template(spec.system, texts_only=True)
        self._prompts = [Template(text, texts_only=True) for text in (spec.prompt, *spec.follow_ups)]
        self._from = None if spec.follow_ups_from is None else expression(spec.follow_ups_from)

    @staticmethod
    def identity(spec: Eval) -> dict[str, Any]:
        """What of the conversation is in every generation key; what is not used is not in it."""
        identity: dict[str, Any] = {"system": spec.system, "prompt": spec.prompt}
        if spec.follow_ups or spec.follow_ups_from:
            identity["follow_ups"] = list(spec.follow_ups) or spec.follow_ups_from
        return identity

    def lines(self, sample: Sample) -> Lines:
        """What is said in the conversation about one sample."""
        opening = [] if self._system is None else [{"role": "system", "content": _render(self._system, sample)}]
        prompts = [_render(template, sample) for template in self._prompts]
        if self._from is not None:
            prompts += _own_prompts(self._from, sample)
        return Lines(opening, prompts)


def _render(template: Template, sample: Sample) -> str:
    try:
        return template.render(sample.fields)
    except NotText as error:
        raise _unfit(sample, f"cannot render the prompt: {error}", NotText.hint) from error
    except RENDER_ERRORS as error:
        raise _unfit(sample, f"cannot render the prompt: {error}") from error


def _own_prompts(find: Callable[[dict[str, Any]], Any], sample: Sample) -> list[str]:
    """The follow-ups a row brings: texts as they are, never templates."""
    try:
        found = find(sample.fields)
    except RENDER_ERRORS as error:
        raise _unfit(sample, f"cannot find follow_ups: {error}") from error
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise _unfit(sample, f"follow_ups give {found!r:.80}, not a list of texts")
    return found


def _unfit(sample: Sample, what: str, hint: str | None = None) -> AttemptError:
    remedy = hint or "Fix the prompts, or the rows that do not fit them, then run the same command again."
    return AttemptError("bad_request", f"{sample.where}: {what}", remedy=remedy, retry=False)


async def converse(lines: Lines, sample: Sample, trial: int, partner: Partner) -> Said:
    """Have the conversation of one trial."""
    seed = xxh3_64_intdigest(f"{sample.digest}:{trial}".encode()) & 0x7FFFFFFF
    messages = [*lines.opening]
    usage: Usage | None = None
    state: Any = None
    marks: list[Mark] = []
    listed: list[list[ToolCall] | UnsetType] = []
    trace: list[TraceStep] = []
    prompt: str | None = lines.prompts[0]
    while True:
        number = len(marks) + 1
        messages.append({"role": "user", "content": prompt})
        reply = await partner.ask(Turn(str(prompt), messages, sample, trial, number, seed, state))
        state = reply.state
        unknown = reply.messages is None and isinstance(reply.calls, UnsetType)
        listed.append([ToolCall(number, None)] if unknown else reply.calls)
        messages.extend(reply.messages or [{"role": "assistant", "content": reply.text}])
        usage = reply.usage if usage is None else add_usage(usage, reply.usage)
        text = UNSET if reply.text == (messages[-1].get("content") or "") else reply.text
        files = UNSET if reply.files is None else reply.files
        calls = _all_calls(messages, [*(mark.end for mark in marks), len(messages)], listed)
        trace += reply.trace or ()
        digest = messages_digest(messages, reply.files, calls, trace)
        steps = len(trace) if trace else UNSET
        marks.append(Mark(len(messages), digest, text, usage, partner.seconds, files, steps))
        so_far = replace(reply, trace=trace) if trace else reply
        stopped = await partner.after_turn(number, messages, marks[-1], so_far, calls)
        if stopped:
            break
        if number < len(lines.prompts):
            prompt = lines.prompts[number]
            continue
        prompt, spent = await partner.next_message(messages, number)
        if spent is not NOTHING:
            usage = add_usage(usage, spent)
        if prompt is None:
            break
    stop = f"checkpoint@{len(marks)}" if stopped else reply.stop
    first_token, files_now = reply.first_token, reply.files
    return Said(
        messages, reply.text, len(marks), stop, usage, first_token, state, files_now, marks, stopped, calls, trace
    )


def _all_calls(
    messages: list[Message], ends: list[int], listed: list[list[ToolCall] | UnsetType]
) -> list[ToolCall] | UnsetType:
    """The calls of all turns, once those of one turn are listed beside its messages."""
    if all(isinstance(calls, UnsetType) for calls in listed):
        return UNSET
    every: list[ToolCall] = []
    for turn, (start, end, calls) in enumerate(zip([0, *ends], ends, listed, strict=False), 1):
        every += as_listed(read_calls(messages[start:end]), turn) if isinstance(calls, UnsetType) else calls
    return every


NOTHING = Usage()
"""What nobody used."""


def add_usage(one: Usage, other: Usage) -> Usage:
    """The sum; unknown plus anything is unknown."""
    return Usage(
        None if one.input_tokens is None or other.input_tokens is None else one.input_tokens + other.input_tokens,
        None if one.output_tokens is None or other.output_tokens is None else one.output_tokens + other.output_tokens,
        one.requests + other.requests,
        None if one.cost is None or other.cost is None else one.cost + other.cost,
    )

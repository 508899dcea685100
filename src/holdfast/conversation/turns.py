"""The user's messages from the eval file, a conversation as it grows, and the digests that tie grades to it.

The script is a system message, history, the prompt and follow-ups. Continuations of the prompt may replace the
follow-ups, and messages, which may contain files, replace history and prompt.

Turn 1 is the prompt. Follow-up i, counted from 0, is turn i + 2, and so is the i-th reply of a simulated user. Nothing
here waits: `engine.trial` asks the target and the simulated user, and adds their replies.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from holdfast.canonical import digest_as_written
from holdfast.data.messages import RowMessages, parts_with_source
from holdfast.errors import AttemptError, DataError
from holdfast.spec.schema import several_answers
from holdfast.spec.target_schema import ModelTarget
from holdfast.spec.template import RENDER_ERRORS, NotText, Template, expression, normal_expression, normal_form
from holdfast.store.records import NO_USAGE, Mark, ToolCall, classify_answer, content_text
from holdfast.targets.trace import as_listed, read_calls
from holdfast.targets.types import Continuation, Turn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from holdfast.data.dataset import Sample
    from holdfast.data.messages import Attachment
    from holdfast.spec.eval import Eval
    from holdfast.store.records import AnswerClass, Content, TraceStep
    from holdfast.targets.types import Message, Reply

_LIST: Final = (list, tuple)


class Prompts(msgspec.Struct, frozen=True):
    """The script rendered for one sample."""

    opening: list[Message]
    """messages before the first user message"""
    contents: list[Content]
    """user messages: the prompt, then the follow-ups, which are texts"""
    continuations: tuple[Continuation, ...] = ()
    """texts whose likelihoods are requested instead of a reply"""
    params: Mapping[str, Any] = MappingProxyType({})
    """the row's own request parameters"""
    files: tuple[Attachment, ...] = ()
    """files that messages name by their digests"""


class Script:
    """The templates of the user's messages."""

    def __init__(self, spec: Eval) -> None:
        self._system = None if spec.system is None else Template(spec.system, texts_only=True)
        self._messages = None if spec.prompt is not None else RowMessages(spec)
        prompts = spec.follow_ups if spec.prompt is None else (spec.prompt, *spec.follow_ups)
        self._prompts = [Template(text, texts_only=True) for text in prompts]
        self._row_follow_ups = None if spec.follow_ups_from is None else expression(spec.follow_ups_from)
        self._history = spec.history
        self._continuations = spec.continuations
        self._params = spec.target.params_from if isinstance(spec.target, ModelTarget) else None

    @staticmethod
    def identity(spec: Eval) -> dict[str, Any]:
        """Return the script's part of every generation key. Keys that are not set are left out."""
        identity: dict[str, Any] = {"system": normal_form(spec.system)}
        if spec.prompt is not None:
            identity["prompt"] = normal_form(spec.prompt)
        else:
            blocks = [block.model_dump(exclude_none=True) for block in spec.messages]
            identity["messages"] = normal_form(blocks) or normal_expression(spec.messages_from)
        if spec.follow_ups or spec.follow_ups_from:
            identity["follow_ups"] = normal_form(spec.follow_ups) or normal_expression(spec.follow_ups_from)
        if spec.history is not None:
            identity["history"] = normal_expression(spec.history)
        if spec.continuations is not None:
            identity["continuations"] = normal_expression(spec.continuations)
        return identity

    def render(self, sample: Sample) -> Prompts:
        """Render the script for a sample; raise AttemptError for a row that does not fit it."""
        opening = [] if self._system is None else [{"role": "system", "content": _render(self._system, sample)}]
        if self._history is not None:
            opening += _evaluate_history(self._history, sample)
        contents: list[Content] = []
        files: tuple[Attachment, ...] = ()
        if self._messages is not None:
            *before, last = _render_messages(self._messages, sample)
            opening += before
            contents, files = [last["content"]], tuple(sample.files.values())
        contents += [_render(template, sample) for template in self._prompts]
        if self._row_follow_ups is not None:
            contents += _evaluate_follow_ups(self._row_follow_ups, sample)
        continuations = () if self._continuations is None else evaluate_continuations(self._continuations, sample)
        params = MappingProxyType({}) if self._params is None else _evaluate_params(self._params, sample)
        return Prompts(opening, contents, continuations, params, files)


def _render_messages(messages: RowMessages, sample: Sample) -> list[Message]:
    """Return the messages of a row, with its files named by their digests."""
    try:
        rendered = messages.render(sample.fields, sample.where)
    except DataError as error:
        raise AttemptError("bad_request", error.message, remedy=error.remedy, retry=False) from error
    except NotText as error:
        raise _unfit(sample, f"cannot render messages: {error}", NotText.hint) from error
    except RENDER_ERRORS as error:
        raise _unfit(sample, f"cannot render messages: {error}") from error
    for part in parts_with_source(rendered):
        source = part.pop("source")
        if (file := sample.files.get(source)) is None:  # a row that is shown without its files
            part["name"] = source[:80]
        else:
            part |= {"digest": file.digest, "media_type": file.media_type, "name": file.name}
    return rendered


def evaluate_continuations(formula: str, sample: Sample) -> tuple[Continuation, ...]:
    """Return a row's continuations, which are used as written, never as templates."""
    values = _evaluate(formula, sample, "continuations")
    if not isinstance(values, _LIST) or not values:
        raise _unfit(sample, f"continuations give {values!r:.80}, not a list of texts")
    return tuple([Continuation(value) if isinstance(value, str) else _pair(value, sample) for value in values])


def _pair(value: Any, sample: Sample) -> Continuation:
    """Return a continuation, which may have its own context."""
    if not isinstance(value, dict) or not value.keys() <= {"text", "context", "rolling"} or "text" not in value:
        raise _unfit(sample, f"a continuation is {value!r:.80}, not a text or a mapping with `text` and `context`")
    text, context, rolling = value["text"], value.get("context"), value.get("rolling", False)
    if not isinstance(text, str) or not isinstance(context, str | None):
        raise _unfit(sample, f"a continuation is {value!r:.80}: `text` and `context` are texts")
    if not isinstance(rolling, bool) or (rolling and context is not None):
        raise _unfit(sample, f"a continuation is {value!r:.80}: `rolling` is true or false, and has no `context`")
    return Continuation(text, context, rolling)


def _evaluate_history(formula: str, sample: Sample) -> list[Message]:
    """Return a row's messages before its prompt, which are used as written, never as templates."""
    values = _evaluate(formula, sample, "history")
    if not isinstance(values, _LIST):
        raise _unfit(sample, f"history gives {values!r:.80}, not a list of messages")
    for value in values:
        fits = isinstance(value, dict) and value.keys() == {"role", "content"} and isinstance(value["content"], str)
        if not fits or value["role"] not in ("system", "user", "assistant"):
            raise _unfit(
                sample,
                f"a message of history is {value!r:.80}, not a mapping with `role` (system, user or assistant) and "
                "`content`",
            )
    return [{"role": value["role"], "content": value["content"]} for value in values]


def _evaluate_params(formula: str, sample: Sample) -> dict[str, Any]:
    params = _evaluate(formula, sample, "target.params_from")
    if not isinstance(params, dict):
        raise _unfit(sample, f"target.params_from gives {params!r:.80}, not a mapping")
    if (name := several_answers(params)) is not None:
        problem = f"target.params_from gives `{name}`, which asks for several answers, but only one would count"
        raise _unfit(sample, problem, "Write `trials:` in the eval file instead.")
    return params


def _evaluate(formula: str, sample: Sample, key: str) -> Any:
    try:
        return expression(formula)(sample.fields)
    except RENDER_ERRORS as error:
        raise _unfit(sample, f"cannot evaluate {key}: {error}") from error


def _render(template: Template, sample: Sample) -> str:
    try:
        return template.render(sample.fields)
    except NotText as error:
        raise _unfit(sample, f"cannot render the prompt: {error}", NotText.hint) from error
    except RENDER_ERRORS as error:
        raise _unfit(sample, f"cannot render the prompt: {error}") from error


def _evaluate_follow_ups(evaluate: Callable[[dict[str, Any]], Any], sample: Sample) -> list[str]:
    """Return a row's follow-ups, which are used as written, never as templates."""
    try:
        texts = evaluate(sample.fields)
    except RENDER_ERRORS as error:
        raise _unfit(sample, f"cannot find follow_ups: {error}") from error
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise _unfit(sample, f"follow_ups give {texts!r:.80}, not a list of texts")
    return texts


def _unfit(sample: Sample, problem: str, hint: str | None = None) -> AttemptError:
    remedy = hint or "Fix the prompts, or the rows that do not fit them, then run the same command again."
    return AttemptError("bad_request", f"{sample.where}: {problem}", remedy=remedy, retry=False)


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
        self,
        prompts: Prompts,
        sample: Sample,
        trial: int,
        load: Callable[[str], bytes] | None = None,
        *,
        key: str = "",
        run: str = "",
    ) -> None:
        """`load`, `key` and `run` as in `Turn`."""
        self._key, self._run = key, run
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
            key=self._key,
            run=self._run,
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

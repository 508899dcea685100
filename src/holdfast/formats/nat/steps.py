"""The model and tool calls of a trial, as NeMo Agent Toolkit's steps.

Where a target reported its steps, the output's trace is written as it is. Otherwise each assistant message is a model
call and each tool's message a tool call; `steps.jsonl` knows when a call was made, how long it took and what it used.
Tokens that nobody knows are left out: NAT's evaluators then leave the call out of their means.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import UnsetType

from holdfast.canonical import digest
from holdfast.store.records import Usage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from holdfast.store.records import Output, Step, TraceStep

_ROOT = {"function_id": "root", "function_name": "root", "parent_id": None, "parent_name": None}


class _Call(NamedTuple):
    """Time and usage of a call."""

    started: float
    ended: float
    usage: Usage | None = None


def nat_steps(output: Output, recorded: Sequence[Step], model: str | None, types: frozenset[str]) -> list[TraceStep]:
    """Return the steps of some types; of all types where `types` is empty, as in NAT."""
    steps = output.trace if not isinstance(output.trace, UnsetType) else _derived(output, recorded, model)
    return [step for step in steps if not types or step.get("payload", {}).get("event_type") in types]


def _derived(output: Output, recorded: Sequence[Step], model: str | None) -> Iterator[TraceStep]:
    asked: dict[str, dict[str, Any]] = {}
    before: Any = ""
    records = _Records(output, recorded)
    for number, message in enumerate(output.conversation, output.opening or 0):
        content = message.get("content") or ""
        if message.get("role") == "assistant":
            for call in message.get("tool_calls") or ():
                if isinstance(call, dict):
                    asked[str(call.get("id") or "")] = call.get("function") or {}
            yield from _pair("LLM", model, before, content, records.model(number), f"{output.key}-{number}")
        elif message.get("role") == "tool" and isinstance(output.calls, UnsetType):
            function = asked.get(str(message.get("tool_call_id") or ""), {})
            name, arguments = function.get("name") or message.get("name"), _arguments(function.get("arguments"))
            call = records.tool(number, name, arguments)
            yield from _pair("TOOL", name, arguments, content, call, f"{output.key}-{number}")
        before = content
    for number, listed in enumerate([] if isinstance(output.calls, UnsetType) else output.calls):
        if listed.name is not None:  # calls that the messages do not hold
            whole = _Call(output.timing.started, output.timing.started + output.timing.seconds)
            yield from _pair("TOOL", listed.name, listed.arguments, listed.result, whole, f"{output.key}-call-{number}")


def _pair(kind: str, name: str | None, arguments: Any, result: Any, call: _Call, uuid: str) -> Iterator[TraceStep]:
    """Yield the step at the start of a call, and the one at its end."""
    start: dict[str, Any] = {"event_timestamp": call.started, "data": {"input": arguments}}
    end: dict[str, Any] = {
        "event_timestamp": call.ended,
        "span_event_timestamp": call.started,
        "data": {"input": arguments, "output": result},
    }
    if (used := call.usage) is not None and used.input_tokens is not None and used.output_tokens is not None:
        counts = {"prompt_tokens": used.input_tokens, "completion_tokens": used.output_tokens}
        end["usage_info"] = {"token_usage": {**counts, "total_tokens": used.tokens}, "num_llm_calls": used.requests}
    for state, fields in (("START", start), ("END", end)):
        payload = {"event_type": f"{kind}_{state}", "framework": None, "name": name, **fields, "UUID": uuid}
        yield {"parent_id": "root", "function_ancestry": _ROOT, "payload": payload}


def _arguments(text: Any) -> Any:
    """Return a tool call's arguments as its tool got them."""
    try:
        return msgspec.json.decode(text or "{}") if isinstance(text, str | None) else text
    except msgspec.DecodeError:
        return text


class _Records:
    """Finds the record of each message's call. Each record is used once: attempts that failed leave records, too."""

    def __init__(self, output: Output, recorded: Iterable[Step]) -> None:
        self._output = output
        self._remaining = list(recorded)
        marks = () if isinstance(output.marks, UnsetType) else output.marks
        self._ends = [mark.end for mark in marks] or [len(output.messages)]
        timing = output.timing
        self._whole = _Call(timing.started, timing.started + timing.seconds)

    def model(self, number: int) -> _Call:
        """Find the model call that gave a message."""
        turn, message = self._turn(number), self._output.messages[number]
        for step in self._remaining:
            if (step.kind, step.turn) == ("model", turn) and _answer(step) == message:
                return self._take(step, step.usage)
        if self._is_only_call(turn):
            for step in self._remaining:
                if (step.kind, step.turn) == ("turn", turn) and isinstance(step.response, dict):
                    return self._take(step, _usage(step.response))
            if len(self._ends) == 1:
                return self._whole._replace(usage=self._output.usage)
        return self._whole

    def tool(self, number: int, name: Any, arguments: Any) -> _Call:
        """Find the tool call that a message answers."""
        request, turn = digest([name, arguments]), self._turn(number)
        for step in self._remaining:
            if (step.kind, step.turn, step.request) == ("tool", turn, request):
                return self._take(step, None)
        return self._whole

    def _take(self, step: Step, usage: Usage | None) -> _Call:
        self._remaining.remove(step)
        return _Call(round(step.time - step.seconds, 6), step.time, usage)

    def _turn(self, number: int) -> int:
        return next((turn for turn, end in enumerate(self._ends, 1) if number < end), len(self._ends))

    def _is_only_call(self, turn: int) -> bool:
        start = self._ends[turn - 2] if turn > 1 else self._output.opening or 0
        messages = self._output.messages[start : self._ends[turn - 1]]
        return [message.get("role") for message in messages].count("assistant") == 1


def _answer(step: Step) -> Any:
    """Return the message in a record of a model call of ours."""
    messages = step.response.get("messages") if isinstance(step.response, dict) else None
    return messages[-1] if isinstance(messages, list) and messages else None


def _usage(response: dict[str, Any]) -> Usage | None:
    try:
        return msgspec.convert(response.get("usage"), Usage)
    except msgspec.ValidationError:
        return None

"""NeMo Agent Toolkit's steps: read from its streams, converted to messages, and made from the calls of a trial.

If a target reported its steps, the output's trace is used as it is. Otherwise each assistant message is a model call
and each tool's message a tool call; `steps.jsonl` has their times and usage. Unknown token counts are left out: NAT's
evaluators then leave the call out of their means.
"""

from __future__ import annotations

import ast
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from msgspec import UnsetType

from holdfast import Usage
from holdfast.canonical import digest
from holdfast.dialects.reading import count

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from holdfast.store.records import Output, Step, TraceStep

_ROOT = {"function_id": "root", "function_name": "root", "parent_id": None, "parent_name": None}
_CALLS: Final = ("TOOL_START", "TOOL_END", "FUNCTION_START", "FUNCTION_END")
_WORKFLOW: Final = "<workflow>"
"""the name that NAT gives to the workflow itself, which is a function too"""
_PREFIX: Final = b"intermediate_data:"


class _Call(NamedTuple):
    """Time and usage of a call."""

    started: float
    ended: float
    usage: Usage | None = None


ENDS: Final = frozenset({"LLM_END", "TOOL_END"})
"""the steps that say what was asked, and what came of it"""


def nat_steps(output: Output, recorded: Sequence[Step], model: str | None, types: frozenset[str]) -> list[TraceStep]:
    """Return the steps of some types; of all types if `types` is empty, as in NAT."""
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
    """Finds the record of each message's call. Each record is used once, because failed attempts leave records too."""

    def __init__(self, output: Output, recorded: Iterable[Step]) -> None:
        self._output = output
        self._remaining = list(recorded)
        marks = () if isinstance(output.marks, UnsetType) else output.marks
        self._ends = [mark.end for mark in marks] or [len(output.messages)]
        timing = output.timing
        self._whole = _Call(timing.started, timing.started + timing.seconds)

    def model(self, number: int) -> _Call:
        """Find the model call that returned a message."""
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


def messages_of(trace: Iterable[TraceStep], text: str) -> list[dict[str, Any]]:
    """Return a reply as messages: each tool call with its result, in the order they began, then the answer."""
    messages: list[dict[str, Any]] = []
    for call_id, call in _calls_by_id(trace).items():
        function = {"name": call["name"], "arguments": _as_json(call.get("input"))}
        messages.append(
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": call_id, "type": "function", "function": function}],
            }
        )
        if "output" in call:
            messages.append(
                {"role": "tool", "tool_call_id": call_id, "name": call["name"], "content": _result_text(call["output"])}
            )
    return [*messages, {"role": "assistant", "content": text}]


def _calls_by_id(trace: Iterable[TraceStep]) -> dict[str, dict[str, Any]]:
    """Return the calls by id. A framework's tool that is a NAT function is reported as both, and counts once."""
    calls: dict[str, dict[str, Any]] = {}
    for step in trace:
        payload = step["payload"]
        kind, name = payload.get("event_type"), payload.get("name")
        if kind not in _CALLS or not name or name == _WORKFLOW:
            continue
        if kind.startswith("FUNCTION") and payload.get("framework"):
            continue  # a step of a framework's chain, not a function of NAT
        call = calls.setdefault(str(payload.get("UUID")), {"name": name, "tool": kind.startswith("TOOL")})
        data = payload.get("data") or {}
        if "input" in data and data["input"] is not None:
            call["input"] = data["input"]
        if kind.endswith("_END"):
            call["output"] = data.get("output")
    tools = {call["name"] for call in calls.values() if call["tool"]}
    return {key: call for key, call in calls.items() if call["tool"] or call["name"] not in tools}


def _as_json(value: Any) -> str:
    """Return arguments as JSON. Frameworks report them as an object, as JSON, or as the text of a Python dict."""
    if isinstance(value, str):
        try:
            msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            pass
        else:
            return value
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            value = ast.literal_eval(value)
    return msgspec.json.encode({} if value is None else value, enc_hook=str).decode()


def _result_text(value: Any) -> str:
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        return str(value["content"])  # LangChain's ToolMessage
    return value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()


class _StreamLine(msgspec.Struct):
    payload: str
    """JSON as a text: what NAT calls an IntermediateStepPayload"""


class StreamedSteps:
    """Collects the steps of one reply."""

    def __init__(self) -> None:
        self.trace: list[TraceStep] = []

    def read(self, line: bytes) -> None:
        """Read a line of the stream; other lines are skipped."""
        if (step := _read_step(line)) is not None:
            self.trace.append(step)

    def usage(self) -> Usage:
        """Add up the tokens of all model calls."""
        return usage_of(self.trace)


def _read_step(line: bytes) -> TraceStep | None:
    """Read a step as `nat eval --endpoint` does; None for any other line.

    `/generate/full` sends steps, `/generate/stream` sends them as Markdown, which no evaluator can read.
    """
    if not line.startswith(_PREFIX):
        return None
    try:
        sent = msgspec.json.decode(line[len(_PREFIX) :], type=_StreamLine)
        payload = msgspec.json.decode(sent.payload, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(payload.get("event_type"), str) or payload["event_type"] == "LLM_NEW_TOKEN":
        return None  # one per token; the end of the call has all of them
    ancestry = {
        "function_id": payload.get("UUID") or "remote_function_id",
        "function_name": payload.get("name") or "remote_function",
        "parent_id": None,
        "parent_name": None,
    }
    return {"parent_id": "remote", "function_ancestry": ancestry, "payload": payload}


def usage_of(trace: Iterable[TraceStep]) -> Usage:
    """Add up the tokens of all model calls; unknown if a call does not report them."""
    counts = []
    for step in trace:
        payload = step["payload"]
        if payload.get("event_type") == "LLM_END":
            counts.append((payload.get("usage_info") or {}).get("token_usage") or {})
    sent = [count(each.get("prompt_tokens")) for each in counts]
    received = [count(each.get("completion_tokens") or 0) for each in counts]
    complete = bool(counts) and all(sent) and None not in received
    return Usage(
        sum(number or 0 for number in sent) if complete else None,
        sum(number or 0 for number in received) if complete else None,
        len(counts),
    )

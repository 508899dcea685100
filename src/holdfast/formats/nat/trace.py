"""Convert NAT's steps: to tool calls and tokens of a workflow, and from messages."""

from __future__ import annotations

import ast
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import UnsetType

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.store.records import Output, TraceStep

_CALLS: Final = ("TOOL_START", "TOOL_END", "FUNCTION_START", "FUNCTION_END")
_WORKFLOW: Final = "<workflow>"
"""the name that NAT gives to the workflow itself, which is a function too"""


def messages_of(trace: Iterable[TraceStep], text: str) -> list[dict[str, Any]]:
    """Return a reply as messages: each tool call with its result, in the order they began, then the answer."""
    messages: list[dict[str, Any]] = []
    for call_id, call in _calls(trace).items():
        function = {"name": call["name"], "arguments": _arguments(call.get("input"))}
        messages.append(
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": call_id, "type": "function", "function": function}],
            }
        )
        if "output" in call:
            messages.append(
                {"role": "tool", "tool_call_id": call_id, "name": call["name"], "content": _text(call["output"])}
            )
    return [*messages, {"role": "assistant", "content": text}]


def steps_of(output: Output) -> list[TraceStep]:
    """Return the reported steps; if there are none, a step for each answer and each tool call."""
    if not isinstance(output.trace, UnsetType):
        return output.trace
    results = {m.get("tool_call_id"): m.get("content") for m in output.messages if m.get("role") == "tool"}
    steps: list[TraceStep] = []
    before: Any = ""

    def add(kind: str, name: str | None, value: Any, result: Any) -> None:
        ended = output.timing.started + output.timing.seconds  # the times of single messages are unknown
        ancestry = {"function_id": "root", "function_name": "root", "parent_id": None, "parent_name": None}
        payload = {
            "event_type": kind,
            "event_timestamp": ended,
            "span_event_timestamp": output.timing.started,
            "name": name,
            "data": {"input": value, "output": result},
            "UUID": f"{output.key}-{len(steps)}",
        }
        steps.append({"parent_id": "root", "function_ancestry": ancestry, "payload": payload})

    listed = None if isinstance(output.calls, UnsetType) else output.calls
    for message in output.conversation:
        if message.get("role") == "assistant":
            add("LLM_END", None, before, message.get("content") or "")
            for call in message.get("tool_calls") or () if listed is None else ():
                if isinstance(call, dict):
                    function = call.get("function") or call
                    add("TOOL_END", function.get("name"), function.get("arguments"), results.get(call.get("id")))
        before = message.get("content") or before
    for call_record in listed or ():  # set if the messages do not hold all calls
        if call_record.name is not None:
            add("TOOL_END", call_record.name, call_record.arguments, call_record.result)
    return steps


def _calls(trace: Iterable[TraceStep]) -> dict[str, dict[str, Any]]:
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


def _arguments(value: Any) -> str:
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


def _text(value: Any) -> str:
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        return str(value["content"])  # LangChain's ToolMessage
    return value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()

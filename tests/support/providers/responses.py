"""OpenAI's Responses API, as it is where nothing is stored."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from tests.support.providers import Asked, Refused, Say, Wire, path_of, words

_KNOWN = {
    *("model", "input", "instructions", "temperature", "top_p", "max_output_tokens", "stream", "tools", "tool_choice"),
    *(
        "parallel_tool_calls",
        "text",
        "reasoning",
        "metadata",
        "prompt_cache_key",
        "client_metadata",
        "store",
        "include",
        "service_tier",
    ),
    *("previous_response_id", "safety_identifier", "truncation", "top_logprobs", "user", "stream_options"),
}
_PARTS = {
    "assistant": {"output_text", "refusal"},
    "user": {"input_text", "input_image", "input_file", "input_audio"},
    "system": {"input_text"},
    "developer": {"input_text"},
}


class _Responses(Wire):
    def check(self, asked: Asked) -> None:
        if path_of(asked) != "/v1/responses":
            raise Refused(f"Unknown request URL: POST {asked.path}", 404)
        body = asked.body
        for name in sorted(body.keys() - _KNOWN):
            raise Refused(f"Unknown parameter: '{name}'.")
        for number, tool in enumerate(body.get("tools") or ()):
            if tool.get("type") == "function" and "name" not in tool:
                raise Refused(f"Missing required parameter: 'tools[{number}].name'.")
        structured = (body.get("text") or {}).get("format") or {}
        if structured.get("type") == "json_schema" and not structured.keys() >= {"name", "schema"}:
            raise Refused("Missing required parameter: 'text.format.name'.")
        if "max_tokens" in (body.get("reasoning") or {}):
            raise Refused("Unknown parameter: 'reasoning.max_tokens'.")
        if isinstance(body["input"], list):
            _check_items(body["input"], stored=body.get("store", True))

    def whole(self, say: Say, asked: Asked) -> Any:
        return _reply(say, asked, _items(say, asked))

    def events(self, say: Say, asked: Asked) -> list[tuple[str | None, Any]]:
        items = _items(say, asked)
        begun = {**_reply(say, asked, []), "status": "in_progress", "usage": None, "incomplete_details": None}
        events: list[dict[str, Any]] = [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
        ]
        for number, item in enumerate(items):
            events += _item_events(number, item)
        kind = "response.completed" if _cut(say) is None else "response.incomplete"
        events.append({"type": kind, "response": _reply(say, asked, items)})
        return [(event["type"], {**event, "sequence_number": number}) for number, event in enumerate(events)]

    def error(self, status: int, message: str) -> Any:
        return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}

    def error_event(self, message: str) -> tuple[str | None, Any]:
        event = {"type": "error", "code": "server_error", "message": message, "param": None, "sequence_number": 99}
        return "error", event


def _check_items(items: list[dict[str, Any]], *, stored: bool) -> None:
    open_calls: list[str] = []
    ids = [item["id"] for item in items if "id" in item]
    for number, item in enumerate(items):
        kind = item.get("type", "message")
        if ids.count(item.get("id")) > 1:
            raise Refused(f"Duplicate item found with id {item['id']}. Remove duplicate items from your input.")
        if kind == "message":
            _check_message(number, item)
        elif kind == "function_call":
            open_calls.append(item["call_id"])
            if not isinstance(item["arguments"], str):
                raise Refused(f"Invalid type for 'input[{number}].arguments': expected a string.")
        elif kind == "function_call_output":
            if item["call_id"] not in open_calls:
                raise Refused(f"No tool call found for function call output with call_id {item['call_id']}.")
            open_calls.remove(item["call_id"])
        elif kind == "reasoning":
            _check_reasoning(number, item, stored=stored)
        else:
            raise Refused(f"Invalid value: '{kind}'. Supported values are: 'message', 'function_call' …")
    for call in open_calls:
        raise Refused(f"No tool output found for function call {call}.")
    for before, item in pairwise([{}, *items, {}]):
        if before.get("type") == "reasoning" and not item.get("id"):
            raise Refused(
                f"Item '{before['id']}' of type 'reasoning' was provided without its required following item."
            )
        if item.get("id", "").startswith("of-thought-") and "id" not in before:
            kind = item["type"]
            raise Refused(f"Item '{item['id']}' of type '{kind}' was provided without its required 'reasoning' item.")


def _check_message(number: int, item: dict[str, Any]) -> None:
    if item.get("role") not in _PARTS:
        raise Refused(f"Invalid value: '{item.get('role')}'. Supported values are: {sorted(_PARTS)}")
    for part in item["content"] if isinstance(item["content"], list) else ():
        if part.get("type") not in _PARTS[item["role"]]:
            raise Refused(f"Invalid value: '{part.get('type')}', at 'input[{number}].content'.")


def _check_reasoning(number: int, item: dict[str, Any], *, stored: bool) -> None:
    for key in ("id", "summary"):
        if key not in item:
            raise Refused(f"Missing required parameter: 'input[{number}].{key}'.")
    if not stored and item.get("encrypted_content") != f"sealed {item['id']}":
        raise Refused(
            f"Item with id '{item['id']}' not found. Items are not persisted when `store` is set to false.", 404
        )


def _items(say: Say, asked: Asked) -> list[dict[str, Any]]:
    """Make the items of an answer. Their ids mark the ones that belong to reasoning."""
    base = len(asked.body["input"])
    items: list[dict[str, Any]] = []
    if say.reasoning is not None:
        name = f"rs_{base}"
        sealed = f"sealed {name}" if "reasoning.encrypted_content" in (asked.body.get("include") or ()) else None
        summary = [{"type": "summary_text", "text": say.reasoning}]
        items.append({"id": name, "type": "reasoning", "summary": summary, "encrypted_content": sealed})
    prefix = "" if say.reasoning is None else "of-thought-"
    if say.text or not say.calls:
        part = {"type": "output_text", "text": say.text, "annotations": [], "logprobs": []}
        status = "completed" if _cut(say) is None else "incomplete"
        message = {"id": f"{prefix}msg_{base}", "type": "message", "status": status, "role": "assistant"}
        items.append({**message, "content": [part]})
    for number, call in enumerate(say.calls):
        items.append(
            {
                "id": f"{prefix}fc_{base}_{number}",
                "type": "function_call",
                "status": "completed",
                "call_id": f"call_{base}_{number}",
                "name": call.name,
                "arguments": json.dumps(call.arguments),
            }
        )
    return items


def _cut(say: Say) -> str | None:
    """Return why an answer is incomplete; None where it is complete."""
    return None if say.calls else {"length": "max_output_tokens", "content_filter": "content_filter"}.get(say.stop)


def _reply(say: Say, asked: Asked, items: list[dict[str, Any]]) -> dict[str, Any]:
    reason = _cut(say)
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "status": "completed" if reason is None else "incomplete",
        "error": None,
        "incomplete_details": None if reason is None else {"reason": reason},
        "instructions": asked.body.get("instructions"),
        "model": asked.body["model"],
        "output": items,
        "parallel_tool_calls": True,
        "temperature": asked.body.get("temperature", 1.0),
        "tool_choice": "auto",
        "tools": asked.body.get("tools", []),
        "store": asked.body.get("store", True),
        "usage": {
            "input_tokens": say.input_tokens,
            "input_tokens_details": {"cached_tokens": say.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": say.output_tokens,
            "output_tokens_details": {"reasoning_tokens": say.reasoning_tokens},
            "total_tokens": say.input_tokens + say.output_tokens,
        },
    }


def _item_events(number: int, item: dict[str, Any]) -> list[dict[str, Any]]:
    place = {"item_id": item["id"], "output_index": number}
    if item["type"] == "reasoning":
        begun: dict[str, Any] = {**item, "summary": [], "encrypted_content": None}
        inner = _part_events({**place, "summary_index": 0}, "reasoning_summary_part", item["summary"][0])
    elif item["type"] == "message":
        begun = {**item, "status": "in_progress", "content": []}
        inner = _part_events({**place, "content_index": 0}, "content_part", item["content"][0])
    else:
        begun, name = {**item, "status": "in_progress", "arguments": ""}, "response.function_call_arguments"
        half = len(item["arguments"]) // 2
        inner = [
            *(
                {"type": f"{name}.delta", **place, "delta": d}
                for d in (item["arguments"][:half], item["arguments"][half:])
            ),
            {"type": f"{name}.done", **place, "name": item["name"], "arguments": item["arguments"]},
        ]
    return [
        {"type": "response.output_item.added", "output_index": number, "item": begun},
        *inner,
        {"type": "response.output_item.done", "output_index": number, "item": item},
    ]


def _part_events(place: dict[str, Any], name: str, part: dict[str, Any]) -> list[dict[str, Any]]:
    text = "response.output_text" if name == "content_part" else "response.reasoning_summary_text"
    more = {"logprobs": []} if name == "content_part" else {}
    return [
        {"type": f"response.{name}.added", **place, "part": {**part, "text": ""}},
        *({"type": f"{text}.delta", **place, "delta": word, **more} for word in words(part["text"])),
        {"type": f"{text}.done", **place, "text": part["text"], **more},
        {"type": f"response.{name}.done", **place, "part": part},
    ]


WIRE = _Responses()

"""Anthropic's Messages, with signatures of thoughts, and usage that is split over the stream."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

from tests.support.providers import Asked, Refused, Say, Wire, path_of, words

_KNOWN = {
    *("model", "messages", "max_tokens", "system", "stream", "temperature", "top_p", "top_k", "stop_sequences"),
    *("tools", "tool_choice", "thinking", "output_config", "metadata", "service_tier", "container"),
    *("cache_control", "context_management", "mcp_servers", "inference_geo", "speed", "diagnostics"),
}
_BLOCKS = {
    "system": {"text"},
    "user": {"text", "image", "document", "tool_result", "search_result"},
    "assistant": {"text", "thinking", "redacted_thinking", "tool_use", "server_tool_use", "web_search_tool_result"},
}
_IMAGES = {"image/jpeg", "image/png", "image/gif", "image/webp"}
_STOPS = {"stop": "end_turn", "length": "max_tokens", "content_filter": "refusal"}
_ERRORS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "api_error",
    529: "overloaded_error",
}


class _Messages(Wire):
    def check(self, asked: Asked) -> None:
        if not path_of(asked).endswith("/v1/messages"):
            raise Refused("Not found", 404)
        if asked.headers.keys().isdisjoint(("x-api-key", "authorization")):
            raise Refused("x-api-key header is required", 401)
        version, body = asked.headers.get("anthropic-version"), asked.body
        if version not in ("2023-06-01", "2026-10-21"):
            raise Refused("anthropic-version: header is required")
        if version == "2026-10-21" and not body.keys().isdisjoint(("temperature", "top_p", "top_k")):
            raise Refused("temperature, top_p and top_k are not supported in this version")
        for key in body:
            if key not in _KNOWN:
                raise Refused(f"{key}: Extra inputs are not permitted")
        if not isinstance(body.get("max_tokens"), int):
            raise Refused("max_tokens: Field required")
        _check_thinking(body)
        format_ = (body.get("output_config") or {}).get("format")
        if format_ and format_["schema"].get("additionalProperties") is not False:
            raise Refused("output_config.format.schema: For 'object' type, 'additionalProperties' must be set to false")
        for tool in body.get("tools") or ():
            if "type" not in tool and tool["input_schema"]["type"] != "object":
                raise Refused("tools.0.custom.input_schema.type: Input should be 'object'")
        _check_conversation(body["messages"])

    def whole(self, say: Say, asked: Asked) -> Any:
        return {
            **_head(asked),
            "content": _blocks(say, asked),
            "stop_reason": _stop(say),
            "stop_sequence": None,
            "usage": {**_input_usage(say), **_output_usage(say)},
        }

    def events(self, say: Say, asked: Asked) -> list[tuple[str | None, Any]]:
        start = {**_head(asked), "content": [], "stop_reason": None, "stop_sequence": None}
        start["usage"] = {**_input_usage(say), "output_tokens": 1}
        events: list[Any] = [{"type": "message_start", "message": start}, {"type": "ping"}]
        for number, block in enumerate(_blocks(say, asked)):
            begun, deltas = _streamed(block)
            events.append({"type": "content_block_start", "index": number, "content_block": begun})
            events += [{"type": "content_block_delta", "index": number, "delta": delta} for delta in deltas]
            events.append({"type": "content_block_stop", "index": number})
        delta = {"stop_reason": _stop(say), "stop_sequence": None}
        events.append({"type": "message_delta", "delta": delta, "usage": _output_usage(say)})
        events.append({"type": "message_stop"})
        return [(event["type"], event) for event in events]

    def error(self, status: int, message: str) -> Any:
        kind = _ERRORS.get(status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1"}

    def error_event(self, message: str) -> tuple[str | None, Any]:
        return "error", {"type": "error", "error": {"type": "api_error", "message": message}}


def _check_thinking(body: dict[str, Any]) -> None:
    thinking = body.get("thinking") or {}
    if thinking.get("type") == "enabled":
        if thinking["budget_tokens"] >= body["max_tokens"]:
            raise Refused("`max_tokens` must be greater than `thinking.budget_tokens`.")
        if "opus-5" in body["model"]:
            raise Refused(
                '"thinking.type.enabled" is not supported for this model. Use "thinking.type.adaptive" and '
                '"output_config.effort" to control thinking behavior.'
            )
    if thinking.get("type") == "adaptive" and "4-5" in body["model"]:
        raise Refused("adaptive thinking is not supported on this model")


def _check_conversation(messages: list[dict[str, Any]]) -> None:
    open_calls: list[str] = []
    seen: set[str] = set()
    for number, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role not in _BLOCKS or (role == "system" and number == 0):
            raise Refused(
                f'messages: Unexpected role "{role}". The Messages API accepts a top-level `system` parameter'
            )
        if number and messages[number - 1]["role"] == role:
            raise Refused('messages: roles must alternate between "user" and "assistant"')
        if not content:
            raise Refused(f"messages.{number}: all messages must have non-empty content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for block in blocks:
            _check_block(block, role, number)
        results = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
        if any(block["type"] != "tool_result" for block in blocks[: len(results)]) or set(open_calls) - set(results):
            raise Refused(
                f"messages.{number - 1}: `tool_use` ids were found without `tool_result` blocks immediately after"
            )
        if set(results) - set(open_calls):
            raise Refused(f"messages.{number}: unexpected `tool_use_id` found in `tool_result` blocks")
        open_calls = [block["id"] for block in blocks if block["type"] == "tool_use"]
        if seen & set(open_calls):
            raise Refused(f"messages.{number}: `tool_use` ids must be unique")
        seen |= set(open_calls)
        thought = [block["type"] for block in blocks[:2]]
        if any("_thought_" in call for call in open_calls) and thought != ["thinking", "redacted_thinking"]:
            raise Refused(f"messages.{number}.content.0.type: Expected `thinking` or `redacted_thinking`")
    if open_calls:
        raise Refused("messages: `tool_use` ids were found without `tool_result` blocks immediately after")


def _check_block(block: dict[str, Any], role: str, number: int) -> None:
    kind = block["type"]
    if kind not in _BLOCKS[role]:
        raise Refused(f"messages.{number}.content.0: Input tag '{kind}' does not match any of the expected tags")
    if kind == "text" and not block["text"].strip():
        raise Refused("messages: text content blocks must contain non-whitespace text")
    if kind == "thinking" and block["signature"] != _signature(block["thinking"]):
        raise Refused(f"messages.{number}.content.0: Invalid `signature` in `thinking` block")
    if kind == "redacted_thinking" and block["data"] != "hidden-thoughts":
        raise Refused(f"messages.{number}.content.1: Invalid `data` in `redacted_thinking` block")
    if kind == "tool_use" and not isinstance(block["input"], dict):
        raise Refused(f"messages.{number}.content.0.tool_use.input: Input should be a valid dictionary")
    source = block.get("source") or {}
    if kind == "image" and source["type"] == "base64" and source["media_type"] not in _IMAGES:
        raise Refused("messages.0.content.0.image.source.base64.media_type: Input should be 'image/jpeg', …")


def _signature(thoughts: str) -> str:
    return sha256(thoughts.encode()).hexdigest()


def _head(asked: Asked) -> dict[str, Any]:
    # Claude Code takes replies with the same id as one.
    id_ = "msg_" + sha256(json.dumps(asked.body["messages"]).encode()).hexdigest()[:24]
    return {"id": id_, "type": "message", "role": "assistant", "model": asked.body["model"]}


def _blocks(say: Say, asked: Asked) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if say.reasoning is not None:
        blocks.append({"type": "thinking", "thinking": say.reasoning, "signature": _signature(say.reasoning)})
        blocks.append({"type": "redacted_thinking", "data": "hidden-thoughts"})
    if say.text:
        blocks.append({"type": "text", "text": say.text})
    thought = "_thought" if say.reasoning is not None else ""
    place = len(asked.body["messages"])
    for number, call in enumerate(say.calls):
        id_ = f"toolu{thought}_{place}_{number}"
        blocks.append({"type": "tool_use", "id": id_, "name": call.name, "input": call.arguments})
    return blocks


def _streamed(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a block as it begins in a stream, and the events that fill it."""
    match block["type"]:
        case "text":
            return {**block, "text": ""}, [{"type": "text_delta", "text": part} for part in words(block["text"])]
        case "thinking":
            deltas = [{"type": "thinking_delta", "thinking": part} for part in words(block["thinking"])]
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
            return {**block, "thinking": "", "signature": ""}, deltas
        case "tool_use":
            arguments = json.dumps(block["input"])
            halves = "", arguments[: len(arguments) // 2], arguments[len(arguments) // 2 :]
            return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": half} for half in halves]
    return block, []


def _stop(say: Say) -> str:
    return "tool_use" if say.calls else _STOPS[say.stop]


def _input_usage(say: Say) -> dict[str, Any]:
    return {
        "input_tokens": say.input_tokens - say.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": say.cached_tokens,
        "service_tier": "standard",
    }


def _output_usage(say: Say) -> dict[str, Any]:
    details = {"output_tokens_details": {"thinking_tokens": say.reasoning_tokens}} if say.reasoning_tokens else {}
    return {"output_tokens": say.output_tokens, **details}


WIRE = _Messages()

"""OpenAI's chat completions, with the reasoning of vLLM and OpenRouter, and Gemini's signatures of tool calls."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.support.providers import Asked, Refused, Say, Wire, path_of, words

if TYPE_CHECKING:
    from tests.support.providers import Call

_KNOWN = {
    *("model", "messages", "temperature", "top_p", "max_tokens", "max_completion_tokens", "stop", "seed", "n", "user"),
    *("stream", "stream_options", "tools", "tool_choice", "parallel_tool_calls", "response_format", "reasoning"),
    *("reasoning_effort", "metadata", "prompt_cache_key", "store", "service_tier", "logprobs"),
}
_PARTS = {"text", "image_url", "input_audio", "file"}


class _Chat(Wire):
    def check(self, asked: Asked) -> None:
        if not path_of(asked).endswith("/chat/completions"):
            raise Refused(f"Unknown request URL: POST {asked.path}", 404)
        body = asked.body
        if unknown := body.keys() - _KNOWN:
            raise Refused(f"Unrecognized request argument supplied: {', '.join(sorted(unknown))}")
        if "stream_options" in body and not body.get("stream"):
            raise Refused("The 'stream_options' parameter is only allowed when 'stream' is enabled.")
        open_calls: list[str] = []
        thinks = False
        for message in body["messages"]:
            if message["role"] == "tool":
                if message["tool_call_id"] not in open_calls:
                    raise Refused("messages with role 'tool' must be a response to a preceding message with tool_calls")
                open_calls.remove(message["tool_call_id"])
                continue
            if open_calls:
                raise Refused("An assistant message with 'tool_calls' must be followed by tool messages")
            if message["role"] == "user":
                thinks = False
            _check_content(message.get("content"))
            for call in message.get("tool_calls") or ():
                open_calls.append(call["id"])
                if "extra_content" not in call:
                    raise Refused("Function call is missing a thought_signature in functionCall parts.")
            if message["role"] == "assistant" and message.get("tool_calls"):
                thinks = thinks or "reasoning" in message
                if thinks and ("reasoning" not in message or "reasoning_details" not in message):
                    raise Refused("thinking is enabled but reasoning is missing in assistant tool call message")

    def whole(self, say: Say, asked: Asked) -> Any:
        message: dict[str, Any] = {"role": "assistant", "content": say.text or None, "refusal": None}
        if say.reasoning is not None:
            message |= _thoughts(say.reasoning)
        if say.calls:
            message["tool_calls"] = [_call(number, call) for number, call in enumerate(say.calls)]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _stop(say)}
        return {**_head(asked, "chat.completion"), "choices": [choice], "usage": _usage(say)}

    def events(self, say: Say, asked: Asked) -> list[tuple[str | None, Any]]:
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if say.reasoning is not None:
            deltas += [_thoughts(part) for part in words(say.reasoning)]
        deltas += [{"content": part} for part in words(say.text) if part]
        for number, call in enumerate(say.calls):
            whole = _call(number, call)
            arguments = whole["function"]["arguments"]
            begun = {**whole, "index": number, "function": {"name": call.name, "arguments": ""}}
            halves = arguments[: len(arguments) // 2], arguments[len(arguments) // 2 :]
            deltas.append({"tool_calls": [begun]})
            deltas += [{"tool_calls": [{"index": number, "function": {"arguments": half}}]} for half in halves]
        head = _head(asked, "chat.completion.chunk")
        chunks = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
        chunks.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": _stop(say)}]})
        if (asked.body.get("stream_options") or {}).get("include_usage"):
            chunks.append({**head, "choices": [], "usage": _usage(say)})
        return [*((None, chunk) for chunk in chunks), (None, "[DONE]")]

    def error(self, status: int, message: str) -> Any:
        kind = {429: "rate_limit_error", 401: "invalid_request_error"}.get(status, "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": None, "code": None}}

    def error_event(self, message: str) -> tuple[str | None, Any]:
        return None, {"error": {"message": message, "type": "server_error", "code": None}}


def _check_content(content: Any) -> None:
    for part in content if isinstance(content, list) else ():
        if part.get("type") not in _PARTS:
            raise Refused(f"Invalid value: '{part.get('type')}'. Supported values are: {sorted(_PARTS)}")


def _head(asked: Asked, kind: str) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": kind,
        "created": 1,
        "model": asked.body["model"],
        "system_fingerprint": "fp_1",
    }


def _thoughts(text: str) -> dict[str, Any]:
    detail = {"type": "reasoning.text", "text": text, "index": 0, "signature": "sig-of-thoughts"}
    return {"reasoning": text, "reasoning_details": [detail]}


def _call(number: int, call: Call) -> dict[str, Any]:
    return {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        "extra_content": {"google": {"thought_signature": f"sig-{number}"}},
    }


def _stop(say: Say) -> str:
    return "tool_calls" if say.calls else say.stop


def _usage(say: Say) -> dict[str, Any]:
    return {
        "prompt_tokens": say.input_tokens,
        "completion_tokens": say.output_tokens,
        "total_tokens": say.input_tokens + say.output_tokens,
        "prompt_tokens_details": {"cached_tokens": say.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": say.reasoning_tokens},
    }


WIRE = _Chat()

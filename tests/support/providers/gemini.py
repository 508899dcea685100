"""Google's generateContent, as Gemini 3 has it; models whose names have `gemini-2` give their calls no ids."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from typing import Any

from tests.support.providers import Asked, Refused, Say, Wire, path_of, words

_PATH = re.compile(r"/v1(beta)?/models/([\w.-]+):(generateContent|streamGenerateContent)")
_KNOWN = {
    *("contents", "systemInstruction", "tools", "toolConfig", "safetySettings", "generationConfig", "cachedContent"),
    *("labels", "serviceTier", "store"),
}
_CONFIG = {
    *("temperature", "topP", "topK", "maxOutputTokens", "stopSequences", "seed", "candidateCount", "presencePenalty"),
    *(
        "frequencyPenalty",
        "responseMimeType",
        "responseJsonSchema",
        "responseSchema",
        "thinkingConfig",
        "mediaResolution",
    ),
}
_THINKING = {"includeThoughts", "thinkingBudget", "thinkingLevel"}
_PARTS = {"text", "thought", "thoughtSignature", "functionCall", "functionResponse", "inlineData", "fileData"}


class _Gemini(Wire):
    def check(self, asked: Asked) -> None:
        match = _PATH.fullmatch(path_of(asked))
        if match is None:
            raise Refused(f"{asked.path} is not found for API version v1", 404)
        if match[3] == "streamGenerateContent" and "alt=sse" not in asked.path:
            raise Refused("this server streams events only")
        if "x-goog-api-key" not in asked.headers:
            raise Refused("Method doesn't allow unregistered callers.", 403)
        body = asked.body
        config = body.get("generationConfig") or {}
        _check_names(body, _KNOWN, "")
        _check_names(config, _CONFIG, " at 'generation_config'")
        _check_names(config.get("thinkingConfig") or {}, _THINKING, " at 'generation_config.thinking_config'")
        if {"thinkingBudget", "thinkingLevel"} <= (config.get("thinkingConfig") or {}).keys():
            raise Refused("You can only set only one of thinking budget and thinking level.")
        if not isinstance(config.get("stopSequences", []), list):
            raise Refused("Invalid value at 'generation_config.stop_sequences'")
        for tool in body.get("tools") or ():
            for function in tool.get("functionDeclarations") or ():
                _check_names(function, {"name", "description", "parameters", "parametersJsonSchema"}, " at 'tools[0]'")
        _check_contents(body.get("contents"))

    def streams(self, asked: Asked) -> bool:
        return "streamGenerateContent" in asked.path

    def whole(self, say: Say, asked: Asked) -> Any:
        return _reply(say, asked, _parts(say, asked), finishReason=_reason(say))

    def events(self, say: Say, asked: Asked) -> list[tuple[str | None, Any]]:
        pieces: list[dict[str, Any]] = []
        for part in _parts(say, asked):
            if "text" not in part:
                pieces.append(part)
                continue
            plain = {key: value for key, value in part.items() if key != "thoughtSignature"}
            pieces += [{**plain, "text": word} for word in words(part["text"])]
            if "thoughtSignature" in part:  # comes last, with an empty text
                pieces.append({"text": "", "thoughtSignature": part["thoughtSignature"]})
        events = [_reply(say._replace(output_tokens=0, reasoning_tokens=0), asked, [piece]) for piece in pieces]
        events.append(_reply(say, asked, [], finishReason=_reason(say)))
        return [(None, event) for event in events]

    def error(self, status: int, message: str) -> Any:
        word = {400: "INVALID_ARGUMENT", 403: "PERMISSION_DENIED", 429: "RESOURCE_EXHAUSTED"}.get(status, "UNAVAILABLE")
        return {"error": {"code": status, "message": message, "status": word}}

    def error_event(self, message: str) -> tuple[str | None, Any]:
        return None, self.error(503, message)


def _check_names(fields: dict[str, Any], known: set[str], where: str) -> None:
    for name in sorted(fields.keys() - known):
        raise Refused(f'Invalid JSON payload received. Unknown name "{name}"{where}: Cannot find field.')


def _check_contents(contents: Any) -> None:
    if not contents:
        raise Refused("* GenerateContentRequest.contents: contents is not specified")
    asks = [number for number, content in enumerate(contents) if content["role"] == "user" and not _results(content)]
    open_calls: list[dict[str, Any]] = []
    for number, content in enumerate(contents):
        if content["role"] not in ("user", "model"):
            raise Refused("Please use a valid role: user, model.")
        if not content["parts"]:
            raise Refused(f"* GenerateContentRequest.contents[{number}].parts: contents.parts must not be empty.")
        for part in content["parts"]:
            _check_names(part, _PARTS, f" at 'contents[{number}].parts[0]'")
        results = _results(content)
        if len(results) != len(open_calls):
            raise Refused(
                "Please ensure that the number of function response parts is equal to the number of function call "
                "parts of the function call turn."
            )
        for call, result in zip(open_calls, results, strict=True):
            if (call["name"], call.get("id")) != (result["name"], result.get("id")):
                raise Refused(f"Function response {result['name']} does not answer its function call.")
            if not isinstance(result["response"], dict):
                raise Refused("Invalid value at 'function_response.response'")
        parts = [part for part in content["parts"] if "functionCall" in part]
        open_calls = [part["functionCall"] for part in parts]
        if number > max(asks, default=-1):
            _check_signatures(content["parts"], parts)
    if open_calls:
        raise Refused("Please ensure that function call turn is followed by function response turn.")


def _results(content: dict[str, Any]) -> list[dict[str, Any]]:
    return [part["functionResponse"] for part in content["parts"] if "functionResponse" in part]


def _check_signatures(parts: list[dict[str, Any]], calls: list[dict[str, Any]]) -> None:
    """The first call of each step of the current turn is signed; the others are not."""
    if calls and "thoughtSignature" not in calls[0]:
        raise Refused("Function call is missing a thought_signature in functionCall parts.")
    for part in parts:
        signature = part.get("thoughtSignature", "skip_thought_signature_validator")
        if signature not in ("skip_thought_signature_validator", _signature(part)):
            raise Refused("Corrupted thought signature.")


def _signature(part: dict[str, Any]) -> str:
    # Only the call: a stream sends the signature of a text after the text.
    return b64encode(json.dumps(["sealed", part.get("functionCall")], sort_keys=True).encode()).decode()


def _parts(say: Say, asked: Asked) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    if say.reasoning is not None:
        parts.append({"text": say.reasoning, "thought": True})
    if say.text or not say.calls:
        parts.append({"text": say.text})
    base = len(asked.body["contents"])
    for number, call in enumerate(say.calls):
        own = {} if "gemini-2" in asked.path else {"id": f"fc{base}x{number}"}
        parts.append({"functionCall": {**own, "name": call.name, "args": call.arguments}})
    signed = next((part for part in parts if "functionCall" in part), parts[-1])
    signed["thoughtSignature"] = _signature(signed)
    return parts


def _reason(say: Say) -> str:
    return "STOP" if say.calls else {"length": "MAX_TOKENS", "content_filter": "SAFETY"}.get(say.stop, "STOP")


def _reply(say: Say, asked: Asked, parts: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    content = {"content": {"role": "model", **({"parts": parts} if parts else {})}}
    counts = {
        "promptTokenCount": say.input_tokens,
        "candidatesTokenCount": say.output_tokens - say.reasoning_tokens,
        "totalTokenCount": say.input_tokens + say.output_tokens,
        "cachedContentTokenCount": say.cached_tokens,
        "thoughtsTokenCount": say.reasoning_tokens,
    }
    return {
        "candidates": [{**content, **more, "index": 0}],
        "usageMetadata": {name: number for name, number in counts.items() if number},
        "modelVersion": "gemini-3-flash",
        "responseId": f"r{len(asked.body['contents'])}",
    }


WIRE = _Gemini()

"""Google's generateContent.

A reply is a list of parts: texts, thoughts, calls of functions. Parts may be signed, and Gemini 3 refuses the next
request of a tool loop unless the signed parts come back as they were. A message keeps the parts in `raw.reply.parts`.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.structs import replace

from holdfast.dialects.reading import (
    check_counts,
    count,
    explain,
    failed_reply,
    keeps_reasoning,
    media_of,
    objects,
    raw_of,
    renamed,
    text_of,
    with_raw,
)
from holdfast.dialects.types import Answer, Dialect, Stop, StreamReader, TokenCounts, no_answer, read_stop

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.dialects.types import Message, ModelRequest
    from holdfast.errors import AttemptError, Fault

    Part = dict[str, Any]

_NAMES: Final = {
    "top_p": "topP",
    "top_k": "topK",
    "max_tokens": "maxOutputTokens",
    "max_completion_tokens": "maxOutputTokens",
    "stop": "stopSequences",
    "presence_penalty": "presencePenalty",
    "frequency_penalty": "frequencyPenalty",
}
_BESIDE_CONFIG: Final = ("safetySettings", "toolConfig", "cachedContent", "labels", "serviceTier", "store")
"""fields of a request; all other parameters are fields of its `generationConfig`"""
_TIERS: Final = {
    **{tier: tier for tier in ("flex", "priority")},
    **{f"on_demand_{tier}": tier for tier in ("flex", "priority")},
    "provisioned_throughput": "provisioned_throughput",
}
"""of service, in the words of Gemini's API and Vertex's"""
_UNSIGNED: Final = "skip_thought_signature_validator"
"""the signature that Google documents for calls which another model made, or nobody"""
_WITHOUT_SIGNATURES: Final = re.compile(r"gemini-[12]\b")
_MODES: Final = {"auto": "AUTO", "none": "NONE", "required": "ANY"}


class _Gemini(Dialect):
    api = "gemini"

    def path(self, model: str, *, stream: bool) -> str:
        name = model if "/" in model else f"models/{model}"
        return f"/{name}:streamGenerateContent?alt=sse" if stream else f"/{name}:generateContent"

    def headers(self, key: str | None) -> dict[str, str]:
        return {"x-goog-api-key": key} if key else {}

    def encode(self, request: ModelRequest) -> dict[str, Any]:
        params = renamed(request.params, _NAMES)
        body: dict[str, Any] = {key: params.pop(key) for key in _BESIDE_CONFIG if key in params}
        if (choice := params.pop("tool_choice", None)) is not None:
            body.setdefault("toolConfig", {"functionCallingConfig": _calling(choice)})
        if request.tools:
            body["tools"] = _tools(request.tools)
        if config := _config(params, request):
            body["generationConfig"] = config
        system = [part for message in request.messages if _is_system(message) for part in _parts(message, request)]
        if system:
            body["systemInstruction"] = {"parts": system}
        body["contents"] = _contents(request)
        return body

    def read_reply(self, reply: Any) -> Answer:
        return _answer(reply)

    def reader(self) -> StreamReader:
        return _GeminiReader()

    def explain(self, error: AttemptError | Fault) -> str | None:
        if error.status == 400 and "API key" in error.message:  # other services answer 401
            return "Check the key: Google does not accept it."
        return explain(error)

    def conversation(self, body: Any) -> list[Message]:
        body = body if isinstance(body, dict) else {}
        system = body.get("systemInstruction")
        text = text_of(system.get("parts")) if isinstance(system, dict) else ""
        messages: list[Message] = [{"role": "system", "content": text}] if text else []
        calls: list[dict[str, Any]] = []
        for number, content in enumerate(objects(body.get("contents"))):
            parts = objects(content.get("parts"))
            if content.get("role") == "model":
                message = _message(parts, f"call-{number}")
                calls = list(message.get("tool_calls") or ())
                messages.append(message)
            else:
                messages += _received(parts, calls)
        return messages


class _GeminiReader(StreamReader):
    def __init__(self) -> None:
        self._reply: dict[str, Any] = {}
        self._candidate: dict[str, Any] = {}
        self._parts: list[Part] = []

    @property
    def ended(self) -> bool:
        return "finishReason" in self._candidate or _block_reason(self._reply) is not None

    def take_event(self, event: Any) -> bool:
        if event.get("error"):
            raise failed_reply(event["error"])
        self._reply |= {key: value for key, value in event.items() if value is not None}
        shown = [self._take(each) for each in event.get("candidates") or () if not count(each.get("index"))]
        return any(shown)

    def _take(self, candidate: dict[str, Any]) -> bool:
        self._candidate |= {key: value for key, value in candidate.items() if value is not None}
        parts = (candidate.get("content") or {}).get("parts") or []
        for part in parts:
            last = self._parts[-1] if self._parts else {}
            if _is_plain(last) and _is_plain(part) and last.get("thought") == part.get("thought"):
                self._parts[-1] = {**last, "text": last["text"] + part["text"]}
            else:
                self._parts.append(part)
        return any(part.get("text") and not part.get("thought") for part in parts)

    def answer(self) -> Answer:
        if not self._candidate:
            return DIALECT.read(self._reply)
        candidate = {**self._candidate, "content": {"parts": self._parts}}
        return DIALECT.read({**self._reply, "candidates": [candidate]})


def _is_plain(part: Part) -> bool:
    """Return True for text that streams cut in pieces. A signature belongs to its part, even without text."""
    return isinstance(part.get("text"), str) and part.keys() <= {"text", "thought"}


def _config(params: Mapping[str, Any], request: ModelRequest) -> dict[str, Any]:
    config = {**params, **params.get("generationConfig", {})}
    config.pop("generationConfig", None)
    if isinstance(reasoning := config.get("reasoning"), dict):
        del config["reasoning"]
        config["thinkingConfig"] = {**_thinking(reasoning), **config.get("thinkingConfig", {})}
    if isinstance(stop := config.get("stopSequences"), str):
        config["stopSequences"] = [stop]
    if request.schema is not None:
        config = {"responseMimeType": "application/json", "responseJsonSchema": request.schema, **config}
    if request.max_tokens is not None:
        config.setdefault("maxOutputTokens", request.max_tokens)
    return config


def _thinking(reasoning: Mapping[str, Any]) -> dict[str, Any]:
    """Translate `params.reasoning`. Thoughts are asked for in words, unless the model is not to think."""
    if reasoning.get("effort") == "none" or reasoning.get("tokens") == 0:
        return {"thinkingBudget": 0}
    names = {"effort": "thinkingLevel", "tokens": "thinkingBudget"}
    return {"includeThoughts": True} | {
        names.get(key, key): value for key, value in reasoning.items() if value is not None
    }


def _calling(choice: Any) -> dict[str, Any]:
    """Translate `tool_choice` of OpenAI's APIs."""
    function = choice.get("function") if isinstance(choice, dict) else None
    if isinstance(function, dict):
        return {"mode": "ANY", "allowedFunctionNames": [function["name"]]}
    return {"mode": _MODES.get(choice, choice)}


def _tools(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tools of a request: functions in one declaration, and the API's own, such as search, as they are."""
    functions = [_declaration(tool["function"]) for tool in tools if isinstance(tool.get("function"), dict)]
    own = [tool for tool in tools if not isinstance(tool.get("function"), dict)]
    return [*([{"functionDeclarations": functions}] if functions else ()), *own]


def _declaration(function: Mapping[str, Any]) -> dict[str, Any]:
    declared = {key: function[key] for key in ("name", "description") if function.get(key)}
    return {**declared, **({"parametersJsonSchema": function["parameters"]} if function.get("parameters") else {})}


def _is_system(message: Message) -> bool:
    return message.get("role") in ("system", "developer")


def _contents(request: ModelRequest) -> list[dict[str, Any]]:
    """Return the conversation. The results of calls that were made at once are one content."""
    contents: list[dict[str, Any]] = []
    calls: dict[str, dict[str, Any]] = {}
    kept = keeps_reasoning(request.messages, request.reasoning_history, default="all")
    answers = False
    for message, keep in zip(request.messages, kept, strict=True):
        role = message.get("role")
        if _is_system(message):
            continue
        if role == "assistant":
            parts = _sent_back(message, keep, request)
            calls |= _named(message, parts)
        elif role == "tool":
            parts = [_result(message, calls, request)]
        else:
            parts = _parts(message, request)
        if role == "tool" and answers:
            contents[-1]["parts"] += parts
        elif parts:  # a model that said nothing is left out: the API refuses contents without parts
            contents.append({"role": "model" if role == "assistant" else "user", "parts": parts})
        answers = role == "tool"
    return contents


def _sent_back(message: Message, keep: bool, request: ModelRequest) -> list[Part]:
    """Return the parts of a message of the model; the server's own parts if there are any."""
    reply = raw_of(message, "gemini")
    if reply is not None and keep:
        return list(reply["parts"])
    if reply is not None:
        parts = [
            {key: value for key, value in part.items() if key != "thoughtSignature"}
            for part in reply["parts"]
            if not part.get("thought")
        ]
    else:
        parts = [{"text": text}] if (text := text_of(message.get("content")) or message.get("refusal")) else []
        parts += [_call_part(call) for call in message.get("tool_calls") or ()]
    calls = [part for part in parts if "functionCall" in part]
    if calls and not _WITHOUT_SIGNATURES.search(request.model):
        calls[0]["thoughtSignature"] = _UNSIGNED
    return parts


def _call_part(call: Mapping[str, Any]) -> Part:
    function = call["function"]
    try:
        arguments = msgspec.json.decode(function.get("arguments") or "{}")
    except msgspec.DecodeError:
        arguments = None
    if not isinstance(arguments, dict):  # a cut text, for example
        arguments = {"arguments": function.get("arguments")}
    own = {"id": call["id"]} if call.get("id") else {}
    return {"functionCall": {**own, "name": function["name"], "args": arguments}}


def _named(message: Message, parts: Sequence[Part]) -> dict[str, dict[str, Any]]:
    """Return the calls of a message by their ids in the conversation. Some models give them no ids of their own."""
    ids = [str(call.get("id")) for call in message.get("tool_calls") or ()]
    return dict(zip(ids, (part["functionCall"] for part in parts if "functionCall" in part), strict=False))


def _result(message: Message, calls: Mapping[str, dict[str, Any]], request: ModelRequest) -> Part:
    call = calls.get(str(message.get("tool_call_id")), {"name": message.get("name")})
    result: dict[str, Any] = {key: call[key] for key in ("id", "name") if call.get(key)}
    result["response"] = {"output": text_of(message.get("content"))}
    if files := [part for part in _parts(message, request) if "text" not in part]:
        result["parts"] = files
    return {"functionResponse": result}


def _parts(message: Message, request: ModelRequest) -> list[Part]:
    content = message.get("content")
    if not isinstance(content, list):
        return [{"text": content or ""}]
    return [_part(part, request) for part in content]


def _part(part: dict[str, Any], request: ModelRequest) -> Part:
    if part.get("type") == "text":
        return {"text": part["text"]}
    media = media_of(part, request.load)
    if media is None:
        return part
    if media.url:
        return {"fileData": {"fileUri": media.url}}
    return {"inlineData": {"mimeType": media.media_type, "data": media.data}}


def _block_reason(reply: Mapping[str, Any]) -> Any:
    feedback = reply.get("promptFeedback")
    return feedback.get("blockReason") if isinstance(feedback, dict) else None


def _answer(reply: Any) -> Answer:
    if reply.get("error"):
        raise failed_reply(reply["error"])
    blocked = _block_reason(reply) is not None
    candidates = sorted(reply.get("candidates") or (), key=lambda each: count(each.get("index")) or 0)
    candidate = candidates[0] if candidates or not blocked else {}
    if not candidate.keys() & {"content", "finishReason"} and not blocked:
        raise no_answer(reply)
    parts = objects((candidate.get("content") or {}).get("parts"))
    message = _message(parts, str(reply.get("responseId") or "call"))
    stop = Stop("content_filter") if blocked else read_stop("gemini", candidate.get("finishReason"), message)
    beside = {"parts": parts} | {
        key: value
        for key, value in {**reply, **candidate}.items()
        if key not in ("candidates", "content", "index") and value is not None
    }
    tokens = _tokens(reply.get("usageMetadata"))
    if (candidate.get("groundingMetadata") or {}).get("webSearchQueries"):
        tokens = replace(tokens, unpriced="web searches")
    return Answer(message=with_raw(message, "gemini", beside), tokens=tokens, stop=stop.word, action=stop.action)


def _message(parts: Sequence[Part], name: str) -> Message:
    """Return the parts of a reply as a message; `name` begins the ids of calls without an id."""
    text = text_of([part for part in parts if not part.get("thought")])
    thoughts = text_of([part for part in parts if part.get("thought")])
    functions = [call for part in parts if isinstance(call := part.get("functionCall"), dict)]
    calls = [
        {
            "id": call.get("id") or f"{name}-{number}",
            "type": "function",
            "function": {
                "name": call.get("name"),
                "arguments": json.dumps(call.get("args") or {}, ensure_ascii=False),
            },
        }
        for number, call in enumerate(functions)
    ]
    message: Message = {"role": "assistant", "content": text if text or not calls else None}
    if thoughts:
        message["reasoning"] = thoughts
    if calls:
        message["tool_calls"] = calls
    return message


def _received(parts: Sequence[Part], calls: list[dict[str, Any]]) -> list[Message]:
    """Return the messages that a content of a program is; `calls` are those without a result, which it loses here."""
    messages: list[Message] = []
    for part in parts:
        if isinstance(result := part.get("functionResponse"), dict):
            call = next((call for call in calls if _answers(result, call)), None)
            if call is not None:
                calls.remove(call)
            response = result.get("response")
            output = response.get("output", response) if isinstance(response, dict) else response
            content = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
            name = call["id"] if call else result.get("id") or ""
            messages.append({"role": "tool", "tool_call_id": name, "name": result.get("name"), "content": content})
    rest = [part for part in map(_chat_part, parts) if part is not None]
    if rest:
        plain = all(part["type"] == "text" for part in rest)
        messages.append({"role": "user", "content": text_of(rest) if plain else rest})
    return messages


def _answers(result: Mapping[str, Any], call: Mapping[str, Any]) -> bool:
    if result.get("id"):
        return bool(result["id"] == call["id"])
    return bool(result.get("name") == call["function"]["name"])


def _chat_part(part: Part) -> dict[str, Any] | None:
    if isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if isinstance(data := part.get("inlineData"), dict):
        kind, content = str(data.get("mimeType")), data.get("data")
        if kind.startswith("image/"):
            return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{content}"}}
        if kind.startswith("audio/"):
            return {"type": "input_audio", "input_audio": {"data": content, "format": kind.removeprefix("audio/")}}
        return {"type": "file", "file": {"file_data": f"data:{kind};base64,{content}"}}
    return None


def _tokens(usage: Any) -> TokenCounts:
    """Read the counts; the API leaves out zeros."""
    if not isinstance(usage, dict) or not usage:
        return TokenCounts()
    names = ("promptTokenCount", "toolUsePromptTokenCount", "candidatesTokenCount", "thoughtsTokenCount")
    reported = [usage.get(name) for name in (*names, "cachedContentTokenCount")]
    prompt, tools, written, thoughts, cached = map(count, reported)
    tokens = TokenCounts(
        input=(prompt or 0) + (tools or 0),
        output=(written or 0) + (thoughts or 0),
        cache_read=cached or 0,
        input_audio=_audio(usage.get("promptTokensDetails")),
        output_audio=_audio(usage.get("candidatesTokensDetails")),
        reasoning=thoughts,
        tier=_TIERS.get(str(usage.get("serviceTier") or usage.get("trafficType")).lower()),
    )
    return check_counts(tokens, reported)


def _audio(details: Any) -> int:
    return sum(count(part.get("tokenCount")) or 0 for part in objects(details) if part.get("modality") == "AUDIO")


DIALECT: Final = _Gemini()

"""OpenAI's chat completions, which most servers speak, each with additions of its own.

Reasoning has three names here: `reasoning_content` (DeepSeek, Moonshot, llama.cpp, older vLLM), `reasoning` (vLLM,
OpenRouter, Groq) and `reasoning_details` (OpenRouter, MiniMax). A message keeps the names that its server used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from holdfast.dialects.media import as_chat
from holdfast.dialects.reading import (
    STOPPED_EARLY,
    count,
    failed_reply,
    keeps_reasoning,
    no_answer,
    not_an_event,
    objects,
    with_raw,
)
from holdfast.dialects.refusals import explain
from holdfast.dialects.types import Answer, Dialect, StreamReader, TokenCounts
from holdfast.errors import AttemptError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.dialects.types import Message, ModelRequest
    from holdfast.errors import Fault

REASONING: Final = ("reasoning", "reasoning_content", "reasoning_details")
_TEXTS: Final = ("reasoning", "reasoning_content", "refusal")
"""fields of a streamed message whose parts are joined"""
_OF_REPLY: Final = frozenset(("object", "created", "choices"))
"""keys of a reply that say nothing, or stand in the message and the output"""
_OF_CHOICE: Final = frozenset(("index", "message", "delta", "text", "finish_reason"))
"""likewise of a choice"""


class _Chat(Dialect):
    api = "chat"
    volatile = ("prompt_cache_key", "safety_identifier", "user", "metadata")

    def path(self, model: str, *, stream: bool) -> str:
        return "/chat/completions"

    def encode(self, request: ModelRequest) -> dict[str, Any]:
        body: dict[str, Any] = {"model": request.model, **request.params}
        if isinstance(reasoning := body.get("reasoning"), dict):
            del body["reasoning"]
            body |= _reasoning_params(reasoning)
        if request.tools:
            body["tools"] = [*request.tools]
        if request.schema is not None:
            structured = {"name": "reply", "strict": True, "schema": request.schema}
            body.setdefault("response_format", {"type": "json_schema", "json_schema": structured})
        if request.max_tokens is not None and "max_completion_tokens" not in body:
            body.setdefault("max_tokens", request.max_tokens)
        body["messages"] = _write_messages(request)
        if request.stream:
            body["stream"] = True
            body.setdefault("stream_options", {"include_usage": True})
        return body

    def read(self, reply: Any) -> Answer:
        try:
            choice = reply["choices"][0]
            check_choice(choice)
            return _answer(choice["message"], choice.get("finish_reason"), reply, choice)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise no_answer(reply) from error

    def reader(self) -> StreamReader:
        return _ChatReader()

    def explain(self, error: AttemptError | Fault) -> str | None:
        return explain(error)

    def conversation(self, body: Any) -> list[Message]:
        return objects(body.get("messages")) if isinstance(body, dict) else []


class _ChatReader(StreamReader):
    def __init__(self) -> None:
        self._message: Message = {}
        self._text: list[str] = []
        self._thoughts: dict[str, list[str]] = {}
        self._calls: dict[int, dict[str, Any]] = {}
        self._reply: dict[str, Any] = {}
        self._choice: dict[str, Any] = {}
        self._stop: str | None = None

    @property
    def ended(self) -> bool:
        return self._stop is not None

    def feed(self, event: Any) -> bool:
        try:
            self._reply |= {key: value for key, value in event.items() if value is not None}
            shown = [self._take(choice) for choice in event.get("choices") or ()]
        except (AttributeError, TypeError) as error:
            raise not_an_event(event) from error
        return any(shown)

    def _take(self, choice: dict[str, Any]) -> bool:
        check_choice(choice)
        self._stop = choice.get("finish_reason") or self._stop
        self._choice |= {key: value for key, value in choice.items() if value is not None}
        delta = choice.get("delta") or choice.get("message") or {}
        for key, value in delta.items():
            if value is None or key == "role":
                continue
            if key == "content":
                self._text.append(value)
            elif key == "tool_calls":
                for piece in value:
                    join_tool_call(self._calls, piece)
            elif key in _TEXTS:
                self._thoughts.setdefault(key, []).append(value)
            elif key == "reasoning_details":
                join_details(self._message.setdefault(key, []), value)
            else:
                self._message[key] = value
        return bool(delta.get("content"))

    def finish(self) -> Answer:
        if self._stop is None:
            raise AttemptError("bad_reply", STOPPED_EARLY)
        try:
            text = "".join(self._text)
            thoughts = {key: "".join(parts) for key, parts in self._thoughts.items()}
        except TypeError as error:
            raise AttemptError("bad_reply", f"the answer is not a text: {error}") from error
        message: Message = {"content": text if text or not self._calls else None, **self._message, **thoughts}
        if self._calls:
            message["tool_calls"] = [self._calls[number] for number in sorted(self._calls)]
        return _answer(message, self._stop, self._reply, self._choice)


def _answer(message: Any, stop: Any, reply: Mapping[str, Any], choice: Mapping[str, Any]) -> Answer:
    calls, content = message.get("tool_calls") or [], message.get("content")
    if not isinstance(calls, list):
        raise AttemptError("bad_reply", f"not tool calls: {str(message)[:200]}")
    if not isinstance(content, str | None):
        raise AttemptError("bad_reply", f"the answer is not a text: {str(message)[:200]}")
    # Beside tool calls, null is sent back as null: some servers refuse an empty text there.
    reply_message: Message = {"role": "assistant", "content": content if calls else content or ""}
    if not message.keys() <= reply_message.keys():
        reply_message |= {
            key: value for key, value in message.items() if key not in reply_message and value not in (None, [], "")
        }
    raw = beside_message(reply, choice)
    tokens = read_tokens(reply.get("usage"))
    return Answer(message=with_raw(reply_message, "chat", raw), tokens=tokens, stop=str(stop or "stop"))


def beside_message(reply: Mapping[str, Any], choice: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a server sent beside the message: its name of the model, ids, details of the usage, probabilities."""
    beside = {key: value for key, value in reply.items() if key not in _OF_REPLY and value is not None}
    if not choice.keys() <= _OF_CHOICE:
        beside |= {key: value for key, value in choice.items() if key not in _OF_CHOICE and value is not None}
    if "usage" in beside and not _has_details(beside["usage"]):
        del beside["usage"]  # its counts are those of the output
    return beside


def _has_details(usage: Any) -> bool:
    return isinstance(usage, dict) and dict in map(type, usage.values())


def read_tokens(usage: Any) -> TokenCounts:
    """Read the counts of chat completions."""
    usage = usage if isinstance(usage, dict) else {}
    incoming, outgoing = count(usage.get("prompt_tokens")), count(usage.get("completion_tokens"))
    cached = count(usage.get("prompt_cache_hit_tokens"))  # DeepSeek
    if not _has_details(usage):
        return TokenCounts(input=incoming, output=outgoing, cache_read=cached or 0)
    sent, received = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
    sent, received = sent if isinstance(sent, dict) else {}, received if isinstance(received, dict) else {}
    if (reported := count(sent.get("cached_tokens"))) is not None:
        cached = reported
    return TokenCounts(
        input=incoming,
        output=outgoing,
        cache_read=cached or 0,
        cache_write=count(sent.get("cache_write_tokens")) or 0,
        reasoning=count(received.get("reasoning_tokens")),
    )


def _reasoning_params(reasoning: Mapping[str, Any]) -> dict[str, Any]:
    """Translate `params.reasoning`; a limit in tokens has no name that several servers share, except OpenRouter's."""
    if reasoning.get("tokens") is None:
        return {"reasoning_effort": reasoning["effort"]} if reasoning.get("effort") is not None else {}
    names = {"effort": "effort", "tokens": "max_tokens"}
    return {"reasoning": {names.get(key, key): value for key, value in reasoning.items()}}


def _write_messages(request: ModelRequest) -> list[Message]:
    if all(len(message) == 2 and isinstance(message.get("content"), str) for message in request.messages):
        return [*request.messages]  # roles and texts, as most conversations are
    kept = keeps_reasoning(request.messages, request.reasoning_history, default="last")
    return [as_chat(_sent(message, keep), request.load) for message, keep in zip(request.messages, kept, strict=True)]


def _sent(message: Message, keep: bool) -> Message:
    """Return a message as it goes to the server, with the reasoning that its server gave it."""
    if message.get("role") != "assistant" or message.keys() <= {"role", "content", "tool_calls"}:
        return message
    return {key: value for key, value in message.items() if key != "raw" and (keep or key not in REASONING)}


def check_choice(choice: dict[str, Any]) -> None:
    """Raise AttemptError where a router reports a failure of its server instead of an answer, or inside one."""
    if choice.get("error") or choice.get("finish_reason") == "error":
        raise failed_reply(choice.get("error"))


def join_tool_call(calls: dict[int, dict[str, Any]], piece: dict[str, Any]) -> None:
    """Add a piece of a tool call, as streams have them, to its earlier pieces."""
    number = count(piece.get("index"))
    if number is None:  # some servers omit the index: a new name is a new call
        number = len(calls) - 1 if calls and not (piece.get("function") or {}).get("name") else len(calls)
    call = calls.setdefault(number, {"type": "function", "function": {"name": "", "arguments": ""}})
    function = piece.get("function") or {}
    for key in ("name", "arguments"):
        call["function"][key] += function.get(key) or ""
    # Gemini's signatures, without which it refuses the next request, are in keys of their own.
    call |= {key: value for key, value in piece.items() if key not in ("index", "function", "type") and value}
    call["function"] |= {key: value for key, value in function.items() if key not in call["function"] and value}


def join_details(details: list[dict[str, Any]], pieces: list[dict[str, Any]]) -> None:
    """Add pieces of `reasoning_details` to the earlier ones of the same index and type."""
    for piece in pieces:
        last = details[-1] if details else None
        if last is None or (last.get("index"), last.get("type")) != (piece.get("index"), piece.get("type")):
            details.append(dict(piece))
            continue
        for key, value in piece.items():
            joined = key in ("text", "summary", "data") and isinstance(last.get(key), str) and isinstance(value, str)
            if value is not None:
                last[key] = last[key] + value if joined else value


DIALECT: Final = _Chat()

"""OpenAI's chat completions, which most servers speak, each with additions of its own; and completions of plain text.

Reasoning has three names here: `reasoning_content` (DeepSeek, Moonshot, llama.cpp, older vLLM), `reasoning` (vLLM,
OpenRouter, Groq) and `reasoning_details` (OpenRouter, MiniMax). A message keeps the names that its server used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.structs import replace

from holdfast.dialects.reading import (
    as_chat,
    check_counts,
    count,
    explain,
    failed_reply,
    keeps_reasoning,
    objects,
    raw_of,
    text_of,
    with_raw,
)
from holdfast.dialects.types import Answer, Dialect, StreamReader, TokenCounts, read_stop
from holdfast.errors import AttemptError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.dialects.types import Message, ModelRequest
    from holdfast.errors import Fault

REASONING: Final = ("reasoning", "reasoning_content", "reasoning_details")
_TEXTS: Final = ("reasoning", "reasoning_content", "refusal")
"""fields of a streamed message whose parts are joined"""
_SEARCHES: Final = ("num_sources_used", "num_search_queries")
"""counts of xAI and Perplexity"""
_OF_REPLY: Final = frozenset(("object", "created", "choices"))
"""keys of a reply that say nothing, or stand in the message and the output"""
_OF_CHOICE: Final = frozenset(("index", "message", "delta", "text", "finish_reason"))
"""the same for a choice"""


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
        return _streamed(body) if request.stream else body

    def read_reply(self, reply: Any) -> Answer:
        choice = first_choice(reply["choices"])
        check_choice(choice)
        # Google sends no message with the reason for its absence.
        message = choice.get("message") or ({} if choice.get("finish_reason") not in (None, "stop") else None)
        return _answer(message, choice.get("finish_reason"), reply, choice)

    def reader(self) -> StreamReader:
        return _ChatReader()

    def explain(self, error: AttemptError | Fault) -> str | None:
        return explain(error)

    def conversation(self, body: Any) -> list[Message]:
        return objects(body.get("messages")) if isinstance(body, dict) else []


def _streamed(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a request for a stream."""
    return {**body, "stream": True, "stream_options": body.get("stream_options", {"include_usage": True})}


class _ChatReader(StreamReader):
    def __init__(self) -> None:
        self._message: Message = {}
        self._text: list[str] = []
        self._thinking: list[str] = []
        """thoughts among the parts of the content"""
        self._thoughts: dict[str, list[str]] = {}
        self._calls = StreamedCalls()
        self._reply: dict[str, Any] = {}
        self._choice: dict[str, Any] = {}
        self._stop: str | None = None

    @property
    def ended(self) -> bool:
        return self._stop is not None

    def take_event(self, event: Any) -> bool:
        self._reply |= {key: value for key, value in event.items() if value is not None}
        shown = [self._take(choice) for choice in event.get("choices") or () if is_first(choice)]
        return any(shown)

    def _take(self, choice: dict[str, Any]) -> bool:
        check_choice(choice)
        self._stop = choice.get("finish_reason") or self._stop
        self._choice |= {key: value for key, value in choice.items() if value is not None}
        whole = not choice.get("delta")
        delta = (choice.get("message") if whole else choice["delta"]) or {}
        for key, value in delta.items():
            if value is None or key == "role":
                continue
            if key == "content":
                text, thoughts = _read_content(value)
                _add(self._text, text, whole=whole)
                _add(self._thinking, thoughts, whole=whole)
            elif key == "tool_calls":
                self._calls = StreamedCalls() if whole else self._calls
                for piece in value:
                    self._calls.add(piece)
            elif key in _TEXTS:
                _add(self._thoughts.setdefault(key, []), value, whole=whole)
            elif key == "reasoning_details":
                if whole:
                    self._message.pop(key, None)
                join_details(self._message.setdefault(key, []), value)
            else:
                self._message[key] = value
        return bool(delta.get("content"))

    def answer(self) -> Answer:
        calls, text = self._calls.all(), "".join(self._text)
        thoughts = {key: "".join(parts) for key, parts in self._thoughts.items()}
        message: Message = {"content": text if text or not calls else None, **self._message, **thoughts}
        if self._thinking:
            thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "".join(self._thinking)}]}
            message["content"] = [thinking, *([{"type": "text", "text": text}] if text else [])]
        if calls:
            message["tool_calls"] = calls
        return _answer(message, self._stop, self._reply, self._choice)


def _add(parts: list[str], value: Any, *, whole: bool) -> None:
    """Add a piece of a text. A whole message after its pieces repeats them, and replaces them."""
    if not isinstance(value, str):
        raise AttemptError("bad_reply", f"the answer is not a text: {str(value)[:200]}")
    if whole and value.startswith("".join(parts)):
        parts.clear()
    parts.append(value)


def _read_content(content: Any) -> tuple[str, str]:
    """Return the text of a message and the thoughts in it: Mistral's models send both as parts of the content."""
    if isinstance(content, str | None):
        return content or "", ""
    if not isinstance(content, list) or len(parts := objects(content)) < len(content):
        raise AttemptError("bad_reply", f"the answer is not a text: {str(content)[:200]}")
    return text_of(parts), "".join(text_of(part.get("thinking")) for part in parts)


def _answer(message: Any, stop: Any, reply: Mapping[str, Any], choice: Mapping[str, Any]) -> Answer:
    calls, content = message.get("tool_calls") or [], message.get("content")
    if not isinstance(calls, list):
        raise AttemptError("bad_reply", f"not tool calls: {str(message)[:200]}")
    raw = beside_message(reply, choice)
    if not isinstance(content, str | None):
        text, thoughts = _read_content(content)
        message = {**message, **({"reasoning": thoughts} if thoughts else {})}
        if thoughts:
            raw["content"] = content
        content = text or None
    # Beside tool calls, null is sent back as null: some servers refuse an empty text there.
    reply_message: Message = {"role": "assistant", "content": content if calls else content or ""}
    if not message.keys() <= reply_message.keys():
        reply_message |= {
            key: value for key, value in message.items() if key not in reply_message and value not in (None, [], "")
        }
    tokens = read_tokens(reply.get("usage"), reply.get("service_tier"))
    if message.get("annotations"):  # the sources of web searches, whose number nobody reports
        tokens = replace(tokens, unpriced="web searches")
    word, action = read_stop("chat", stop, reply_message)
    return Answer(message=with_raw(reply_message, "chat", raw), tokens=tokens, stop=word, action=action)


def beside_message(reply: Mapping[str, Any], choice: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a server sent with the message: its name of the model, ids, details of the usage, probabilities."""
    beside = {key: value for key, value in reply.items() if key not in _OF_REPLY and value is not None}
    if not choice.keys() <= _OF_CHOICE:
        beside |= {key: value for key, value in choice.items() if key not in _OF_CHOICE and value is not None}
    if "usage" in beside and not _has_details(beside["usage"]):
        del beside["usage"]  # its counts are in the output
    return beside


def _has_details(usage: Any) -> bool:
    return isinstance(usage, dict) and dict in map(type, usage.values())


def read_tokens(usage: Any, tier: Any = None) -> TokenCounts:
    """Read the counts of chat completions; `tier` is the service tier that answered."""
    usage = usage if isinstance(usage, dict) else {}
    incoming, outgoing = usage.get("prompt_tokens"), usage.get("completion_tokens")
    cached = usage.get("prompt_cache_hit_tokens")  # DeepSeek
    tier = tier if isinstance(tier, str) else None
    if not _has_details(usage):
        plain = TokenCounts(input=count(incoming), output=count(outgoing), cache_read=count(cached) or 0, tier=tier)
        return check_counts(plain, (incoming, outgoing, cached))
    sent, received = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
    sent, received = sent if isinstance(sent, dict) else {}, received if isinstance(received, dict) else {}
    if sent.get("cached_tokens") is not None:
        cached = sent["cached_tokens"]
    details = (cached, sent.get("cache_write_tokens"), sent.get("audio_tokens"))
    reasoning, spoken = received.get("reasoning_tokens"), received.get("audio_tokens")
    searched = any(count(usage.get(key)) for key in _SEARCHES)
    tokens = TokenCounts(
        input=count(incoming),
        output=count(outgoing),
        cache_read=count(details[0]) or 0,
        cache_write=count(details[1]) or 0,
        input_audio=count(details[2]) or 0,
        output_audio=count(spoken) or 0,
        reasoning=count(reasoning),
        tier=tier,
        unpriced="web searches" if searched else None,
    )
    return check_counts(tokens, (incoming, outgoing, *details, reasoning, spoken), usage.get("total_tokens"))


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
    parts = (raw_of(message, "chat") or {}).get("content")
    kept = {key: value for key, value in message.items() if key != "raw" and (keep or key not in REASONING)}
    if keep and isinstance(parts, list):  # the server knows its thoughts only as parts of the content
        return {key: value for key, value in kept.items() if key not in REASONING} | {"content": parts}
    return kept


def check_choice(choice: dict[str, Any]) -> None:
    """Raise AttemptError if a router reports a failure of its server instead of an answer, or inside one."""
    if choice.get("error") or choice.get("finish_reason") == "error":
        raise failed_reply(choice.get("error"))


def first_choice(choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the choice that counts, in any order of the reply."""
    return sorted(choices, key=lambda choice: count(choice.get("index")) or 0)[0]


def is_first(choice: Mapping[str, Any]) -> bool:
    """Return True for the choice that counts in a stream; some servers do not number the only one."""
    return not count(choice.get("index"))


class StreamedCalls:
    """Tool calls that are put together from the pieces of a stream."""

    def __init__(self) -> None:
        self._calls: list[tuple[int, dict[str, Any]]] = []
        """with their indices, in the order in which they began"""

    def all(self) -> list[dict[str, Any]]:
        """Return the calls in the order of their indices."""
        return [call for _, call in sorted(self._calls, key=lambda entry: entry[0])]

    def add(self, piece: dict[str, Any]) -> None:
        """Add a piece to its call, or begin a new one."""
        function = piece.get("function") or {}
        number = count(piece.get("index"))
        if number is None:  # some servers omit the index: a new name is a new call
            number = len(self._calls) - 1 if self._calls and not function.get("name") else len(self._calls)
        call = next((call for index, call in reversed(self._calls) if index == number), None)
        if call is None or _begins(call, piece, function):
            call = {"type": "function", "function": {"name": "", "arguments": ""}}
            self._calls.append((number, call))
        name = function.get("name") or ""
        if name != call["function"]["name"]:  # otherwise it is repeated in every piece
            call["function"]["name"] += name
        call["function"]["arguments"] += function.get("arguments") or ""
        # Gemini's signatures, without which it refuses the next request, are in keys of their own.
        own = {key: value for key, value in piece.items() if key not in ("index", "function", "type") and value}
        call |= own | ({"id": call["id"]} if "id" in call else {})
        call["function"] |= {key: value for key, value in function.items() if key not in call["function"] and value}


def _begins(call: dict[str, Any], piece: dict[str, Any], function: dict[str, Any]) -> bool:
    """Return True for a piece that begins a new call under the index of another: gateways number them all 0."""
    id_, name, begun = piece.get("id"), function.get("name"), call["function"]
    if id_ and call.get("id") and id_ != call["id"]:
        return bool(name) or not function.get("arguments")  # else a server that invents an id for each piece
    if not name or not begun["name"] or id_:
        return False
    if name != begun["name"]:
        return bool(begun["arguments"])  # else the name itself comes in pieces
    return _is_json(begun["arguments"])


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


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


class _Completions(Dialect):
    """Plain completions of a text, as base models have them."""

    api = "completions"

    def path(self, model: str, *, stream: bool) -> str:
        return "/completions"

    def encode(self, request: ModelRequest) -> dict[str, Any]:
        body: dict[str, Any] = {"model": request.model, **request.params, "prompt": plain_text(request.messages)}
        if request.max_tokens is not None:
            body.setdefault("max_tokens", request.max_tokens)
        return _streamed(body) if request.stream else body

    def read_reply(self, reply: Any) -> Answer:
        choice = first_choice(reply["choices"])
        check_choice(choice)
        return _text_answer(choice["text"], choice, reply)

    def reader(self) -> StreamReader:
        return _CompletionsReader()

    def conversation(self, body: Any) -> list[Message]:
        prompt = body.get("prompt") if isinstance(body, dict) else None
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else []


class _CompletionsReader(StreamReader):
    def __init__(self) -> None:
        self._text: list[str] = []
        self._choice: dict[str, Any] = {}
        self._reply: dict[str, Any] = {}

    @property
    def ended(self) -> bool:
        return self._choice.get("finish_reason") is not None

    def take_event(self, event: Any) -> bool:
        self._reply |= {key: value for key, value in event.items() if value is not None}
        texts = []
        for choice in filter(is_first, event.get("choices") or ()):
            check_choice(choice)
            self._choice |= {key: value for key, value in choice.items() if value is not None}
            texts.append(choice.get("text") or "")
        self._text += texts
        return any(texts)

    def answer(self) -> Answer:
        return _text_answer("".join(self._text), self._choice, self._reply)


def _text_answer(text: Any, choice: dict[str, Any], reply: dict[str, Any]) -> Answer:
    if not isinstance(text, str):
        raise AttemptError("bad_reply", f"the answer is not a text: {str(choice)[:200]}")
    message = with_raw({"role": "assistant", "content": text}, "completions", beside_message(reply, choice))
    tokens = read_tokens(reply.get("usage"), reply.get("service_tier"))
    word, action = read_stop("completions", choice.get("finish_reason"), message)
    return Answer(message=message, tokens=tokens, stop=word, action=action)


def plain_text(messages: Sequence[Message]) -> str:
    """Return a conversation as the prompt of a completion."""
    return "\n\n".join(str(message["content"]) for message in messages)


CHAT: Final = _Chat()
COMPLETIONS: Final = _Completions()

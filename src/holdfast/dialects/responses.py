"""OpenAI's Responses API.

A reply is a list of items: reasoning, messages, tool calls. The provider is asked to store nothing: the items go back
as they came, reasoning in its encrypted form. A message keeps them in `raw.reply.output`.
"""

from __future__ import annotations

import json
import re
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

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
from holdfast.dialects.types import Answer, Dialect, StreamReader, TokenCounts, no_answer, read_stop
from holdfast.errors import AttemptError, Fault

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from holdfast.dialects.types import Message, ModelRequest

_NAMES: Final = {"max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens"}
_ENCRYPTED: Final = "reasoning.encrypted_content"
_NO_REASONING: Final = re.compile(r"(ft:)?(gpt-[34]|chatgpt-|gpt-5[\w.]*-chat)")
"""models that refuse a request for encrypted reasoning, because they do not reason"""
_ENDS: Final = ("response.completed", "response.incomplete", "response.failed")
_DELTAS: Final = {
    "response.output_text.delta": "text",
    "response.refusal.delta": "refusal",
    "response.function_call_arguments.delta": "arguments",
    "response.custom_tool_call_input.delta": "input",
}
"""events with pieces of an item, and the field of the item that they belong to"""
_CHARGED: Final = ("file_search_call", "code_interpreter_call", "image_generation_call", "computer_call")
"""items that the provider charges for in addition to tokens, at an unknown price"""
_ECHOED: Final = frozenset(
    (
        *("object", "created_at", "completed_at", "instructions", "tools", "tool_choice", "parallel_tool_calls"),
        *("text", "temperature", "top_p", "top_logprobs", "presence_penalty", "frequency_penalty", "store", "user"),
        *("max_output_tokens", "max_tool_calls", "truncation", "reasoning", "metadata", "background", "prompt"),
        *("previous_response_id", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
        "safety_identifier",
    )
)
"""keys of a reply that every reply has, or that repeat the request"""


class _Responses(Dialect):
    api = "responses"
    volatile = ("prompt_cache_key", "client_metadata", "metadata", "safety_identifier", "user", "input[].id")

    def path(self, model: str, *, stream: bool) -> str:
        return "/responses"

    def encode(self, request: ModelRequest) -> dict[str, Any]:
        body: dict[str, Any] = {"model": request.model, **renamed(request.params, _NAMES)}
        _check_reasoning(body.get("reasoning"))
        body.setdefault("store", False)
        if not body["store"] and not _NO_REASONING.match(request.model):
            body.setdefault("include", [_ENCRYPTED])
        if request.tools:
            body["tools"] = [_tool(tool) for tool in request.tools]
        if "tool_choice" in body:
            body["tool_choice"] = _tool_choice(body["tool_choice"])
        if request.schema is not None:
            structured = {"type": "json_schema", "name": "reply", "strict": True, "schema": request.schema}
            body["text"] = {"format": structured, **(body.get("text") or {})}
        if request.max_tokens is not None:
            body.setdefault("max_output_tokens", request.max_tokens)
        kept = keeps_reasoning(request.messages, request.reasoning_history, default="all")
        body["input"] = [
            item
            for message, keep in zip(request.messages, kept, strict=True)
            for item in _sent(message, keep, request, stored=body["store"])
        ]
        if request.stream:
            body["stream"] = True
        return body

    def read_reply(self, reply: Any) -> Answer:
        return _answer(reply)

    def reader(self) -> StreamReader:
        return _ResponsesReader()

    def explain(self, error: AttemptError | Fault) -> str | None:
        if error.status == 400 and "Encrypted content is not supported" in error.message:
            return "Write `include: []` in target.params: this model does not reason."
        return explain(error)

    def conversation(self, body: Any) -> list[Message]:
        body = body if isinstance(body, dict) else {}
        system, sent = body.get("instructions"), body.get("input")
        messages: list[Message] = [{"role": "system", "content": system}] if isinstance(system, str) else []
        if isinstance(sent, str):
            return [*messages, {"role": "user", "content": sent}]
        for by_model, group in groupby(objects(sent), _is_of_model):
            items = [*group]
            messages += [_message(items)] if by_model else [message for item in items for message in _received(item)]
        return messages


class _ResponsesReader(StreamReader):
    def __init__(self) -> None:
        self._items: dict[int, dict[str, Any]] = {}
        self._begun: dict[int, dict[str, Any]] = {}
        """items as they were when they began"""
        self._pieces: dict[int, dict[str, list[str]]] = {}
        self._reply: dict[str, Any] | None = None

    @property
    def ended(self) -> bool:
        return self._reply is not None

    def take_event(self, event: Any) -> bool:
        kind = event.get("type")
        if kind == "error":
            raise failed_reply(event.get("error") or event)
        if kind == "response.output_item.done":
            number = count(event.get("output_index"))
            self._items[len(self._items) if number is None else number] = event["item"]
        elif kind == "response.output_item.added":
            self._begun[count(event.get("output_index")) or 0] = event["item"]
        elif kind in _DELTAS:
            pieces = self._pieces.setdefault(count(event.get("output_index")) or 0, {})
            pieces.setdefault(_DELTAS[kind], []).append("" + (event.get("delta") or ""))
        elif kind in _ENDS:
            self._reply = _checked(event["response"])
        elif event.get("object") == "response":  # a server that does not stream
            self._reply = event
        return kind in ("response.output_text.delta", "response.refusal.delta") and bool(event.get("delta"))

    def answer(self) -> Answer:
        assert self._reply is not None
        try:
            return self._answer(self._reply)
        except (KeyError, TypeError, AttributeError) as error:
            raise no_answer(self._reply) from error

    def _answer(self, reply: dict[str, Any]) -> Answer:
        built = {number: _built(self._begun.get(number), pieces) for number, pieces in self._pieces.items()}
        built |= {number: item for number, item in self._items.items() if number not in built or _speaks([item])}
        items, sent = [built[number] for number in sorted(built)], objects(reply.get("output"))
        # Many gateways end with a reply that has no items, and some send nothing but the pieces of them.
        if len(sent) < len(items) or (_speaks(items) and not _speaks(sent)):
            return DIALECT.read({**reply, "output": items})
        return DIALECT.read(reply)


def _built(begun: Any, pieces: dict[str, list[str]]) -> dict[str, Any]:
    """Return an item from the pieces that a stream has sent."""
    texts = {key: "".join(parts) for key, parts in pieces.items()}
    begun = begun if isinstance(begun, dict) else {}
    if "text" not in texts and "refusal" not in texts:
        return {"type": "function_call", **begun, **texts}
    content = [{"type": "refusal" if key == "refusal" else "output_text", key: text} for key, text in texts.items()]
    return {"type": "message", "role": "assistant", **begun, "content": content}


def _speaks(items: Sequence[dict[str, Any]]) -> bool:
    """Return True if items hold a text, a refusal or a tool call."""
    message = _message(items)
    return any(message.get(key) for key in ("content", "refusal", "tool_calls"))


def _check_reasoning(reasoning: Any) -> None:
    if isinstance(reasoning, dict) and reasoning.get("tokens") is not None:
        raise Fault(
            "rejected",
            "target.params.reasoning.tokens: the Responses API has no limit for reasoning in tokens",
            remedy="Write `effort` instead (low, medium, high), and limit the whole reply with `max_tokens`.",
        )


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool in the form of this API, which is strict unless told otherwise; chat completions are not."""
    function = tool.get("function")
    return {"type": "function", "strict": False, **function} if isinstance(function, dict) else tool


def _tool_choice(choice: Any) -> Any:
    function = choice.get("function") if isinstance(choice, dict) else None
    return {"type": "function", **function} if isinstance(function, dict) else choice


def _sent(message: Message, keep: bool, request: ModelRequest, *, stored: bool) -> Iterator[dict[str, Any]]:
    """Yield the items of a message: the server's own items if there are any."""
    reply, content = raw_of(message, "responses"), _content(message, request)
    if reply is not None and isinstance(reply.get("output"), list):
        yield from _sent_back(reply["output"], keep, stored=stored)
    elif message.get("role") == "tool":
        yield {"type": "function_call_output", "call_id": message.get("tool_call_id"), "output": content or ""}
    elif message.get("role") != "assistant":
        yield {"role": message.get("role"), "content": content or ""}
    else:
        if text := content or message.get("refusal"):
            yield {"role": "assistant", "content": text}
        for call in message.get("tool_calls") or ():
            function = call["function"]
            name, arguments = function["name"], function.get("arguments") or "{}"
            yield {"type": "function_call", "call_id": call.get("id"), "name": name, "arguments": arguments}


def _sent_back(items: Sequence[dict[str, Any]], keep: bool, *, stored: bool) -> Iterator[dict[str, Any]]:
    """Yield the items of an earlier reply, without reasoning that the server could not read or is not to get."""
    for item in items:
        if item.get("type") != "reasoning":
            # An item whose id the server knows must follow the reasoning that led to it.
            yield item if keep else {key: value for key, value in item.items() if key != "id"}
        elif keep and (stored or item.get("encrypted_content") or item.get("content")):
            yield item


def _content(message: Message, request: ModelRequest) -> Any:
    content = message.get("content")
    if not isinstance(content, list) or message.get("role") == "assistant":
        return text_of(content)
    return [_part(part, request) for part in content]


def _part(part: dict[str, Any], request: ModelRequest) -> dict[str, Any]:
    if part.get("type") == "text":
        return {"type": "input_text", "text": part["text"]}
    media = media_of(part, request.load)
    if media is None:
        return part
    if media.kind == "image":
        detail = part["image_url"].get("detail", "auto") if "image_url" in part else "auto"
        return {"type": "input_image", "image_url": media.link, "detail": detail}
    if media.kind == "audio":
        audio = {"data": media.data, "format": media.media_type.rpartition("/")[2]}
        return {"type": "input_audio", "input_audio": audio}
    return {"type": "input_file", "filename": media.name, "file_data": media.link}


def _checked(reply: dict[str, Any]) -> dict[str, Any]:
    """Return a reply; raise AttemptError for one that reports a failure."""
    if reply.get("error") or reply.get("status") == "failed":
        raise failed_reply(reply.get("error"))
    return reply


def _answer(reply: Any) -> Answer:
    status = _checked(reply).get("status")
    if status in ("cancelled", "in_progress", "queued") or not isinstance(reply["output"], list):
        raise no_answer(reply)
    message = _message(objects(reply["output"]))
    reason = (reply.get("incomplete_details") or {}).get("reason") if status == "incomplete" else None
    word, action = read_stop("responses", reason or status, message)
    beside = {key: value for key, value in reply.items() if key not in _ECHOED and value is not None}
    return Answer(message=with_raw(message, "responses", beside), tokens=_tokens(reply), stop=word, action=action)


def _message(items: Sequence[dict[str, Any]]) -> Message:
    """Return the message that the items of a reply are.

    Of a reply with a final answer only this is the content. Remarks on the way to it are in `raw`.
    """
    texts = [item for item in items if item.get("type", "message") == "message"]
    final = [item for item in texts if item.get("phase") == "final_answer"] or texts
    text = "".join(text_of(item.get("content")) for item in final)
    calls = [_call(item) for item in items if item.get("type") in ("function_call", "custom_tool_call")]
    message: Message = {"role": "assistant", "content": text if text or not calls else None}
    if thoughts := "\n\n".join(_thoughts(items)):
        message["reasoning"] = thoughts
    if calls:
        message["tool_calls"] = calls
    refusals = [part.get("refusal") for item in final for part in objects(item.get("content"))]
    if any(refusals):
        message["refusal"] = "".join(filter(None, refusals))
    return message


def _thoughts(items: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield the texts of reasoning: the reasoning itself if the server shows it, or else its summary."""
    for item in items:
        if item.get("type") == "reasoning":
            parts = objects(item.get("content")) or objects(item.get("summary"))
            yield from (part["text"] for part in parts if part.get("text"))


def _call(item: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call; the text that a custom tool gets is its argument `input`."""
    custom = item["type"] == "custom_tool_call"
    arguments = json.dumps({"input": item.get("input")}, ensure_ascii=False) if custom else item.get("arguments")
    return {
        "id": item.get("call_id") or item.get("id"),
        "type": "function",
        "function": {"name": item.get("name"), "arguments": arguments or "{}"},
    }


def _is_of_model(item: dict[str, Any]) -> bool:
    """Return True for an item that a model made, hosted tools included."""
    kind = item.get("type", "message")
    return item.get("role") == "assistant" if kind == "message" else str(kind).endswith(("reasoning", "_call"))


def _received(item: dict[str, Any]) -> Iterator[Message]:
    """Yield the message that an item is which a program sent; nothing for one that is not known."""
    kind = item.get("type", "message")
    if kind == "message":
        yield {"role": item.get("role"), "content": _chat_content(item.get("content"))}
    elif kind in ("function_call_output", "custom_tool_call_output"):
        yield {
            "role": "tool",
            "tool_call_id": item.get("call_id"),
            "content": _chat_content(item.get("output")),
        }


def _chat_content(content: Any) -> Any:
    """Return content as chat completions have it: a text if it holds nothing else."""
    parts = objects(content)
    return text_of(content) if all("text" in part for part in parts) else [_chat_part(part) for part in parts]


def _chat_part(part: dict[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind == "input_image":
        return {"type": "image_url", "image_url": {"url": part.get("image_url")}}
    if kind == "input_file":
        return {"type": "file", "file": {key: value for key, value in part.items() if key != "type"}}
    return {"type": "text", "text": part["text"]} if "text" in part else part


def _tokens(reply: Mapping[str, Any]) -> TokenCounts:
    usage, tier = reply.get("usage"), reply.get("service_tier")
    usage = usage if isinstance(usage, dict) else {}
    sent, received = usage.get("input_tokens_details") or {}, usage.get("output_tokens_details") or {}
    reported = (
        *(usage.get("input_tokens"), usage.get("output_tokens"), sent.get("cached_tokens")),
        *(sent.get("cache_write_tokens"), received.get("reasoning_tokens")),
    )
    incoming, outgoing, read, written, reasoning = map(count, reported)
    kinds = [item.get("type") for item in objects(reply.get("output"))]
    tokens = TokenCounts(
        input=incoming,
        output=outgoing,
        cache_read=read or 0,
        cache_write=written or 0,
        reasoning=reasoning,
        searches=sum(map(_is_search, objects(reply.get("output")))),
        tier=tier if isinstance(tier, str) else None,
        unpriced=next((str(kind) for kind in kinds if kind in _CHARGED), None),
    )
    return check_counts(tokens, reported, usage.get("total_tokens"))


def _is_search(item: Mapping[str, Any]) -> bool:
    """Return True for a web search; pages that the model opens afterwards cost only their tokens."""
    action = item.get("action")
    kind = action.get("type", "search") if isinstance(action, dict) else "search"
    return item.get("type") == "web_search_call" and kind == "search"


DIALECT: Final = _Responses()

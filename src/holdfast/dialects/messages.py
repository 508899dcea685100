"""Anthropic's Messages, which Claude speaks, and vLLM, MiniMax and others in addition to chat completions.

A reply is a list of blocks: text, thoughts with a signature, tool calls. Claude refuses the next request of a tool loop
unless the thoughts come back as they were, so a message keeps its blocks in `raw` and is sent back from there.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import msgspec

from holdfast.dialects.reading import (
    check_counts,
    count,
    explain,
    failed_reply,
    keeps_reasoning,
    media_of,
    objects,
    raw_of,
    with_raw,
)
from holdfast.dialects.types import Answer, Dialect, StreamReader, TokenCounts, no_answer, read_stop
from holdfast.errors import AttemptError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from holdfast.dialects.types import Message, ModelRequest
    from holdfast.errors import Fault
    from holdfast.spec.providers import Access

    Block = dict[str, Any]
    Load = Callable[[str], bytes] | None

_CLOUD_VERSIONS: Final[dict[Access, str]] = {"aws": "bedrock-2023-05-31", "gcp": "vertex-2023-10-16"}
VERSION: Final = "2023-06-01"
"""the version that all servers know; version 2026-10-21 removes sampling parameters from models that have them"""
MAX_TOKENS: Final = 16_384
"""limit of a reply without one in `params`, since the API requires it; it is added to `reasoning.tokens`.
Outputs depend on it and their keys do not show it: it must not change."""

_PRICED_TOOLS: Final = ("web_search_requests", "web_fetch_requests")
"""tools that the provider runs and whose price is known; fetching costs only its tokens"""
_USUAL: Final = {
    "service_tier": ("standard", "batch"),
    "speed": ("standard",),
    "inference_geo": ("global", "not_available"),
}
"""by a field of the usage: values at the usual price"""
_THOUGHTS: Final = ("thinking", "redacted_thinking")
_WITHOUT_ADAPTIVE: Final = re.compile(r"claude-(?:[a-z]+-)?(?:[0-3]\b|4[.-][015]\b|4(?:-\d{8}|@|$))")
"""the models from before adaptive thinking, up to 4.5"""
_LINES: Final = {
    r"thinking\.type\.enabled.{0,20} is not supported": "Write `reasoning: {{effort: high}}` in target.params: "
    "this model takes no limit of its reasoning in tokens.",
    r"adaptive thinking is not supported|does not support the effort": "Write `reasoning: {{tokens: 8192}}` in "
    "target.params: this model takes no effort, only a limit of its reasoning.",
    r"max_tokens: \d+ > (\d+)": "Write `max_tokens: {0}` in target.params: this model writes no longer replies.",
    r"\b(\w+): Extra inputs are not permitted": "Remove `{0}` from target.params: this API does not have it.",
}
"""by the API's message about a refused request"""


class _Messages(Dialect):
    api = "messages"
    volatile = ("metadata.user_id",)

    def at(self, access: Access) -> Dialect:
        return _CloudMessages(access) if access in _CLOUD_VERSIONS else self

    def path(self, model: str, *, stream: bool) -> str:
        return "/messages"

    def headers(self, key: str | None) -> dict[str, str]:
        return {"anthropic-version": VERSION, **({"x-api-key": key} if key else {})}

    def encode(self, request: ModelRequest) -> dict[str, Any]:
        body: dict[str, Any] = {"model": request.model, **_params(request)}
        if request.tools:
            body["tools"] = [_tool(tool) for tool in request.tools]
        if request.schema is not None:
            format_ = {"type": "json_schema", "schema": request.schema}
            body["output_config"] = {"format": format_, **body.get("output_config", {})}
        system, body["messages"] = _written(request)
        if system:
            body["system"] = system
        if request.stream:
            body["stream"] = True
        return body

    def read_reply(self, reply: Any) -> Answer:
        if reply.get("type") == "error":
            raise failed_reply(reply.get("error"))
        return _answer(reply)

    def reader(self) -> StreamReader:
        return _MessagesReader()

    def join(self, paused: Message, rest: Message) -> Message:
        before, after = paused["raw"]["reply"], rest["raw"]["reply"]
        blocks = [*before["content"], *after["content"]]
        return with_raw(_assistant(blocks), "messages", {**after, "content": blocks})

    def explain(self, error: AttemptError | Fault) -> str | None:
        if error.status == 400:
            for pattern, line in _LINES.items():
                if match := re.search(pattern, error.message, re.IGNORECASE):
                    return line.format(*match.groups())
        return explain(error)

    def conversation(self, body: Any) -> list[Message]:
        if not isinstance(body, dict):
            return []
        system = _plain(body.get("system"))
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        for message in objects(body.get("messages")):
            messages += _read_message(message)
        return messages


class _CloudMessages(_Messages):
    """The API as clouds offer it: the path names the model, and the body the version of the API."""

    def __init__(self, cloud: Access) -> None:
        self._cloud = cloud

    def path(self, model: str, *, stream: bool) -> str:
        name = quote(model, safe="")  # an ARN has slashes
        if self._cloud == "aws":
            return f"/model/{name}/invoke"
        return f"/models/{name}:{'streamRawPredict' if stream else 'rawPredict'}"

    def headers(self, key: str | None) -> dict[str, str]:
        return Dialect.headers(self, key)

    def encode(self, request: ModelRequest) -> dict[str, Any]:
        body = super().encode(request)
        del body["model"]
        return {"anthropic_version": _CLOUD_VERSIONS[self._cloud], **body}


class _MessagesReader(StreamReader):
    def __init__(self) -> None:
        self._reply: dict[str, Any] = {}
        self._blocks: dict[int, Block] = {}
        self._pieces: dict[tuple[int, str], list[str]] = {}
        """of a block's texts, by the number of the block and the text's name"""
        self._whole = self._stopped = False

    @property
    def ended(self) -> bool:
        return self._whole or (self._stopped and bool(self._reply.get("stop_reason")))

    def take_event(self, event: Any) -> bool:
        match event.get("type"):
            case "error":
                raise failed_reply(event.get("error"))
            case "message_start":
                self._reply = dict(event["message"])
            case "message":  # of a server that does not stream
                self._reply, self._blocks, self._whole = event, dict(enumerate(event["content"])), True
            case "content_block_start":
                self._blocks[event["index"]] = dict(event["content_block"])
            case "content_block_delta":
                return self._add(event["index"], event["delta"])
            case "message_delta":
                self._reply |= event["delta"]
                usage = {key: value for key, value in (event.get("usage") or {}).items() if value is not None}
                self._reply["usage"] = {**(self._reply.get("usage") or {}), **usage}
            case "message_stop":
                self._stopped = True
        return False

    def _add(self, number: int, delta: dict[str, Any]) -> bool:
        for key, value in delta.items():
            if key == "citation":
                block = self._blocks[number]
                block["citations"] = [*(block.get("citations") or ()), value]
            elif key != "type" and isinstance(value, str):
                self._pieces.setdefault((number, key), []).append(value)
        return bool(delta.get("text"))

    def answer(self) -> Answer:
        try:
            for (number, key), pieces in self._pieces.items():
                block, text = self._blocks.get(number, {}), "".join(pieces)
                if key == "partial_json":
                    block["input"] = _decoded(text)
                else:
                    block[key] = (block.get(key) or "") + text
            blocks = [self._blocks[number] for number in sorted(self._blocks)]
        except TypeError as error:
            raise no_answer(self._reply) from error
        return DIALECT.read({**self._reply, "content": blocks})


def _answer(reply: dict[str, Any]) -> Answer:
    if not isinstance(reply["content"], list):
        raise AttemptError("bad_reply", f"the answer is not a list of blocks: {str(reply)[:200]}")
    message = _assistant(reply["content"])
    kept = {key: value for key, value in reply.items() if key not in ("type", "role") and value is not None}
    word, action = read_stop("messages", reply.get("stop_reason"), message)
    tokens = _tokens(reply.get("usage"))
    return Answer(message=with_raw(message, "messages", kept), tokens=tokens, stop=word, action=action)


def _assistant(blocks: Iterable[Block]) -> Message:
    """Return blocks of the model as a message of a conversation."""
    blocks = list(blocks)
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    thoughts = "\n\n".join(block["thinking"] for block in blocks if block["type"] == "thinking" and block["thinking"])
    calls = [
        {
            "id": block["id"],
            "type": "function",
            "function": {"name": block["name"], "arguments": json.dumps(block["input"], ensure_ascii=False)},
        }
        for block in blocks
        if block["type"] == "tool_use"
    ]
    message: Message = {"role": "assistant", "content": text or None if calls else text}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning"] = thoughts
    return message


def _tokens(usage: Any) -> TokenCounts:
    """Read the counts; the API counts cached tokens separately from the input."""
    usage = usage if isinstance(usage, dict) else {}
    created, details, tools = (
        value if isinstance(value := usage.get(key), dict) else {}
        for key in ("cache_creation", "output_tokens_details", "server_tool_use")
    )
    reported = (
        *(usage.get(f"{kind}input_tokens") for kind in ("", "cache_read_", "cache_creation_")),
        *(usage.get("output_tokens"), details.get("thinking_tokens"), created.get("ephemeral_1h_input_tokens")),
    )
    fresh, read, written, output, reasoning, long = map(count, reported)
    tokens = TokenCounts(
        input=None if fresh is None else fresh + (read or 0) + (written or 0),
        output=output,
        cache_read=read or 0,
        cache_write=written or 0,
        cache_write_long=long or 0,
        reasoning=reasoning,
        searches=count(tools.get("web_search_requests")) or 0,
        tier=_tier(usage),
        unpriced=next((key for key in tools if key not in _PRICED_TOOLS and tools[key]), None),
    )
    return check_counts(tokens, reported)


def _tier(usage: Mapping[str, Any]) -> str | None:
    """Return what makes a request dearer: its tier, its speed, or the place where it is answered."""
    for key, usual in _USUAL.items():
        if (value := usage.get(key)) and value not in usual:
            return str(value) if key == "service_tier" else f"{key} {value}"
    return None


def _params(request: ModelRequest) -> dict[str, Any]:
    """Return the parameters of a request by the API's names, with the limit that it requires."""
    params = dict(request.params)
    if isinstance(reasoning := params.get("reasoning"), dict):
        del params["reasoning"]
        for key, value in _reasoning(reasoning, request.model).items():
            params[key] = {**value, **params.get(key, {})}
    if (stop := params.pop("stop", None)) is not None:
        params.setdefault("stop_sequences", [stop] if isinstance(stop, str) else stop)
    if (limit := params.pop("max_completion_tokens", None)) is not None:
        params.setdefault("max_tokens", limit)
    if (choice := params.get("tool_choice")) is not None:
        params["tool_choice"] = _tool_choice(choice)
    if "max_tokens" not in params:
        budget = count((params.get("thinking") or {}).get("budget_tokens")) or 0
        params["max_tokens"] = (request.max_tokens or MAX_TOKENS) + budget
    return params


def _reasoning(reasoning: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Translate `params.reasoning`. Thoughts are asked for in words, since newer models send only signatures."""
    effort, tokens = reasoning.get("effort"), reasoning.get("tokens")
    if effort == "none":
        return {"thinking": {"type": "disabled"}}
    params: dict[str, Any] = {} if effort is None else {"output_config": {"effort": effort}}
    if tokens is not None:
        params["thinking"] = {"type": "enabled", "budget_tokens": tokens}
    elif "claude" in model and not _WITHOUT_ADAPTIVE.search(model):
        params["thinking"] = {"type": "adaptive", "display": "summarized"}
    return params


def _tool_choice(choice: Any) -> Any:
    """Translate the words of OpenAI's APIs."""
    if isinstance(choice, str):
        return {"type": "any" if choice == "required" else choice}
    function = choice.get("function") if isinstance(choice, dict) else None
    return {"type": "tool", "name": function["name"]} if isinstance(function, dict) else choice


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool  # one of the API's own, such as web search
    rest = {key: value for key, value in function.items() if key != "parameters"}
    return {**rest, "input_schema": function.get("parameters") or {"type": "object", "properties": {}}}


def _written(request: ModelRequest) -> tuple[str | list[Block], list[Message]]:
    """Return the system prompt and the messages of a request. Messages of one side that follow each other are one."""
    system: list[Any] = []
    messages: list[Message] = []
    kept = keeps_reasoning(request.messages, request.reasoning_history, default="all")
    for message, keep in zip(request.messages, kept, strict=True):
        role = message.get("role")
        if role in ("system", "developer"):
            system.append(message.get("content"))
            continue
        if role == "assistant":
            content: Any = _sent_back(message, keep)
        elif role == "tool":
            role, content = "user", [_tool_result(message, request.load)]
        else:
            content = _content(message.get("content"), request.load)
        if role == "assistant" and not content:
            continue  # the model said nothing, and the API refuses an empty message
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] = [*_blocks(messages[-1]["content"]), *_blocks(content)]
        else:
            messages.append({"role": role, "content": content})
    if all(isinstance(text, str) for text in system):
        return "\n\n".join(system), messages
    return [block for text in system for block in _blocks(_content(text, request.load))], messages


def _sent_back(message: Message, keep: bool) -> list[Block]:
    """Return the blocks of a message of the model; thoughts of other APIs have no signature and are left out."""
    raw = raw_of(message, "messages")
    if raw is not None:
        # The API sends empty texts and refuses them.
        return [
            block
            for block in raw["content"]
            if (keep or block.get("type") not in _THOUGHTS) and block.get("text") != ""
        ]
    blocks = _blocks(message.get("content") or [])
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = _decoded(function.get("arguments") or "")
        blocks.append({"type": "tool_use", "id": _id(call["id"]), "name": function["name"], "input": arguments})
    return blocks


def _tool_result(message: Message, load: Load) -> Block:
    content = _content(message.get("content") or "", load)
    return {"type": "tool_result", "tool_use_id": _id(message["tool_call_id"]), "content": content}


def _id(name: str) -> str:
    """Return the id of a call in the letters that the API accepts."""
    return re.sub(r"[^a-zA-Z0-9_-]", "_", name)


def _decoded(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object. Text that is not a JSON object, such as a truncated one, is kept."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def _blocks(content: str | list[Block]) -> list[Block]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _content(content: Any, load: Load) -> Any:
    return [_part(part, load) for part in content] if isinstance(content, list) else content


def _part(part: dict[str, Any], load: Load) -> Block:
    """Return a part of a message in the API's form; parts that have it already stay as they are."""
    media = media_of(part, load)
    if media is None:
        return part
    kind, media_type, data, url, name = media
    if kind == "audio":
        raise AttemptError("bad_request", "the Messages API takes images and documents, no audio", retry=False)
    source = {"type": "url", "url": url} if url else {"type": "base64", "media_type": media_type, "data": data}
    if kind == "image":
        return {"type": "image", "source": source}
    if media_type.startswith("text/"):
        source = {"type": "text", "media_type": "text/plain", "data": b64decode(data).decode("utf-8", "replace")}
    return {"type": "document", "source": source, **({"title": name} if name else {})}


def _read_message(message: Mapping[str, Any]) -> list[Message]:
    """Return a message of a request in the form of conversations: results of tools are messages of their own."""
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": message.get("role"), "content": content}]
    blocks = objects(content)
    try:
        if message.get("role") == "assistant":
            return [_assistant(blocks)]
        results = [
            {"role": "tool", "tool_call_id": block["tool_use_id"], "content": _plain(block.get("content"))}
            for block in blocks
            if block.get("type") == "tool_result"
        ]
    except (KeyError, TypeError):
        return []
    rest = [block for block in blocks if block.get("type") != "tool_result"]
    return [*results, *([{"role": message.get("role"), "content": _plain(rest)}] if rest else [])]


def _plain(content: Any) -> Any:
    """Return blocks as a text if they are only text."""
    if not isinstance(content, list) or any(block.get("type") != "text" for block in objects(content)):
        return content
    return "\n\n".join(str(block.get("text")) for block in objects(content))


DIALECT: Final = _Messages()

"""The messages of a conversation for readers: text, images, and tool calls together with their results."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct, UnsetType

from holdfast.data.messages import PICTURES
from holdfast.store.records import file_label
from holdfast.targets.trace import calls_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from holdfast.targets.trace import Seen

_ONE_LINE: Final = 72
"""bytes of JSON up to which it stays on one line"""
_READ_APART: Final = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "function_call"}
    | {"reasoning", "reasoning_content", "reasoning_details", "raw"}
)
"""keys of a message that are read one by one, or that only its server needs"""


class MessageImage(Struct, frozen=True, kw_only=True):
    """An image of a message."""

    address: str
    """as the message has it: a `data:` address holds the image itself"""

    @property
    def inline(self) -> bool:
        """True if a page can show the image without asking anybody for it."""
        kind, _, rest = self.address.partition(";")
        return kind in _SHOWN_IMAGES and rest.startswith("base64,")


_SHOWN_IMAGES: Final = frozenset(f"data:{kind}" for kind in PICTURES)


class StoredPicture(Struct, frozen=True, kw_only=True):
    """An image of a message whose content is in the run directory."""

    digest: str
    """hexadecimal digits"""
    name: str


class ToolUse(Struct, frozen=True, kw_only=True):
    """A tool call with its result."""

    name: str
    arguments: str
    """indented JSON, or the text that the model wrote if it is not JSON"""
    result: str | None = None
    """None if the conversation does not have it"""
    answer: int | None = None
    """number of the message that held the result"""


class ChatMessage(Struct, frozen=True, kw_only=True):
    """A message of the conversation. A tool message is the result of its call, unless it answers no call."""

    number: int
    """from 1, in the whole conversation"""
    role: str
    name: str | None = None
    text: str = ""
    reasoning: str = ""
    """the model's thoughts, if it reports them"""
    images: list[MessageImage] = []
    pictures: list[StoredPicture] = []
    """images that are named in the text"""
    calls: list[ToolUse] = []
    others: dict[str, Any] = {}
    """further fields of the message"""
    hidden_before: int = 0
    """messages before this one that were left out"""
    hidden_from: int = 0
    """number of the first of them"""


def read_messages(messages: Iterable[Mapping[str, Any]]) -> list[ChatMessage]:
    """Return messages in the form of the timeline: each tool call has its result."""
    numbered = list(enumerate(messages, 1))
    calls: dict[int, list[Seen]] = {}
    answers: dict[int, tuple[int, Any]] = {}
    """by the identity of a call: the number of the message that answers it, and the content of that message"""
    last: dict[str, Seen] = {}
    joined: set[int] = set()
    for number, message in numbered:
        role = message.get("role")
        if role in ("tool", "function"):
            about = str(message.get("tool_call_id" if role == "tool" else "name"))
            if (call := last.get(about)) is not None and id(call) not in answers:
                answers[id(call)] = number, message.get("content")
                joined.add(number)
            continue
        calls[number] = list(calls_in({**message, "role": "assistant"}))
        last |= {call.id or call.name: call for call in calls[number]}
    return [
        _message(number, message, [_use(call, message, answers.get(id(call))) for call in calls.get(number, ())])
        for number, message in numbered
        if number not in joined
    ]


def _use(call: Seen, message: Mapping[str, Any], answer: tuple[int, Any] | None) -> ToolUse:
    if not call.name:  # not a call of the chat API: shown as it is
        return ToolUse(name="?", arguments=as_text(message.get("tool_calls") or message.get("function_call")))
    number, content = answer or (None, None if isinstance(call.result, UnsetType) else call.result)
    result = None if answer is None and content is None else _content_text(content)
    return ToolUse(name=call.name, arguments=as_text(call.arguments), result=result, answer=number)


def listed_call(name: str, arguments: Any, result: Any) -> ToolUse:
    """Return a tool call that no message holds."""
    return ToolUse(name=name, arguments=as_text(arguments), result=None if result is None else as_text(result))


def _message(number: int, message: Mapping[str, Any], calls: list[ToolUse]) -> ChatMessage:
    name = message.get("name") or message.get("tool_call_id")
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return ChatMessage(
        number=number,
        role=str(message.get("role") or "?"),
        name=str(name) if name else None,
        text=_content_text(content),
        reasoning=as_text(message.get("reasoning_content") or message.get("reasoning") or ""),
        images=[image for part in parts if (image := _image(part)) is not None],
        pictures=[picture for part in parts if (picture := _picture(part)) is not None],
        calls=calls,
        others={str(key): value for key, value in message.items() if key not in _READ_APART and value is not None},
    )


def _content_text(content: Any) -> str:
    if not isinstance(content, list):
        return "" if content is None else as_text(content)
    texts = []
    for part in content:  # parts of the chat API; a part that is neither text nor image is shown as JSON
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif _image(part) is None:
            texts.append((isinstance(part, dict) and file_label(part)) or as_text(part))
    return "\n".join(texts)


def _image(part: Any) -> MessageImage | None:
    image = part.get("image_url") if isinstance(part, dict) else None
    address = image.get("url") if isinstance(image, dict) else image
    return MessageImage(address=address) if isinstance(address, str) else None


def _picture(part: Any) -> StoredPicture | None:
    if not isinstance(part, dict) or part.get("media_type") not in PICTURES:
        return None
    match = re.fullmatch(r"sha256:([0-9a-f]{32,64})", str(part.get("digest")))
    return None if match is None else StoredPicture(digest=match[1], name=str(part.get("name") or "image"))


def as_text(value: Any) -> str:
    """Return a text as it is, and anything else as JSON: on one line if it is short, else indented."""
    if isinstance(value, str):
        return value
    encoded = msgspec.json.encode(value)
    indent = 0 if len(encoded) <= _ONE_LINE else 2
    return msgspec.json.format(encoded, indent=indent).decode()

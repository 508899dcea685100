"""Images, audio and files in messages: by reference in conversations, by content in requests.

In a conversation a part is `{"type": "image" | "audio" | "file", "digest": …, "media_type": …, "name": …}`. Its content
is kept once, by its digest.
"""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.dialects.types import Message

KINDS: Final = ("image", "audio", "file")


def content_of(part: dict[str, Any], load: Callable[[str], bytes] | None) -> str:
    """Return the content of a part, in base64."""
    assert load is not None, "a conversation with files needs a way to load them"
    return b64encode(load(part["digest"])).decode()


def as_chat(message: Message, load: Callable[[str], bytes] | None) -> Message:
    """Return a message with its files in the form of chat completions."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [_part(part, load) for part in content]}


def _part(part: dict[str, Any], load: Callable[[str], bytes] | None) -> dict[str, Any]:
    if part.get("type") not in KINDS or "digest" not in part:
        return part
    data, media_type = content_of(part, load), part["media_type"]
    if part["type"] == "image":
        return {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{data}"}}
    if part["type"] == "audio":
        return {"type": "input_audio", "input_audio": {"data": data, "format": media_type.rpartition("/")[2]}}
    return {"type": "file", "file": {"filename": part["name"], "file_data": f"data:{media_type};base64,{data}"}}

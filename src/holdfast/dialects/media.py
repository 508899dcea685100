"""Images, audio and files in messages: by reference in conversations, by content in requests.

In a conversation a part is `{"type": "image" | "audio" | "file", "digest": …, "media_type": …, "name": …}`. Its content
is kept once, by its digest.
"""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.dialects.types import Message

KINDS: Final = ("image", "audio", "file")


class Media(NamedTuple):
    """An image, audio or a file of a message, for APIs whose parts differ from chat completions."""

    kind: str
    """one of KINDS"""
    media_type: str = ""
    data: str = ""
    """the content in base64; empty if `url` names a place on the web"""
    url: str = ""
    name: str = ""

    @property
    def link(self) -> str:
        """A URL of the content; a data URL if there is no other."""
        return self.url or f"data:{self.media_type};base64,{self.data}"


def media_of(part: dict[str, Any], load: Callable[[str], bytes] | None) -> Media | None:
    """Read a part that conversations or chat completions have; None for texts and for parts of other APIs."""
    kind = part.get("type")
    if kind in KINDS and "digest" in part:
        return Media(kind, part["media_type"], content_of(part, load), name=part.get("name") or "")
    if kind == "image_url":
        return _linked("image", part["image_url"]["url"])
    if kind == "input_audio":
        audio = part["input_audio"]
        return Media("audio", f"audio/{audio['format']}", audio["data"])
    if kind == "file" and "file_data" in part.get("file", {}):
        return _linked("file", part["file"]["file_data"])._replace(name=part["file"].get("filename") or "")
    return None


def _linked(kind: str, url: str) -> Media:
    head, comma, data = url.partition(",")
    if not (comma and head.startswith("data:") and head.endswith(";base64")):
        return Media(kind, url=url)
    return Media(kind, head.removeprefix("data:").removesuffix(";base64"), data)


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

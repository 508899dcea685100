"""The kind of a file by its first bytes, and files as texts of a row."""

from __future__ import annotations

from base64 import b64encode
from typing import Final

_MARKS: Final = (
    (b"\x89PNG\r\n\x1a\n", 0, "image/png"),
    (b"\xff\xd8\xff", 0, "image/jpeg"),
    (b"GIF8", 0, "image/gif"),
    (b"WEBP", 8, "image/webp"),
    (b"WAVE", 8, "audio/wav"),
    (b"fLaC", 0, "audio/flac"),
    (b"OggS", 0, "audio/ogg"),
    (b"ID3", 0, "audio/mp3"),
    (b"\xff\xfb", 0, "audio/mp3"),
    (b"%PDF-", 0, "application/pdf"),
)
"""bytes, where they stand, and what begins with them"""
PICTURES: Final = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
"""images that every browser shows, and that can do nothing else"""


def media_type_of(data: bytes) -> str:
    """Return the media type of a file by its content, whatever it is called."""
    return next(
        (kind for mark, start, kind in _MARKS if data[start : start + len(mark)] == mark), "application/octet-stream"
    )


def data_url(data: bytes) -> str:
    """Return a file as a `data:` URL."""
    return f"data:{media_type_of(data)};base64,{b64encode(data).decode()}"

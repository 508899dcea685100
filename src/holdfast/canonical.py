"""Digests of content: equal values have equal digests on every machine and in every version.

Canonical JSON has sorted keys, no white space and UTF-8, and writes equal numbers alike (`1.0` as `1`). The digest is
the first 128 bits of its SHA-256, with the algorithm's name in front.
"""

from __future__ import annotations

import math
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from msgspec.json import Encoder

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

_encoder = Encoder(order="sorted")


def _normalize(value: Any) -> Any:
    if isinstance(value, float):
        if not math.isfinite(value):
            return {"float": repr(value)}  # JSON has no such number, and null would hide it
        return int(value) if value.is_integer() else value
    if isinstance(value, dict):
        return {str(key): _normalize(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_normalize(inner) for inner in value]
    return value


encode_sorted = _encoder.encode
"""encodes JSON with sorted keys and numbers as they are written; the digests of rows and messages use it"""


def canonical(value: Any) -> bytes:
    """Encode a JSON-like value as canonical JSON."""
    return _encoder.encode(_normalize(value))


def digest_bytes(data: bytes) -> str:
    """Return the tagged digest of bytes."""
    return "sha256:" + sha256(data).hexdigest()[:32]


def tagged(content: Hash) -> str:
    """Return the tagged digest of bytes that were hashed piece by piece."""
    return "sha256:" + content.hexdigest()[:32]


def digest(value: Any) -> str:
    """Return the tagged digest of a JSON-like value."""
    return digest_bytes(canonical(value))


def digest_as_written(value: Any) -> str:
    """Return the tagged digest of a JSON-like value in which `1` and `1.0` differ."""
    return digest_bytes(encode_sorted(value))

"""Reading back what W&B writes offline: records of its own protocol, framed as in LevelDB's logs.

The client has no reader for it any more, only the program that sends it.
"""

from __future__ import annotations

import json
import struct
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_HEAD, _BLOCK = 7, 32_768
_FULL, _FIRST, _LAST = 1, 2, 4


class OfflineRun:
    """One `run-ID.wandb`."""

    def __init__(self, path: Path) -> None:
        from wandb.proto import wandb_internal_pb2 as proto

        self.run: Any = None
        self.config: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []
        self.artifacts: dict[str, list[str]] = {}
        """names of artefacts to the files in them"""
        for data in _frames(path.read_bytes()):
            record = proto.Record()  # type: ignore[attr-defined]
            record.ParseFromString(data)
            match record.WhichOneof("record_type"):
                case "run":
                    self.run = record.run
                    self.config |= _values(record.run.config.update)
                case "config":
                    self.config |= _values(record.config.update)
                case "summary":
                    self.summary |= _values(record.summary.update)
                case "history":
                    self.history.append(_values(record.history.item))
                case "artifact":
                    self.artifacts[record.artifact.name] = [file.path for file in record.artifact.manifest.contents]
                case "request" if record.request.HasField("log_artifact"):
                    artifact = record.request.log_artifact.artifact
                    self.artifacts[artifact.name] = [file.path for file in artifact.manifest.contents]


def _values(items: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def _frames(data: bytes) -> Iterator[bytes]:
    assert data[:4] == b":W&B"
    at, parts = _HEAD, []
    while at + _HEAD <= len(data):
        room = _BLOCK - at % _BLOCK
        if room < _HEAD:
            at += room
            continue
        check, length, kind = struct.unpack_from("<IHB", data, at)
        if kind == 0:
            at += room
            continue
        body = data[at + _HEAD : at + _HEAD + length]
        assert check == zlib.crc32(body, zlib.crc32(bytes([kind]))), f"damaged at byte {at}"
        at += _HEAD + length
        parts = [body] if kind in (_FULL, _FIRST) else [*parts, body]
        if kind in (_FULL, _LAST):
            yield b"".join(parts)

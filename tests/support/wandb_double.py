"""A stand-in for W&B's server, which cannot run here: it notes what the real client sends, and says yes.

That the client's requests are the right ones for the real server is for the client to know; that they are made, with
which ids and contents, is seen here. What the client writes offline is read back from its file: records of its own
protocol, framed as in LevelDB's logs. The client no longer has a reader for it, only the program that sends it.
"""

from __future__ import annotations

import gzip
import json
import struct
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests.support.serving import read_body, send, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from http.server import BaseHTTPRequestHandler
    from pathlib import Path

_HEAD, _BLOCK = 7, 32_768
_FULL, _FIRST, _LAST = 1, 2, 4


class Double:
    """The requests that the server got so far."""

    def __init__(self) -> None:
        self.url = ""
        self.queries: list[tuple[str, dict[str, Any]]] = []
        """GraphQL operations with their variables"""
        self.streams: list[tuple[str, dict[str, Any]]] = []
        """paths and bodies of the file stream, which carries summary and history"""
        self.files: dict[str, bytes] = {}
        """what was uploaded"""

    def asked(self, operation: str) -> list[dict[str, Any]]:
        """The variables of every query of a name."""
        return [variables for name, variables in self.queries if name == operation]

    def summary(self) -> dict[str, Any]:
        """The run's summary as it was streamed last."""
        summaries = [body["files"]["wandb-summary.json"]["content"] for _, body in self.streams if "files" in body]
        return json.loads(summaries[-1][-1])

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """Return the part of an answer that the client needs to continue."""
        project = {"id": "p", "name": variables.get("project"), "entity": {"id": "e", "name": "somebody"}}
        match operation:
            case "Viewer":
                flags = {"id": "u", "entity": "somebody", "username": "somebody", "flags": "{}", "teams": {"edges": []}}
                return {"viewer": flags, "serverInfo": {"cliVersionInfo": {"max_cli_version": "99.0.0"}}}
            case "ServerFeatures" | "ServerFeaturesQuery":
                return {"serverInfo": {"features": []}}
            case "RunResumeStatus":
                return {"model": None}
            case "UpsertBucket":
                bucket = {"id": "r", "name": variables["name"], "displayName": variables["name"], "config": "{}"}
                return {"upsertBucket": {"bucket": {**bucket, "project": project}, "inserted": True}}
            case "CreateRunFiles":
                files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in variables["files"]]
                return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
            case "ArtifactType":
                return {"project": None}
            case "CreateArtifact":
                sequence = {"id": "s", "latestArtifact": None}
                return {"createArtifact": {"artifact": {"id": "a", "state": "COMMITTED", "artifactSequence": sequence}}}
            case "CommitArtifact":
                return {"commitArtifact": {"artifact": {"id": "a"}}}
            case _:
                return {}


@contextmanager
def wandb_double() -> Iterator[Double]:
    """One on a port of its own."""
    double = Double()

    def reply(handler: BaseHTTPRequestHandler) -> None:
        body, path = read_body(handler), handler.path
        if handler.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        answer: dict[str, Any] = {}
        if handler.command == "PUT":
            double.files[path.removeprefix("/upload/")] = body
        elif path == "/graphql":
            asked = json.loads(body)
            words = asked["query"].replace("(", " ").replace("{", " ").split()
            operation = asked.get("operationName") or words[1]
            variables = asked.get("variables") or {}
            double.queries.append((operation, variables))
            answer = {"data": double.answer(operation, variables)}
        elif handler.command == "POST":
            answer = {"exitcode": None, "limits": {}}
            if path.endswith("/file_stream"):
                double.streams.append((path, json.loads(body)))
        send(handler, 200, answer)

    with serving(reply) as double.url:
        yield double


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

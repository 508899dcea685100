"""A workflow behind HTTP, in a thread of the test: it shows each request to a function and sends what that returns."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tests.support.serving import read_body, send, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from http.server import BaseHTTPRequestHandler


@dataclass
class Asked:
    """One request."""

    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class Answer:
    """A response: a JSON value, or the lines of an event stream."""

    body: Any = None
    status: int = 200
    events: list[str] | None = None
    raw: bytes | None = None
    stream: bytes | None = None
    """the bytes of an event stream, sent as `framing` says"""
    framing: Literal["chunked", "close", "cut"] = "chunked"
    """in chunks; up to the end of the connection; in chunks of which the last is missing"""


@dataclass
class Workflow:
    """A running workflow server, and its requests."""

    url: str
    asked: list[Asked] = field(default_factory=list)


@contextmanager
def workflow(answer: Callable[[Asked], Any]) -> Iterator[Workflow]:
    """Serve until the end of the block; `answer` returns an Answer, or a value to be sent as JSON."""

    running = Workflow("")

    def reply(handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(read_body(handler))
        request = Asked(handler.path, {key.lower(): value for key, value in handler.headers.items()}, body)
        running.asked.append(request)
        value = answer(request)
        sent = value if isinstance(value, Answer) else Answer(value)
        if sent.stream is not None:
            _send_stream(handler, sent.stream, sent.framing)
        elif sent.events is not None:
            data = "".join(f"{line}\n" for line in sent.events).encode()
            send(handler, sent.status, data, kind="text/event-stream")
        else:
            send(handler, sent.status, sent.body if sent.raw is None else sent.raw)

    with serving(reply) as running.url:
        yield running


def _send_stream(handler: BaseHTTPRequestHandler, data: bytes, framing: str) -> None:
    handler.send_response(200)
    handler.send_header("Content-Type", "text/event-stream; charset=utf-8")
    if framing == "close":
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write(data)
        return
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    handler.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
    handler.wfile.write(b"" if framing == "cut" else b"0\r\n\r\n")
    handler.close_connection = framing == "cut"

"""Scripted servers of models' APIs, one module per API, which refuse what the real services refuse.

A script is a list of moves. The server makes them one after the other, in the form of its API, streamed or not as the
request asks. It keeps every request, and refuses those that the real service would refuse.
"""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from tests.support.serving import read_body, send, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from http.server import BaseHTTPRequestHandler

    from holdfast.spec.schema import Api


class Call(NamedTuple):
    """A tool call that the model makes."""

    name: str
    arguments: dict[str, Any]


class Say(NamedTuple):
    """The model answers: with a text, with tool calls, or with both, after thinking or not."""

    text: str = ""
    calls: tuple[Call, ...] = ()
    reasoning: str | None = None
    stop: str = "stop"
    """`stop`, `length` or `content_filter`; with calls it is `tool_calls` whatever is written here"""
    input_tokens: int = 11
    output_tokens: int = 7
    cached_tokens: int = 0
    """of the input tokens"""
    reasoning_tokens: int = 0
    """of the output tokens"""


class Refuse(NamedTuple):
    """The server refuses the request, with the API's form of an error."""

    status: int
    message: str
    headers: dict[str, str] = {}  # noqa: RUF012 - nobody changes it


class FailMidStream(NamedTuple):
    """The server reports an error after the first half of the text; without streaming, with status 500."""

    text: str
    message: str


class Cut(NamedTuple):
    """The stream ends after the first half of the text, without the events that end an answer."""

    text: str


class Raw(NamedTuple):
    """The server sends this: a list of events as a stream, anything else as a whole reply; bytes as they are."""

    reply: Any


Move = Say | Refuse | FailMidStream | Cut | Raw


class Refused(Exception):
    """A request that the real service would refuse."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Asked(NamedTuple):
    """A request."""

    path: str
    """with its query"""
    headers: dict[str, str]
    """names in lower case"""
    body: Any


class Wire:
    """The form of one API. Each module of this package has one as `WIRE`."""

    def check(self, asked: Asked) -> None:
        """Raise Refused for a request that the real service would refuse."""
        raise NotImplementedError

    def whole(self, say: Say, asked: Asked) -> Any:
        """Return the JSON of an answer."""
        raise NotImplementedError

    def events(self, say: Say, asked: Asked) -> list[tuple[str | None, Any]]:
        """Return the events of a streamed answer: the name of each where the API names them, and its JSON or text."""
        raise NotImplementedError

    def error(self, status: int, message: str) -> Any:
        """Return the JSON of an error."""
        raise NotImplementedError

    def error_event(self, message: str) -> tuple[str | None, Any]:
        """Return the event by which an error is reported inside a stream."""
        raise NotImplementedError

    def streams(self, asked: Asked) -> bool:
        """Return True for a request whose answer is to be streamed."""
        return bool(asked.body.get("stream"))


class Provider:
    """A running server."""

    def __init__(self, wire: Wire, script: Sequence[Move] | Callable[[Asked], Move]) -> None:
        self._wire = wire
        self._script = script
        self._lock = threading.Lock()
        self._moves = 0
        self.asked: list[Asked] = []
        """every request, refused ones included"""
        self.refused: list[str] = []
        """why requests were refused that the script would have answered"""
        self.url = ""

    def move(self, asked: Asked) -> Move:
        with self._lock:
            self.asked.append(asked)
            try:
                self._wire.check(asked)
            except Refused as refused:
                self.refused.append(str(refused))
                return Refuse(refused.status, str(refused))
            if callable(self._script):
                return self._script(asked)
            self._moves += 1
            return self._script[min(self._moves, len(self._script)) - 1]

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        data = read_body(handler)
        headers = {name.lower(): value for name, value in handler.headers.items()}
        asked = Asked(handler.path, headers, json.loads(data) if data else None)
        move = self.move(asked)
        streams = isinstance(asked.body, dict) and self._wire.streams(asked)
        match move:
            case Refuse(status, message, more):
                send(handler, status, self._wire.error(status, message), more)
            case Raw(list() as events):
                _stream(handler, [(event.get("type"), event) for event in events])
            case Raw(reply):
                send(handler, 200, reply)
            case Say() if streams:
                _stream(handler, self._wire.events(move, asked))
            case Say():
                send(handler, 200, self._wire.whole(move, asked))
            case FailMidStream(text, message) if streams:
                begun = _first_half(self._wire.events(Say(text), asked))
                _stream(handler, [*begun, self._wire.error_event(message)])
            case FailMidStream(_, message):
                send(handler, 500, self._wire.error(500, message))
            case Cut(text):
                _stream(handler, _first_half(self._wire.events(Say(text), asked)))


def _first_half(events: list[tuple[str | None, Any]]) -> list[tuple[str | None, Any]]:
    return events[: len(events) // 2]


def _stream(handler: BaseHTTPRequestHandler, events: list[tuple[str | None, Any]]) -> None:
    handler.send_response(200)
    handler.send_header("Content-Type", "text/event-stream")
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    for name, value in events:
        data = value if isinstance(value, str) else json.dumps(value)
        chunk = (f"event: {name}\n" if name else "").encode() + f"data: {data}\n\n".encode()
        handler.wfile.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
    handler.wfile.write(b"0\r\n\r\n")


def words(text: str) -> list[str]:
    """Return the pieces in which a text is streamed."""
    return text.split(" ", 1)[:1] + [" " + rest for rest in text.split(" ")[1:]]


@contextmanager
def provider(api: Api, script: Sequence[Move] | Callable[[Asked], Move]) -> Iterator[Provider]:
    """Run a scripted server. The last move is repeated; a function is asked for each request's move."""
    running = Provider(import_module(f"tests.support.providers.{api}").WIRE, script)
    with serving(running.answer) as address:
        running.url = f"{address}/v1"
        yield running


def path_of(asked: Asked) -> str:
    """Return the path of a request, without its query."""
    return urlsplit(asked.path).path

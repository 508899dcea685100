"""Replies of hostile and broken servers, as data, and a server that sends them.

A request is attacked if its body has `attack:NAME` in it, with the reply of that name; others get a sound answer in the
API that their path belongs to.
"""

from __future__ import annotations

import json
import re
import threading
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Final, NamedTuple

from tests.support.providers import Asked, Say
from tests.support.serving import read_body, send, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from http.server import BaseHTTPRequestHandler

LIMIT: Final = 2_000_000
"""`limits.reply_bytes` of the evals that are attacked"""


class Attack(NamedTuple):
    """A reply that no client should take for an answer."""

    body: bytes = b""
    head: bytes = b""
    """further headers"""
    status: bytes = b"200 OK"
    sized: bool = True
    """the length of the body is announced"""
    endless: bool = False
    """the body is sent again and again, as long as anybody reads"""
    hangs: bool = False
    """nothing follows, and the connection stays open"""
    raw: bool = False
    """the body is all that is sent"""


def bomb(megabytes: int) -> bytes:
    """Compressed zeros inside a JSON text: a thousandth of so many megabytes."""
    packer = zlib.compressobj(9, wbits=31)
    parts = [packer.compress(b'data: {"text": "'), *(packer.compress(bytes(1_000_000)) for _ in range(megabytes))]
    return b"".join([*parts, packer.flush()])


ATTACKS: Final = {
    # sizes
    "bomb": Attack(bomb(200), b"Content-Encoding: gzip\r\n"),
    "endless-body": Attack(b"data: " + b"x" * 10_000 + b"\n", sized=False, endless=True),
    "endless-line": Attack(b"x" * 10_000, sized=False, endless=True),
    "announces-a-terabyte": Attack(b'{"a": "' + b"x" * 10_000, b"Content-Length: 1000000000000\r\n", endless=True),
    "endless-chunks": Attack(b"1\r\nx\r\n" * 2000, b"Transfer-Encoding: chunked\r\n", endless=True),
    "endless-headers": Attack(b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 100_000, raw=True),
    "100,000-headers": Attack(b"", b"".join(b"X-%d: y\r\n" % number for number in range(100_000))),
    "endless-preliminaries": Attack(b"HTTP/1.1 100 Continue\r\n\r\n" * 200_000, raw=True),
    "endless-error": Attack(b"x" * 10_000, status=b"500 Oops", sized=False, endless=True),
    # time
    "hangs-in-the-head": Attack(b"HTTP/1.1 200 OK\r\nX-", raw=True, hangs=True),
    "hangs-in-the-body": Attack(b'{"choices": [', b"Content-Length: 100\r\n", sized=False, hangs=True),
    # HTTP
    "nothing": Attack(b"", raw=True),
    "not-http": Attack(b"SSH-2.0-OpenSSH_9.6\r\n\r\n", raw=True),
    "cut": Attack(b'{"choices": [', b"Content-Length: 100\r\n", sized=False),
    "length-and-chunks": Attack(b"0\r\n\r\n", b"Content-Length: 7\r\nTransfer-Encoding: chunked\r\n", sized=False),
    "two-lengths": Attack(b"{}", b"Content-Length: 3\r\nContent-Length: 2\r\n", sized=False),
    "upgrade": Attack(b"", b"Connection: Upgrade\r\nUpgrade: websocket\r\n", status=b"101 Switching"),
    "not-compressed": Attack(b"{}", b"Content-Encoding: gzip\r\n"),
    "unknown-compression": Attack(b"{}", b"Content-Encoding: zstd\r\n"),
    "redirect-loop": Attack(b"", b"Location: ?again\r\n", status=b"307 Again"),
    "redirect-nowhere": Attack(b"", b"", status=b"302 Found"),
    # JSON
    "empty": Attack(b""),
    "null": Attack(b"null"),
    "number": Attack(b"7"),
    "list": Attack(b"[1, 2]"),
    "empty-object": Attack(b"{}"),
    "deep": Attack(b"[" * 200_000 + b"]" * 200_000),
    "deep-objects": Attack(b'{"choices":' * 100_000 + b"1" + b"}" * 100_000),
    "bad-utf-8": Attack(b'{"choices": "\xff\xfe"}'),
    "200,000-empty-choices": Attack(b'{"choices": [' + b"{}, " * 200_000 + b"{}]}"),
    "choices-are-a-text": Attack(b'{"choices": "x", "content": 7, "output": {}, "candidates": "x"}'),
    "huge-number": Attack(b"1" + b"0" * 100_000),
    "error-with-control-characters": Attack(
        b'{"error": {"message": "\\u001b]0;pwned\\u0007\\u001b[2J\\u202e", "code": {"a": []}}}', status=b"400 Bad"
    ),
}


@dataclass
class Hostile:
    """A running server, which attacks until it is told not to."""

    url: str = ""
    attacks: bool = True
    asked: list[str] = field(default_factory=list)
    """what each request was marked with"""
    released: threading.Event = field(default_factory=threading.Event)
    """ends what hangs"""

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer a request."""
        data = read_body(handler)
        mark = re.search(rb"(attack|sound):([\w,-]*\w)", data)
        kind, name = ("sound", "") if mark is None else (mark[1].decode(), mark[2].decode())
        self.asked.append(f"{kind}:{name}")
        asked = Asked(handler.path, {}, json.loads(data) if data else {})
        if kind == "attack" and self.attacks:
            self._attack(handler, ATTACKS[name], streams=b'"stream":true' in data or "stream" in handler.path.lower())
        else:
            _sound(handler, asked, f"answer to {kind}:{name}")

    def _attack(self, handler: BaseHTTPRequestHandler, attack: Attack, *, streams: bool) -> None:
        handler.close_connection = True
        body = attack.body
        if streams and not attack.raw and not attack.head and not attack.endless:
            body = b"data: " + body + b"\n\n"
        if not attack.raw:
            kind = b"text/event-stream" if streams else b"application/json"
            head = b"HTTP/1.1 %b\r\nContent-Type: %b\r\n%b" % (attack.status, kind, attack.head)
            if attack.sized and not attack.endless:
                head += b"Content-Length: %d\r\n" % len(body)
            handler.wfile.write(head + b"\r\n")
        handler.wfile.write(body)
        while attack.endless:
            handler.wfile.write(body)
        if attack.hangs:
            handler.wfile.flush()
            self.released.wait(60)


def _sound(handler: BaseHTTPRequestHandler, asked: Asked, text: str) -> None:
    """Send an answer in the API of a path."""
    if '"score"' in str(asked.body):
        text = json.dumps({"reason": text, "score": 1})
    if handler.path.endswith("/flow"):
        events, whole = [(None, {"value": text})], {"value": text}
    else:
        wire = import_module(f"tests.support.providers.{_api_of(handler.path)}").WIRE
        events, whole = wire.events(Say(text), asked), wire.whole(Say(text), asked)
    streams = bool(asked.body.get("stream")) or "stream" in handler.path.lower()
    if streams:
        parts = [
            (f"event: {name}\n" if name else "") + f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n"
            for name, value in events
        ]
        send(handler, 200, "".join(parts).encode(), kind="text/event-stream")
    else:
        send(handler, 200, whole)


def _api_of(path: str) -> str:
    ends = {
        "/chat/completions": "chat",
        "/completions": "completions",
        "/messages": "messages",
        "/responses": "responses",
    }
    return next((api for end, api in ends.items() if path.endswith(end)), "gemini")


@contextmanager
def hostile() -> Iterator[Hostile]:
    """Run the server."""
    running = Hostile()
    with serving(running.answer) as address:
        running.url = f"{address}/v1"
        try:
            yield running
        finally:
            running.released.set()


@contextmanager
def redirecting(location: str) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Run a server that sends every request elsewhere; yield its URL and the headers that it is sent."""
    asked: list[dict[str, str]] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        read_body(handler)
        asked.append({name.lower(): value for name, value in handler.headers.items()})
        send(handler, 307, b"", {"Location": location})

    with serving(answer) as address:
        yield f"{address}/v1", asked

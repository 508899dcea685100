"""A workflow behind HTTP, in a thread of the test: it shows each request to a function and sends what that returns."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:  # the library's name
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            request = Asked(self.path, {key.lower(): value for key, value in self.headers.items()}, body)
            running.asked.append(request)
            value = answer(request)
            sent = value if isinstance(value, Answer) else Answer(value)
            if sent.stream is not None:
                self.send_stream(sent.stream, sent.framing)
                return
            if sent.events is not None:
                kind, data = "text/event-stream", "".join(f"{line}\n" for line in sent.events).encode()
            else:
                kind, data = "application/json", sent.raw if sent.raw is not None else json.dumps(sent.body).encode()
            self.send_response(sent.status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def send_stream(self, data: bytes, framing: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
            if framing == "close":
                self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write(data)
                return
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
            self.wfile.write(b"" if framing == "cut" else b"0\r\n\r\n")
            self.close_connection = framing == "cut"

        def log_message(self, *_: Any) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    running = Workflow(f"http://127.0.0.1:{httpd.server_port}")
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield running
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()

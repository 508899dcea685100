"""Judges that say what a test wants: an OpenAI-compatible server in a thread, answered by a function."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Judges:
    """The server's address, and every request it was sent."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self.bodies: list[dict[str, Any]] = []


class Refuse(Exception):
    """Answer with an HTTP status and a message instead."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@contextmanager
def judges(answer: Callable[[dict[str, Any]], str | dict[str, Any]]) -> Iterator[Judges]:
    """Serve what `answer` returns for a request's body: a text, or a whole choice."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            served.bodies.append(body)
            status = 200
            try:
                reply_of_judge = answer(body)
                choice = {"message": {"role": "assistant", "content": reply_of_judge}, "finish_reason": "stop"}
                reply: Any = {"choices": [choice if isinstance(reply_of_judge, str) else reply_of_judge], "usage": {}}
                reply["usage"] = {"prompt_tokens": 10, "completion_tokens": 5}
            except Refuse as refusal:
                status, reply = refusal.status, {"error": {"message": str(refusal)}}
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: Any) -> None:
            pass  # a client that was killed

    with Server(("127.0.0.1", 0), Handler) as server:
        served = Judges(f"http://127.0.0.1:{server.server_address[1]}/v1")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield served
        finally:
            server.shutdown()
            thread.join()

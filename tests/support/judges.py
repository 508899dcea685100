"""Judges that say what a test wants: an OpenAI-compatible server in a thread, answered by a function."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests.support.serving import read_body, send, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from http.server import BaseHTTPRequestHandler


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

    served = Judges("")

    def reply(handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(read_body(handler))
        served.bodies.append(body)
        try:
            said = answer(body)
        except Refuse as refusal:
            send(handler, refusal.status, {"error": {"message": str(refusal)}})
            return
        choice = {"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        choices = [choice if isinstance(said, str) else said]
        send(handler, 200, {"choices": choices, "usage": {"prompt_tokens": 10, "completion_tokens": 5}})

    with serving(reply) as address:
        served.base_url = f"{address}/v1"
        yield served

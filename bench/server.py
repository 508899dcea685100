"""A fast OpenAI-compatible server on loopback that always says the same, for measuring clients.

    python bench/server.py

prints `listening http://127.0.0.1:PORT` and serves until its standard input ends.

POST /v1/chat/completions      answers at once
POST /50/v1/chat/completions   answers after 50 ms; any number does
GET  /stats                    {"requests": …, "bytes": …, "first": …, "last": …}: how many completions were asked for
                               with how many bytes, and when the first came and the last was answered, on the clock
                               of `time.monotonic()`
POST /reset                    forgets the counts

It reads no JSON: it finds the end of a request by its Content-Length and sends bytes made beforehand.

Its ceiling, measured with `wrk -t1 -c64` on 2 cores: 60,000 to 97,000 answers per second, where the bare loop asks for
8,000 to 11,000. That is seven to ten times as many, so it is not what is measured.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from functools import lru_cache
from typing import Any

ANSWER = "The answer is 42."


def _http(body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


_REPLY = _http(
    json.dumps(
        {
            "id": "chatcmpl-bench",
            "object": "chat.completion",
            "model": "bench",
            "choices": [
                {"index": 0, "message": {"role": "assistant", "content": ANSWER}, "finish_reason": "stop"},
            ],
            "usage": {"prompt_tokens": 12, "completion_tokens": 6, "total_tokens": 18},
        }
    ).encode()
)


class _Counts:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.requests = self.bytes = 0
        self.first: float | None = None
        self.last: float | None = None


@lru_cache
def _latency(path: bytes) -> float:
    """Seconds, from a path such as /50/v1/chat/completions."""
    first = path[1:].partition(b"/")[0]
    return int(first) / 1000 if first.isdigit() else 0.0


class _Connection(asyncio.Protocol):
    """Just enough HTTP/1.1: kept connections, bodies with a Content-Length."""

    def __init__(self, counts: _Counts, loop: asyncio.AbstractEventLoop) -> None:
        self._counts = counts
        self._later = loop.call_later
        self._pending = b""

    def connection_made(self, transport: Any) -> None:
        self._write = transport.write

    def data_received(self, data: bytes) -> None:
        if self._pending:
            data = self._pending + data
        while data:
            end = data.find(b"\r\n\r\n") + 4
            if end == 3:
                break
            at = data.find(b"ontent-", 0, end)
            while at >= 0 and data[at + 7 : at + 14].lower() != b"length:":
                at = data.find(b"ontent-", at + 7, end)
            if at >= 0:
                end += int(data[at + 14 : data.index(b"\r", at)])
            if len(data) < end:
                break
            self._request(data, end)
            data = data[end:]
        self._pending = data

    def _request(self, data: bytes, length: int) -> None:
        path = data[data.index(b" ") + 1 : data.index(b" ", 6)]
        if path.endswith(b"/completions"):
            counts = self._counts
            if counts.first is None:
                counts.first = time.monotonic()
            counts.requests += 1
            counts.bytes += length
            latency = _latency(path)
            if latency:
                self._later(latency, self._answer)
            else:
                self._answer()
        elif path == b"/stats":
            self._write(_http(json.dumps(vars(self._counts)).encode()))
        elif path == b"/reset":
            self._counts.reset()
            self._write(_http(b"{}"))
        else:
            self._write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    def _answer(self) -> None:
        self._write(_REPLY)  # a transport that is closed drops it
        self._counts.last = time.monotonic()


async def serve() -> None:
    """Serve until standard input ends."""
    loop = asyncio.get_running_loop()
    counts = _Counts()
    server = await loop.create_server(lambda: _Connection(counts, loop), "127.0.0.1", 0, backlog=4096)
    print(f"listening http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await loop.run_in_executor(None, sys.stdin.buffer.read)


if __name__ == "__main__":
    import uvloop

    uvloop.run(serve())

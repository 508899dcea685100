"""A fast OpenAI-compatible server on loopback that always says the same, for measuring clients.

    python bench/server.py

prints `listening http://127.0.0.1:PORT` and serves until its standard input ends.

POST /v1/chat/completions      answers at once
POST /50/v1/chat/completions   answers after 50 ms; any number does
POST /50-2/v1/chat/completions the same, but refuses 2 % of the requests at once with 429
POST /v1/completions           log-probabilities of a prompt of token ids, as vLLM gives them with `echo`
POST /tokenize                 token ids of a text; also GET /tokenizer_info and /v1/models
GET  /stats                    {"requests": …, "bytes": …, "first": …, "last": …}: how many completions were asked for
                               with how many bytes, and when the first came and the last was answered, on the clock
                               of `time.monotonic()`; "opened": when a request of any kind first came. Prompts of fewer
                               than 32 ids are probes and do not count
POST /reset                    forgets the counts

Chats are answered without reading JSON: the end of a request is found by its Content-Length, and the reply's bytes are
made beforehand. Likelihoods are nearly so: what is long in a reply depends on the number of tokens, and is kept.

The ceiling for chats, measured with `wrk -t1 -c64` on 2 cores: 60,000 to 97,000 answers per second, where the bare loop
asks for 8,000 to 11,000. That is seven to ten times as many, so the server is not what is measured. `benchmarks.py`
measures the ceiling for likelihoods.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.support.token_model import BOS, EOS, TokenModel

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


_PROBE = 32
"""ids that a prompt of a row has at least"""
_MODEL = TokenModel()
_ABOUT = {
    b"/tokenizer_info": _http(json.dumps({"bos_token": BOS, "eos_token": EOS}).encode()),
    b"/v1/models": _http(json.dumps({"data": [{"id": "bench", "max_model_len": 100_000}]}).encode()),
}


@lru_cache(4096)
def _likelihoods(count: int, variant: int) -> bytes:
    """Return the end of a reply for a prompt of so many tokens."""
    values = [-((place * 31 + variant * 1009) % 7919 + 1) / 1009 for place in range(1, count + 1)]
    logprobs = {
        "text_offset": list(range(0, 4 * count + 4, 4)),
        "tokens": [" word"] * (count + 1),
        "token_logprobs": [None, *values],
        "top_logprobs": [None, *({" other": value / 2, " word": value} for value in values)],
    }
    usage = {"prompt_tokens": count, "completion_tokens": 1, "total_tokens": count + 1}
    return b',"finish_reason":"length","logprobs":%b}],"usage":%b}' % (
        json.dumps(logprobs).encode(),
        json.dumps(usage).encode(),
    )


def _echo(prompt: Any) -> bytes:
    """Return the reply for a prompt of ids, or for a list of one of these."""
    ids = prompt[0] if isinstance(prompt[0], list) else prompt
    text = msgspec.json.encode(_MODEL.decode(ids) + ".")
    variant = zlib.crc32(text) % 16
    head = b'{"id":"cmpl-bench","object":"text_completion","model":"bench","choices":[{"index":0,"text":'
    return _http(head + text + _likelihoods(len(ids), variant))


class _Counts:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.requests = self.bytes = 0
        self.opened: float | None = None
        self.first: float | None = None
        self.last: float | None = None


_REFUSAL = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n"


@lru_cache
def _behaviour(path: bytes) -> tuple[float, int]:
    """Seconds, and how many of a hundred requests are refused, from a path such as /50-2/v1/chat/completions."""
    latency, _, refused = path[1:].partition(b"/")[0].partition(b"-")
    return int(latency) / 1000 if latency.isdigit() else 0.0, int(refused) if refused.isdigit() else 0


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
        if path == b"/stats":
            self._write(_http(json.dumps(vars(self._counts)).encode()))
            return
        if path == b"/reset":
            self._counts.reset()
            self._write(_http(b"{}"))
            return
        if self._counts.opened is None:
            self._counts.opened = time.monotonic()
        if path.endswith(b"/chat/completions"):
            self._count(path, length, _REPLY)
        elif path.endswith(b"/completions"):
            body = msgspec.json.decode(data[data.index(b"\r\n\r\n") + 4 : length])
            reply = _echo(body["prompt"])
            if len(body["prompt"]) < _PROBE and isinstance(body["prompt"][0], int):
                self._write(reply)
            else:
                self._count(path, length, reply)
        elif path.endswith(b"/tokenize"):
            body = msgspec.json.decode(data[data.index(b"\r\n\r\n") + 4 : length])
            self._write(_http(msgspec.json.encode({"tokens": _MODEL.encode(body.get("prompt", ""))})))
        else:
            answers = (reply for end, reply in _ABOUT.items() if path.endswith(end))
            self._write(next(answers, b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"))

    def _count(self, path: bytes, length: int, reply: bytes) -> None:
        """Answer a request that counts."""
        counts = self._counts
        if counts.first is None:
            counts.first = time.monotonic()
        counts.requests += 1
        counts.bytes += length
        latency, refused = _behaviour(path)
        if refused and zlib.crc32(b"%d" % counts.requests) % 100 < refused:
            self._write(_REFUSAL)
        elif latency:
            self._later(latency, self._answer, reply)
        else:
            self._answer(reply)

    def _answer(self, reply: bytes) -> None:
        self._write(reply)  # a transport that is closed drops it
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

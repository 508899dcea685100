"""A fast OpenAI-compatible server on loopback that breaks on demand and counts what it is asked.

    python -m tests.support.server [key=value …]

prints `listening http://127.0.0.1:PORT/v1` and serves until its standard input ends. What it does can be changed
while it runs: `POST /control` with a JSON object of these settings, `GET /stats` for the counts, `POST /reset`.

latency         seconds before an answer
fail            how each request fails, as {"429": 0.1, "500": 0.1, "hang": 0.05, "cut": 0.05, "garbage": 0.05}; which
                requests is decided by a digest of the prompt and how often it was asked, so it is repeatable;
                `overloaded` is a 503 that says so, `later` a 503 with Retry-After
fail_first      only the first so many requests for each prompt can fail (0: any)
retry_after     sent with a 429 and `later`, in seconds (negative: not sent)
status, code    answer everything with this HTTP status, and this error code in the body
max_concurrent  answer 429 to requests beyond so many at once
answer          `echo` (the prompt), `digest` (a number from the prompt) or `judge` (a judge's JSON), or a fixed text
usage           whether replies say how many tokens they took
tool_calls      how many tools it calls, one after the other, before it answers a user's message; the arguments are made
                of that message and of how many calls came before; the answer is made of the tools' results
calls           the very calls to make, once, where a request offers tools
"""

from __future__ import annotations

import asyncio
import json
import sys
import zlib
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

REFUSALS = {
    "429": (429, "told to fail"),
    "500": (500, "told to fail"),
    "503": (503, "told to fail"),
    "529": (529, "told to fail"),
    "overloaded": (503, "The model is overloaded."),
    "later": (503, "told to fail"),
}


@dataclass
class Settings:
    latency: float = 0.0
    fail: dict[str, float] = field(default_factory=dict)
    fail_first: int = 0
    retry_after: float = 0.05
    status: int = 200
    code: str = ""
    max_concurrent: int = 0
    answer: str = "echo"
    usage: bool = True
    tool_calls: int = 0
    calls: list[Any] = field(default_factory=list)


class State:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.reset()

    def reset(self) -> None:
        self.asked: Counter[str] = Counter()
        """requests by prompt, whatever became of them"""
        self.answered: Counter[str] = Counter()
        """whole good answers written, by prompt"""
        self.outcomes: Counter[str] = Counter()
        self.active = 0
        self.most_active = 0

    def stats(self) -> dict[str, Any]:
        return {
            "requests": sum(self.asked.values()),
            "asked": self.asked,
            "answered": self.answered,
            "outcomes": self.outcomes,
            "active": self.active,
            "most_active": self.most_active,
        }

    def fate(self, prompt: str, nth: int) -> str:
        """`ok`, or how this request fails."""
        settings = self.settings
        if settings.fail_first and nth > settings.fail_first:
            return "ok"
        draw = zlib.crc32(f"{nth}:{prompt}".encode()) / 0xFFFFFFFF
        for how, share in settings.fail.items():
            if draw < share:
                return how
            draw -= share
        return "ok"


class Connection(asyncio.Protocol):
    """Just enough HTTP/1.1: keep-alive, Content-Length bodies."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.buffer = b""
        self.transport: Any = None
        self.busy: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self.busy is not None:
            self.state.active -= 1
            self.busy = None

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end]
            low = head.lower()
            at = low.find(b"content-length:")
            length = int(low[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self.buffer) < end + 4 + length:
                return
            body = self.buffer[end + 4 : end + 4 + length]
            self.buffer = self.buffer[end + 4 + length :]
            method, path, _ = head.split(b" ", 2)
            self.request(method.decode(), path.decode(), body)

    def request(self, method: str, path: str, body: bytes) -> None:
        if path == "/stats":
            self.send(200, json.dumps(self.state.stats()).encode())
        elif path == "/reset":
            self.state.reset()
            self.send(200, b"{}")
        elif path == "/control":
            for key, value in json.loads(body).items():
                setattr(self.state.settings, key, value)
            self.send(200, json.dumps(asdict(self.state.settings)).encode())
        elif method == "POST" and path.endswith(("/completions", "/generate")):
            self.complete(path, json.loads(body))
        else:
            self.send(404, b'{"error": {"message": "no such path"}}')

    def complete(self, path: str, body: dict[str, Any]) -> None:
        state, settings = self.state, self.state.settings
        if "messages" in body:
            prompt, results = since_user(body["messages"])
            prompt += f" #{len(results)}" if results else ""
        else:
            prompt = body.get("prompt", body.get("input_message", ""))
        state.asked[prompt] += 1
        if settings.status != 200:
            state.outcomes[str(settings.status)] += 1
            error = {"error": {"message": "told to refuse", "code": settings.code}}
            self.send(settings.status, json.dumps(error).encode())
            return
        if settings.max_concurrent and state.active >= settings.max_concurrent:
            state.outcomes["429"] += 1
            self.refuse(429)
            return
        state.active += 1
        state.most_active = max(state.most_active, state.active)
        self.busy = prompt
        how = state.fate(prompt, state.asked[prompt])
        if how == "hang":
            state.outcomes["hang"] += 1
        elif settings.latency:
            loop = asyncio.get_running_loop()
            loop.call_later(settings.latency, self.answer, path, body, prompt, how)
        else:
            self.answer(path, body, prompt, how)

    def answer(self, path: str, body: dict[str, Any], prompt: str, how: str) -> None:
        if self.busy is None:
            return  # the client has gone
        self.busy = None
        self.state.active -= 1
        self.state.outcomes[how] += 1
        if how in REFUSALS:
            status, message = REFUSALS[how]
            self.refuse(status, message, later=how == "later")
            return
        data = self.reply(path, body, prompt)
        if body.get("stream"):
            self.stream(data)
        elif how == "garbage":
            self.send(200, data[: len(data) // 2])
        elif how == "cut":
            self.transport.write(self.head(200, len(data)) + data[: len(data) // 2])
            self.transport.close()
        else:
            self.send(200, data)
        if how == "ok":
            self.state.answered[prompt] += 1

    def reply(self, path: str, body: dict[str, Any], prompt: str) -> bytes:
        text = {
            "echo": prompt,
            "digest": str(zlib.crc32(prompt.encode()) % 1000),
            "judge": '{"reason": "as told", "score": 1}',
        }.get(self.state.settings.answer, self.state.settings.answer)
        if path.endswith("/generate"):
            return json.dumps({"value": text}).encode()
        key = "message" if path.endswith("/chat/completions") else "text"
        content: Any = {"role": "assistant", "content": text} if key == "message" else text
        stop = "stop"
        if self.state.settings.tool_calls and body.get("tools"):
            asked, results = since_user(body["messages"])
            content["content"] = f"{asked}: {'; '.join(results)}"
            if len(results) < self.state.settings.tool_calls:
                content, stop = tool_call(body["tools"], asked, len(results)), "tool_calls"
        elif self.state.settings.calls and body.get("tools") and body["messages"][-1]["role"] != "tool":
            content = {"role": "assistant", "content": None, "tool_calls": self.state.settings.calls}
        reply: dict[str, Any] = {
            "id": "r",
            "object": "chat.completion" if key == "message" else "text_completion",
            "created": 1,
            "model": body.get("model"),
            "choices": [{"index": 0, key: content, "finish_reason": stop}],
        }
        if self.state.settings.usage:
            reply["usage"] = {"prompt_tokens": len(prompt.split()), "completion_tokens": 1, "total_tokens": 2}
        return json.dumps(reply).encode()

    def stream(self, data: bytes) -> None:
        reply = json.loads(data)
        choice = reply["choices"][0]
        text, calls = choice["message"]["content"] or "", choice["message"].get("tool_calls") or []
        deltas: list[Any] = [{"content": part + " "} for part in text.split()]
        deltas += [{"tool_calls": [{**call, "index": number}]} for number, call in enumerate(calls)]
        about = {"id": "r", "object": "chat.completion.chunk", "created": 1, "model": reply["model"]}
        events = [{**about, "choices": [{"index": 0, "delta": delta}]} for delta in deltas]
        events.append({**about, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]})
        events.append({**about, "choices": [], "usage": reply.get("usage")})
        body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
        self.transport.write(self.head(200, len(body), "text/event-stream") + body)

    def refuse(self, status: int, message: str = "told to fail", *, later: bool = False) -> None:
        wait = self.state.settings.retry_after
        extra = f"Retry-After: {wait}\r\n" if (status == 429 or later) and wait >= 0 else ""
        self.send(status, json.dumps({"error": {"message": message}}).encode(), extra)

    def send(self, status: int, body: bytes, extra: str = "") -> None:
        self.transport.write(self.head(status, len(body), extra=extra) + body)

    @staticmethod
    def head(status: int, length: int, kind: str = "application/json", extra: str = "") -> bytes:
        return (f"HTTP/1.1 {status} Status\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n{extra}\r\n").encode()


def since_user(messages: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """The last user message, and the tools' results that came after it."""
    positions = (
        number for number, message in enumerate(messages) if message["role"] != "tool" and message.get("content")
    )
    at = max(positions, default=0)  # a user may say nothing
    at = max((number for number, message in enumerate(messages) if message["role"] == "user"), default=at)
    content = messages[at]["content"]
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    return text, [str(message["content"]) for message in messages[at:] if message["role"] == "tool"]


def tool_call(tools: list[dict[str, Any]], asked: str, nth: int) -> dict[str, Any]:
    function = tools[nth % len(tools)]["function"]
    values = {"integer": nth, "number": nth, "boolean": True, "string": f"{asked} {nth}"}
    properties = function["parameters"].get("properties", {})
    required = function["parameters"].get("required", [])
    arguments = {name: values.get(properties[name].get("type", "string"), "?") for name in required}
    call = {"name": function["name"], "arguments": json.dumps(arguments)}
    about = {"id": f"call-{zlib.crc32(asked.encode())}-{nth}", "type": "function", "function": call}
    return {"role": "assistant", "content": None, "tool_calls": [about]}


async def serve(settings: Settings, port: int = 0) -> None:
    loop = asyncio.get_running_loop()
    state = State(settings)
    server = await loop.create_server(lambda: Connection(state), "127.0.0.1", port, backlog=4096)
    port = server.sockets[0].getsockname()[1]
    print(f"listening http://127.0.0.1:{port}/v1", flush=True)
    await loop.run_in_executor(None, sys.stdin.buffer.read)


def main() -> None:
    import uvloop

    options = dict(argument.split("=", 1) for argument in sys.argv[1:])
    port = int(options.pop("port", 0))
    settings = Settings()
    for key, value in options.items():
        setattr(settings, key, json.loads(value) if key != "answer" else value)
    uvloop.run(serve(settings, port))


if __name__ == "__main__":
    main()

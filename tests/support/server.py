"""A fast OpenAI-compatible server on loopback that breaks on demand and counts what it is asked.

    python -m tests.support.server [key=value …]

prints `listening http://127.0.0.1:PORT/v1` and serves until its standard input ends. What it does can be changed
while it runs: `POST /control` with a JSON object of these settings, `GET /stats` for the counts, `POST /reset`.

latency         seconds before an answer
holds_after     hold all requests but the first so many, until this is set to -1: then they are answered
fail            how each request fails, as {"429": 0.1, "500": 0.1, "hang": 0.05, "cut": 0.05, "garbage": 0.05}; which
                requests is decided by a digest of the prompt and how often it was asked, so it is repeatable;
                `overloaded` is a 503 that says so, `later` a 503 with Retry-After
spares          a prompt that never fails
fail_first      only the first so many requests for each prompt can fail (0: any)
retry_after     sent with a 429 and `later`, in seconds (negative: not sent)
status, code    answer everything with this HTTP status, and this error code in the body
max_concurrent  answer 429 to requests beyond so many at once
answer          `echo` (the prompt), `digest` (a number from the prompt), `judge` (a judge's JSON) or `body` (the
                request), or a fixed text
usage           whether replies say how many tokens they took
tool_calls      how many tools it calls, one after the other, before it answers a user's message; the arguments are made
                of that message and of how many calls came before; the answer is made of the tools' results
calls           the very calls to make, once, if a request offers tools

It also has a small model of its own, whose log-probabilities are a pure function of the tokens (`token_model`):
/tokenize, /detokenize, /tokenizer_info and /v1/models as vLLM has them, and completions with `echo` and `logprobs`.

engine          which server it is: `vllm`; `sglang`, which has /generate instead of `echo`; `llama.cpp`, which has
                /completion with a grammar instead; or `chat`, which has none of them
tokenizes       whether there is /tokenize
ignores_echo    accept `echo`, and return nothing about the prompt
adds_bos        put a BOS token before prompts that are text
max_logprobs    refuse requests for more `logprobs` than this (negative: none are refused)
max_model_len   refuse longer prompts, and list this with the model (0: unknown)
cuts_at         silently drop all but the last so many tokens of a prompt (0: none)
"""

from __future__ import annotations

import asyncio
import json
import sys
import zlib
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.support.token_model import BOS, EOS, TokenModel, echoed, forced, generated

if TYPE_CHECKING:
    from collections.abc import Callable

REFUSALS = {
    "429": (429, "told to fail"),
    "500": (500, "told to fail"),
    "503": (503, "told to fail"),
    "529": (529, "told to fail"),
    "overloaded": (503, "The model is overloaded."),
    "later": (503, "told to fail"),
    "oom": (500, "CUDA out of memory. Tried to allocate 2.32 GiB"),
}


@dataclass
class Settings:
    latency: float = 0.0
    holds_after: int = -1
    fail: dict[str, float] = field(default_factory=dict)
    fail_first: int = 0
    spares: str = ""
    retry_after: float = 0.05
    status: int = 200
    code: str = ""
    max_concurrent: int = 0
    answer: str = "echo"
    stop: str = "stop"
    usage: bool = True
    tool_calls: int = 0
    calls: list[Any] = field(default_factory=list)
    engine: str = "vllm"
    tokenizes: bool = True
    ignores_echo: bool = False
    adds_bos: bool = False
    max_logprobs: int = -1
    max_model_len: int = 0
    cuts_at: int = 0


class State:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.model = TokenModel()
        self.reset()

    def reset(self) -> None:
        self.asked: Counter[str] = Counter()
        """requests by prompt, whatever became of them"""
        self.answered: Counter[str] = Counter()
        """whole good answers written, by prompt"""
        self.outcomes: Counter[str] = Counter()
        self.active = 0
        self.most_active = 0
        self.held: list[Callable[[], None]] = []

    def release(self) -> None:
        """Answer the requests that were held."""
        held, self.held = self.held, []
        for answer in held:
            answer()

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
        if prompt == settings.spares or (settings.fail_first and nth > settings.fail_first):
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
            if self.state.settings.holds_after < 0:
                self.state.release()
        elif method == "POST" and path.endswith(("/completions", "/generate", "/completion")):
            self.complete(path, json.loads(body))
        elif (about := self.about(path, json.loads(body or b"{}"))) is not None:
            self.send(200, json.dumps(about).encode())
        else:
            self.send(404, b'{"error": {"message": "no such path"}}')

    def about(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """Answer for the tokenizer and the model, as the engine does; None for a path that it does not have."""
        model, settings = self.state.model, self.state.settings
        if path == "/v1/models":
            length = {"max_model_len": settings.max_model_len} if settings.max_model_len else {}
            return {"object": "list", "data": [{"id": "test-model", "object": "model", **length}]}
        if not settings.tokenizes or settings.engine == "chat":
            return None
        if path == "/tokenize":
            key = "content" if settings.engine == "llama.cpp" else "prompt"
            return {"tokens": model.encode(body.get(key, ""))}
        if path == "/detokenize":
            return {"prompt": model.decode(body["tokens"])}
        if path == ("/props" if settings.engine == "llama.cpp" else "/tokenizer_info"):
            length = (
                {"default_generation_settings": {"n_ctx": settings.max_model_len}} if settings.max_model_len else {}
            )
            return {"bos_token": BOS, "eos_token": EOS, **length}
        return None

    def ids_of(self, prompt: Any) -> list[int]:
        """Return the tokens of a prompt, which may be text, ids, or a list of one of these."""
        if isinstance(prompt, list) and not isinstance(prompt[0], int):
            return self.ids_of(prompt[0])
        if isinstance(prompt, list):
            return prompt
        return self.state.model.encode(BOS * self.state.settings.adds_bos + prompt)

    def complete(self, path: str, body: dict[str, Any]) -> None:
        state, settings = self.state, self.state.settings
        if "messages" in body:
            prompt, results = since_user(body["messages"])
            prompt += f" #{len(results)}" if results else ""
        else:
            prompt = body.get("prompt", body.get("input_ids", body.get("input_message", "")))
            prompt = state.model.decode(self.ids_of(prompt)) if isinstance(prompt, list) else prompt
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
        elif 0 <= settings.holds_after < sum(state.asked.values()):
            state.held.append(partial(self.answer, path, body, prompt, how))
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
        if (refusal := self.refusal(body)) is not None:
            self.send(400, json.dumps({"error": {"message": refusal}}).encode())
            return
        data = self.scores(path, body) or self.reply(path, body, prompt)
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

    def refusal(self, body: dict[str, Any]) -> str | None:
        """Refuse what vLLM refuses."""
        settings = self.state.settings
        if 0 <= settings.max_logprobs < (body.get("logprobs") or 0):
            return (
                f"Requested logprobs of {body['logprobs']}, which is greater than max allowed: {settings.max_logprobs}"
            )
        prompt = body.get("prompt")
        if settings.max_model_len and prompt and (length := len(self.ids_of(prompt))) >= settings.max_model_len:
            return f"This model's maximum context length is {settings.max_model_len} tokens, your request has {length}"
        return None

    def scores(self, path: str, body: dict[str, Any]) -> bytes | None:
        """Answer a request for log-probabilities of its prompt, in the form that the engine has; None for others."""
        model, settings = self.state.model, self.state.settings
        if settings.engine == "sglang" and path == "/generate" and body.get("return_logprob"):
            return json.dumps(generated(model, body["input_ids"][-settings.cuts_at :])).encode()
        if settings.engine == "llama.cpp" and path == "/completion":
            return json.dumps(forced(model, body)).encode()
        if settings.engine != "vllm" or settings.ignores_echo or not (body.get("echo") and body.get("logprobs")):
            return None
        ids = self.ids_of(body["prompt"])[-settings.cuts_at :]
        usage = {"prompt_tokens": len(ids), "completion_tokens": 1, "total_tokens": len(ids) + 1}
        return json.dumps({"id": "r", "choices": [echoed(model, ids)], "usage": usage}).encode()

    def reply(self, path: str, body: dict[str, Any], prompt: str) -> bytes:
        text = {
            "echo": prompt,
            "digest": str(zlib.crc32(prompt.encode()) % 1000),
            "judge": '{"reason": "as told", "score": 1}',
            "body": json.dumps(body),
        }.get(self.state.settings.answer, self.state.settings.answer)
        if path.endswith("/generate"):
            return json.dumps({"value": text}).encode()
        key = "message" if path.endswith("/chat/completions") else "text"
        content: Any = {"role": "assistant", "content": text} if key == "message" else text
        stop = self.state.settings.stop
        if self.state.settings.tool_calls and body.get("tools"):
            asked, results = since_user(body["messages"])
            content["content"] = f"{asked}: {'; '.join(results)}"
            if len(results) < self.state.settings.tool_calls:
                content, stop = tool_call(body["tools"], asked, len(results)), "tool_calls"
        elif self.state.settings.calls and body.get("tools") and body["messages"][-1]["role"] != "tool":
            content = {"role": "assistant", "content": None, "tool_calls": self.state.settings.calls}
        choice = {"index": 0, key: content, "finish_reason": stop}
        if body.get("logprobs") and key == "text":
            choice["logprobs"] = {"tokens": [text], "token_logprobs": [-0.5], "top_logprobs": [{text: -0.5}]}
        reply: dict[str, Any] = {
            "id": "r",
            "object": "chat.completion" if key == "message" else "text_completion",
            "created": 1,
            "model": body.get("model"),
            "choices": [choice],
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
        setattr(settings, key, json.loads(value) if key not in ("answer", "engine", "stop") else value)
    uvloop.run(serve(settings, port))


if __name__ == "__main__":
    main()

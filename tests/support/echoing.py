"""The embedded model with vLLM's interface: /tokenize and completions with `echo`, which llama.cpp ignores.

The log-probabilities of a prompt come from forced decoding: a grammar lets the model say the tokens of the prompt and
nothing else. All clients get the same numbers, because requests are answered one at a time and without a cache.
"""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.request
from contextlib import AsyncExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from holdfast.targets.embedded import serve

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL = "local/smollm2-135m"


class Echoing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    model_url = ""
    one_at_a_time = threading.Lock()

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Ask llama.cpp's server."""
        request = urllib.request.Request(
            self.model_url + path,
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with self.one_at_a_time, urllib.request.urlopen(request) as response:
            return json.load(response)

    def encode(self, text: str) -> list[int]:
        return self.ask("/tokenize", {"content": text, "add_special": False})["tokens"]

    def echo(self, ids: list[int]) -> dict[str, Any]:
        """Return a choice as vLLM does for `echo` with `logprobs: 1` and `max_tokens: 1`."""
        reply_id = self.encode(".")
        forced = [*ids[1:], *reply_id]  # the token of the reply, which no client looks at
        body = {
            "prompt": ids[:1],
            "n_predict": len(forced),
            "n_probs": 1,
            "temperature": 0,
            "samplers": [],
            "grammar": "root ::= " + " ".join(f"<[{number}]>" for number in forced),
            "cache_prompt": False,
        }
        steps = self.ask("/completion", body)["completion_probabilities"]
        assert [step["id"] for step in steps] == forced
        logprobs = {
            "tokens": ["", *(step["token"] for step in steps)],
            "token_logprobs": [None, *(step["logprob"] for step in steps)],
            "top_logprobs": [
                None,
                *({top["token"]: top["logprob"] for top in step["top_logprobs"]} for step in steps),
            ],
        }
        text = self.ask("/detokenize", {"tokens": [*ids, *reply_id]})["content"]
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": "length"}

    def do_GET(self) -> None:
        if self.path == "/tokenizer_info":
            properties = self.ask("/props")
            self.send({key: properties[key] for key in ("bos_token", "eos_token")})
        elif self.path == "/v1/models":
            self.send({"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 2048}]})
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self.send({"tokens": self.encode(body.get("prompt", ""))})
        elif self.path == "/v1/completions":
            prompt = body["prompt"]  # token ids, which lm-eval sends as a batch of one
            ids = prompt[0] if isinstance(prompt[0], list) else prompt
            self.send({"choices": [self.echo(ids)], "usage": {"prompt_tokens": len(ids), "completion_tokens": 1}})
        else:
            self.send_error(404)

    def send(self, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def echoing_model() -> Iterator[str]:
    """Start the embedded model with this interface before it, and yield the base URL."""
    with asyncio.Runner() as runner:
        serving = AsyncExitStack()
        model_url = runner.run(serving.enter_async_context(serve(MODEL))).removesuffix("/v1")
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Echoing,), {"model_url": model_url}))
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
            runner.run(serving.aclose())

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
from typing import TYPE_CHECKING, Any

from holdfast.targets.embedded import serve
from tests.support.serving import read_body, send, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from http.server import BaseHTTPRequestHandler

MODEL = "local/smollm2-135m"


class Echoing:
    """The interface, in front of llama.cpp's server."""

    def __init__(self, model_url: str) -> None:
        self._model_url = model_url
        self._one_at_a_time = threading.Lock()

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Ask llama.cpp's server."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._model_url + path, data, {"Content-Type": "application/json"})
        with self._one_at_a_time, urllib.request.urlopen(request) as response:
            return json.load(response)

    def _encode(self, text: str) -> list[int]:
        return self._ask("/tokenize", {"content": text, "add_special": False})["tokens"]

    def _echo(self, ids: list[int]) -> dict[str, Any]:
        """Return a choice as vLLM does for `echo` with `logprobs: 1` and `max_tokens: 1`."""
        reply_id = self._encode(".")
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
        steps = self._ask("/completion", body)["completion_probabilities"]
        assert [step["id"] for step in steps] == forced
        tops = [{top["token"]: top["logprob"] for top in step["top_logprobs"]} for step in steps]
        logprobs = {
            "tokens": ["", *(step["token"] for step in steps)],
            "token_logprobs": [None, *(step["logprob"] for step in steps)],
            "top_logprobs": [None, *tops],
        }
        text = self._ask("/detokenize", {"tokens": [*ids, *reply_id]})["content"]
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": "length"}

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer a request."""
        body = json.loads(read_body(handler) or b"{}")
        match handler.path:
            case "/tokenizer_info":
                properties = self._ask("/props")
                send(handler, 200, {key: properties[key] for key in ("bos_token", "eos_token")})
            case "/v1/models":
                model = {"id": MODEL, "object": "model", "max_model_len": 2048}
                send(handler, 200, {"object": "list", "data": [model]})
            case "/tokenize":
                send(handler, 200, {"tokens": self._encode(body.get("prompt", ""))})
            case "/v1/completions":
                prompt = body["prompt"]  # token ids, which lm-eval sends as a batch of one
                ids = prompt[0] if isinstance(prompt[0], list) else prompt
                usage = {"prompt_tokens": len(ids), "completion_tokens": 1}
                send(handler, 200, {"choices": [self._echo(ids)], "usage": usage})
            case _:
                send(handler, 404, {})


@contextmanager
def echoing_model() -> Iterator[str]:
    """Start the embedded model with this interface before it, and yield the base URL."""
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        model_url = runner.run(stack.enter_async_context(serve(MODEL))).removesuffix("/v1")
        try:
            with serving(Echoing(model_url).answer) as address:
                yield f"{address}/v1"
        finally:
            runner.run(stack.aclose())

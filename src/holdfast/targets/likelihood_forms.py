"""The requests by which servers return the log-probabilities of a text, and the paths of such servers.

Echo      completions that return their prompt, with its log-probabilities: vLLM, NIM and others
SGLang    SGLang's own /generate
LlamaCpp  llama.cpp's own /completion, with a grammar that forces the model to produce the continuation's tokens

Each is tried once on a short text before it is used. A server may accept `echo` and ignore it, and every continuation
would score alike; so the returned log-probabilities are counted, not trusted.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple, Self

from holdfast.errors import AttemptError, Fault
from holdfast.http.client import client_of
from holdfast.targets.access import eval_hints

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
    from contextlib import AsyncExitStack

    from holdfast.http.client import Balancer, Client

_LOGPROBS: Final = "Let the server return log-probabilities; for vLLM, start it with --max-logprobs 1 or more."
_PAUSES: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
"""seconds between the attempts of a probe"""
_ABSENT: Final = (401, 403, 404, 405, 501)
"""a path that the server does not have, or that a proxy does not let through"""


class Tokens(NamedTuple):
    """A context and its continuation as token ids."""

    ids: list[int]
    start: int
    """the number of the context's tokens"""

    @property
    def prompt(self) -> list[int]:
        """The value of `prompt` in a request."""
        return self.ids


class Characters(NamedTuple):
    """A context and its continuation as text, for servers without a tokenizer."""

    text: str
    start: int
    """the number of the context's characters"""

    @property
    def prompt(self) -> str:
        """The value of `prompt` in a request."""
        return self.text


class Score(NamedTuple):
    """The likelihood of a continuation."""

    logprob: float
    greedy: bool
    """each token is the most likely one"""
    tokens: int
    sent: int | None
    """tokens of the request, as the server counts them"""
    received: int | None


class Unsupported(Exception):
    """The server gives no likelihoods in this form; the message completes "the server …".

    A remedy is given if the server has the form, but one of its settings prevents it.
    """

    def __init__(self, reason: str, remedy: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy


class Form(ABC):
    """A server's way of giving likelihoods; by default one of a single kind of server, known by its answer."""

    name: ClassVar[str]
    takes_text: ClassVar[bool] = False
    """the form works without token ids"""
    notice: str | None = None
    """what the user should know about the server"""
    lacks: ClassVar[str]
    """completes "the server …" for another kind of server"""

    def __init__(self, server: ModelServer) -> None:
        self._server = server

    async def probe(self, span: Tokens | Characters, text: str) -> None:
        """Check the server's answer for a text; raise Unsupported if it is of no use."""
        try:
            await self.score(span)
        except _CutError as error:
            raise _cut_probe(error.returned, error.sent) from error
        except AttemptError as error:
            if error.kind != "bad_reply" and error.status != 500:
                raise
            raise Unsupported(f"{self.lacks}: {error.message}") from error

    @abstractmethod
    async def score(self, span: Tokens | Characters) -> Score:
        """Return the likelihood of a continuation."""


class Echo(Form):
    """Completions with `echo`, as lm-eval asks for them."""

    name = "echo"
    takes_text = True

    def __init__(self, server: ModelServer, model: str) -> None:
        super().__init__(server)
        self._model = model
        self._added = 0
        """tokens that the server adds before a prompt of ids"""
        self._shift = 0
        """characters that the server adds before a prompt of text"""

    async def probe(self, span: Tokens | Characters, text: str) -> None:
        """Count the log-probabilities of a short text."""
        try:
            reply = await self._ask(span)
        except AttemptError as error:
            if error.status not in (400, 422) or "logprobs" not in error.message:
                raise
            raise Unsupported(f"refuses `logprobs: 1`: {error.message}", _LOGPROBS) from error
        choice = _choice(reply)
        values = choice["logprobs"]
        entries, tops = values["token_logprobs"], values.get("top_logprobs")
        if len(entries) < 3:
            raise Unsupported("ignores `echo`: it returns log-probabilities of its own reply, not of the given text")
        if text not in choice["text"]:
            raise self._other_text(choice["text"], span, text, len(entries) - 1)
        if not tops or not all(tops[1:]):
            raise Unsupported("returns no `top_logprobs` for `logprobs: 1`", _LOGPROBS)
        if isinstance(span, Tokens):
            self._added = len(entries) - len(span.ids) - 1
            if self._added not in (0, 1):
                raise Unsupported(f"returns {len(entries)} log-probabilities for {len(span.ids)} tokens")
        else:
            if len(values.get("text_offset") or ()) != len(entries):
                raise Unsupported("returns no `text_offset`, so where the continuation begins is unknown")
            self._shift = "".join(values["tokens"]).find(text)
            if self._shift < 0:
                raise Unsupported(f"returns tokens that are not in {text!r}")
        if self._added or self._shift:
            self.notice = "the server adds a BOS token to every prompt; it counts as a part of the context"

    @staticmethod
    def _other_text(returned: str, span: Tokens | Characters, text: str, count: int) -> Unsupported:
        """Explain why a text of so many tokens comes back instead of the one that was sent."""
        first, last = text.split()[0], text.split()[-1]
        if returned.startswith(first) or last in returned:
            return _cut_probe(count, len(span.ids) if isinstance(span, Tokens) else None)
        if isinstance(span, Tokens):
            return Unsupported(
                f"returns {returned[:60]!r} for {text!r}: the tokenizer is not the one of its model",
                "Set target.tokenizer to the model's own tokenizer.",
            )
        return Unsupported(f"returns {returned[:60]!r} for {text!r}")

    async def score(self, span: Tokens | Characters) -> Score:
        """Sum the log-probabilities of the continuation's tokens from left to right."""
        reply = await self._ask(span)
        try:
            choice = _choice(reply)
        except Unsupported as error:
            raise AttemptError("bad_reply", f"the server {error}") from error
        values, usage = choice["logprobs"], reply.get("usage") or {}
        entries, tops = values["token_logprobs"], values.get("top_logprobs") or []
        if len(entries) < 2:
            raise AttemptError("bad_reply", "the server ignores `echo`: it returned nothing about the given text")
        if isinstance(span, Tokens):
            start, end = span.start + self._added, len(span.ids) + self._added
            # A model that says nothing more has no entry for its own token.
            own = 0 if len(entries) == end and usage.get("completion_tokens") == 0 else 1
            if len(entries) != end + own:
                raise _CutError(len(entries) - self._added - own, len(span.ids))
        else:
            if span.text not in choice["text"]:
                raise _CutError()
            offsets = values["text_offset"]
            start = sum(offset < span.start + self._shift for offset in offsets)
            end = sum(offset < len(span.text) + self._shift for offset in offsets)
        if len(tops) < end:
            raise AttemptError("bad_reply", "the server returned no `top_logprobs`")
        bests = [max(top.values(), default=None) if top else None for top in tops[start:end]]
        return _score(entries[start:end], bests, usage.get("prompt_tokens"), usage.get("completion_tokens"))

    async def _ask(self, span: Tokens | Characters) -> Any:
        body = {
            "model": self._model,
            "prompt": span.prompt,
            "max_tokens": 1,
            "logprobs": 1,
            "echo": True,
            "temperature": 0,
            "seed": 1234,
        }
        return await self._server.post("/v1/completions", body)


def _choice(reply: Any) -> Any:
    try:
        choice = reply["choices"][0]
        entries = choice["logprobs"]["token_logprobs"]
        usable = isinstance(entries, list) and isinstance(choice["text"], str)
    except (KeyError, IndexError, TypeError):
        usable = False
    if not usable:
        raise Unsupported(f"returns no log-probabilities in {_outline(reply)}")
    return choice


class SGLang(Form):
    """SGLang's /generate, which returns the log-probabilities of its input."""

    name = "sglang"
    lacks = "does not answer /generate as SGLang does"

    async def score(self, span: Tokens | Characters) -> Score:
        """Sum the log-probabilities of the continuation's tokens."""
        assert isinstance(span, Tokens)
        body = {
            "input_ids": span.ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 1,
        }
        reply = await self._server.post("/generate", body)
        try:
            meta = reply["meta_info"]
            entries, tops = meta["input_token_logprobs"], meta["input_top_logprobs"]
            ids = [entry[1] for entry in entries]
            values = [entry[0] for entry in entries[span.start :]]
            bests = [max(entry[0] for entry in top) for top in tops[span.start :]]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise AttemptError("bad_reply", f"no log-probabilities in {_outline(reply)}") from error
        if len(ids) != len(span.ids):
            raise _CutError(len(ids), len(span.ids))
        if ids != span.ids or len(bests) != len(values):
            raise AttemptError("bad_reply", "the log-probabilities are of other tokens than those that were sent")
        return _score(values, bests, meta.get("prompt_tokens"), meta.get("completion_tokens"))


class LlamaCpp(Form):
    """llama.cpp's /completion: the grammar allows one token at each step, and `n_probs` returns its probability."""

    name = "llama.cpp"
    lacks = "does not force tokens by a grammar, as llama.cpp does since December 2025"

    async def score(self, span: Tokens | Characters) -> Score:
        """Sum the log-probabilities of the tokens that the model was forced to say."""
        assert isinstance(span, Tokens)
        forced = span.ids[span.start :]
        body = {
            "prompt": span.ids[: span.start],
            "n_predict": len(forced),
            "n_probs": 1,
            "temperature": 0,
            "samplers": [],
            "grammar": "root ::= " + " ".join(f"<[{number}]>" for number in forced),
            "cache_prompt": True,
        }
        reply = await self._server.post("/completion", body)
        try:
            steps = reply["completion_probabilities"]
            ids = [step["id"] for step in steps]
            values = [step["logprob"] for step in steps]
            bests = [max(top["logprob"] for top in step["top_logprobs"]) for step in steps]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise AttemptError("bad_reply", f"no log-probabilities in {_outline(reply)}") from error
        if reply.get("truncated"):
            raise _CutError()
        if ids != forced:
            raise AttemptError("bad_reply", f"the model was not forced to say tokens {forced}: it said {ids}")
        return _score(values, bests, reply.get("tokens_evaluated"), reply.get("tokens_predicted"))


def _score(values: list[Any], bests: Iterable[Any], sent: Any, received: Any) -> Score:
    for value in values:
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise AttemptError("bad_reply", f"a token of the continuation has the log-probability {value!r:.40}")
    greedy = all(value == best for value, best in zip(values, bests, strict=True))
    # `sum`, as in lm-eval: the digits depend on the order, and since Python 3.12 on the function.
    return Score(
        float(sum(values)),
        greedy,
        len(values),
        sent if isinstance(sent, int) else None,
        received if isinstance(received, int) else None,
    )


def _outline(reply: Any) -> str:
    """Describe a reply by its keys: its values may be long."""
    if not isinstance(reply, dict):
        return "its reply, which is no JSON object"
    return f"its reply (keys: {', '.join(list(reply)[:8]) or 'none'})"


class _CutError(AttemptError):
    """The server scored fewer tokens than it was sent."""

    def __init__(self, returned: int | None = None, sent: int | None = None) -> None:
        counts = "" if returned is None else f": {returned:,} of {sent:,} tokens came back"
        super().__init__(
            "bad_request",
            f"the server cut the prompt{counts}",
            remedy="Set target.likelihood.max_length to the server's limit, and `truncate: left` to cut such rows as "
            "lm-eval does; or start the server with a longer context.",
            retry=False,
        )
        self.returned = returned
        self.sent = sent


def _cut_probe(returned: int | None, sent: int | None) -> Unsupported:
    counts = "" if returned is None or sent is None else f": {returned:,} of {sent:,} tokens came back"
    return Unsupported(
        f"cut a prompt of a few words{counts}",
        "Start the server with a longer context, or turn off its truncation of prompts.",
    )


class ModelServer:
    """Servers of one model: OpenAI's paths below the base URL, and the server's own paths next to it.

    Each path has a client, opened on first use.
    """

    def __init__(self, urls: Sequence[str], headers: Mapping[str, str], key_hint: str, opened: AsyncExitStack) -> None:
        self._urls = urls
        self._headers = headers
        self._key_hint = key_hint
        self._opened = opened
        self._clients: dict[str, Client | Balancer] = {}

    async def post(self, path: str, body: Any) -> Any:
        """Post JSON to a path and return the JSON of the reply. `/v1` in the path stands for the base URL."""
        return await (await self._client(path)).post(body)

    async def find(self, method: Literal["GET", "POST"], path: str, body: Any = None) -> Any:
        """Return the reply of a path; None if the server does not have the path."""
        client = await self._client(path)
        try:
            return await patiently(lambda: client.get() if method == "GET" else client.post(body))
        except Fault as fault:
            if fault.status not in _ABSENT:
                raise
        except AttemptError as error:
            if error.kind not in ("bad_request", "bad_reply") and error.status not in _ABSENT:
                raise
        return None

    async def _client(self, path: str) -> Client | Balancer:
        if path not in self._clients:
            urls = [
                f"{url}{path.removeprefix('/v1')}" if path.startswith("/v1/") else f"{url.removesuffix('/v1')}{path}"
                for url in self._urls
            ]
            client = client_of(urls, self._headers, eval_hints(self._key_hint))
            self._clients[path] = await self._opened.enter_async_context(client)
        return self._clients[path]


async def patiently(call: Callable[[], Awaitable[Any]]) -> Any:
    """Return the result of a call at the start of a run, which is repeated a few times if that may help."""
    for pause in _PAUSES:
        try:
            return await call()
        except AttemptError as error:
            if not error.retry or error.kind == "bad_reply" or error.status in _ABSENT:
                raise
            await asyncio.sleep(max(pause, error.retry_after or 0))
    return await call()


class Gate:
    """Limits requests in flight to a number that may change at any time. First come, first served."""

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._active = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> Self:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._leave()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        self._active -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._active < self._limit():
            turn = self._waiting.popleft()
            if not turn.cancelled():
                self._active += 1
                turn.set_result(None)

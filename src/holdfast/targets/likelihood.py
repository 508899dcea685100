"""A model that is asked for likelihoods: how likely it finds given texts after a prompt.

Contexts and continuations are divided into tokens as in lm-eval, so that the numbers are the same. White space at the
end of the context belongs to the continuation. The whole text is tokenized, and the continuation has all tokens after
the first n, if the context on its own has n. Token ids come from the server that has the model, or from the model's
`tokenizer.json` on this machine.
"""

from __future__ import annotations

import asyncio
import re
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from holdfast.canonical import digest_bytes
from holdfast.dialects.chat import plain_text
from holdfast.dialects.types import TokenCounts
from holdfast.errors import AttemptError, Fault
from holdfast.spec.schema import is_embedded
from holdfast.store.records import NO_USAGE
from holdfast.targets.access import headers_of
from holdfast.targets.likelihood_forms import (
    Characters,
    Echo,
    Gate,
    LlamaCpp,
    ModelServer,
    SGLang,
    Tokens,
    Unsupported,
    patiently,
)
from holdfast.targets.model import Model
from holdfast.targets.types import Reply, most_likely

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
    from contextlib import AsyncExitStack

    from holdfast.spec.eval import Origin
    from holdfast.spec.target_schema import ModelTarget
    from holdfast.targets.likelihood_forms import Form, Score
    from holdfast.targets.prices import Prices
    from holdfast.targets.types import Continuation, Turn

_CONTEXT: Final = "The capital of France is"
_CONTINUATION: Final = " Paris."
_HUB_NAME: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HINT: Final = "It is a tokenizer.json, a folder with one, or a name on the Hugging Face hub such as owner/name."
_FORMS: Final = (
    "These work: vLLM, NIM and other servers whose /v1/completions supports `echo` with `logprobs` (form: echo), "
    "SGLang (form: sglang), llama.cpp's server since December 2025 (form: llama.cpp), and local/smollm2-135m. Chat "
    "APIs have no likelihoods."
)


class _Span(NamedTuple):
    """A context and its continuation, as they are sent."""

    value: Tokens | Characters
    cut: int
    """tokens that were cut from the left"""


class _Failure(NamedTuple):
    """Why a form of request gives no likelihoods."""

    form: str
    reason: str
    remedy: str | None = None
    """set if this failure is decisive, and no other form has to be considered"""


class LikelihoodModel(Model):
    """Answers with the likelihood of each continuation instead of a reply."""

    def __init__(self, block: ModelTarget, prices: Prices, origin: Origin) -> None:
        super().__init__(block, prices, where=origin.where("model"))
        self.notices: list[str] = []
        self._settings = block.likelihood
        self._limit: Callable[[], int] = lambda: 1
        self._tokenizer: ServerTokenizer | LocalTokenizer | None = None
        if block.tokenizer is not None:
            self._tokenizer = LocalTokenizer(block.tokenizer, origin)
        self._form: Form
        self._prefix: int | str | None = None
        self._max_length = block.likelihood.max_length
        self._rows_cut = 0

    def limit_requests(self, limit: Callable[[], int]) -> None:
        """Keep the requests of all trials together within a limit: one trial makes several at once."""
        self._limit = limit

    @property
    def final_notices(self) -> list[str]:
        """How many rows were cut."""
        if not self._rows_cut:
            return []
        rows = "row was" if self._rows_cut == 1 else "rows were"
        assert self._max_length is not None
        limit = _describe_limit(self._max_length)
        return [f"{self._rows_cut} {rows} cut on the left (likelihood.truncate: left): {limit}"]

    async def _open(self, opening: AsyncExitStack) -> None:
        urls = await self._base_urls(opening)
        headers = headers_of(self.endpoint, self._dialect)
        server = ModelServer(urls, headers, self._key_hint, opening)
        self._gate = Gate(lambda: self._limit())
        await self._probe(server)

    async def _probe(self, server: ModelServer) -> None:
        """Find out how the server returns likelihoods; raise Fault if it does not."""
        if self._tokenizer is None:
            self._tokenizer = await ServerTokenizer.find(server, self.endpoint.model)
        text = _CONTEXT + _CONTINUATION
        characters = Characters(text, len(_CONTEXT))
        tokens = None if self._tokenizer is None else await patiently(self._probe_tokens)
        failures: list[_Failure] = []
        hint = _FORMS
        for form in self._candidates(server):
            for span in (tokens, characters if form.takes_text else None):
                if span is None:
                    if tokens is None and not form.takes_text:
                        reason = "needs token ids, and the server has no /tokenize: set target.tokenizer"
                        failures.append(_Failure(form.name, reason))
                        break
                    continue
                try:
                    await patiently(partial(form.probe, span, text))
                except Unsupported as error:
                    failures.append(_Failure(form.name, f"the server {error.reason}", error.remedy))
                except (AttemptError, Fault) as error:
                    if not _is_refusal(error):
                        raise
                    failures.append(_Failure(form.name, error.message))
                    if isinstance(error, Fault) and form.name == "echo":  # perhaps of an unknown model
                        hint = f"{error.remedy} {_FORMS}"
                else:
                    await self._settle(form, server, text=span is characters)
                    return
        raise _no_likelihoods(failures, hint)

    def _candidates(self, server: ModelServer) -> list[Form]:
        forms: list[Form] = [Echo(server, self.endpoint.model), SGLang(server), LlamaCpp(server)]
        name = self._settings.form
        if name == "auto" and is_embedded(self.block.model):
            name = "llama.cpp"
        return forms if name == "auto" else [form for form in forms if form.name == name]

    async def _probe_tokens(self) -> Tokens:
        assert self._tokenizer is not None
        context = await self._tokenizer.encode(_CONTEXT)
        return Tokens(await self._tokenizer.encode(_CONTEXT + _CONTINUATION), len(context))

    async def _settle(self, form: Form, server: ModelServer, *, text: bool) -> None:
        """Choose a form, and read the server's other properties."""
        self._form = form
        if text:
            self._tokenizer = None
        if self._max_length is None:
            self._max_length = await _read_max_length(server, self.endpoint.model)
        self._prefix = self._settings.prefix
        if self._prefix is None and self._tokenizer is not None:
            self._prefix = await patiently(self._tokenizer.prefix)
        elif isinstance(self._prefix, str) and self._tokenizer is not None:
            ids = await self._tokenizer.encode(self._prefix)
            if len(ids) != 1:
                raise Fault(
                    "rejected",
                    f"target.likelihood.prefix {self._prefix!r} is {len(ids)} tokens, not one",
                    remedy="Give the token's id, or the text of a single token.",
                )
            self._prefix = ids[0]
        source = "text" if self._tokenizer is None else self._tokenizer.source
        length = "unknown" if self._max_length is None else f"{self._max_length:,} tokens"
        self.notices = [f"likelihoods: form {form.name}, {source}, maximum length {length}"]
        if form.notice is not None:
            self.notices.append(form.notice)

    async def reply(self, turn: Turn) -> Reply:
        """Ask for the likelihood of each continuation, of all at once."""
        prompt = plain_text(turn.messages)
        async with self._gate:
            divided = await self._divide(prompt, turn.continuations)
        scores = iter(await _together(self._score(span) for spans in divided for span in spans))
        self._rows_cut += any(span.cut for spans in divided for span in spans)
        likelihoods: list[dict[str, Any]] = []
        usage = NO_USAGE
        for spans in divided:
            own = list(islice(scores, len(spans)))
            entry = {
                "logprob": sum(score.logprob for score in own),
                "greedy": all(score.greedy for score in own),
                "tokens": sum(score.tokens for score in own),
            }
            cut = sum(span.cut for span in spans)
            likelihoods.append({**entry, "cut": cut} if cut else entry)
            for score in own:
                usage += self._prices.usage(TokenCounts(input=score.sent, output=score.received))
        text = turn.continuations[most_likely([entry["logprob"] for entry in likelihoods])].text
        message = {"role": "assistant", "content": text, "likelihoods": likelihoods}
        return Reply(text=text, messages=[message], usage=usage)

    async def _score(self, span: _Span) -> Score:
        try:
            async with self._gate:
                return await self._form.score(span.value)
        except AttemptError as error:
            if (error.status or 0) >= 500:
                error.remedy = error.remedy or (
                    "If the server ran out of memory: log-probabilities of prompts need much of it. Ask for fewer at "
                    "once with limits.concurrency=4, or give the server more room (vLLM: --gpu-memory-utilization)."
                )
            raise

    async def _divide(self, prompt: str, continuations: Iterable[Continuation]) -> list[list[_Span]]:
        """Divide contexts and continuations into spans to send; a text that occurs again is encoded once.

        A continuation is one span, or as many as a rolling one needs.
        """
        known: dict[str, list[int]] = {}

        async def encode(text: str) -> list[int]:
            assert self._tokenizer is not None
            if text not in known:
                known[text] = await self._tokenizer.encode(text)
            return known[text]

        divided = []
        for each in continuations:
            if each.rolling and self._tokenizer is not None:
                limit = None if self._max_length is None else self._max_length - 1  # one is for the reply
                windows = rolling_windows(await encode(each.text), self._token_prefix(), limit)
                divided.append([_Span(window, 0) for window in windows])
            else:
                context = "" if each.rolling else prompt if each.context is None else each.context
                divided.append([await self._span(context, each.text, encode)])
        return divided

    async def _span(self, context: str, continuation: str, encode: Callable[[str], Awaitable[list[int]]]) -> _Span:
        """Divide a context and its continuation; raise AttemptError if they do not fit."""
        bare = context.rstrip()
        continuation = context[len(bare) :] + continuation
        if self._tokenizer is None:
            before = bare or self._text_prefix()
            if not continuation:
                raise _nothing()
            return _Span(Characters(before + continuation, len(before)), 0)
        if bare:
            context_ids = await encode(bare)
            whole = await encode(bare + continuation)
            # The context keeps its own tokens, even if its last token would merge with the continuation's first.
            ids = [*context_ids, *whole[len(context_ids) :]]
        else:
            ids = await encode(continuation)
            if ids[:1] != [prefix := self._token_prefix()]:
                ids = [prefix, *ids]
            context_ids = ids[:1]
        start = len(context_ids)
        if len(ids) <= start:
            raise _nothing()
        if self._max_length is None or len(ids) < self._max_length:
            return _Span(Tokens(ids, start), 0)
        excess = len(ids) + 1 - self._max_length
        if excess >= start or self._settings.truncate == "never":
            raise _too_long(len(ids), len(ids) - start, self._max_length)
        return _Span(Tokens(ids[excess:], start - excess), excess)

    def _token_prefix(self) -> int:
        if not isinstance(self._prefix, int):
            raise _no_prefix()
        return self._prefix

    def _text_prefix(self) -> str:
        if not isinstance(self._prefix, str):
            raise _no_prefix()
        return self._prefix


def rolling_windows(ids: list[int], prefix: int, limit: int | None) -> Iterator[Tokens]:
    """Divide a text into windows, in which each token is judged once, after at least one token before it.

    The windows are lm-eval's (`get_rolling_token_windows` with a context of 1, and `make_disjoint_window`): the first
    begins with the prefix, and the last is filled up with tokens of the one before.
    """
    size = max(1, len(ids) if limit is None else limit - 1)
    for start in range(0, len(ids), size):
        end = min(start + size, len(ids))
        if start == 0:
            yield Tokens([prefix, *ids[:end]], 1)
        else:
            yield Tokens(ids[end - size - 1 : end], size + 1 - (end - start))


async def _read_max_length(server: ModelServer, model: str) -> int | None:
    """Return the model's context length, which vLLM and SGLang list with the model, and llama.cpp under /props."""
    listed = await server.find("GET", "/v1/models")
    models = listed.get("data") if isinstance(listed, dict) else None
    entries = [entry for entry in models or [] if isinstance(entry, dict)]
    entries = [entry for entry in entries if entry.get("id") == model] or entries[:1]
    lengths = [entry.get("max_model_len") for entry in entries]
    if not any(isinstance(length, int) for length in lengths):
        props = await server.find("GET", "/props")
        settings = props.get("default_generation_settings") if isinstance(props, dict) else None
        lengths = [settings.get("n_ctx")] if isinstance(settings, dict) else []
    return next((length for length in lengths if isinstance(length, int)), None)


async def _together(calls: Iterable[Awaitable[Score]]) -> list[Score]:
    """Return the results of concurrent calls; if one fails, cancel the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _is_refusal(error: AttemptError | Fault) -> bool:
    """Return True if a server refuses a form of request for good."""
    if isinstance(error, Fault):
        return error.status in (404, 405)
    return error.kind in ("bad_request", "bad_reply") or error.status in (405, 501)


def _no_likelihoods(failures: list[_Failure], hint: str) -> Fault:
    """Return the fault of a server that no form fits: the reason that has a remedy, or a line for each form."""
    decisive = next((failure for failure in failures if failure.remedy is not None), None)
    lines = dict.fromkeys(
        f"  {failure.form}: {failure.reason}"
        for failure in failures
        if decisive is None or failure.form != decisive.form
    )
    if decisive is None:
        message = "the server gives no likelihoods of the text it is given, so every continuation would score alike"
        return Fault("rejected", "\n".join([f"{message}. These forms were tried:", *lines]), remedy=hint)
    message = f"no likelihoods: {decisive.reason} (form {decisive.form})"
    others = ["Other forms that were tried:", *lines] if lines else []
    return Fault("rejected", "\n".join([message, *others]), remedy=decisive.remedy)


def _nothing() -> AttemptError:
    return AttemptError("bad_request", "a continuation has no token of its own after its context", retry=False)


def _describe_limit(max_length: int) -> str:
    return f"the maximum length is {max_length:,} tokens, one of which is for the reply"


def _too_long(tokens: int, own: int, max_length: int) -> AttemptError:
    """Return the error of a row that is not cut, or whose continuation leaves no room for a token of its context."""
    limit = _describe_limit(max_length)
    longer = "Serve the model with a longer context, or set target.likelihood.max_length if it takes more"
    if own + 2 > max_length:
        problem = f"the continuation has {own:,} tokens by itself and does not fit after a context: {limit}"
        return AttemptError("bad_request", problem, remedy=f"{longer}.", retry=False)
    return AttemptError(
        "bad_request",
        f"context and continuation have {tokens:,} tokens ({own:,} of the continuation); {limit}",
        remedy=f"{longer}; or cut such rows as lm-eval does with `truncate: left` there.",
        retry=False,
    )


def _no_prefix() -> AttemptError:
    return AttemptError(
        "bad_request",
        "the context is empty, and the server does not say which token begins a text",
        remedy="Name it under target.likelihood.prefix, by its id or its text.",
        retry=False,
    )


class ServerTokenizer:
    """The tokenizer of the server, without special tokens, in the form of vLLM and SGLang or of llama.cpp."""

    def __init__(self, server: ModelServer, path: str, fields: Mapping[str, Any], key: str) -> None:
        self.source = f"token ids from the server's {path.lstrip('/')}"
        self._server = server
        self._path = path
        self._fields = fields
        self._key = key

    @classmethod
    async def find(cls, server: ModelServer, model: str) -> ServerTokenizer | None:
        """Return the tokenizer of a server; None for a server without one."""
        vllm = {"model": model, "add_special_tokens": False}
        llama_cpp = {"add_special": False}
        for path in ("/tokenize", "/v1/tokenize"):
            for fields, key in ((vllm, "prompt"), (llama_cpp, "content")):
                tokenizer = cls(server, path, fields, key)
                reply = await server.find("POST", path, tokenizer.request("a"))
                if isinstance(reply, dict) and reply.get("tokens"):  # llama.cpp finds nothing in vLLM's form
                    return tokenizer
        return None

    def request(self, text: str) -> dict[str, Any]:
        """Return the body of a request."""
        return {**self._fields, self._key: text}

    async def encode(self, text: str) -> list[int]:
        """Ask the server for the ids of a text."""
        if not text:
            return []
        reply = await self._server.post(self._path, self.request(text))
        ids = reply.get("tokens") if isinstance(reply, dict) else None
        if not isinstance(ids, list) or not {int}.issuperset(map(type, ids)):
            raise AttemptError("bad_reply", f"{self._path} returned no token ids: {str(reply)[:200]}")
        return ids

    async def prefix(self) -> int | None:
        """Return the token before an empty context: BOS, or else EOS; None if neither is known.

        vLLM shows them under /tokenizer_info, llama.cpp under /props.
        """
        for path in ("/tokenizer_info", "/props"):
            info = await self._server.find("GET", path)
            for name in ("bos_token", "eos_token"):
                token = info.get(name) if isinstance(info, dict) else None
                if isinstance(token, str) and (ids := await self.encode(token)):
                    return ids[0]
        return None


class LocalTokenizer:
    """A `tokenizer.json`, read by the package `tokenizers`."""

    def __init__(self, written: str, origin: Origin) -> None:
        self.source = f"token ids of {written}"
        try:
            import tokenizers
        except ImportError:
            raise origin.error(
                "target.tokenizer needs the package tokenizers", "Install it with: pip install tokenizers"
            ) from None
        path = tokenizer_file(written, origin)
        try:
            if path is None:
                self._tokenizer = tokenizers.Tokenizer.from_pretrained(written)
            else:
                self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare exceptions, for files and for the hub alike
            raise origin.error(f"tokenizer {written!r} cannot be loaded: {error}", _HINT) from error
        self._special = _special_tokens(path)

    async def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    async def prefix(self) -> int | None:
        """Return the id of the token that the folder's `tokenizer_config.json` calls BOS, or else EOS."""
        ids = (self._tokenizer.token_to_id(token) for token in self._special)
        return next((number for number in ids if number is not None), None)


def tokenizer_file(written: str, origin: Origin) -> Path | None:
    """Return the file that `target.tokenizer` names, relative to the eval file; None for a name on the hub."""
    path = origin.folder / Path(written).expanduser()
    if path.is_dir():
        path /= "tokenizer.json"
    if path.is_file():
        return path
    if written.endswith(".json") or not _HUB_NAME.fullmatch(written):
        raise origin.error(f"tokenizer: {path}: no such file", _HINT)
    return None


def tokenizer_identity(written: str, origin: Origin) -> str:
    """Return what identifies a tokenizer: the digest of its file, or its name on the hub."""
    path = tokenizer_file(written, origin)
    return written if path is None else digest_bytes(path.read_bytes())


def _special_tokens(path: Path | None) -> Iterable[str]:
    config = None if path is None else path.with_name("tokenizer_config.json")
    if config is None or not config.is_file():
        return []
    try:
        values = msgspec.json.decode(config.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError:
        return []
    tokens = (values.get(name) for name in ("bos_token", "eos_token"))
    return [token["content"] if isinstance(token, dict) else token for token in tokens if token]

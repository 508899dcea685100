"""A model with an API, in any dialect."""

from __future__ import annotations

import os
import re
import time
from contextlib import AsyncExitStack
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Self

from msgspec.structs import replace

from holdfast.dialects import dialect_at
from holdfast.dialects.reading import split_thoughts
from holdfast.dialects.types import UNKNOWN, ModelRequest, is_known
from holdfast.errors import AttemptError, ConfigError, Fault, Problem
from holdfast.http.client import Client, client_of
from holdfast.http.response import mend
from holdfast.spec.grader_schema import is_judge
from holdfast.spec.plugins import load_reference
from holdfast.spec.providers import endpoint_of, provider_of, suggest_prefix
from holdfast.spec.redact import shown_url
from holdfast.spec.schema import is_embedded
from holdfast.spec.target_schema import ModelTarget
from holdfast.spec.template import normal_expression
from holdfast.targets.access import eval_hints, headers_of, signer_of
from holdfast.targets.prices import Prices
from holdfast.targets.types import Reply, Target, batch_problem

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping

    from holdfast.dialects.types import Answer
    from holdfast.http.client import Balancer
    from holdfast.spec.eval import Origin
    from holdfast.spec.eval_schema import ResponderBlock
    from holdfast.spec.grader_schema import PromptGrader
    from holdfast.targets.tools import Toolbox
    from holdfast.targets.types import BatchedClient, BatchHub, Calls, Message, Turn


_PARTS: Final = {
    "likelihood": "holdfast.targets.likelihood:LikelihoodModel",
    "tokenizer_identity": "holdfast.targets.likelihood:tokenizer_identity",
    "tools": "holdfast.targets.tools:Toolbox",
    "tools_identity": "holdfast.targets.tools:tools_identity",
    "check_embedded": "holdfast.targets.embedded:check_embedded",
    "serve_embedded": "holdfast.targets.embedded:serve",
}
"""parts that few evals need, loaded by name"""
_MOST_PAUSES: Final = 20
"""how often a model that pauses within an answer is asked to go on"""


class Model(Target):
    """Answers with one request per turn; with tools, with as many as it takes."""

    schema = ModelTarget
    block: ModelTarget

    def __init__(
        self,
        block: ModelTarget,
        prices: Prices,
        tools: Toolbox | None = None,
        where: str = "",
        schema: Mapping[str, Any] | None = None,
    ) -> None:
        self.block = block
        self._prices = prices
        self._tools = tools
        self._schema = schema
        self.endpoint = endpoint_of(block.model, block.api, block.base_url, block.api_key_env)
        self._client: Client | Balancer | None = None
        self._batches: BatchHub | None = None
        self._batched: BatchedClient | None = None
        """if the run has batches"""
        self._place = "target"
        """the block of the eval file that asks"""
        self._odd_stops: set[str] = set()
        """stop reasons that no table has"""
        self._opened = AsyncExitStack()
        if is_embedded(block.model):
            _part("check_embedded")(block.model, where)
        elif block.batch is None or block.batch.via == "api":
            self._check_endpoint(where)
        if block.batch is not None and (problem := batch_problem(block.batch, block.model, self.endpoint)):
            raise ConfigError([Problem(where, problem)], remedy="Remove `batch`.")
        self._dialect = dialect_at(self.endpoint)
        self._signer = signer_of(self.endpoint)

    @classmethod
    def build(cls, block: ModelTarget, origin: Origin) -> Model:
        """Build the target of an eval, with its tools."""
        if origin.spec.continuations is not None:
            if block.batch is not None:
                problem = Problem(origin.where("batch"), "likelihoods cannot be asked for in batches")
                raise ConfigError([problem], remedy="Remove `batch`.")
            model: Model = _part("likelihood")(block, Prices(block.model, origin.spec.prices), origin)
            return model
        tools = _part("tools")(block.tools, origin.spec) if block.tools else None
        prices, where = Prices(block.model, origin.spec.prices), origin.where("model")
        return cls(block, prices, tools, where, _schema_of(block, origin))

    @classmethod
    def identity(cls, block: ModelTarget, origin: Origin) -> dict[str, Any]:
        """Leave out the model's URL, unless `identity: url` is set."""
        provider, name = provider_of(block.model, block.base_url)
        api = block.api or provider.api
        identity: dict[str, Any] = {"model": name, "api": api, "params": block.params, "version": block.version}
        if origin.spec.continuations is not None:
            del identity["params"]  # they are about replies
            identity |= likelihood_identity(block, origin)
        elif block.params_from is not None:
            identity["params_from"] = normal_expression(block.params_from)
        if block.reasoning_history != "auto":
            identity["reasoning_history"] = block.reasoning_history
        if block.strip_reasoning is not None:
            identity["strip_reasoning"] = block.strip_reasoning.model_dump()
        if block.json_schema is not None:
            identity["schema"] = _schema_of(block, origin)
        if block.identity == "url":
            endpoint = endpoint_of(block.model, block.api, block.base_url)
            default = block.base_url is None and endpoint.hosted
            urls = [""] if default else sorted(shown_url(url) for url in endpoint.urls)
            identity["base_url"] = urls if isinstance(block.base_url, list) or len(urls) > 1 else urls[0]
        if block.tools:
            identity |= {"tools": _part("tools_identity")(block.tools, origin.spec), "max_steps": block.max_steps}
        return identity

    @classmethod
    def of(cls, block: PromptGrader | ResponderBlock, prices: Prices, where: str) -> Model:
        """Return the model of a judge or a simulated user."""
        assert isinstance(block.model, str)
        asked = ModelTarget(
            model=block.model,
            base_url=block.base_url,
            api_key_env=block.api_key_env,
            api=block.api,
            params=block.params,
            batch=getattr(block, "batch", None),
        )
        model = cls(asked, prices, where=where)
        model._place = f"graders.{block.name}" if is_judge(block) else "responder"
        return model

    def _check_endpoint(self, where: str) -> None:
        """Raise ConfigError if the model cannot be asked."""
        if self.block.stream and self.endpoint.access == "aws" and self.endpoint.api == "messages":
            message = f"{self.block.model} cannot be streamed: Bedrock has a format of its own for streams"
            raise ConfigError([Problem(where, message)], remedy="Remove `stream: true` from target.")
        unset = [name for name in self.endpoint.needs if not os.environ.get(name)]
        if not unset:
            return
        exports = " ".join(f"{name}=…" for name in unset)
        hint = suggest_prefix(self.block.model, self.block.base_url)
        problem = "no API key: " if unset == [self.endpoint.key_env] else ""
        raise ConfigError(
            [Problem(where, f"{problem}{' and '.join(unset)} {'are' if len(unset) > 1 else 'is'} not set")],
            remedy=hint or f"export {exports}, or point base_url there at your server.",
        )

    def use_batches(self, batches: BatchHub, where: str = "target") -> None:
        """Take part in the batches of a run, before it is opened."""
        self._batches, self._asked_by = batches, where

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opening:  # closes what was opened before a failure
            await self._open(opening)
            self._opened = opening.pop_all()
        return self

    async def _base_urls(self, opening: AsyncExitStack) -> list[str]:
        if is_embedded(self.block.model):
            return [await opening.enter_async_context(_part("serve_embedded")(self.block.model))]
        return self.endpoint.urls

    @property
    def _key_hint(self) -> str:
        name = self.endpoint.key_env
        if self.endpoint.access == "gcp" or (self.endpoint.access == "aws" and not os.environ.get(name)):
            return "Check the account's permissions for this model."
        return f"Check the key in {name}." if os.environ.get(name) else f"Set {name}: it is empty."

    async def _open(self, opening: AsyncExitStack) -> None:
        urls = await self._base_urls(opening)
        path = self._dialect.path(self.endpoint.model, stream=self.block.stream)
        headers = headers_of(self.endpoint, self._dialect)
        hints = eval_hints(self._key_hint, suggest_prefix(self.block.model, self.block.base_url) or "")
        client = client_of([url + path for url in urls], headers, hints, self._signer)
        self._client = await opening.enter_async_context(client)
        self._batched = self._join_batches(path)
        if self._tools is not None:
            await opening.enter_async_context(self._tools)

    def _join_batches(self, path: str) -> BatchedClient | None:
        if self._batches is None or not isinstance(self._client, Client):
            return None
        return self._batches.client(self._client, self.endpoint, path, self.block.batch, self._asked_by)

    async def __aexit__(self, *details: Any) -> None:
        await self._opened.__aexit__(*details)

    async def reply(self, turn: Turn) -> Reply:
        """Ask for the next assistant message; call the tools it asks for, until it answers."""
        try:
            if self._tools is not None:
                return await self._reply_with_tools(turn, self._tools)
            if turn.calls is not None and self.block.may_pause and self.endpoint.api == "messages":
                return await self.answer(turn.messages, turn.calls, dict(turn.params), turn.load)
            return await self.complete(turn.messages, turn.params, turn.load)
        except (AttemptError, Fault) as error:
            raise self.explained(error) from error

    async def _reply_with_tools(self, turn: Turn, toolbox: Toolbox) -> Reply:
        assert turn.calls is not None
        tools = await toolbox.of(turn.calls)
        await toolbox.restore(tools, turn)
        offered = [tool.definition() for tool in tools.values()]
        messages: list[Message] = []
        for _ in range(self.block.max_steps):
            conversation, more = [*turn.messages, *messages], {**turn.params, "tools": offered}
            reply = await self.answer(conversation, turn.calls, more, turn.load)
            messages += reply.messages or []
            calls = messages[-1].get("tool_calls") or []
            if not calls:
                return replace(reply, messages=messages)
            for call in calls:
                messages.append(await toolbox.answer(tools, call, turn))
        return Reply(text=reply.text, messages=messages, stop="max_steps", first_token=reply.first_token)

    async def answer(
        self, messages: list[Message], calls: Calls, more: dict[str, Any], load: Callable[[str], bytes] | None = None
    ) -> Reply:
        """Return the model's answer to a conversation, from the trial's record if possible."""

        async def ask(sent: list[Message]) -> Reply:
            async def live() -> Reply:
                return await self._ask_once(self.request(sent, more, self._schema, load))

            request = {"model": self.endpoint.model, **self.block.params, **more, "messages": sent}
            reply: Reply = await calls.model(request, live)
            return reply

        reply = await ask(messages)
        for _ in range(_MOST_PAUSES):
            if not _is_paused(reply):
                break
            reply = self._join(reply, await ask([*messages, *(reply.messages or ())]))
        return reply

    def complete(
        self,
        messages: list[Message],
        more: Mapping[str, Any] = MappingProxyType({}),
        load: Callable[[str], bytes] | None = None,
    ) -> Coroutine[Any, Any, Reply]:
        """Return the model's answer to a conversation; `more` is sent in addition to the target's parameters.

        `load` returns the content of a file that a message names by its digest.
        """
        return self.ask(self.request(messages, more, self._schema, load))

    def request(
        self,
        messages: list[Message],
        more: Mapping[str, Any],
        schema: Mapping[str, Any] | None,
        load: Callable[[str], bytes] | None = None,
    ) -> ModelRequest:
        """Return a request with the target's settings."""
        params, tools = self.block.params, ()
        if more or "tools" in params:
            params = {**params, **more}
            tools = params.pop("tools", ())
        return ModelRequest(
            model=self.endpoint.model,
            messages=messages,
            tools=tools,
            params=params,
            stream=self.block.stream,
            reasoning_history=self.block.reasoning_history,
            schema=schema,
            load=load,
        )

    async def ask(self, request: ModelRequest) -> Reply:
        """Send a request and return the model's answer. A message in which it paused is sent back, to be continued."""
        reply = await self._ask_once(request)
        for _ in range(_MOST_PAUSES):
            if not _is_paused(reply):
                break
            try:
                rest = await self._ask_once(replace(request, messages=[*request.messages, *(reply.messages or ())]))
            except AttemptError as error:
                error.usage = reply.usage if error.usage is None else reply.usage + error.usage  # was paid for
                raise
            reply = self._join(reply, rest)
        return reply

    def _join(self, paused: Reply, rest: Reply) -> Reply:
        assert paused.messages and rest.messages
        message = self._without_thoughts(self._dialect.join(paused.messages[-1], rest.messages[-1]))
        text, usage = message.get("content") or "", paused.usage + rest.usage
        return replace(rest, text=text, messages=[message], usage=usage, first_token=paused.first_token)

    async def _ask_once(self, request: ModelRequest) -> Reply:
        assert self._client is not None
        body, first, in_batch = self._dialect.encode(request), None, False
        if request.stream:
            answer, first = await self._streamed(body)
        elif self._batched is not None:
            reply, in_batch = await self._batched.post(body)
            answer = self._dialect.read(reply)
        else:
            answer = self._dialect.read(await self._client.post(body))
        tokens, tier = answer.tokens, request.params.get("service_tier") or request.params.get("serviceTier")
        if tier and tokens.tier is None:  # the reply does not say which one it got
            tokens = replace(tokens, tier=str(tier))
        usage = self._prices.usage(tokens, batch=in_batch)
        if answer.action == "retry":
            message = f"the server ended the answer with {answer.stop!r}: it has failed, and the answer is not whole"
            raise AttemptError("server", message, usage=usage)
        if not is_known(answer.stop):
            self._odd_stops.add(answer.stop)
        answer = replace(answer, message=self._without_thoughts(answer.message))
        return Reply(text=answer.text, messages=[answer.message], usage=usage, stop=answer.stop, first_token=first)

    def _without_thoughts(self, message: Message) -> Message:
        marks = self.block.strip_reasoning
        return message if marks is None else split_thoughts(message, marks)

    @property
    def final_notices(self) -> list[str]:
        """Notices for the end of the run: stop reasons and usage that Holdfast does not know."""
        strays = [] if self._client is None else self._client.notices
        return [*_stop_notices(self.block.model, self._odd_stops), *self._prices.notices, *strays]

    async def _streamed(self, body: dict[str, Any]) -> tuple[Answer, float | None]:
        """Return a streamed answer, and the seconds until its first token."""
        assert self._client is not None
        started, first = time.monotonic(), None
        reader = self._dialect.reader()
        async for event in self._client.stream(body, halves=True):
            if reader.feed(event) and first is None:
                first = time.monotonic() - started
        answer = reader.finish()
        return replace(answer, message=mend(answer.message)), first

    def explained(self, error: AttemptError | Fault) -> AttemptError | Fault:
        """Make a refusal that every request will meet a Fault, with the line to write."""
        line = self._dialect.explain(error)
        if line is None:
            return error
        line = re.sub(r"\btarget\b", self._place, line)
        return Fault("rejected", error.message, remedy=line, status=error.status)


class AsksModel:
    """Opens and closes with the model that it asks: a judge, or a simulated user."""

    _model: Model | AsksModel

    async def __aenter__(self) -> Self:
        await self._model.__aenter__()
        return self

    async def __aexit__(self, *details: object) -> None:
        await self._model.__aexit__(*details)

    @property
    def final_notices(self) -> list[str]:
        """Notices for the end of the run: stop reasons and usage that Holdfast does not know."""
        return self._model.final_notices


def _part(name: str) -> Any:
    return load_reference(_PARTS[name])


def _is_paused(reply: Reply) -> bool:
    return reply.stop == "pause" and bool(reply.messages)


def _stop_notices(model: str, words: set[str]) -> Iterator[str]:
    for word in sorted(words - {UNKNOWN}):
        yield f"{model} ended answers with {word!r}, which Holdfast does not know; they are graded as whole ones"
    if UNKNOWN in words:
        yield f"{model} ended answers without a stop reason, so that they may be cut; they are graded as whole ones"


def _schema_of(block: ModelTarget, origin: Origin) -> dict[str, Any] | None:
    schema = block.json_schema
    return origin.read_schema(schema) if isinstance(schema, str) else schema


def likelihood_identity(block: ModelTarget, origin: Origin) -> dict[str, Any]:
    """Return the settings that can change a likelihood, if they are set."""
    identity: dict[str, Any] = {}
    if settings := block.likelihood.model_dump(exclude_defaults=True):
        identity["likelihood"] = settings
    if block.tokenizer is not None:
        identity["tokenizer"] = _part("tokenizer_identity")(block.tokenizer, origin)
    return identity

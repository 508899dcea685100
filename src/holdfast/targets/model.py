"""A model behind an OpenAI-compatible API."""

from __future__ import annotations

import os
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Self

import msgspec
from msgspec.structs import replace

from holdfast.errors import AttemptError, ConfigError, Problem
from holdfast.spec.redact import shown_url
from holdfast.spec.schema import ModelTarget, is_embedded
from holdfast.targets.embedded import check_embedded, serve
from holdfast.targets.endpoints import DEFAULT_BASE_URL, base_urls
from holdfast.targets.prices import Prices
from holdfast.targets.tokenizer import tokenizer_identity
from holdfast.targets.types import Reply, Target

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from holdfast.spec.grader_schema import PromptGrader
    from holdfast.spec.origin import Origin
    from holdfast.spec.schema import ResponderBlock
    from holdfast.store.records import Usage
    from holdfast.targets.balancer import Balancer
    from holdfast.targets.client import Client
    from holdfast.targets.tools import Toolbox
    from holdfast.targets.types import Calls, Message, Turn


class Model(Target):
    """Answers with one request per turn; with tools, with as many as it takes."""

    schema = ModelTarget
    block: ModelTarget

    def __init__(self, block: ModelTarget, prices: Prices, tools: Toolbox | None = None, where: str = "") -> None:
        self.block = block
        self._prices = prices
        self._tools = tools
        self._client: Client | Balancer | None = None
        self._opened = AsyncExitStack()
        if is_embedded(block.model):
            check_embedded(block.model, where)
        else:
            self._check_key(where)

    @classmethod
    def build(cls, block: ModelTarget, origin: Origin) -> Model:
        """Build the target of an eval, with its tools."""
        if origin.spec.continuations is not None:
            from holdfast.targets.likelihood import LikelihoodModel  # which few evals need

            return LikelihoodModel(block, Prices(block.model, origin.spec.prices), origin)
        tools = None
        if block.tools:
            from holdfast.targets.tools import Toolbox  # which few evals need

            tools = Toolbox(block.tools, origin.spec)
        return cls(block, Prices(block.model, origin.spec.prices), tools, origin.where("model"))

    @classmethod
    def identity(cls, block: ModelTarget, origin: Origin) -> dict[str, Any]:
        """Leave out where the model is asked, unless `identity: url` is set."""
        identity = block.model_dump(include={"model", "api", "params", "version"})
        if origin.spec.continuations is not None:
            del identity["params"]  # they are about replies
            identity |= likelihood_identity(block, origin)
        elif block.params_from is not None:
            identity["params_from"] = block.params_from
        if block.identity == "url":
            urls = sorted(shown_url(url) for url in base_urls(block.base_url, ""))
            identity["base_url"] = urls if isinstance(block.base_url, list) or len(urls) > 1 else urls[0]
        if block.tools:
            from holdfast.targets.tools import tools_identity

            identity |= {"tools": tools_identity(block.tools, origin.spec), "max_steps": block.max_steps}
        return identity

    @classmethod
    def of(cls, block: PromptGrader | ResponderBlock, prices: Prices, where: str) -> Model:
        """Return the model of a judge or a simulated user."""
        assert block.model is not None
        asked = ModelTarget(
            model=block.model,
            base_url=block.base_url,
            api_key_env=block.api_key_env or "OPENAI_API_KEY",
            params=block.params,
        )
        return cls(asked, prices, where=where)

    def _check_key(self, where: str) -> None:
        name = self.block.api_key_env
        if DEFAULT_BASE_URL in base_urls(self.block.base_url) and not os.environ.get(name):
            raise ConfigError(
                [Problem(where, f"no API key: {name} is not set")],
                remedy=f"export {name}=…, or point base_url there (or OPENAI_BASE_URL) at your server.",
            )

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opening:  # closes what was opened before a failure
            await self._open(opening)
            self._opened = opening.pop_all()
        return self

    async def _base_urls(self, opening: AsyncExitStack) -> list[str]:
        if is_embedded(self.block.model):
            return [await opening.enter_async_context(serve(self.block.model))]
        return base_urls(self.block.base_url)

    @property
    def _key_hint(self) -> str:
        name = self.block.api_key_env
        return f"Check the key in {name}." if os.environ.get(name) else f"Set {name}: it is empty."

    async def _open(self, opening: AsyncExitStack) -> None:
        urls = await self._base_urls(opening)
        path = "/chat/completions" if self.block.api == "chat" else "/completions"
        from holdfast.targets.balancer import client_of  # aiohttp takes long to import
        from holdfast.targets.client import bearer

        client = client_of([url + path for url in urls], bearer(self.block.api_key_env), self._key_hint)
        self._client = await opening.enter_async_context(client)
        if self._tools is not None:
            await opening.enter_async_context(self._tools)

    async def __aexit__(self, *details: Any) -> None:
        await self._opened.__aexit__(*details)

    async def reply(self, turn: Turn) -> Reply:
        """Ask for the next assistant message; call the tools it asks for, until it answers."""
        if self._tools is None:
            return await self.complete(turn.messages, turn.params)
        from holdfast.targets.tools import answer

        assert turn.calls is not None
        tools = await self._tools.of(turn.calls)
        await self._tools.restore(tools, turn)
        offered = [tool.definition() for tool in tools.values()]
        messages: list[Message] = []
        for _ in range(self.block.max_steps):
            reply = await self.answer([*turn.messages, *messages], turn.calls, {**turn.params, "tools": offered})
            messages += reply.messages or []
            calls = messages[-1].get("tool_calls") or []
            if not calls:
                return replace(reply, messages=messages)
            for call in calls:
                messages.append(await answer(tools, call, turn))
        return Reply(text=reply.text, messages=messages, stop="max_steps", first_token=reply.first_token)

    async def answer(self, messages: list[Message], calls: Calls, more: dict[str, Any]) -> Reply:
        """Return the model's answer to a conversation, from the trial's record where it is there."""

        async def ask() -> Any:
            return msgspec.to_builtins(await self.complete(messages, more))

        request = {"model": self.block.model, **self.block.params, **more, "messages": messages}
        return msgspec.convert(await calls.model(request, ask), Reply)

    async def complete(self, messages: list[Message], more: Mapping[str, Any] | None = None) -> Reply:
        """Return the model's answer to a conversation; `more` is sent beside the target's parameters."""
        assert self._client is not None
        body: dict[str, Any] = {"model": self.block.model, **self.block.params, **(more or {})}
        if self.block.api == "chat":
            body["messages"] = messages
        else:
            body["prompt"] = plain_text(messages)
        if self.block.stream:
            body["stream"] = True
            body.setdefault("stream_options", {"include_usage": True})
            return await self._streamed(self._client.stream(body))
        return self._whole(await self._client.post(body))

    def _whole(self, data: Any) -> Reply:
        try:
            choice = data["choices"][0]
            message = choice["message"] if self.block.api == "chat" else {"content": choice["text"]}
            content = message.get("content")
            stop = choice.get("finish_reason") or "stop"
            usage = self._usage(data.get("usage"))
            check_choice(choice)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise AttemptError("bad_reply", f"the reply has no answer in it: {str(data)[:200]}") from error
        if not isinstance(message.get("tool_calls") or [], list):
            raise AttemptError("bad_reply", f"not tool calls: {str(message)[:200]}")
        text = "" if content is None else content  # the model only thought, or only calls tools
        if not isinstance(text, str):
            raise AttemptError("bad_reply", f"the answer is not a text: {str(message)[:200]}")
        # Beside tool calls, null is sent back as null: some servers refuse an empty text there.
        reply: Message = {"role": "assistant", "content": content if message.get("tool_calls") else text}
        if self.block.api == "chat":
            reply |= {key: message[key] for key in ("tool_calls", "reasoning_content") if message.get(key)}
        return Reply(text=text, messages=[reply], usage=usage, stop=str(stop))

    async def _streamed(self, events: AsyncIterator[Any]) -> Reply:
        started, first = time.monotonic(), None
        parts: list[str] = []
        calls: dict[int, dict[str, Any]] = {}
        stop, usage = None, None
        async for event in events:
            try:
                usage = event.get("usage") or usage
                for choice in event.get("choices") or []:
                    check_choice(choice)
                    delta = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
                    if delta.get("content"):
                        first = time.monotonic() - started if first is None else first
                        parts.append(delta["content"])
                    for piece in delta.get("tool_calls") or []:
                        join_tool_call(calls, piece)
                    stop = choice.get("finish_reason") or stop
            except (AttributeError, TypeError) as error:
                raise AttemptError("bad_reply", f"not an event of a completion: {str(event)[:200]}") from error
        if stop is None:
            raise AttemptError("bad_reply", "the stream ended before the answer was complete")
        text = "".join(parts)
        message: Message = {"role": "assistant", "content": text if parts or not calls else None}
        if calls:
            message["tool_calls"] = [calls[number] for number in sorted(calls)]
        return Reply(
            text=text,
            messages=[message],
            usage=self._usage(usage),
            stop=stop,
            first_token=first,
        )

    def _usage(self, data: Any) -> Usage:
        counts = data if isinstance(data, dict) else {}
        sent, received = counts.get("prompt_tokens"), counts.get("completion_tokens")
        return self._prices.usage(
            sent if isinstance(sent, int) else None, received if isinstance(received, int) else None
        )


def plain_text(messages: list[Message]) -> str:
    """Return a conversation as the prompt of a completion."""
    return "\n\n".join(str(message["content"]) for message in messages)


def likelihood_identity(block: ModelTarget, origin: Origin) -> dict[str, Any]:
    """Return what can change a likelihood, as far as it is set."""
    identity: dict[str, Any] = {}
    if settings := block.likelihood.model_dump(exclude_defaults=True):
        identity["likelihood"] = settings
    if block.tokenizer is not None:
        identity["tokenizer"] = tokenizer_identity(block.tokenizer, origin)
    return identity


def check_choice(choice: dict[str, Any]) -> None:
    """Raise AttemptError where a router reports a failure of its server instead of an answer, or inside one."""
    if choice.get("error") or choice.get("finish_reason") == "error":
        error = choice.get("error")
        message = (error.get("message") if isinstance(error, dict) else error) or "no reason given"
        raise AttemptError("server", f"the answer ends with an error: {message}"[:300])


def join_tool_call(calls: dict[int, dict[str, Any]], piece: dict[str, Any]) -> None:
    """Add a piece of a tool call, as streams have them, to its earlier pieces."""
    number = piece.get("index")
    if number is None:  # some servers omit the index: a new name is a new call
        number = len(calls) - 1 if calls and not (piece.get("function") or {}).get("name") else len(calls)
    call = calls.setdefault(number, {"type": "function", "function": {"name": "", "arguments": ""}})
    if piece.get("id"):
        call["id"] = piece["id"]
    function = piece.get("function") or {}
    for key in ("name", "arguments"):
        call["function"][key] += function.get(key) or ""

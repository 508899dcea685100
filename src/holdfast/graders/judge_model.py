"""Requests to a judge model: with structured output and a token limit, as far as its server supports them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Self

from holdfast.errors import AttemptError
from holdfast.targets.model import Model

if TYPE_CHECKING:
    from holdfast.spec.grader_schema import PromptGrader
    from holdfast.store.records import Usage
    from holdfast.targets.batches import Batches
    from holdfast.targets.prices import Prices
    from holdfast.targets.types import Message, Reply

DEFAULT_LIMIT: Final = 4096
"""tokens of a judge's reply where `params` sets no limit: room to reason, and an end for a model that finds none"""
_LIMITS: Final = ("max_tokens", "max_completion_tokens")


class JudgeModel:
    """A judge's model, used by many gradings at once. Remembers which request fields its server rejects."""

    def __init__(self, block: PromptGrader, prices: Prices, where: str) -> None:
        assert block.model is not None
        self.name = block.model
        self._model = Model.of(block, prices, where)
        self._limit: dict[str, int] = (
            {} if any(name in block.params for name in _LIMITS) else {_LIMITS[0]: DEFAULT_LIMIT}
        )
        self._form: str | None = None if "response_format" in block.params else "untried"

    def use_batches(self, batches: Batches, grader: str) -> None:
        """Ask in batches, for a grader of this name."""
        self._model.use_batches(batches, grader)

    async def __aenter__(self) -> Self:
        await self._model.__aenter__()
        return self

    async def __aexit__(self, *details: Any) -> None:
        await self._model.__aexit__(*details)

    async def ask(self, messages: list[Message], schema: dict[str, Any] | None, tools: list[Any] | None) -> Reply:
        """Return the model's reply. `schema` is asked for as structured output where the server has it."""
        more: dict[str, Any] = {} if tools is None else {"tools": tools}
        if schema is None or self._form is None:
            return await self._limited(messages, more)
        structured = {"name": "verdict", "strict": True, "schema": schema}
        try:
            reply = await self._limited(
                messages, {**more, "response_format": {"type": "json_schema", "json_schema": structured}}
            )
        except AttemptError as error:
            if self._form == "known" or error.status not in (400, 415, 422, 501):
                raise
            reply = await self._limited(messages, more)  # raises its own error where the form was not the reason
            self._form = None
        else:
            self._form = "known"
        return reply

    async def _limited(self, messages: list[Message], more: dict[str, Any]) -> Reply:
        limit = self._limit
        try:
            return await self._model.complete(messages, {**more, **limit})
        except AttemptError as error:
            if not limit or error.status not in (400, 422) or not _names_limit(error.message):
                raise
            other = {_LIMITS[1]: DEFAULT_LIMIT} if _LIMITS[1] in error.message and _LIMITS[0] in limit else {}
            try:
                reply = await self._model.complete(messages, {**more, **other})
            except AttemptError as again:
                if not other or again.status not in (400, 422) or not _names_limit(again.message):
                    raise
                other = {}  # the context is too short for it under either name
                reply = await self._model.complete(messages, more)
            self._limit = other
            return reply


def _names_limit(message: str) -> bool:
    return any(name in message for name in _LIMITS) or "context length" in message


class JudgeSession:
    """A conversation with the judge about one output, and its usage."""

    def __init__(
        self,
        model: JudgeModel,
        messages: list[Message],
        *,
        schema: dict[str, Any] | None = None,
        tools: list[Any] | None = None,
    ) -> None:
        self._model = model
        self._messages = messages
        self._schema = schema
        self._tools = tools
        self.usage: Usage | None = None

    async def ask(self) -> Reply:
        """Return the judge's next reply, and add it to the conversation."""
        try:
            reply = await self._model.ask(self._messages, self._schema, self._tools)
        except AttemptError as error:
            error.usage = error.usage or self.usage  # the replies so far were paid for
            raise
        self.usage = reply.usage if self.usage is None else self.usage + reply.usage
        message = (reply.messages or [{"role": "assistant", "content": reply.text}])[-1]
        self._messages.append({**message, "content": message.get("content") or ("" if self._tools else "(no text)")})
        return reply

    def say(self, *messages: Message) -> None:
        """Add messages for the judge."""
        self._messages += messages

    def unreadable(self, reason: str) -> AttemptError:
        """Return the error for a judge that gave no verdict, even after it was shown its mistake."""
        return AttemptError(
            "bad_reply",
            f"the judge {reason}",
            remedy="Use a judge that follows the form it is asked for, or raise its params.max_tokens.",
            retry=False,  # it was asked twice already
            usage=self.usage,
        )

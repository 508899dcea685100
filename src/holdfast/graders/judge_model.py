"""Requests to a judge model: with structured output and a token limit, as far as its server supports them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from msgspec.structs import replace

from holdfast.dialects.stops import describe_partial
from holdfast.errors import AttemptError, Fault
from holdfast.graders.replies import Unreadable
from holdfast.targets.model import Model

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.spec.judge_schema import PromptGrader
    from holdfast.store.records import Usage
    from holdfast.targets.batching import BatchHub
    from holdfast.targets.prices import Prices
    from holdfast.targets.types import Message, Reply

DEFAULT_LIMIT: Final = 4096
"""tokens of a judge's reply where `params` sets no limit: room to reason, and an end for a model that finds none"""
_LIMITS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens", "maxOutputTokens")
_OTHER_NAME: Final = "max_completion_tokens"
T = TypeVar("T")
_REFUSALS: Final = (400, 404, 405, 415, 422, 501)
"""statuses of a server that does not know a field of the request"""


class JudgeModel:
    """A judge's model, used by many gradings at once. Remembers which request fields its server rejects."""

    def __init__(self, block: PromptGrader, prices: Prices, where: str) -> None:
        assert isinstance(block.model, str)
        self.name = block.model
        self._model = Model.of(block, prices, where)
        self._limit: dict[str, Any] = (
            {} if any(name in block.params for name in _LIMITS) else {"max_tokens": DEFAULT_LIMIT}
        )
        """how a reply is limited: by the field of the request, which each API names in its own way, by a parameter, or
        not at all"""
        self._form: str | None = None if "response_format" in block.params else "untried"
        self.takes_tools: bool | None = None
        """None: untried"""

    def use_batches(self, batches: BatchHub, grader: str) -> None:
        """Ask in batches, for a grader of this name."""
        self._model.use_batches(batches, grader)

    async def __aenter__(self) -> Self:
        await self._model.__aenter__()
        return self

    async def __aexit__(self, *details: Any) -> None:
        await self._model.__aexit__(*details)

    @property
    def final_notices(self) -> list[str]:
        """Notices for the end of the run: stop reasons and usage that Holdfast does not know."""
        return self._model.final_notices

    async def ask(self, messages: list[Message], schema: dict[str, Any] | None, tools: list[Any] | None) -> Reply:
        """Return the model's reply. `schema` is asked for as structured output where the server has it."""
        more: dict[str, Any] = {} if tools is None else {"tools": tools}
        if schema is None or self._form is None:
            return await self._limited(messages, more)
        try:
            reply = await self._limited(messages, more, schema)
        except (AttemptError, Fault) as error:
            if self._form == "known" or not is_refusal(error):
                raise
            reply = await self._limited(messages, more)  # raises its own error where the form was not the reason
            self._form = None
        else:
            self._form = "known"
        return reply

    async def _limited(
        self, messages: list[Message], more: dict[str, Any], schema: dict[str, Any] | None = None
    ) -> Reply:
        async def ask(limit: dict[str, Any]) -> Reply:
            by_name = {key: value for key, value in limit.items() if key == _OTHER_NAME}
            request = self._model.request(messages, {**more, **by_name}, schema)
            return await self._model.ask(replace(request, max_tokens=limit.get("max_tokens")))

        limit = self._limit
        try:
            return await ask(limit)
        except (AttemptError, Fault) as error:
            if not limit or error.status not in (400, 422) or not _names_limit(error.message):
                raise
            other = {_OTHER_NAME: DEFAULT_LIMIT} if _OTHER_NAME in error.message and _OTHER_NAME not in limit else {}
            try:
                reply = await ask(other)
            except (AttemptError, Fault) as again:
                if not other or again.status not in (400, 422) or not _names_limit(again.message):
                    raise
                other = {}  # the context is too short for it under either name
                reply = await ask(other)
            self._limit = other
            return reply


def is_refusal(error: AttemptError | Fault) -> bool:
    """Return True for an error by which a server may say that it does not know a field of the request."""
    return error.status in _REFUSALS


def _names_limit(message: str) -> bool:
    return any(name in message for name in _LIMITS) or "context length" in message


def check_whole(reply: Reply) -> Reply:
    """Return a whole reply; raise Unreadable for another one, which is no verdict even if it looks like one."""
    if (reason := describe_partial(reply.stop)) is not None:
        raise Unreadable(f"{reason} before its verdict was complete")
    return reply


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

    async def verdict(self, read: Callable[[str], T], form: str) -> tuple[T, Reply, Reply | None]:
        """Ask for a verdict in a form; a judge that gives none is shown its mistake once.

        Return what `read` makes of the reply, the reply, and the one that was rejected before it.
        """
        first = await self.ask()
        try:
            return read(check_whole(first).text), first, None
        except Unreadable as unreadable:
            correction = f"Your reply {unreadable}\nReply again, with one JSON object and nothing else: {form}"
        self.say({"role": "user", "content": correction})
        second = await self.ask()
        try:
            return read(check_whole(second).text), second, first
        except Unreadable as again:
            raise self.unreadable(str(again)) from again

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

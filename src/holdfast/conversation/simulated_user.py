"""The simulated user: a model or a function that replies to the target, stops, or abstains.

A model is asked for its decision as a JSON object. A plain text is the user's next message, and a text of nothing but
`STOP` ends the conversation. A model that answers in another form is shown its mistake once. Abstaining means that the
model cannot play its part, which is an error of the attempt, because it is not the target's fault.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from holdfast.dialects.reading import after_thoughts
from holdfast.dialects.types import describe_partial
from holdfast.errors import AttemptError
from holdfast.functions import Function, function_source, load_function, user_error
from holdfast.spec.providers import identity_of_model
from holdfast.spec.template import RENDER_ERRORS, Template, expression, normal_expression, normal_form
from holdfast.store.records import Usage, content_text
from holdfast.targets.model import AsksModel, Model
from holdfast.targets.prices import Prices

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.data.dataset import Sample
    from holdfast.spec.eval import Eval
    from holdfast.spec.eval_schema import ResponderBlock
    from holdfast.targets.types import Message, Reply

OFFERED = ("messages", "sample", "turn")

_PART = """\
You play the user in a conversation with an assistant. Stay in your part:

<part>
{instructions}
</part>

Read the conversation and decide what the user does next. Answer with one JSON object and nothing else:
{form}"""

_FORM = """\
{"action": "reply", "message": "<what the user says next>"} to go on,
{"action": "stop", "reason": "<why>"} when the user has got what they wanted or has nothing more to say,
{"action": "abstain", "reason": "<why>"} when your part does not tell you how to answer."""

_DECODER: Final = json.JSONDecoder(strict=False)  # models break lines inside texts
_OPENING: Final = re.compile(r'\{(?=\s*")')
_MARKER: Final = re.compile(r"(?:\A|\n|[#\[<*]{1,3})\W*(?P<word>STOP|DONE|ABSTAIN)\W*\Z")
"""a whole reply, a last line, or a mark such as `###STOP###` after the user's message"""
_SPEAKER: Final = re.compile(r"\A(?:\[user\]|user:)\s*", re.IGNORECASE)


class Decision(msgspec.Struct, frozen=True):
    """The user's next action."""

    message: str | None
    """None: the user stops"""
    usage: Usage = Usage()


def responder_identity(spec: Eval) -> dict[str, Any] | None:
    """Return the simulated user's part of every generation key; None without a simulated user."""
    block = spec.responder
    if block is None:
        return None
    identity = block.model_dump(exclude={"base_url", "api_key_env", "api"})
    identity |= {"instructions": normal_form(block.instructions), "stop_when": normal_expression(block.stop_when)}
    if block.model is not None:
        identity = identity_of_model(identity, block)
    if block.python is not None:
        where = spec.document.where(("responder", "python"))
        name, source = function_source(block.python, spec.folder, where, spec.functions)
        identity |= {"python": name, "source": source}
    return identity


def build_player(spec: Eval) -> Player | None:
    """Build the simulated user, if the eval has one."""
    block = spec.responder
    if block is None:
        return None
    if block.python is not None:
        where = spec.document.where(("responder", "python"))
        function = load_function(block.python, spec.folder, where, spec.functions)
        return _FunctionPlayer(Function(function, OFFERED, where, takes_fields=True), block)
    assert block.model is not None
    return _ModelPlayer(block, Prices(block.model, spec.prices), spec.document.where(("responder", "model")))


class _EndRules:
    """The rules that end a conversation before the user is asked."""

    def __init__(self, block: ResponderBlock) -> None:
        limit = block.max_followups
        self._limit_expression = expression(limit) if isinstance(limit, str) else None
        self._fixed_limit = 0 if isinstance(limit, str) else limit
        self._when = None if block.stop_when is None else expression(block.stop_when)

    def __call__(self, messages: list[Message], sample: Sample, turn: int) -> bool:
        if turn > self._limit(sample):
            return True
        if self._when is None:
            return False
        try:
            return bool(self._when({**sample.fields, "output": messages[-1].get("content"), "turn": turn}))
        except RENDER_ERRORS as error:
            raise AttemptError(
                "bad_request", f"responder.stop_when cannot be evaluated: {error}", retry=False
            ) from error

    def _limit(self, sample: Sample) -> int:
        if self._limit_expression is None:
            return self._fixed_limit
        try:
            limit = self._limit_expression(sample.fields)
        except RENDER_ERRORS as error:
            raise AttemptError(
                "bad_request", f"{sample.where}: cannot evaluate responder.max_followups: {error}", retry=False
            ) from error
        if type(limit) is not int:
            raise AttemptError(
                "bad_request", f"{sample.where}: responder.max_followups gives {limit!r}, not a number", retry=False
            )
        return limit


class _FunctionPlayer:
    """A function that plays the user."""

    def __init__(self, function: Function, block: ResponderBlock) -> None:
        self.function = function
        self._over = _EndRules(block)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def decide(self, messages: list[Message], sample: Sample, turn: int) -> Decision:
        if self._over(messages, sample, turn):
            return Decision(None)
        offered = {
            "messages": [dict(message) for message in messages],
            "sample": dict(sample.fields),
            "turn": turn,
            **self.function.of_row(sample.fields),
        }
        try:
            message = await self.function(offered)
        except AttemptError:
            raise
        except Exception as error:  # in the user's code: an error of this trial, never of the run
            raise user_error("agent", error, f"the responder raised {type(error).__name__}: {error}") from error
        if message is not None and not isinstance(message, str):
            raise AttemptError(
                "agent", f"the responder returned {type(message).__name__}, not a text or None", retry=False
            )
        return Decision(message)


class _ModelPlayer(AsksModel):
    """A model that plays the user."""

    _model: Model

    def __init__(self, block: ResponderBlock, prices: Prices, where: str) -> None:
        assert block.model is not None and block.instructions is not None
        self._instructions = Template(block.instructions)
        self._over = _EndRules(block)
        self._model = Model.of(block, prices, where)

    async def decide(self, messages: list[Message], sample: Sample, turn: int) -> Decision:
        if self._over(messages, sample, turn):
            return Decision(None)
        try:
            part = _PART.format(instructions=self._instructions.render(sample.fields), form=_FORM)
        except RENDER_ERRORS as error:
            raise AttemptError("bad_request", f"cannot render responder.instructions: {error}", retry=False) from error
        transcript = "\n\n".join(
            f"[{message['role']}]\n{content_text(message.get('content'))}" for message in _spoken(messages)
        )
        asked = [{"role": "system", "content": part}, {"role": "user", "content": transcript}]
        reply = await self._model.complete(asked)
        try:
            return _decision(reply, reply.usage)
        except Malformed as mistake:
            correction = f"Your reply {mistake}\nAnswer again, with one JSON object and nothing else:\n{_FORM}"
        again = [{"role": "assistant", "content": reply.text or "(no text)"}, {"role": "user", "content": correction}]
        second = await self._model.complete([*asked, *again])
        usage = reply.usage + second.usage
        try:
            return _decision(second, usage)
        except Malformed as mistake:
            raise AttemptError(
                "bad_reply",
                f"the simulated user's reply {mistake}",
                remedy="Use a model that replies in the requested form, or raise its params.max_tokens.",
                retry=False,  # it was asked twice already
                usage=usage,
            ) from mistake


Player = _FunctionPlayer | _ModelPlayer
"""returns the user's action after each turn, or raises AttemptError if it cannot be decided"""


def _spoken(messages: list[Message]) -> Iterator[Message]:
    """Yield the user's messages and the final answers, without intermediate steps."""
    for message, after in pairwise([*messages, {"role": "user"}]):
        if message.get("role") == "user" or (message.get("role") == "assistant" and after.get("role") == "user"):
            yield message


class Malformed(ValueError):
    """A reply that is not a decision; the message gives the reason, and completes "the simulated user …"."""


def _decision(reply: Reply, usage: Usage) -> Decision:
    try:
        return Decision(read_decision(reply), usage)
    except AttemptError as error:
        error.usage = usage
        raise


def read_decision(reply: Reply) -> str | None:
    """Return the user's next message; None: the user stops. Raises Malformed, or AttemptError if the model abstains."""
    if (reason := describe_partial(reply.stop)) is not None:
        raise Malformed(reason)
    text = after_thoughts(reply.text).strip()
    decisions = [value for value in _objects(text) if "action" in value]
    if len(decisions) > 1:
        raise Malformed(f"gave several decisions: {text[:200]!r}")
    if decisions:
        return _decided(decisions[0])
    if (marker := _MARKER.search(text)) is not None:
        return _decided({"action": "abstain" if marker["word"] == "ABSTAIN" else "stop"})
    text = _SPEAKER.sub("", text)
    if not text or text.startswith(("{", "```", "<think")):
        raise Malformed(f"gave no decision: {text[:200]!r}")
    return text


def _decided(decision: dict[str, Any]) -> str | None:
    action, message = decision["action"], decision.get("message")
    if action == "stop":
        return None
    if action == "abstain":
        raise AttemptError("agent", f"the simulated user abstained: {decision.get('reason', '')}")
    if action != "reply":
        raise Malformed(f"gave no decision: `action` is {action!r}, not reply, stop or abstain")
    if not isinstance(message, str) or not message.strip():
        raise Malformed("gave no decision: a reply needs a `message`")
    return message


def _objects(text: str) -> Iterator[dict[str, Any]]:
    place = 0
    while (match := _OPENING.search(text, place)) is not None:
        try:
            value, place = _DECODER.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            place = match.end()
        else:
            yield value

"""One conversation: the user's messages go in, one turn after the other; what was said comes out.

How a turn is asked (time-outs, retries, records) is the engine's; it hands in `ask`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from xxhash import xxh3_64_intdigest

from holdfast.errors import AttemptError
from holdfast.spec.template import RENDER_ERRORS, Template
from holdfast.store.records import Usage
from holdfast.targets.types import Turn

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from holdfast.data.dataset import Sample
    from holdfast.spec.load import Eval
    from holdfast.targets.types import Message, Reply


class Said(NamedTuple):
    """A whole conversation."""

    messages: list[Message]
    output: str
    turns: int
    stop: str
    usage: Usage
    first_token: float | None
    state: Any


class Lines(NamedTuple):
    """What the user's side says about one sample."""

    opening: list[Message]
    """what stands before the first user message"""
    prompts: list[str]


class Script:
    """The templates of the user's side."""

    def __init__(self, spec: Eval) -> None:
        self._system = None if spec.system is None else Template(spec.system)
        self._prompt = Template(spec.prompt)

    @staticmethod
    def identity(spec: Eval) -> dict[str, Any]:
        """What of the conversation is in every generation key."""
        return {"system": spec.system, "prompt": spec.prompt}

    def lines(self, sample: Sample) -> Lines:
        """What is said in the conversation about one sample, as far as it is known before it starts."""
        opening = [] if self._system is None else [{"role": "system", "content": _render(self._system, sample)}]
        return Lines(opening, [_render(self._prompt, sample)])


def _render(template: Template, sample: Sample) -> str:
    try:
        return template.render(sample.fields)
    except RENDER_ERRORS as error:
        raise AttemptError("bad_request", f"{sample.where}: cannot render the prompt: {error}", retry=False) from error


async def converse(lines: Lines, sample: Sample, trial: int, ask: Callable[[Turn], Awaitable[Reply]]) -> Said:
    """Have the conversation of one trial."""
    seed = xxh3_64_intdigest(f"{sample.digest}:{trial}".encode()) & 0x7FFFFFFF
    messages = [*lines.opening]
    reply: Reply | None = None
    usage: Usage | None = None
    number = 0
    for number, prompt in enumerate(lines.prompts, 1):
        messages.append({"role": "user", "content": prompt})
        reply = await ask(Turn(prompt, messages, sample, trial, number, seed))
        messages.extend(reply.messages or [{"role": "assistant", "content": reply.text}])
        usage = reply.usage if usage is None else add_usage(usage, reply.usage)
    assert reply is not None and usage is not None
    return Said(messages, reply.text, number, reply.stop, usage, reply.first_token, reply.state)


def add_usage(one: Usage, other: Usage) -> Usage:
    """The sum; unknown plus anything is unknown."""
    return Usage(
        None if one.input_tokens is None or other.input_tokens is None else one.input_tokens + other.input_tokens,
        None if one.output_tokens is None or other.output_tokens is None else one.output_tokens + other.output_tokens,
        one.requests + other.requests,
        None if one.cost is None or other.cost is None else one.cost + other.cost,
    )

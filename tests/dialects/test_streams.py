"""A streamed answer is the answer that is sent whole, however the network cuts the stream."""

from __future__ import annotations

import json
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.dialects import dialect_of
from holdfast.dialects.types import ModelRequest
from holdfast.errors import AttemptError
from holdfast.http.response import EventParser
from tests.dialects.test_conformance import apis, every_api
from tests.support.providers import Asked, Call, Say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.dialects.types import Answer, StreamReader
    from holdfast.spec.schema import Api

CALLS = st.builds(
    Call,
    name=st.sampled_from(["weather", "clock"]),
    arguments=st.dictionaries(st.sampled_from(["city", "zone"]), st.text(max_size=5) | st.integers(0, 9)),
)
SAYS = st.builds(
    Say,
    text=st.text(max_size=30),
    calls=st.lists(CALLS, max_size=3).map(tuple),
    reasoning=st.none() | st.text(min_size=1, max_size=30),
    stop=st.sampled_from(["stop", "length"]),
    cached_tokens=st.integers(0, 11),
    reasoning_tokens=st.integers(0, 7),
)


def asked(api: Api, *, stream: bool) -> Asked:
    request = ModelRequest(model="m-1", messages=[{"role": "user", "content": "hello"}], stream=stream)
    return Asked("", {}, dialect_of(api).encode(request))


def sent(events: list[tuple[str | None, Any]]) -> bytes:
    """The bytes of a stream."""
    texts = [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in events]
    return "".join((f"event: {name}\n" if name else "") + f"data: {text}\n\n" for name, text in texts).encode()


def received(data: bytes, cuts: set[int]) -> Iterator[Any]:
    parser = EventParser()
    for start, end in pairwise(sorted({0, len(data), *cuts})):
        for event in parser.feed(data[start:end]):
            text = b"\n".join(event.data)
            if text != b"[DONE]":
                yield json.loads(text)


def fed(api: Api, events: Iterator[Any]) -> StreamReader:
    reader = dialect_of(api).reader()
    for event in events:
        reader.feed(event)
    return reader


def read(answer: Answer) -> tuple[Any, ...]:
    """What an answer says. What only its server reads may be in pieces in a stream."""
    return {key: value for key, value in answer.message.items() if key != "raw"}, answer.tokens, answer.stop


@every_api
@given(say=SAYS, data=st.data())
def test_a_stream_cut_anywhere_is_the_whole_answer(api: Api, say: Say, data: st.DataObject) -> None:
    say = say if api != "completions" else Say(say.text, stop=say.stop)
    wire = import_module(f"tests.support.providers.{api}").WIRE
    stream = sent(wire.events(say, asked(api, stream=True)))
    cuts = data.draw(st.sets(st.integers(1, len(stream)), max_size=20))
    streamed = fed(api, received(stream, cuts)).finish()
    assert read(streamed) == read(dialect_of(api).read(wire.whole(say, asked(api, stream=False))))


@apis
@given(say=SAYS, data=st.data())
def test_a_stream_is_no_answer_before_its_last_event(api: Api, say: Say, data: st.DataObject) -> None:
    wire = import_module(f"tests.support.providers.{api}").WIRE
    events = [value for _, value in wire.events(say, asked(api, stream=True)) if value != "[DONE]"]
    ends = next(number for number in range(len(events) + 1) if fed(api, iter(events[:number])).ended)
    reader = fed(api, iter(events[: data.draw(st.integers(0, ends - 1))]))
    with pytest.raises(AttemptError, match="ended before"):
        reader.finish()


def spoiled(value: Any, data: st.DataObject) -> Any:
    """Replace a part of a value with something that does not belong there."""
    inside = [*value] if isinstance(value, dict) else [*range(len(value))] if isinstance(value, list) else []
    if not inside or data.draw(st.integers(0, 5)) == 0:
        return data.draw(st.sampled_from([None, 1, "x", [], {}, [1], ["x"], {"text": 1}, {"type": 1}, True]))
    at = data.draw(st.sampled_from(inside))
    changed = {**value} if isinstance(value, dict) else [*value]
    changed[at] = spoiled(value[at], data)
    return changed


@apis
@given(say=SAYS, data=st.data())
def test_a_reply_that_makes_no_sense_is_an_error_of_the_attempt(api: Api, say: Say, data: st.DataObject) -> None:
    dialect, wire = dialect_of(api), import_module(f"tests.support.providers.{api}").WIRE
    reply = spoiled(wire.whole(say, asked(api, stream=False)), data)
    events = [value for _, value in wire.events(say, asked(api, stream=True)) if value != "[DONE]"]
    at = data.draw(st.integers(0, len(events) - 1))
    events[at] = spoiled(events[at], data)
    attempts: list[Callable[[], Answer]] = [lambda: dialect.read(reply), lambda: fed(api, iter(events)).finish()]
    for attempt in attempts:
        try:
            assert isinstance(attempt().text, str)
        except AttemptError as error:
            assert error.kind in ("bad_reply", "server")


@apis
@given(data=st.data())
def test_the_conversation_of_a_request_that_makes_no_sense_is_what_is_known_of_it(
    api: Api, data: st.DataObject
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "b", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "d"},
    ]
    body = dialect_of(api).encode(ModelRequest(model="m-1", messages=messages))
    assert all(isinstance(message, dict) for message in dialect_of(api).conversation(spoiled(body, data)))

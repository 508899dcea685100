"""Streams: parsed as the standard says, and never taken for an answer where they report an error or were cut off."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.data.dataset import Sample
from holdfast.errors import AttemptError, Fault
from holdfast.spec.target_schema import HttpTarget
from holdfast.targets.http import HttpWorkflow
from holdfast.targets.sse import Event, EventParser
from holdfast.targets.types import Reply, Turn
from tests.support.workflow import Answer, workflow

if TYPE_CHECKING:
    from holdfast.spec.eval import Origin


def parse(*chunks: bytes) -> list[Event]:
    parser = EventParser()
    return [event for chunk in chunks for event in parser.feed(chunk)] + parser.close()


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """Split bytes at places."""
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


FIELDS = [b"data: a", b"data:b", b"data:  c", b"data", b"event: error", b"event:", b": comment", b"id: 1", b"x: y"]
OTHERS = [b"", b"", b"\xef\xbb\xbf", b'{"code":"e"}', "data: \u2028é".encode(), b"data: [DONE]"]
LINES = st.sampled_from([*FIELDS, *OTHERS])
Parts = list[tuple[bytes, bytes]]
ENDS = st.sampled_from([b"\n", b"\r", b"\r\n"])


@given(st.lists(st.tuples(LINES, ENDS)), st.lists(st.integers(min_value=0)), st.booleans())
def test_the_chunking_of_a_stream_changes_nothing(
    parts: list[tuple[bytes, bytes]], places: list[int], end: bool
) -> None:
    data = b"".join(line + ending for line, ending in parts) + (b"" if end else b"data: last")
    assert parse(*cut(data, places)) == parse(data)


@given(st.lists(st.tuples(LINES, ENDS)))
def test_events_are_those_of_the_standard_read_line_by_line(parts: Parts) -> None:
    expected, name, data = [], "", []
    # A CR before an LF is one line end, whatever two were meant.
    text = b"".join(line + ending for line, ending in parts)
    for number, line in enumerate([*text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")[:-1], b""]):
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line
        field, _, value = line.partition(b":")
        value = value[1:] if value.startswith(b" ") else value
        if not line:
            expected += [(name, b"\n".join(data))] if data else []
            name, data = "", []
        elif field == b"data":
            data.append(value)
        elif field == b"event":
            name = value.decode()
    assert [(event.name, b"\n".join(event.data)) for event in parse(text) if event.data] == expected


def test_one_huge_line_in_small_pieces_is_parsed_in_linear_time() -> None:
    parser = EventParser()
    piece = b"x" * 16
    parser.feed(b"data: ")
    for _ in range(200_000):  # quadratic time would be minutes
        assert parser.feed(piece) == []
    (event,) = parser.feed(b"\n\n")
    assert len(event.data[0]) == 200_000 * 16


def ask(answer: Answer, **block: Any) -> Reply:
    """Ask a workflow that answers so, once."""
    with workflow(lambda _: answer) as service:
        target = HttpWorkflow(
            HttpTarget(**{"http": service.url, "request": {"q": "{{ prompt }}"}} | block), cast("Origin", None)
        )

        async def reply() -> Reply:
            turn = Turn("hi", [{"role": "user", "content": "hi"}], Sample("a", {}, "sha256:0", ""), 1, 1)
            async with target:
                return await target.reply(turn)

        return asyncio.run(reply())


def refused(answer: Answer, **block: Any) -> AttemptError | Fault:
    with pytest.raises((AttemptError, Fault)) as raised:
        ask(answer, **block)
    return raised.value  # type: ignore[return-value]


def events(*values: Any, end: bytes = b"\n\n") -> bytes:
    return end.join(b"data: " + json.dumps(value).encode() for value in values)


HALF = events({"value": "You said "}) + b"\n\n"


@pytest.mark.parametrize(
    ("rest", "kind"),
    [
        (b'{"code":"workflow_error","message":"model is down","details":"ValueError"}', "server"),
        (b'{"code":"workflow_error","message":"model is down"}\n\n', "server"),
        (b'data: {"code":"workflow_error","message":"model is down"}\n\n', "server"),
        (b'data: {"error": {"message": "model is down"}}\n\n', "server"),
        (b'data: {"error": "model is down"}\n\ndata: [DONE]\n\n', "server"),
        (b'data: {"type": "error", "message": "model is down"}\n\n', "server"),
        (b"event: error\ndata: model is down\n\n", "server"),
        (b'event: error\ndata: {"message": "model is down"}\n\ndata: [DONE]\n\n', "server"),
        (b'data: {"error": {"message": "model is down", "code": 429}}\n\n', "rate_limit"),
        (b'data: {"error": {"message": "model is down", "type": "invalid_request_error"}}\n\n', "bad_request"),
    ],
)
def test_an_error_inside_a_stream_is_never_an_answer(rest: bytes, kind: str) -> None:
    error = refused(Answer(stream=HALF + rest), response="value")
    assert error.kind == kind and "model is down" in error.message


@pytest.mark.parametrize("answer", ["", None, [], {}])
def test_an_error_beside_no_answer_is_no_answer(answer: Any) -> None:
    error = refused(Answer({"answer": answer, "error": {"message": "model is down"}}), response="answer")
    assert error.kind == "server" and "model is down" in error.message
    assert ask(Answer({"answer": "yes", "error": "the cache was cold"}), response="answer").text == "yes"


def test_of_several_answers_in_a_stream_the_first_counts() -> None:
    texts = [(0, "4"), (1, "9"), (0, "2"), (1, "9")]
    parts = [{"choices": [{"index": number, "delta": {"content": text}}]} for number, text in texts]
    stream = events(*parts, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}) + b"\n\n"
    assert ask(Answer(stream=stream), response="choices[0].delta.content").text == "42"


def test_characters_that_a_workflow_cut_in_two_are_whole_again() -> None:
    stream = events({"value": "so \ud83d"}, {"value": "\ude00!"}) + b"\n\ndata: [DONE]\n\n"
    assert ask(Answer(stream=stream), response="value").text == "so \N{GRINNING FACE}!"


def test_a_quota_that_is_used_up_in_a_stream_stops_the_run() -> None:
    broke = b'data: {"error": {"message": "no money", "code": "insufficient_quota"}}\n\n'
    assert isinstance(refused(Answer(stream=HALF + broke), response="value"), Fault)


def test_a_null_error_is_no_error() -> None:
    stream = events({"value": "all ", "error": None}, {"value": "well", "error": ""})
    assert ask(Answer(stream=stream), response="value").text == "all well"


@pytest.mark.parametrize(
    "stream",
    [
        b'data: {"value": "Hello "}\n\ndata: {"value": "world"}',
        b'data: {"value": "Hello "}\r\n\r\ndata: {"value": "world"}\r\n\r\n',
        b'data: {"value": "Hello "}\r\rdata: {"value": "world"}\r\r',
        b'data: {"value":\ndata: "Hello "}\n\n: comment\n\nevent: token\ndata: {"value": "world"}\nid: 7\n\n',
        b'data: {"value": "Hello "}\ndata: {"value": "world"}\ndata: [DONE]\n',
        b'\xef\xbb\xbfdata:{"value": "Hello "}\n\ndata:\n\ndata: {"value": "world"}\n\ndata: [DONE]\n\n',
    ],
    ids=["no newline at the end", "CRLF", "CR", "several lines", "no blank lines", "byte order mark, empty event"],
)
def test_a_stream_is_read_as_servers_write_them(stream: bytes) -> None:
    assert ask(Answer(stream=stream), response="value").text == "Hello world"


def test_a_stream_that_is_cut_off_is_no_answer() -> None:
    assert refused(Answer(stream=HALF, framing="cut"), response="value").kind == "connection"


def test_a_stream_that_ends_with_its_connection_needs_an_end_of_its_own() -> None:
    error = refused(Answer(stream=HALF, framing="close"), response="value")
    assert error.kind == "bad_reply" and "stream_end: close" in str(error.remedy)
    done = Answer(stream=HALF + b"data: [DONE]\n\n", framing="close")
    assert ask(done, response="value").text == "You said "
    assert ask(Answer(stream=HALF, framing="close"), response="value", stream_end="close").text == "You said "


@pytest.mark.parametrize("last", [b"data: over\n\n", b"event: over\ndata: {}\n\n"])
def test_a_stream_with_a_named_end_must_have_that_end(last: bytes) -> None:
    assert ask(Answer(stream=HALF + last), response="value", stream_end="over").text == "You said "
    error = refused(Answer(stream=HALF), response="value", stream_end="over")
    assert error.kind == "bad_reply" and "without 'over'" in error.message


def test_a_stream_of_chat_completions_ends_with_a_finish_reason_for_a_workflow_too() -> None:
    first = {"choices": [{"delta": {"content": "half "}}]}
    path = "choices[0].delta.content"
    assert "finish_reason" in refused(Answer(stream=events(first) + b"\n\n"), response=path).message
    last = {"choices": [{"delta": {"content": "done"}, "finish_reason": "stop"}]}
    usage = {"choices": [], "usage": {}}
    assert ask(Answer(stream=events(first, last, usage)), response=path).text == "half done"


def test_a_whole_reply_that_is_an_error_is_no_answer_either() -> None:
    assert refused(Answer({"error": "model is down"})).kind == "server"
    assert ask(Answer({"answer": "yes", "error": "of rounding"}), response="answer").text == "yes"


def test_a_missing_path_is_reported_with_a_hint_for_http_targets() -> None:
    error = refused(Answer({"detail": "Not Found"}, status=404))
    assert "target.http" in str(error.remedy) and "base_url" not in str(error.remedy)


def test_a_failed_workflow_is_retried_for_every_status() -> None:
    failed = refused(Answer({"code": "workflow_error", "message": "model is down"}, status=422))
    assert isinstance(failed, AttemptError) and failed.kind == "server" and failed.retry
    wrong = refused(Answer({"detail": [{"msg": "Field required"}]}, status=422))
    assert isinstance(wrong, AttemptError) and wrong.kind == "bad_request" and not wrong.retry


def step_line(**payload: Any) -> bytes:
    """A step as `/generate/full` sends it."""
    body = {"id": "u", "type": payload["event_type"], "name": "n", "payload": json.dumps(payload)}
    return b"intermediate_data: " + json.dumps(body).encode() + b"\n\n"


def test_the_steps_of_a_workflow_are_kept_with_its_answer() -> None:
    llm = {
        "event_type": "LLM_END",
        "name": "m",
        "UUID": "u1",
        "usage_info": {"token_usage": {"prompt_tokens": 5, "completion_tokens": 2}},
    }
    tool = {"event_type": "TOOL_END", "name": "power", "UUID": "u2", "data": {"input": {"number": 7}, "output": "49"}}
    markdown = b'intermediate_data: {"id": "x", "name": "n", "payload": "**Input:** no JSON"}\n\n'
    trace_id = b'observability_trace: {"observability_trace_id": "1"}\n\n'
    stream = trace_id + step_line(**llm) + markdown + step_line(**tool) + step_line(**llm) + HALF
    reply = ask(Answer(stream=stream), response="value")
    assert reply.text == "You said " and reply.trace is not None
    assert [step["payload"] for step in reply.trace] == [llm, tool, llm]
    assert reply.trace[1]["parent_id"] == "remote"
    assert reply.trace[1]["function_ancestry"]["function_name"] == "power"
    assert (reply.usage.input_tokens, reply.usage.output_tokens, reply.usage.requests) == (10, 4, 1)

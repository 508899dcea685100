"""HTTP targets: values keep their types in requests, and a stream with an error or a cut is never an answer."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, cast

import pytest

import holdfast
from holdfast.data.dataset import Sample
from holdfast.engine.session import Options, preview_run
from holdfast.errors import AttemptError, Fault
from holdfast.report.run_view import GradedTrial, RunView
from holdfast.spec.target_schema import HttpTarget
from holdfast.targets.http import HttpWorkflow
from holdfast.targets.types import Reply, Turn
from tests.support.running import lines, server
from tests.support.specs import load, who, write_spec
from tests.support.workflow import Answer, Asked, Workflow, workflow

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from holdfast.spec.eval import Origin

ROW = {
    "id": "a",
    "q": "two",
    "expected": "two",
    "n": 3,
    "part": 0.5,
    "tags": ["x", {"y": None}],
    "on": True,
    "none": None,
}


def sent(tmp_path: Path, request: dict[str, Any]) -> Any:
    """The body that a workflow is asked with."""
    asked: list[Asked] = []
    with workflow(lambda one: asked.append(one) or {"answer": "two"}) as service:
        run = holdfast.evaluate(
            name="e",
            samples=[ROW],
            prompt="{{ q }}",
            target={"http": service.url, "request": request, "response": "answer"},
            graders=[{"type": "exact"}],
            runs_dir=tmp_path / "runs",
        )
    assert run.score == 1
    return asked[0].body


def test_a_value_that_is_one_expression_keeps_its_type(tmp_path: Path) -> None:
    request = {
        "text": "{{ prompt }}",
        "n": "{{ n }}",
        "part": "{{ part }}",
        "tags": ["{{ tags }}", "{{ tags[0] }}"],
        "sum": "{{ n + trial }}",
        "on": "{{ on }}",
        "none": "{{ none }}",
        "messages": "{{ messages }}",
        "inside": "n is {{ n }}",
        "as text": "{{ n | string }}",
        "json": "{{ tags | tojson }}",
        "fixed": 7,
    }
    assert sent(tmp_path, request) == {
        "text": "two",
        "n": 3,
        "part": 0.5,
        "tags": [["x", {"y": None}], "x"],
        "sum": 4,
        "on": True,
        "none": None,
        "messages": [{"role": "user", "content": "two"}],
        "inside": "n is 3",
        "as text": "3",
        "json": '["x", {"y": null}]',
        "fixed": 7,
    }


def test_a_conversation_of_several_turns_goes_through_a_chat_endpoint(tmp_path: Path) -> None:
    with server() as model:
        run = holdfast.evaluate(
            name="e",
            samples=[{"id": "a", "q": "one", "expected": "three"}],
            prompt="{{ q }}",
            system="Be brief.",
            follow_ups=["two", "three"],
            target={
                "http": f"{model.base_url}/chat/completions",
                "request": {"model": "m", "messages": "{{ messages }}"},
                "response": "choices[0].message.content",
            },
            graders=[{"type": "exact"}],
            runs_dir=tmp_path / "runs",
        )
        assert run.score == 1 and model.requests == 3
    (output,) = lines(run.path / "outputs.jsonl")
    contents = [message["content"] for message in output["messages"]]
    assert contents == ["Be brief.", "one", "one", "two", "two", "three", "three"]


TEXTS = [{"id": f"t{number}", "q": "two", "n": str(number), "expected": "two"} for number in range(4)]
NUMBERS = [{"id": f"n{number}", "q": "two", "n": number, "expected": "two"} for number in range(4)]


class Service:
    """A workflow that is asked for rows, over and over, in one folder of runs."""

    def __init__(self, folder: Path, service: Workflow) -> None:
        self.folder, self._service = folder, service

    def evaluate(self, rows: list[dict[str, Any]], **keys: Any) -> tuple[int, list[Any]]:
        """Plan, then run; return how many trials were to run, and the numbers that were asked for."""
        target = {"http": self._service.url, "request": {"n": "{{ n }}"}, "response": "answer"}
        keys = {"samples": rows, "prompt": "{{ q }}", "target": target, **keys}
        _, self.rundir, self.plan = preview_run(load(self.folder, **keys), Options(runs_dir=self.folder / "runs"))
        self._service.asked.clear()
        run = holdfast.evaluate(write_spec(self.folder, **keys), runs_dir=self.folder / "runs")
        assert run.score == 1 and run.path == self.rundir.path
        trials = list(RunView(self.rundir).everything())
        assert [len(trial.grades) for trial in trials if isinstance(trial, GradedTrial)] == [1] * len(rows)
        assert [trial.fields for trial in trials] == rows
        return self.plan.to_run, [asked.body["n"] for asked in self._service.asked]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with workflow(lambda _: {"answer": "two"}) as running:
        yield Service(tmp_path, running)


@pytest.mark.parametrize(("rows", "new"), [(TEXTS, NUMBERS[0]), (NUMBERS, TEXTS[0])], ids=["number", "text"])
def test_the_first_row_with_another_kind_of_value_is_the_only_one_that_is_asked(
    service: Service, rows: list[dict[str, Any]], new: dict[str, Any]
) -> None:
    assert service.evaluate(rows)[0] == len(rows)
    assert service.evaluate([*rows, new]) == (1, [new["n"]])
    assert str(service.plan) == (
        f"5 trials of 5 samples: 4 reused, 1 to run (1 row new); 4 outputs from e/{neighbour(service)}"
    )
    assert service.evaluate(rows) == (0, []), "and without it everything is there"


def neighbour(service: Service) -> str:
    (other,) = {path.parent for path in service.folder.glob("runs/e/*/manifest.json")} - {service.rundir.path}
    return other.name


def test_a_row_without_an_id_keeps_its_name_whatever_it_sends(tmp_path: Path) -> None:
    rows = [{"q": "two", "n": n, "expected": "x"} for n in ("3", 3)]
    names = []
    for request in ({"q": "{{ q }}"}, {"n": "{{ n }}"}):
        identity = who(tmp_path, samples=rows, prompt="x", target={"http": "http://127.0.0.1:1", "request": request})
        names.append([sample.id for sample in identity.dataset])
        assert all(sample.is_nameless for sample in identity.dataset)
    assert names[0] == names[1]


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
def test_an_error_without_an_answer_is_no_answer(answer: Any) -> None:
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

"""Steps in NeMo Agent Toolkit's files: what a target reported as it is, and the calls of models as they were made."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.plugins.nat.export import write_nat
from holdfast.plugins.nat.schema import NatOutput, NatStep
from holdfast.plugins.nat.steps import nat_steps
from holdfast.report.run_view import RunView
from holdfast.store.records import Mark, Step, Usage
from holdfast.store.rundir import RunDir
from tests.support.running import lines, server
from tests.support.specs import output_of
from tests.support.workflow import Answer, workflow

if TYPE_CHECKING:
    from pathlib import Path

ENDS = frozenset({"LLM_END", "TOOL_END"})


def exported(run: Any, folder: Path, *steps: NatStep) -> dict[str, Any]:
    """The one row of the run's `workflow_output.json`."""
    block = NatOutput(dir=".", step_filter=list(steps)) if steps else None
    write_nat(RunView(RunDir(run.path)), folder, lines=True, block=block)
    (row,) = json.loads((folder / "workflow_output.json").read_text())
    assert lines(folder / "workflow_output.jsonl") == [row]
    return row


def call(id_: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def test_calls_of_a_model_with_tools_have_names_arguments_times_and_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools.py").write_text(
        "def power(number: int) -> int:\n    return number ** 2\n"
        "def half(number: float) -> float:\n    return number / 2\n"
    )
    calls = [call("c1", "power", number=7), call("c2", "half", number=3), call("c3", "power", number=7)]
    with server(calls=calls, answer="done") as model:
        run = holdfast.evaluate(
            name="e",
            samples=[{"id": "a", "question": "seven squared", "expected": "x"}],
            prompt="{{ question }}",
            follow_ups=["and again, please"],
            target={
                "model": "m",
                "base_url": model.base_url,
                "tools": [{"python": "tools.py:power"}, {"python": "tools.py:half"}],
            },
            graders=[{"type": "exact"}],
            runs_dir=tmp_path / "runs",
        )
    row = exported(run, tmp_path / "nat")
    payloads = [step["payload"] for step in row["intermediate_steps"]]
    events = [(one["event_type"], one["name"], one["data"]["input"], one["data"]["output"]) for one in payloads]
    tools = [
        ("TOOL_END", "power", {"number": 7}, "49"),
        ("TOOL_END", "half", {"number": 3}, "1.5"),
        ("TOOL_END", "power", {"number": 7}, "49"),
    ]
    assert events == [
        *[("LLM_END", "m", "seven squared", ""), *tools, ("LLM_END", "m", "49", "done")],
        *[("LLM_END", "m", "and again, please", ""), *tools, ("LLM_END", "m", "49", "done")],
    ]
    recorded = [step for step in lines(run.path / "steps.jsonl") if step["kind"] in ("model", "tool")]
    assert [one["event_timestamp"] for one in payloads] == [step["time"] for step in recorded]
    assert all(
        one["span_event_timestamp"] == pytest.approx(step["time"] - step["seconds"])
        for one, step in zip(payloads, recorded, strict=True)
    )
    used = [one["usage_info"]["token_usage"] for one in payloads if one["event_type"] == "LLM_END"]
    assert [counts["prompt_tokens"] for counts in used] == [
        step["usage"]["input_tokens"] for step in recorded if step["kind"] == "model"
    ]
    assert all(counts["total_tokens"] == counts["prompt_tokens"] + 1 for counts in used)
    assert all("usage_info" not in one for one in payloads if one["event_type"] == "TOOL_END")


def test_a_single_call_has_the_trials_times_and_tokens(tmp_path: Path) -> None:
    with server() as model:
        run = holdfast.evaluate(
            name="e",
            samples=[{"id": "a", "question": "two words", "expected": "x"}],
            prompt="{{ question }}",
            target={"model": "m", "base_url": model.base_url},
            graders=[{"type": "exact"}],
            runs_dir=tmp_path / "runs",
        )
    (output,) = lines(run.path / "outputs.jsonl")
    (step,) = exported(run, tmp_path / "nat")["intermediate_steps"]
    assert step["payload"]["name"] == "m"
    assert step["payload"]["span_event_timestamp"] == output["timing"]["started"]
    assert step["payload"]["usage_info"]["token_usage"]["prompt_tokens"] == 2


def line(**payload: Any) -> bytes:
    """A step as `/generate/full` sends it."""
    body = {"id": "u", "type": payload["event_type"], "name": payload["name"], "payload": json.dumps(payload)}
    return b"intermediate_data: " + json.dumps(body).encode() + b"\n\n"


def test_steps_that_a_workflow_reports_are_on_disk_and_in_the_files_as_they_came(tmp_path: Path) -> None:
    payloads: list[dict[str, Any]] = [
        {"event_type": "LLM_START", "name": "m", "event_timestamp": 1.0, "UUID": "1", "data": {"input": "q"}},
        {
            "event_type": "LLM_END",
            "name": "m",
            "event_timestamp": 2.5,
            "span_event_timestamp": 1.0,
            "framework": "langchain",
            "metadata": {"chat_responses": [{"text": "x"}]},
            "data": {"input": "q", "output": "a"},
            "usage_info": {"token_usage": {"prompt_tokens": 30, "completion_tokens": 3, "total_tokens": 33}},
            "UUID": "1",
        },
        {"event_type": "TOOL_END", "name": "power", "data": {"input": {"number": 7}, "output": "49"}, "UUID": "2"},
    ]
    token = line(event_type="LLM_NEW_TOKEN", name="m", data={"chunk": "4"})
    stream = token.join(line(**payload) for payload in payloads) + b'data: {"value": "49"}\n\n'
    with workflow(lambda _: Answer(stream=stream)) as service:
        run = holdfast.evaluate(
            name="e",
            samples=[{"id": "a", "question": "seven squared", "expected": "49"}],
            prompt="{{ question }}",
            follow_ups=["again"],
            target={"http": service.url, "request": {"input_message": "{{ prompt }}"}, "response": "value"},
            graders=[{"type": "exact"}],
            runs_dir=tmp_path / "runs",
        )
    assert run.score == 1
    (output,) = lines(run.path / "outputs.jsonl")
    assert [step["payload"] for step in output["trace"]] == payloads * 2
    assert (output["usage"]["input_tokens"], output["usage"]["output_tokens"]) == (60, 6)
    assert exported(run, tmp_path / "all", "LLM_START", "LLM_END", "TOOL_END")["intermediate_steps"] == output["trace"]
    ends = exported(run, tmp_path / "ends")["intermediate_steps"]
    assert [step["payload"] for step in ends] == payloads[1:] * 2


def step(kind: str, response: Any, *, turn: int = 1, time: float = 10.0, tokens: int = 5, request: str = "") -> Step:
    return Step("k", "s", 1, turn, kind, request, 1, response, Usage(tokens, 1, 1), time, 1.0)


def test_records_of_attempts_that_failed_are_passed_over() -> None:
    reply = {"role": "assistant", "content": "kept"}
    recorded = [
        step("model", {"messages": [{"role": "assistant", "content": "lost"}]}, time=5.0, tokens=99),
        step("model", {"messages": [reply]}, time=20.0),
        step("model", {"model": "m", "whole": {}}, time=21.0),
    ]
    output = output_of("kept", messages=[{"role": "user", "content": "?"}, reply])
    (event,) = nat_steps(output, recorded, "m", ENDS)
    assert event["payload"]["event_timestamp"] == 20.0
    assert event["payload"]["usage_info"]["token_usage"]["prompt_tokens"] == 5


def test_calls_of_which_nothing_was_recorded_have_no_tokens() -> None:
    tool = {"role": "tool", "tool_call_id": "c1", "content": "49"}
    asking = {"role": "assistant", "content": "", "tool_calls": [call("c1", "power", number=7)]}
    messages = [{"role": "user", "content": "?"}, asking, tool, {"role": "assistant", "content": "49"}]
    output = output_of(
        "49", messages=messages, usage=Usage(50, 5, 2), marks=[Mark(4, "sha256:d", Usage(50, 5, 2), 1.0)]
    )
    payloads = [one["payload"] for one in nat_steps(output, [], None, ENDS)]
    assert [(one["event_type"], one["name"]) for one in payloads] == [
        ("LLM_END", None),
        ("TOOL_END", "power"),
        ("LLM_END", None),
    ]
    assert all("usage_info" not in one for one in payloads)
    assert payloads[1]["data"] == {"input": {"number": 7}, "output": "49"}
